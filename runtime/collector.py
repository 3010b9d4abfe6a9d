"""Takes what the device sampled: tokens to their rows, ended sequences out of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import BoolArray, IntArray
from .errors import StepError
from .kv_ledger import KVLedger
from .plan import WITHHELD, StepOutput, StepPlan
from .roster import Roster
from .sequence import Finished, FinishReason

LogProbs = npt.NDArray[np.float32] | None


class Collector:
    """Ends steps that went well.

    Args:
        ledger, roster: where tokens and sequences are.
    """

    def __init__(self, ledger: KVLedger, roster: Roster) -> None:
        self._ledger, self._roster, self._rows = ledger, roster, roster.rows

    def take(self, plan: StepPlan, values: IntArray, logs: LogProbs) -> StepOutput:
        """Ends the oldest step in flight; `values` and `logs` are one for each token that it sampled."""
        withheld = values.size > 0 and int(np.minimum.reduce(values)) == WITHHELD
        if withheld:
            self._require_last(plan, values)
            self._roster.epoch += 1  # whoever pauses is not in the next step
        if plan.num_samples is not None:
            return self._verify(plan, plan.num_samples, values, logs)
        state = self._rows
        if plan.epoch == self._roster.epoch:  # nobody came or went: every row still has its sequence
            self._ledger.finish_step(plan.step, plan.index, plan.ends)
            index, rows, request_ids = plan.index, plan.rows, plan.request_ids
            if values.size != rows.size:
                index = rows = rows[plan.samples]
                request_ids = request_ids[plan.samples]
        else:
            alive = self._alive(plan)
            self._ledger.finish_step(plan.step, plan.rows[alive], plan.ends[alive])
            sampled = alive[plan.samples]
            values, logs = values[sampled], None if logs is None else logs[sampled]
            index = rows = plan.rows[plan.samples & alive]
            request_ids = state.request_ids[rows]
        self._after_chunks(plan)
        if withheld:
            given = values != WITHHELD
            state.num_pending[rows[~given]] -= 1
            index = rows = rows[given]
            request_ids, values, logs = request_ids[given], values[given], None if logs is None else logs[given]
        full, stopped = state.push(index, values)
        if logs is not None:
            state.push_logprobs(rows, logs)
        return StepOutput(request_ids, values, self._finish(rows, full, stopped), logs)

    def _require_last(self, plan: StepPlan, values: IntArray) -> None:
        """Raises StepError if a step in flight goes on from a token that is withheld."""
        counts = plan.samples.astype(np.int64) if plan.num_samples is None else plan.num_samples
        which = np.repeat(np.arange(plan.rows.size), counts)[values == WITHHELD]
        rows = plan.rows[which]
        gone_on = which[(self._rows.ticket[rows] == plan.tickets[which]) & (self._rows.num_pending[rows] > 1)]
        if gone_on.size:
            raise StepError(
                f"step {plan.step} withholds a token of request {plan.request_ids[gone_on[0]]!r}, and a step in flight "
                "goes on from it: before a step that may withhold is committed, schedule no other over its requests"
            )

    def _after_chunks(self, plan: StepPlan) -> None:
        """Publishes the chunks of prompts of a step that has ended, and gives back what is behind the window."""
        if self._roster.sharing is not None and plan.num_decodes < plan.rows.size:
            for row in plan.rows[(plan.query_lens > 1) & self._alive(plan)].tolist():
                self._roster.sharing.store(row)  # for those that come meanwhile
        if self._ledger.window is not None and plan.bounds.max_query_len > 1:
            self._ledger.trim(plan.rows[self._alive(plan)])

    def _alive(self, plan: StepPlan) -> BoolArray:
        """Which rows of a plan still have its sequences."""
        alive: BoolArray = self._rows.ticket[plan.rows] == plan.tickets
        return alive

    def give(self, row: int, token: int) -> Finished | None:
        """Takes a token that was withheld; the request's end, if it is the last one."""
        rows = np.array([row])
        self._rows.num_pending[row] += 1
        full, stopped = self._rows.push(rows, np.array([token]))
        ended = self._finish(rows, full, stopped)
        return ended[0] if ended else None

    def _finish(self, rows: IntArray, full: BoolArray, stopped: BoolArray | None) -> tuple[Finished, ...]:
        """Ends the sequences in `rows` that are full or have stopped."""
        ended = full if stopped is None else full | stopped
        if not np.count_nonzero(ended):
            return ()
        which = np.flatnonzero(ended)
        sequences = [self._roster.live[request_id] for request_id in self._rows.request_ids[rows[which]]]
        hit = np.zeros(which.size, np.bool_) if stopped is None else stopped[which]
        reasons = (FinishReason.STOP if stop else FinishReason.LENGTH for stop in hit.tolist())
        return tuple(self._roster.end(sequence, reason) for sequence, reason in zip(sequences, reasons, strict=True))

    def _verify(self, plan: StepPlan, num_samples: IntArray, values: IntArray, logs: LogProbs) -> StepOutput:
        """Ends a step with drafts, sequence by sequence: each may take another number of tokens."""
        state, ledger = self._rows, self._ledger
        alive = self._alive(plan)
        ledger.finish_step(plan.step, plan.rows[alive], plan.ends[alive])
        starts = np.cumsum(num_samples) - num_samples
        request_ids: list[str] = []
        taken_tokens, taken_logs = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
        finished: list[Finished] = []
        for i in np.flatnonzero(alive & (num_samples > 0)).tolist():
            row, start, count = int(plan.rows[i]), int(starts[i]), int(num_samples[i])
            sequence = self._roster.rows_sequence(row)
            if count == 1:
                state.num_pending[row] -= 1
            taken, kept, stopped, full = state.verify(row, values[start : start + count])
            if logs is not None:
                taken_logs.append(logs[start : start + taken.size])
                state.set_logprobs(row, taken_logs[-1])
            if kept < count:
                ledger.truncate(row, int(plan.ends[i]) - count + kept)
            request_ids += [sequence.request_id] * taken.size
            taken_tokens.append(taken)
            if stopped or full:
                finished.append(self._roster.end(sequence, FinishReason.STOP if stopped else FinishReason.LENGTH))
        self._after_chunks(plan)  # only now are rejected drafts no longer among what is processed
        joined = None if logs is None else np.concatenate(taken_logs)
        return StepOutput(np.array(request_ids, object), np.concatenate(taken_tokens), tuple(finished), joined)
