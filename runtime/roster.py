"""Who is live, who runs in which row, who waits, and how the recent ones ended: every way in and out."""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from dataclasses import dataclass, replace

import numpy as np

from .arrays import IntArray, blocks_for
from .errors import InvalidRequest, RequestFinished, UnknownRequest
from .kv_ledger import KVLedger
from .prefix_sharing import PrefixSharing
from .rows import RunningRows
from .sequence import Family, Finished, FinishReason, Parked, Request, Sequence
from .swap import SwapSpace

REMEMBERED = 1024  # ended requests whose id still gets a precise error


@dataclass(frozen=True)
class ForkPoint:
    """Where a waiting sequence could branch off a running one.

    Args:
        row: of the running one; -1 if there is nothing to share yet.
        position: tokens that they have in common and that are processed.
        later: whether waiting a step would let them share more.
    """

    row: int
    position: int
    later: bool


class Roster:
    """Live requests. Leaving, whichever way, gives back row and blocks together.

    Args:
        ledger: rows and blocks that leaving sequences give back.
        swap: host memory for those that are to come back; None computes them anew.

    Attributes:
        rows: state of the running sequences by row.
        running: int64: rows in order of admission.
        sharing: what leaving sequences leave their blocks in; None for nothing.
        waiting: sequences that do not run, next one first.
        live: every request added and not ended, by id.
        epoch: counts changes of who runs in which row.
        num_preemptions, num_swapped, num_finished: since the start; swapped ones are preempted ones too.
    """

    def __init__(self, ledger: KVLedger, swap: SwapSpace | None = None) -> None:
        tables = ledger.tables
        self._ledger, self.swap = ledger, swap
        self.sharing: PrefixSharing | None = None
        self.rows = RunningRows(tables.max_num_seqs, tables.max_blocks * tables.block_size + 1, tables.stored)
        self.running = np.empty(0, np.int64)
        self.waiting: deque[Sequence] = deque()
        self.live: dict[str, Sequence] = {}
        self.epoch = 0
        self.num_preemptions = self.num_swapped = self.num_finished = 0
        self._ended: OrderedDict[str, FinishReason] = OrderedDict()

    @property
    def has_free_row(self) -> bool:
        """Whether another sequence can run."""
        return self.running.size < self.rows.max_num_seqs

    def add(self, request: Request) -> None:
        """Queues a request, all its samples.

        Raises:
            InvalidRequest: its id, or that of a sample, is that of a live request.
        """
        if request.n == 1:
            sequences = [Sequence.of(request)]
        else:
            seed = request.sampling.seed
            seed = secrets.randbits(63) if seed is None else seed
            family = Family()
            sequences = [Sequence.of(request.sample(i, seed), family) for i in range(request.n)]
        for sequence in sequences:
            self.require_unused(sequence.request_id)
        for sequence in sequences:
            self.register(sequence)
            self.waiting.append(sequence)

    def require_unused(self, request_id: str) -> None:
        """Raises InvalidRequest if a live request has this id."""
        if request_id in self.live:
            raise InvalidRequest(f"request {request_id!r} is live already: ids must be unique among live ones")

    def register(self, sequence: Sequence) -> None:
        """Makes a sequence live; whoever calls it queues it or gives it a row."""
        self.live[sequence.request_id] = sequence
        if sequence.family is not None:
            sequence.family.members.append(sequence)

    def find(self, request_id: str) -> Sequence:
        """The live request of this id.

        Raises:
            RequestFinished: it has ended, and is among the last 1024 that did.
            UnknownRequest: none of this id is known.
        """
        sequence = self.live.get(request_id)
        if sequence is not None:
            return sequence
        if request_id in self._ended:
            raise RequestFinished(f"request {request_id!r} has ended already: {self._ended[request_id]}")
        raise UnknownRequest(
            f"request {request_id!r} is unknown: never added, or ended before the last {REMEMBERED} requests that did"
        )

    def tokens_of(self, sequence: Sequence) -> IntArray:
        """Prompt and output so far."""
        if sequence.row < 0:
            return sequence.tokens
        count = int(self.rows.num_tokens[sequence.row])
        return self.rows.tokens[sequence.row, :count].astype(np.int64)

    def share_logprobs(self, source: Sequence, fork: Sequence) -> None:
        """Gives a fork the log probabilities of the output that it takes over; NaN for tokens of its own."""
        logprobs = source.logprobs
        if source.row >= 0 and self.rows.logprobs is not None:
            logprobs = self.rows.logprobs[source.row, source.prompt_len : int(self.rows.num_tokens[source.row])]
        count = fork.tokens.size - fork.prompt_len
        fork.logprobs = np.full(count, np.nan, np.float32)
        shared = min(count, logprobs.size) if fork.prompt_len == source.prompt_len else 0
        fork.logprobs[:shared] = logprobs[:shared]

    def enter(self, sequence: Sequence) -> int:
        """Gives a sequence a row, and returns the row. If that fails, it still waits."""
        row = self.rows.admit(sequence)
        if self.waiting and self.waiting[0] is sequence:
            self.waiting.popleft()
        self.running = np.append(self.running, row)
        self.epoch += 1
        return row

    def fork_point(self, sequence: Sequence) -> ForkPoint | None:
        """The running relative with which a sequence has most tokens in common; None without one."""
        best, most = ForkPoint(-1, 0, later=False), 0
        for member in sequence.family.members if sequence.family else ():
            if member.row < 0:
                continue
            common = self._common_tokens(member.row, sequence.tokens)
            position = min(common, int(self._ledger.processed[member.row]))
            if position > best.position and self._ledger.can_fork(member.row, position):
                best = ForkPoint(member.row, position, later=False)
            most = max(most, common)
        if most > best.position and self._will_process_more(sequence, most):
            return replace(best, later=True)
        return best if best.position else None

    def _will_process_more(self, sequence: Sequence, position: int) -> bool:
        """Whether a running relative that has `position` tokens in common still has to process some of them."""
        assert sequence.family is not None
        rows = [member.row for member in sequence.family.members if member.row >= 0]
        return any(
            self._ledger.processed[row] < position and self._common_tokens(row, sequence.tokens) == position
            for row in rows
        )

    def _common_tokens(self, row: int, tokens: IntArray) -> int:
        """Tokens with which both begin: the last of `tokens` aside, as a sequence needs a query to go on from."""
        count = min(int(self.rows.num_tokens[row]), tokens.size - 1)
        differs = np.flatnonzero(self.rows.tokens[row, :count] != tokens[:count])
        return int(differs[0]) if differs.size else count

    def preempt(self, row: int, recompute: bool = False) -> str:
        """Sends a running sequence back to the head of the queue; returns its id.

        Args:
            row: its row.
            recompute: not to keep its K and V in host memory, whatever the policy says.
        """
        sequence = self.rows_sequence(row)
        if self.swap is not None and not recompute:
            sequence.parked = self._park(row)
        self._leave(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)
        return sequence.request_id

    def compute_anew(self, rows: IntArray) -> None:
        """Preempts those of `rows` that run, without a look at the policy: what they hold is not to be trusted."""
        chosen = set(rows.tolist())
        for row in self.running[::-1].tolist():
            if row in chosen:
                self.preempt(row, recompute=True)

    def give_up(self, rows: IntArray) -> None:
        """Takes back what was booked for a step over `rows` that could not be planned: it has not begun."""
        self._ledger.forget_copies()
        self.compute_anew(rows)

    def rows_sequence(self, row: int) -> Sequence:
        """The sequence that runs in `row`."""
        return self.live[self.rows.request_ids[row]]

    def _park(self, row: int) -> Parked | None:
        """Copies out what `row` has processed, but for the token that it will continue from."""
        assert self.swap is not None
        ledger = self._ledger
        count = min(int(ledger.processed[row]), int(self.rows.num_tokens[row]) - 1)
        if not ledger.can_fork(row, count):
            return None  # a query from there would see blocks that were given back
        first = int(ledger.tables.first_block[row])
        blocks = ledger.tables.blocks_of(row)[: max(blocks_for(count, ledger.tables.block_size) - first, 0)]
        host_blocks = self.swap.try_save(blocks, count) if blocks.size else None
        if host_blocks is None:
            return None
        self.num_swapped += 1
        return Parked(host_blocks, first, count, None if self.sharing is None else self.sharing.keep(row))

    def unpark(self, sequence: Sequence) -> None:
        """Forgets what a sequence has in host memory."""
        if sequence.parked is not None and self.swap is not None:
            self.swap.drop(sequence.parked.host_blocks)
            if self.sharing is not None and sequence.parked.lease is not None:
                self.sharing.cache.release(sequence.parked.lease)
        sequence.parked = None

    def end(self, sequence: Sequence, reason: FinishReason) -> Finished:
        """Ends a request, running or waiting."""
        if sequence.row >= 0:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
            self.unpark(sequence)
        request_id = sequence.request_id
        del self.live[request_id]
        self._forget_relative(sequence)
        self._ended.pop(request_id, None)
        self._ended[request_id] = reason
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        self.num_finished += 1
        output = tuple(sequence.tokens[sequence.prompt_len :].tolist())
        logprobs = tuple(sequence.logprobs.tolist()) if sequence.request.logprobs else None
        sequence.finished = Finished(request_id, output, reason, sequence.num_preemptions, logprobs)
        return sequence.finished

    def _forget_relative(self, sequence: Sequence) -> None:
        if sequence.family is not None:
            sequence.family.members.remove(sequence)

    def _leave(self, sequence: Sequence) -> None:
        row = sequence.row
        if self.sharing is not None:
            self.sharing.leave(row)
        self.rows.vacate(sequence)
        self._ledger.release(row)
        self.running = self.running[self.running != row]
        self.epoch += 1
