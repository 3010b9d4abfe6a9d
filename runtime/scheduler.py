"""Continuous batching: which sequences run in the next step, with how many tokens and on which blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .admission import Admission
from .allocator import BlockAllocator
from .arrays import IntArray, blocks_for
from .block_tables import BlockTables
from .collector import Collector
from .errors import InvalidRequest, RequestTooLarge, StepError
from .kv_ledger import KVLedger
from .metrics import SequenceReport, Snapshot, report, take_snapshot
from .plan import StepOutput, StepPlan, sampled_logprobs, sampled_tokens
from .planner import DecodeBatch, Planner
from .prefix_cache import PrefixCache
from .prefix_sharing import PrefixSharing
from .roster import Roster
from .sampling import SamplingParams
from .scheduler_check import check_scheduler
from .scheduler_config import SchedulerConfig
from .sequence import Finished, FinishReason, Request, branch
from .swap import SwapSpace
from .validation import require_tokens, require_type, token_ids


class Scheduler:
    """Admits requests, plans steps over them, and gives every block back whichever way a request ends.

    Policy, all first come, first served:
    - Each step, running sequences get their next token or chunk of prompt, single tokens first; what is left of the
      budget goes to the waiting queue, nobody overtaking.
    - A request is admitted when the blocks for all its tokens and the next one are free, beside those that admitted
      prompts still lack and the watermark.
    - A request that could not finish with the whole pool to itself is refused when it is added. So the oldest
      running sequence can always go on, if need be alone: nothing can deadlock.
    - When blocks run out, the most recently admitted sequence is preempted: it gives back its blocks and waits at the
      head of the queue. What it had computed is kept in host memory or computed anew, whichever `SwapPolicy` finds
      cheaper. While freed blocks are fenced, nothing more is preempted, as that would free nothing sooner:
      sequences that lack a block sit out the step.
    - Samples and forks of a request wait until the prompt that they share is processed, then branch off it.

    One or two steps may be in flight: `schedule`, launch, `schedule`, launch, `commit` the first, and so on.

    Args:
        allocator: blocks of the pool.
        tables: their tables; a row for each running sequence.
        config: how to batch.
        swap: host memory for sequences that are preempted; without it they are computed anew.
        prefix_cache: keeps the blocks of sequences for later ones with the same prefix.

    Attributes:
        ledger: where the tokens of every row are.
        roster: who is live.

    Raises:
        ValueError: a token budget below the number of rows, or a prefix cache of other blocks or beside a window.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        tables: BlockTables,
        config: SchedulerConfig | None = None,
        swap: SwapSpace | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self.allocator, self.tables, self.config = allocator, tables, config or SchedulerConfig()
        if self.config.token_budget < tables.max_num_seqs:
            raise ValueError(
                f"token_budget={self.config.token_budget} is below max_num_seqs={tables.max_num_seqs}: some sequences "
                "would starve. Raise the budget or lower the rows"
            )
        self.ledger = KVLedger(allocator, tables, self.config.window)
        self.roster = Roster(self.ledger, swap)
        self.rows = self.roster.rows
        self._pinned_most = 0
        if prefix_cache is not None:
            self.roster.sharing = PrefixSharing(prefix_cache, self.ledger, self.rows)
            self._pinned_most = prefix_cache.max_pinned_blocks
        self._admission = Admission(self.ledger, self.roster, self.config.token_budget, self.config.watermark_blocks)
        self._planner = Planner(self.rows, self.ledger, self.config.debug)
        self._collector = Collector(self.ledger, self.roster)
        self._batch: DecodeBatch | None = None
        self._has_drafts = False
        # `ends` of the plans of the last two steps, by the lowest bit of their numbers: no more are in flight.
        self._flight: list[IntArray | None] = [None, None]

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.roster.live)

    @property
    def most_blocks(self) -> int:
        """Blocks that live requests can have together: all but those reserved and those that pins may keep."""
        return self.allocator.num_blocks - self.allocator.num_reserved - self._pinned_most

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestTooLarge: it could not finish even if it had the pool to itself, or may grow too long.
            InvalidRequest: its id is that of a live request, or a token is outside the vocabulary.
        """
        require_type("request", request, Request)
        if self.config.vocab_size is not None:
            request.require_vocabulary(self.config.vocab_size)
        self._require_fits(request)
        self.roster.add(request)

    def _require_fits(self, request: Request) -> None:
        self.config.require_short(request)
        needed = blocks_for(request.max_stored_tokens, self.tables.block_size)
        most = min(self.most_blocks, self.tables.max_blocks)
        if needed > most:
            raise RequestTooLarge(
                f"request {request.request_id!r} stores up to {request.max_stored_tokens} tokens: {needed} blocks of "
                f"{self.tables.block_size}, and a sequence can have {most}. Shorten it or build a larger pool"
            )

    def schedule(self) -> StepPlan | None:
        """Plans and begins the next step. None if there is nothing to run, or nothing before a step is committed.

        Whatever else is raised, as by a device without memory, passes through: no step has begun, and sequences that
        were to be in it are computed anew, losing no token.

        Raises:
            StepError: two steps are in flight.
            PoolExhausted: blocks were reserved after a request was added, and the rest no longer holds it.
        """
        self.allocator.require_step_slot()
        plan = self._schedule_decode() or self._schedule_mix()
        if plan is not None:
            self._flight[plan.step & 1] = plan.ends
        return plan

    def commit(self, plan: StepPlan, tokens: Any, logprobs: Any = None) -> StepOutput:
        """Ends a step that the device has finished, and takes its tokens.

        Args:
            plan: the oldest in flight, as `schedule` of this scheduler returned it, or `dataclasses.replace` of it.
            tokens: int [num_sampled]: one for each sequence that samples, in order; array, tensor or list.
                Tokens of sequences that were cancelled or preempted in the meantime are dropped. -1 withholds one: its
                sequence pauses until `give`, and where it is preempted meanwhile, it samples once more. A sequence
                of which the other step in flight computes the next token has gone on already: that is refused.
            logprobs: [num_sampled]: log probability of each, for those that ask.

        Raises:
            InvalidToken: one is outside the vocabulary; it names whose. The step is still in flight.
            ValueError: another number of tokens, or one that is no integer; the step is still in flight.
            StepError: another step must end first, the plan is another scheduler's, or a token is withheld from which
                a step in flight goes on; the step is still in flight.
        """
        self._require_own(plan)
        values = sampled_tokens(plan, tokens, self.config.vocab_size)
        logs = None if logprobs is None else sampled_logprobs(plan, logprobs)
        self._batch = self._batch if plan.num_samples is None else None
        return self._collector.take(plan, values, logs)

    def _require_own(self, plan: StepPlan) -> None:
        """Raises StepError if another scheduler made `plan`: its number may be that of a step in flight here."""
        require_type("plan", plan, StepPlan, StepError)
        if self._flight[plan.step & 1] is not plan.ends and plan.step in self.allocator.steps_in_flight:
            raise StepError(
                f"this plan of step {plan.step} is not the one that this scheduler has in flight under that number: "
                "hand a plan to the scheduler that made it"
            )

    def lacks_token(self, request_id: str) -> bool:
        """Whether a live request pauses because its last token was withheld, and can take it now."""
        sequence = self.roster.live.get(request_id)
        if sequence is None or sequence.row < 0:
            return False
        row = sequence.row
        return not self.rows.num_pending[row] and bool(self.rows.num_scheduled[row] == self.rows.num_tokens[row])

    def give(self, request_id: str, token: int) -> Finished | None:
        """Hands in a token that was withheld when its step was committed; returns the end of the request, if it is.

        Raises:
            RequestFinished, UnknownRequest: as for `cancel`.
            InvalidRequest: a token that is no token id or outside the vocabulary, or none is missing.
        """
        row = self.roster.find(request_id).row
        (token,) = token_ids(f"request {request_id!r}", "the token given", (token,))
        if self.config.vocab_size is not None:
            require_tokens(request_id, "token", (token,), self.config.vocab_size)
        if not self.lacks_token(request_id):
            raise InvalidRequest(f"request {request_id!r} lacks no token: its last one was not withheld")
        self._batch = None
        return self._collector.give(row, token)

    def speculate(self, request_id: str, tokens: Sequence[int]) -> None:
        """Guesses the next tokens of a running request; the next step verifies them all at once.

        It then takes those up to the first that it would have sampled otherwise, and one more: the output is the same
        as without. Slots of the rest are rolled back. No effect on a request that waits, is amid its prompt, or has
        a token on its way; nor where blocks are short.

        Args:
            request_id: a live one.
            tokens: guesses, next one first; none takes earlier ones back.

        Raises:
            RequestFinished, UnknownRequest: as for `cancel`.
            InvalidRequest: a token outside the vocabulary.
        """
        row = self.roster.find(request_id).row
        guesses = np.array(token_ids(f"request {request_id!r}", "drafts", tokens), np.int64)
        if self.config.vocab_size is not None:
            require_tokens(request_id, "drafts", guesses, self.config.vocab_size)
        if row < 0 or self.rows.num_pending[row] or self.rows.num_scheduled[row] != self.rows.num_tokens[row] - 1:
            return
        self.rows.draft(row, guesses)
        self._has_drafts = True

    def abort(self, plan: StepPlan) -> None:
        """Ends a step that failed on the device: its sequences are preempted and computed anew, losing no token.

        Raises:
            StepError: another step must end first, or the plan is another scheduler's.
        """
        self._require_own(plan)
        self.allocator.end_step(plan.step)
        self.roster.compute_anew(plan.rows[self.rows.ticket[plan.rows] == plan.tickets])

    def cancel(self, request_id: str) -> Finished:
        """Ends a request at any point, also while a step over it is in flight; returns what it had produced.

        Raises:
            RequestFinished: it has ended already.
            UnknownRequest: there is none of this id.
        """
        return self.roster.end(self.roster.find(request_id), FinishReason.CANCELLED)

    def fork(
        self,
        request_id: str,
        new_id: str,
        position: int | None = None,
        tokens: Sequence[int] = (),
        sampling: SamplingParams | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        """Branches a new request off a live one: it shares the blocks of what both have in common.

        A block that both still write to is copied when the first of them does. Where the original waits, or there is
        no free row, the new one waits too, ahead of others, and shares what it can when it runs.

        Args:
            request_id: the live one.
            new_id: of the new one.
            position: how many of its tokens, prompt included, to take over; all without.
            tokens: what goes on from there in the new one, such as the token of another beam. They count as output,
                as do those taken over beyond the prompt.
            sampling: of the new one; that of the live one without. Another seed makes another sample.
            max_new_tokens: most tokens of output, those taken over included; that of the live one without.

        Raises:
            RequestFinished, UnknownRequest: as for `cancel`.
            InvalidRequest: the id is in use, a position outside the tokens, a token outside the vocabulary, or
                nothing is left to generate.
            RequestTooLarge: as for `add`.
        """
        source = self.roster.find(request_id)
        fork = branch(source, self.roster.tokens_of(source), new_id, position, tokens, sampling, max_new_tokens)
        self.roster.require_unused(new_id)
        if self.config.vocab_size is not None:
            fork.request.require_vocabulary(self.config.vocab_size)
            require_tokens(new_id, "tokens", fork.tokens, self.config.vocab_size)
        self._require_fits(fork.request)
        if fork.request.logprobs:
            self.roster.share_logprobs(source, fork)
        self.roster.register(fork)
        if not self._admission.enter_forked(fork):
            self.roster.waiting.appendleft(fork)

    def cancel_all(self, request_id: str) -> tuple[Finished, ...]:
        """Ends a request and every live sample or fork of it.

        Raises:
            RequestFinished, UnknownRequest: as for `cancel`.
        """
        sequence = self.roster.find(request_id)
        members = [sequence] if sequence.family is None else list(sequence.family.members)
        return tuple(self.roster.end(member, FinishReason.CANCELLED) for member in members)

    def preempt(self, request_id: str) -> None:
        """Takes the blocks of a running request; it is computed anew later. No effect on a waiting one.

        Raises:
            RequestFinished, UnknownRequest: as for `cancel`.
        """
        if (row := self.roster.find(request_id).row) >= 0:
            self.roster.preempt(row)

    def snapshot(self, block_bytes: int | None = None) -> Snapshot:
        """Where the blocks are and what the queue does.

        Args:
            block_bytes: bytes of one block, `KVCache.block_bytes`: for sizes in bytes.
        """
        return take_snapshot(self.ledger, self.roster, block_bytes)

    def explain(self, request_id: str) -> SequenceReport:
        """Where one live request is, what it holds, what it shares, and what it waits for.

        Raises:
            RequestFinished, UnknownRequest: as for `cancel`.
        """
        return report(self.ledger, self.roster, self.roster.find(request_id))

    def check(self) -> None:
        """Derives every invariant of scheduler, tables and allocator anew.

        Raises:
            InvariantViolation: names the invariant and the place.
        """
        check_scheduler(self.ledger, self.roster)

    def _schedule_decode(self) -> StepPlan | None:
        """The next token of everybody, where that is all there is to do; None, and no change, where it is not."""
        if self._has_drafts or self._admission.may_admit():
            return None
        roster, batch = self.roster, self._batch
        known = batch is not None and batch.epoch == roster.epoch
        if not (known and not self.allocator.steps_in_flight) and not self._all_decode():
            return None
        if batch is None or not known:
            batch = DecodeBatch(self.rows, np.sort(roster.running), roster.epoch, self.tables.device)
            self._batch = batch
        try:
            return self._planner.one_token_each(batch)
        except BaseException:
            self.roster.give_up(batch.rows)
            raise

    def _all_decode(self) -> bool:
        """Whether every running sequence can compute one token: none is amid its prompt or has its last on the way."""
        rows = self.roster.running
        return rows.size > 0 and not np.count_nonzero(self.rows.owed(rows) != 1)

    def _schedule_mix(self) -> StepPlan | None:
        """Chunks of prompts, admissions and preemptions beside the next tokens of the others."""
        self._batch = None  # it counts along the longest context
        self.ledger.trim(self.roster.running)
        rows, counts, preempted, short = self._admission.secure(self._with_drafts(self._grant()))
        if self.roster.waiting and (not short or self._admission.is_stalled(counts)):
            rows, counts = self._admission.admit(rows, counts, preempted)
        counts = self._admission.settle(rows, counts)
        self._drop_stale_drafts(rows, counts)
        self._has_drafts = False  # only now: what raises above leaves drafts behind, and they need this again
        chosen = counts > 0
        if not chosen.any():
            return None
        rows, counts = rows[chosen], counts[chosen]
        order = np.argsort(rows)
        rows, counts = rows[order], counts[order]
        self.ledger.advance(rows, counts)
        try:
            return self._planner.any_mix(rows, counts, self.roster.epoch, preempted)
        except BaseException:
            self.roster.give_up(rows)
            raise

    def _with_drafts(self, counts: IntArray) -> IntArray:
        """`counts` of the running rows, and their drafts where budget and free blocks allow them: all or none."""
        rows = self.roster.running
        drafts = np.where((self.rows.num_drafts[rows] > 0) & (counts == 1), self.rows.num_drafts[rows], 0)
        if not drafts.any():
            return counts
        fits = int((counts + drafts).sum()) <= self.config.token_budget
        if fits and self._admission.make_room(int(self.ledger.demand(rows, counts + drafts).sum())):
            return counts + drafts
        self.rows.num_drafts[rows[drafts > 0]] = 0
        return counts

    def _drop_stale_drafts(self, rows: IntArray, counts: IntArray) -> None:
        """Drafts of rows that sit out; those in flight stay."""
        drafts, state = self.rows.num_drafts, self.rows
        stale = (drafts[rows] > 0) & (counts <= drafts[rows]) & (state.num_scheduled[rows] < state.num_tokens[rows])
        drafts[rows[stale]] = 0

    def _grant(self) -> IntArray:
        """Query tokens for each running row within the budget, blocks aside: single tokens first, then prompts."""
        owed = self.rows.owed(self.roster.running)
        prompts = np.where(owed > 1, owed, 0)
        if not prompts.any():
            return owed
        left = self.config.token_budget - int(owed.sum() - prompts.sum())
        before = np.cumsum(prompts) - prompts
        return np.where(owed > 1, np.clip(left - before, 0, prompts), owed)
