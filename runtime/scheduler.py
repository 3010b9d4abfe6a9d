"""Continuous batching: which sequences run in the next step, with how many tokens and on which blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .allocator import BlockAllocator
from .arrays import IntArray, blocks_for
from .block_tables import BlockTables
from .errors import PoolExhausted, RequestTooLarge
from .metrics import Snapshot
from .plan import StepOutput, StepPlan, make_plan, sampled_tokens
from .roster import Roster
from .scheduler_check import check_scheduler
from .sequence import Finished, FinishReason, Request


@dataclass(frozen=True)
class SchedulerConfig:
    """How to batch.

    Args:
        token_budget: most query tokens of one step; longer prompts run in chunks. At least the rows of the tables,
            so that every running sequence can decode in every step.
        watermark_blocks: blocks that admission leaves free for the growth of those that run. Not kept when nothing
            runs, so that it locks nobody out.
        vocab_size: for checking tokens; None checks less.
        debug: records what each step reads, so that `check()` proves that nothing of it was recycled too early.
    """

    token_budget: int = 2048
    watermark_blocks: int = 0
    vocab_size: int | None = None
    debug: bool = False


class Scheduler:
    """Admits requests, plans steps over them, and gives every block back whichever way a request ends.

    Policy, all first come, first served:
    - Each step, running sequences get their next token or chunk of prompt, single tokens first; what is left of the
      budget goes to the waiting queue, nobody overtaking.
    - A request is admitted when the blocks for all its tokens and the next one are free, beside those that admitted
      prompts still lack and the watermark.
    - A request that could not finish with the whole pool to itself is refused when it is added. So the oldest
      running sequence can always go on, if need be alone: nothing can deadlock.
    - When blocks run out, the most recently admitted sequence is preempted: it gives back its blocks, waits at the
      head of the queue and is computed anew, its output so far included. While freed blocks are fenced, nothing
      more is preempted, as that would free nothing sooner: sequences that lack a block sit out the step.

    One or two steps may be in flight: `schedule`, launch, `schedule`, launch, `commit` the first, and so on.

    Args:
        allocator: blocks of the pool.
        tables: their tables; a row for each running sequence.
        config: how to batch.

    Raises:
        ValueError: a token budget below the number of rows, or a negative watermark.
    """

    def __init__(self, allocator: BlockAllocator, tables: BlockTables, config: SchedulerConfig | None = None) -> None:
        self.allocator, self.tables, self.config = allocator, tables, config or SchedulerConfig()
        if self.config.token_budget < tables.max_num_seqs:
            raise ValueError(
                f"token_budget={self.config.token_budget} is below max_num_seqs={tables.max_num_seqs}: some sequences "
                "would starve. Raise the budget or lower the rows"
            )
        if self.config.watermark_blocks < 0:
            raise ValueError(f"watermark_blocks={self.config.watermark_blocks} must not be negative")
        self.roster = Roster(allocator, tables)
        self.rows = self.roster.rows

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.roster.live)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestTooLarge: it could not finish even if it had the pool to itself.
            InvalidRequest: its id is that of a live request, or a token is outside the vocabulary.
        """
        if self.config.vocab_size is not None:
            request.require_vocabulary(self.config.vocab_size)
        needed = blocks_for(request.max_stored_tokens, self.tables.block_size)
        most = min(self.allocator.num_blocks - self.allocator.num_reserved, self.tables.max_blocks)
        if needed > most:
            raise RequestTooLarge(
                f"request {request.request_id!r} stores up to {request.max_stored_tokens} tokens: {needed} blocks of "
                f"{self.tables.block_size}, and a sequence can have {most}. Shorten it or build a larger pool"
            )
        self.roster.add(request)

    def schedule(self) -> StepPlan | None:
        """Plans and begins the next step. None if there is nothing to run, or nothing before a step is committed.

        Raises:
            StepError: two steps are in flight.
            PoolExhausted: blocks were reserved after a request was added, and the rest no longer holds it.
        """
        self.allocator.require_step_slot()
        rows, counts, preempted, short = self._secure_blocks(self._grant())
        if self.roster.waiting and not short:
            rows, counts = self._admit(rows, counts)
        chosen = counts > 0
        if not chosen.any():
            return None
        rows, counts = rows[chosen], counts[chosen]
        missing = self.tables.missing_blocks(rows, self.rows.num_scheduled[rows] + counts)
        grows = missing > 0
        self.tables.append(rows[grows], missing[grows], self.allocator.allocate(int(missing.sum())))
        step = self.allocator.begin_step(self.tables.blocks_of(rows) if self.config.debug else None)
        return make_plan(step, self.rows, self.tables, rows, counts, preempted)

    def commit(self, plan: StepPlan, tokens: Any) -> StepOutput:
        """Ends a step that the device has finished, and takes its tokens.

        Args:
            plan: the oldest in flight.
            tokens: int [num_sampled]: one for each sequence that samples, in order; array, tensor or list.
                Tokens of sequences that were cancelled or preempted in the meantime are dropped.

        Raises:
            ValueError: another number of tokens, or one outside the vocabulary; the step is still in flight.
            StepError: another step must end first.
        """
        values = sampled_tokens(plan, tokens, self.config.vocab_size)
        self.allocator.end_step(plan.step)
        rows = plan.rows[plan.samples]
        alive = self.rows.ticket[rows] == plan.tickets[plan.samples]
        rows, values = rows[alive], values[alive]
        request_ids = self.rows.request_ids[rows]
        stopped, full = self.rows.push(rows, values)
        ended = np.flatnonzero(stopped | full)
        reasons = {True: FinishReason.STOP, False: FinishReason.LENGTH}
        finished = [self.roster.end(self.roster.live[request_ids[i]], reasons[bool(stopped[i])]) for i in ended]
        return StepOutput(request_ids, values, tuple(finished))

    def abort(self, plan: StepPlan) -> None:
        """Ends a step that failed on the device: its sequences are preempted and computed anew, losing no token.

        Raises:
            StepError: another step must end first.
        """
        self.allocator.end_step(plan.step)
        alive = set(plan.rows[self.rows.ticket[plan.rows] == plan.tickets].tolist())
        for row in self.roster.running[::-1].tolist():
            if row in alive:
                self.roster.preempt(row)

    def cancel(self, request_id: str) -> Finished:
        """Ends a request at any point, also while a step over it is in flight; returns what it had produced.

        Raises:
            RequestFinished: it has ended already.
            UnknownRequest: there is none of this id.
        """
        return self.roster.end(self.roster.find(request_id), FinishReason.CANCELLED)

    def preempt(self, request_id: str) -> None:
        """Takes the blocks of a running request; it is computed anew later. No effect on a waiting one.

        Raises:
            RequestFinished, UnknownRequest: as for `cancel`.
        """
        if (row := self.roster.find(request_id).row) >= 0:
            self.roster.preempt(row)

    def snapshot(self) -> Snapshot:
        """Where the blocks are and what the queue does."""
        allocator = self.allocator
        return Snapshot(
            num_blocks=allocator.num_blocks,
            block_size=self.tables.block_size,
            free=allocator.num_free,
            referenced=allocator.num_referenced,
            fenced=allocator.num_fenced,
            reserved=allocator.num_reserved,
            live_tokens=int(self.rows.num_scheduled.sum()),
            running=self.roster.running.size,
            waiting=len(self.roster.waiting),
            steps_in_flight=len(allocator.steps_in_flight),
            preemptions=self.roster.num_preemptions,
            finished=self.roster.num_finished,
        )

    def check(self) -> None:
        """Derives every invariant of scheduler, tables and allocator anew.

        Raises:
            InvariantViolation: names the invariant and the place.
        """
        check_scheduler(self.allocator, self.tables, self.roster)

    def _grant(self) -> IntArray:
        """Query tokens for each running row within the budget, blocks aside: single tokens first, then prompts."""
        owed = self.rows.owed(self.roster.running)
        prompts = np.where(owed > 1, owed, 0)
        if not prompts.any():
            return owed
        left = self.config.token_budget - int(owed.sum() - prompts.sum())
        before = np.cumsum(prompts) - prompts
        return np.where(owed > 1, np.clip(left - before, 0, prompts), owed)

    def _secure_blocks(self, counts: IntArray) -> tuple[IntArray, IntArray, list[str], bool]:
        """Preempts, or has rows sit out, until the free blocks suffice for `counts` more tokens of the running rows.

        Returns rows, their counts, the requests preempted, and whether blocks were short.
        """
        preempted: list[str] = []
        while True:
            rows = self.roster.running
            missing = self.tables.missing_blocks(rows, self.rows.num_scheduled[rows] + counts)
            needed, free = int(missing.sum()), self.allocator.num_free
            if needed <= free:
                return rows, counts, preempted, bool(preempted)
            if self.allocator.num_fenced:
                counts = np.where((missing > 0) & (np.cumsum(missing) > free), 0, counts)
                return rows, counts, preempted, True
            if rows.size == 1:
                raise PoolExhausted(needed, free, 0, self.allocator.num_reserved)
            preempted.append(self.roster.preempt(int(rows[-1])))
            counts = counts[:-1]

    def _admit(self, rows: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
        """Takes requests from the queue while rows, budget and blocks last; returns rows and counts with theirs."""
        scheduled = self.rows.num_scheduled[rows] + counts
        promised = self.tables.missing_blocks(rows, np.maximum(scheduled, self.rows.num_tokens[rows]))
        free = self.allocator.num_free - int(promised.sum())
        left = self.config.token_budget - int(counts.sum())
        chunks: list[int] = []
        while self.roster.waiting and left > 0 and self.rows.has_free:
            sequence = self.roster.waiting[0]
            length = sequence.tokens.size
            needed = blocks_for(min(length + 1, sequence.request.max_stored_tokens), self.tables.block_size)
            alone = self.roster.running.size == 0
            if needed > free - (0 if alone else self.config.watermark_blocks):
                if alone and not self.allocator.steps_in_flight:
                    raise PoolExhausted(needed, free, 0, self.allocator.num_reserved)
                break
            self.roster.enter()
            chunks.append(min(left, length))
            free, left = free - needed, left - chunks[-1]
        return self.roster.running, np.concatenate((counts, np.array(chunks, np.int64)))
