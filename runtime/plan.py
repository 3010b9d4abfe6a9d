"""What the scheduler hands to the engine for one step, and what it makes of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..kernels.bounds import Bounds
from .arrays import BoolArray, IntArray, ragged_arange, to_device
from .block_tables import BlockTables
from .rows import RunningRows
from .sampling import SamplingBatch
from .sequence import Finished

ObjectArray = npt.NDArray[np.object_]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step: which tokens go through the model, where their K and V go, and what attention reads.

    Sequences with one query token come first. Launch a plan before the next one is made: its table tensors may be
    views of those that the next plan updates, in stream order.

    Args:
        step: number of the step; `Scheduler.commit` or `abort` ends it.
        rows: int64 [num_seqs], host: row of each sequence.
        tickets: int64 [num_seqs], host: which admission held the row.
        request_ids: object [num_seqs]: the caller's names.
        query_lens: int64 [num_seqs], host.
        num_decodes: sequences with one query token.
        samples: bool [num_seqs], host: which sequences sample a token; the others are amid their prompt.
        sampling: parameters of the sequences that sample, in order.
        input_ids: int64 [num_tokens], device; -1 stands for the token that the sequence samples in the step
            before, still in flight: the engine fills it in on the device, by row.
        positions: int64 [num_tokens], device: position of each token in its sequence.
        slot_mapping: int64 [num_tokens], device: where its K and V go.
        query_start_loc: int32 [num_seqs + 1], device.
        block_table: int32 [num_seqs, max blocks of these sequences], device.
        context_lens: int32 [num_seqs], device: tokens of each sequence, this step's included.
        sample_index: int64 [num_sampled], device: the tokens whose logits are sampled.
        bounds: tightest bounds of the launch, for dispatch.
        preempted: requests that lost their blocks while this plan was made; they run again later.
    """

    step: int
    rows: IntArray
    tickets: IntArray
    request_ids: ObjectArray
    query_lens: IntArray
    num_decodes: int
    samples: BoolArray
    sampling: SamplingBatch
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    sample_index: torch.Tensor
    bounds: Bounds
    preempted: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return int(self.input_ids.shape[0])


@dataclass(frozen=True, eq=False)
class StepOutput:
    """What a step produced.

    Args:
        request_ids: object [n]: requests that got a token, in batch order.
        tokens: int64 [n]: their tokens.
        finished: requests that ended with it.
    """

    request_ids: ObjectArray
    tokens: IntArray
    finished: tuple[Finished, ...]


def make_plan(
    step: int,
    state: RunningRows,
    tables: BlockTables,
    rows: IntArray,
    query_lens: IntArray,
    preempted: Sequence[str],
) -> StepPlan:
    """The plan for `query_lens` more tokens of `rows`, whose blocks are in the tables. Advances the rows."""
    max_query_len = int(query_lens.max())
    if max_query_len > 1:
        order = np.argsort(query_lens > 1, kind="stable")  # one launch can then serve all single-token queries
        rows, query_lens = rows[order], query_lens[order]
    start = state.num_scheduled[rows]
    samples = state.schedule(rows, query_lens)
    context_lens = start + query_lens
    tables.set_context_lens(rows, context_lens)
    token_rows, positions = rows, start
    if max_query_len > 1:
        token_rows = np.repeat(rows, query_lens)
        positions = np.repeat(start, query_lens) + ragged_arange(query_lens)
    ends = np.cumsum(query_lens)
    slots = tables.slot_mapping(token_rows, positions)
    tables.flush()
    block_table, device_lens = tables.batch(rows)
    device = tables.device
    return StepPlan(
        step=step,
        rows=rows,
        tickets=state.ticket[rows],
        request_ids=state.request_ids[rows],
        query_lens=query_lens,
        num_decodes=int((query_lens == 1).sum()),
        samples=samples,
        sampling=state.sampling(rows[samples]),
        input_ids=to_device(state.inputs(token_rows, positions), device),
        positions=to_device(positions, device),
        slot_mapping=to_device(slots, device),
        query_start_loc=to_device(np.concatenate(([0], ends)).astype(np.int32), device),
        block_table=block_table,
        context_lens=device_lens,
        sample_index=to_device((ends - 1)[samples], device),
        bounds=Bounds(rows.size, int(context_lens.max()), max_query_len),
        preempted=tuple(preempted),
    )


def sampled_tokens(plan: StepPlan, tokens: Any, vocab_size: int | None) -> IntArray:
    """`tokens`, checked: one for each sequence of the plan that samples.

    Raises:
        ValueError: another number of tokens, or one that is no token id.
    """
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.cpu().numpy()
    values = np.asarray(tokens, np.int64)
    if values.shape != (plan.sampling.seed.size,):
        raise ValueError(
            f"step {plan.step} samples {plan.sampling.seed.size} tokens, not an array of shape {values.shape}"
        )
    limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    bad = values[(values < 0) | (values >= limit)]
    if bad.size:
        raise ValueError(
            f"step {plan.step} got token {bad[0]}: ids are 0 to {limit - 1}. Logits of NaN sample beyond the last"
        )
    return values
