"""Who gets blocks when they are scarce: preemption of those that run, admission of those that wait."""

from __future__ import annotations

import numpy as np

from .arrays import IntArray, blocks_for
from .errors import PoolExhausted
from .kv_ledger import KVLedger
from .prefix_lease import PrefixMatch
from .roster import ForkPoint, Roster
from .sequence import Sequence


class Admission:
    """Decides over blocks, by the policy that `Scheduler` states.

    Args:
        ledger, roster: what there is.
        token_budget, watermark_blocks: see `SchedulerConfig`.
    """

    def __init__(self, ledger: KVLedger, roster: Roster, token_budget: int, watermark_blocks: int) -> None:
        self._ledger, self._roster, self._allocator = ledger, roster, ledger.allocator
        self._budget, self._watermark = token_budget, watermark_blocks

    def may_admit(self) -> bool:
        """Whether the head of the queue could get in, as far as a few comparisons tell."""
        roster = self._roster
        if not roster.waiting or not roster.has_free_row:
            return False
        head = roster.waiting[0]
        if head.family is not None or not roster.running.size:
            return True
        spare = self._available - self._watermark
        return self._price(head, most=spare)[0] <= spare

    def secure(self, counts: IntArray) -> tuple[IntArray, IntArray, list[str], bool]:
        """Preempts, or has rows sit out, until the free blocks suffice for `counts` more tokens of the running rows.

        Returns rows, their counts, the requests preempted, and whether blocks were short.
        """
        preempted: list[str] = []
        sits_out = False
        roster, allocator = self._roster, self._allocator
        while True:
            rows = roster.running
            missing = self._ledger.demand(rows, counts)
            needed = int(missing.sum())
            self.make_room(needed, rows.size)  # and some more, so that the next steps need not ask
            free = allocator.num_free
            if needed <= free:
                return rows, counts, preempted, sits_out or bool(preempted)
            if allocator.num_fenced or (rows.size == 1 and allocator.steps_in_flight):  # it copies while they read
                # Once more: who shares a block with one that sits out may now be the one that has to copy it.
                counts = np.where((missing > 0) & (np.cumsum(missing) > free), 0, counts)
                sits_out = True
                continue
            if rows.size == 1:
                raise PoolExhausted(needed, free, 0, allocator.num_reserved)
            preempted.append(roster.preempt(int(rows[-1])))
            counts = counts[:-1]

    def is_stalled(self, counts: IntArray) -> bool:
        """Whether nothing happens unless somebody is admitted: no step in flight, and all that run lack a token."""
        return not self._allocator.steps_in_flight and not counts.any()

    def admit(self, rows: IntArray, counts: IntArray, preempted: list[str]) -> tuple[IntArray, IntArray]:
        """Takes sequences from the queue while rows, budget and blocks last; returns rows and counts with theirs.

        Those that pause for a token may wait for relatives in the queue, as beams do. Where nothing else can go on,
        such a relative overtakes, if need be at the expense of others that pause: `preempted` gets their names.
        """
        rows, counts = self._take_in_turn(rows, counts)
        while self.is_stalled(counts) and (overtaken := self._make_way()) is not None:
            preempted += overtaken
            rows = self._roster.running
            rows, counts = self._take_in_turn(rows, np.zeros(rows.size, np.int64))
        return rows, counts

    def _make_way(self) -> list[str] | None:
        """Puts a relative of the sequences that pause at the head of the queue; returns whom that preempts, None where
        there is no relative, or it stands there already and nobody else has blocks."""
        roster = self._roster
        running = [roster.rows_sequence(row) for row in roster.running.tolist()]
        families = {sequence.family for sequence in roster.waiting}
        family = next((each.family for each in running if each.family is not None and each.family in families), None)
        if family is None:
            return None
        kin = next(sequence for sequence in roster.waiting if sequence.family is family)
        preempted: list[str] = []
        if roster.waiting[0] is kin:
            others = [sequence.row for sequence in running if sequence.family is not family]
            if not others:
                return None
            preempted.append(roster.preempt(others[-1]))
        roster.waiting.remove(kin)
        roster.waiting.appendleft(kin)
        return preempted

    def _take_in_turn(self, rows: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
        """`admit` with nobody overtaking."""
        roster, state = self._roster, self._roster.rows
        scheduled = self._ledger.stored[rows]
        whole = np.maximum(scheduled + counts, state.num_tokens[rows]) - scheduled
        free = self._available - int(self._ledger.demand(rows, whole).sum())
        left = self._budget - int(counts.sum())
        chunks: list[int] = []
        while roster.waiting and left > 0 and roster.has_free_row:
            sequence = roster.waiting[0]
            fork = roster.fork_point(sequence) if sequence.parked is None else None
            if fork is not None and fork.later:
                break  # a step or two, and it shares what a relative is computing now
            alone = roster.running.size == 0
            grows = not alone and (chunks or not self.is_stalled(counts))
            spare = free - (self._watermark if grows else 0)
            needed, match = self._price(sequence, fork, spare)
            if needed > spare and self._shares_instead(sequence, spare):
                continue
            if needed > spare:
                if alone and not self._allocator.steps_in_flight:
                    raise PoolExhausted(needed, free, 0, self._allocator.num_reserved)
                break
            if sequence.parked is not None and not self.make_room(sequence.parked.host_blocks.size):
                break
            row = roster.enter(sequence)
            self._bring(sequence, row, fork, match)
            chunks.append(min(left, int(state.num_tokens[row] - self._ledger.stored[row])))
            free, left = free - needed, left - chunks[-1]
        return roster.running, np.concatenate((counts, np.array(chunks, np.int64)))

    def settle(self, rows: IntArray, counts: IntArray) -> IntArray:
        """Has the cache give up what `counts` more tokens need; rows whose blocks are fenced yet sit out the step."""
        while not self.make_room(int((demand := self._ledger.demand(rows, counts)).sum())):
            counts = np.where((demand > 0) & (np.cumsum(demand) > self._allocator.num_free), 0, counts)
        return counts

    def enter_forked(self, sequence: Sequence) -> bool:
        """Gives a fork a row beside its relatives at once, if there is one and something to share."""
        fork = self._roster.fork_point(sequence)
        if fork is None or fork.position == 0 or not self._roster.has_free_row:
            return False
        self._bring(sequence, self._roster.enter(sequence), fork)
        return True

    @property
    def _available(self) -> int:
        """Blocks that are free or can be."""
        sharing = self._roster.sharing
        return self._allocator.num_free + (0 if sharing is None else sharing.num_evictable)

    def make_room(self, needed: int, spare: int = 0) -> bool:
        """Whether `needed` blocks are free, once the cache has given up what it must, and `spare` more then."""
        sharing = self._roster.sharing
        if sharing is not None:
            sharing.make_room(needed, spare)
        return needed <= self._allocator.num_free

    def _price(
        self, sequence: Sequence, fork: ForkPoint | None = None, most: int | None = None
    ) -> tuple[int, PrefixMatch | None]:
        """What a waiting sequence takes from the available blocks, and what the cache has for it.

        Beside the blocks that it lacks, those of its prefix that could be evicted and then no longer can. A block
        that is to be copied in part stays too, until it is copied: not worth it if that makes it more than `most`.
        """
        sharing = self._roster.sharing
        match = sharing.match(sequence) if sharing is not None and fork is None else None
        if sharing is None or match is None:
            parked = sequence.parked
            skipped = parked.first_block * self._ledger.tables.block_size if parked else 0
            return self._blocks_of(sequence, fork.position if fork else skipped), None
        needed = self._blocks_of(sequence, match.num_tokens(sharing.cache.block_size)) + match.num_idle
        if match.copy is not None:
            if most is None or needed + 1 <= most:
                return needed + 1, match
            match = sharing.match(sequence, with_copy=False)
        return needed, match

    def _blocks_of(self, sequence: Sequence, shared_tokens: int) -> int:
        """Blocks that a waiting sequence takes from the free ones: for all its tokens and the next one."""
        size = self._ledger.tables.block_size
        most = min(sequence.tokens.size + 1, sequence.request.max_stored_tokens)
        return blocks_for(most, size) - shared_tokens // size

    def _shares_instead(self, sequence: Sequence, spare: int) -> bool:
        """Whether a sequence in host memory, where it shares no block, fits beside a running relative; then it gives
        up what it has there."""
        fork = self._roster.fork_point(sequence) if sequence.parked is not None else None
        if fork is None or self._blocks_of(sequence, fork.position) > spare:
            return False
        self._roster.unpark(sequence)
        return True

    def _bring(self, sequence: Sequence, row: int, fork: ForkPoint | None, match: PrefixMatch | None = None) -> None:
        """Gives a sequence that has just got a row what it need not compute."""
        parked, swap, sharing = sequence.parked, self._roster.swap, self._roster.sharing
        if parked is not None and swap is not None:
            blocks = self._allocator.allocate(parked.host_blocks.size)
            try:
                swap.load(parked.host_blocks, blocks)
            except BaseException:  # the row is empty and is computed anew
                self._allocator.free(blocks)
                self._roster.unpark(sequence)
                raise
            self._ledger.adopt(row, blocks, parked.num_tokens, parked.first_block)
            sequence.parked = None
            if sharing is not None:
                sharing.begin(row, parked.lease)
        elif fork is not None:
            self._ledger.fork(fork.row, row, fork.position)
            if sharing is not None:
                sharing.fork(fork.row, row, fork.position)
        elif sharing is not None and match is not None:
            sharing.bring(row, match)
