"""Turns what the scheduler decided into the tensors of a step: any mix of chunks, or one token of everybody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..kernels.bounds import Bounds
from .arrays import IntArray, RowIndex, blocks_for, ragged_arange, to_device
from .kv_ledger import KVLedger
from .plan import StepPlan
from .rows import RunningRows
from .sampling import SamplingBatch
from .staging import Staging


def row_index(rows: IntArray) -> RowIndex:
    """`rows`, sorted and distinct, as a slice where they are 0, 1, 2, ..."""
    if rows.size and int(rows[-1]) == rows.size - 1:
        return slice(0, rows.size)
    return rows


class DecodeBatch:
    """What stays the same from step to step while the same rows each compute their next token.

    Args:
        state, rows, epoch: the rows, sorted, and the epoch for which this holds.
        device: of the tensors.
    """

    def __init__(self, state: RunningRows, rows: IntArray, epoch: int, device: torch.device) -> None:
        self.rows, self.epoch, self.index = rows, epoch, row_index(rows)
        self.request_ids, self.tickets = state.request_ids[rows], state.ticket[rows]
        self.samples = np.ones(rows.size, np.bool_)
        self.query_lens = np.ones(rows.size, np.int64)
        self.sampling = state.sampling(rows)
        self.wants_logprobs = state.wants_logprobs(rows)
        self.max_context_len = int(np.maximum.reduce(state.num_scheduled[rows]))
        self.query_start_loc = to_device(np.arange(rows.size + 1, dtype=np.int32), device)
        self.sample_index = to_device(np.arange(rows.size), device)
        self.device_rows = None if type(self.index) is slice else to_device(rows, device)
        self._views: dict[int, torch.Tensor] = {}
        self._lens: torch.Tensor | None = None

    def tables(self, block_tables: torch.Tensor, context_lens: torch.Tensor, width: int) -> tuple[Any, Any]:
        """The batch's part of the device tensors: views that stay the same, or copies where rows are missing."""
        if self.device_rows is not None:
            picked = block_tables[:, :width].index_select(0, self.device_rows)
            return picked, context_lens.index_select(0, self.device_rows)
        view = self._views.get(width)
        if view is None or self._lens is None:
            view = self._views[width] = block_tables[: self.rows.size, :width]
            self._lens = context_lens[: self.rows.size]
        return view, self._lens


class Planner:
    """Makes plans for tokens whose blocks are in the tables.

    Args:
        state: rows.
        ledger: their blocks.
        record_reads: whether steps tell which blocks they read; see `BlockAllocator.begin_step`.
        staging: what brings arrays to the device; by default none on the CPU, where tensors share their memory, and
            none on torch's "meta", where there is nothing to bring them to: its plans keep them on the CPU.
    """

    def __init__(
        self, state: RunningRows, ledger: KVLedger, record_reads: bool, staging: Staging | None = None
    ) -> None:
        self._state, self._ledger, self._tables = state, ledger, ledger.tables
        self._record_reads = record_reads
        if staging is None and ledger.tables.device.type not in ("cpu", "meta"):
            staging = Staging(ledger.tables.device)
        self._staging = staging

    def any_mix(self, rows: IntArray, query_lens: IntArray, epoch: int, preempted: Sequence[str]) -> StepPlan:
        """The plan for `query_lens` tokens of sorted `rows` that have just been booked; begins the step."""
        state, tables = self._state, self._tables
        max_query_len = int(query_lens.max())
        if max_query_len > 1:
            order = np.argsort(query_lens > 1, kind="stable")  # one launch can then serve all single-token queries
            rows, query_lens = rows[order], query_lens[order]
        ends = state.num_scheduled[rows]
        start = ends - query_lens
        samples = state.schedule(rows, ends)
        drafts = state.num_drafts[rows]
        num_samples = samples * (1 + drafts) if drafts.any() else None
        token_rows, positions = rows, start
        if max_query_len > 1:
            token_rows = np.repeat(rows, query_lens)
            positions = np.repeat(start, query_lens) + ragged_arange(query_lens)
        query_ends = np.cumsum(query_lens)
        query_start_loc = np.concatenate(([0], query_ends)).astype(np.int32)
        sampled_rows, sample_index = rows[samples], (query_ends - 1)[samples]
        sampling = state.sampling(sampled_rows)
        if num_samples is not None:
            each = num_samples[samples]
            later = ragged_arange(each)
            sample_index = np.repeat(sample_index - each + 1, each) + later
            sampling = sampling.spread(each, later + np.repeat(each > 1, each))  # their first one is not pending
        slots = tables.slot_mapping(token_rows, positions)
        arrays = (state.inputs(token_rows, positions), positions, slots, query_start_loc, sample_index)
        sent, copies = self._send(arrays)
        block_table, device_lens = tables.batch(rows)
        return StepPlan(
            step=self._begin(rows),
            rows=rows,
            tickets=state.ticket[rows],
            request_ids=state.request_ids[rows],
            query_lens=query_lens,
            num_decodes=int(np.count_nonzero(query_lens == 1)),
            samples=samples,
            sampling=sampling,
            input_ids=sent[0],
            positions=sent[1],
            slot_mapping=sent[2],
            query_start_loc=sent[3],
            block_table=block_table,
            context_lens=device_lens,
            sample_index=sent[4],
            bounds=Bounds(rows.size, int(ends.max()), max_query_len),
            ends=ends,
            index=rows,
            epoch=epoch,
            preempted=tuple(preempted),
            copies=copies,
            wants_logprobs=state.wants_logprobs(sampled_rows),
            num_samples=num_samples,
        )

    def one_token_each(self, batch: DecodeBatch) -> StepPlan | None:
        """Books the next token of all rows of a batch and plans it: a constant number of operations.

        None, and no change, if blocks do not suffice.
        """
        state, index, tables = self._state, batch.index, self._tables
        slots = self._ledger.advance_one(index, batch.rows)
        if slots is None:
            return None
        ends = state.num_scheduled[index].copy()
        inputs = state.last_inputs(index)
        state.num_pending[index] += 1
        sent, copies = self._send((inputs, ends - 1, slots))
        batch.max_context_len += 1
        width = blocks_for(batch.max_context_len, tables.block_size)
        block_table, context_lens = batch.tables(tables.block_tables, tables.context_lens, width)
        each = batch.sampling
        return StepPlan(
            step=self._begin(batch.rows),
            rows=batch.rows,
            tickets=batch.tickets,
            request_ids=batch.request_ids,
            query_lens=batch.query_lens,
            num_decodes=batch.rows.size,
            samples=batch.samples,
            sampling=SamplingBatch(
                each.temperature, each.top_k, each.top_p, each.seed, state.output_positions(index, ends)
            ),
            input_ids=sent[0],
            positions=sent[1],
            slot_mapping=sent[2],
            query_start_loc=batch.query_start_loc,
            block_table=block_table,
            context_lens=context_lens,
            sample_index=batch.sample_index,
            bounds=Bounds(batch.rows.size, batch.max_context_len, 1),
            ends=ends,
            index=index,
            epoch=batch.epoch,
            copies=copies,
            wants_logprobs=batch.wants_logprobs,
        )

    def _send(self, arrays: tuple[npt.NDArray[Any], ...]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Brings the arrays of the next step, its copies, and what changed in the tables, to the device.

        That takes memory, which may be lacking: the step begins when all of it is there.
        """
        tables, count, copies = self._tables, len(arrays), self._ledger.next_copies
        if self._staging is None:
            tables.flush()
            sent = tuple(map(torch.from_numpy, arrays))
            return sent, None if copies is None else torch.from_numpy(copies)
        changes = tables.differences()
        more: tuple[npt.NDArray[Any], ...] = (tables.stored.astype(np.int32),)
        more += () if changes is None else changes
        more += () if copies is None else (copies,)
        allocator = self._ledger.allocator
        sent = self._staging.send(allocator.last_step + 1, allocator.steps_in_flight, (*arrays, *more))
        tables.context_lens.copy_(sent[count])
        tables.lens_changed = False
        if changes is not None:
            tables.apply(sent[count + 1], sent[count + 2])
        return sent[:count], None if copies is None else sent[-1]

    def _begin(self, rows: IntArray) -> int:
        """Begins the step over `rows` and returns its number."""
        return self._ledger.begin_step(self._tables.blocks_of(rows) if self._record_reads else None)[0]
