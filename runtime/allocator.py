"""Blocks of the one KV pool: who owns which, which are free, and which a step in flight still reads."""

from __future__ import annotations

import operator
from array import array
from typing import Any, NoReturn

import numpy as np

from ..kernels.problem import require_positive
from .arrays import ONE, IntArray, as_ints
from .errors import DoubleFree, InvalidBlock, PoolExhausted
from .fences import StepFences
from .pool_check import FENCED, FREE, RESERVED, BlockState, check_pool, state_of

_ONE_REFERENCE = np.int64(1).tobytes()


class BlockAllocator:
    """Hands out the blocks of a pool, by reference counts, singly or in bulk, safely while steps are in flight.

    Every operation is all or nothing. Those on many blocks cost a fixed number of vector operations; those on one
    (`allocate_one`, `free_one`) touch no vector at all. Both work on the same memory: machine arrays, which Python
    indexes several times faster than numpy's, under numpy views. Checks on many compare
    bytes where they can: on a hundred blocks that takes a third of the time of numpy's comparison and reduction.

    Order is part of the contract: a new pool hands out 0, 1, 2, ...; blocks that come back are reused first
    (their lines may still be in a cache), and `free(x)` followed by `allocate(len(x))` gives x again.

    Life of a block: FREE -> REFERENCED (`allocate`), count raised by `add_reference` and lowered by `free`; at
    zero -> FREE, or FENCED until the newest step in flight has ended. `reserve` makes FREE -> RESERVED, then
    `commit_reserved` -> REFERENCED or `release_reserved` -> as at zero. Whoever keeps a block without a table
    naming it, such as a prefix cache, holds a reference of its own.

    Args:
        num_blocks: blocks of the pool; ids are 0 .. num_blocks - 1.
    """

    __slots__ = (
        "_counts",
        "_fences",
        "_free_stack",
        "_generation",
        "_guarded",
        "_head",
        "_identity",
        "_marks",
        "_num_fenced",
        "_num_reserved",
        "_recording",
        "_refcount",
        "_stack",
        "num_blocks",
    )

    def __init__(self, num_blocks: int) -> None:
        require_positive("num_blocks", num_blocks)
        self.num_blocks = num_blocks
        # One number for each block says all: references if positive, else FREE, RESERVED or FENCED.
        self._counts = array("q", bytes(8 * num_blocks))
        self._stack = array("q", range(num_blocks))  # free blocks from `_head` on, those that come next first
        self._refcount: IntArray = np.frombuffer(self._counts, np.int64)
        self._free_stack: IntArray = np.frombuffer(self._stack, np.int64)
        self._generation = np.zeros(num_blocks, np.int64)  # times that the block came back since reads are recorded
        self._identity = np.arange(num_blocks)
        self._marks = np.zeros(num_blocks, np.int64)
        self._head = 0
        self._num_fenced = 0
        self._num_reserved = 0
        self._fences = StepFences()
        self._guarded = False  # a step is in flight: what comes back waits for its end
        self._recording = False  # a step has told what it reads, or somebody counts what comes back

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return self.num_blocks - self._head

    @property
    def num_fenced(self) -> int:
        """Blocks that nobody names and that come back when the steps in flight have ended."""
        return self._num_fenced

    @property
    def num_reserved(self) -> int:
        """Blocks set aside."""
        return self._num_reserved

    @property
    def num_referenced(self) -> int:
        """Blocks that somebody names."""
        return self._head - self._num_fenced - self._num_reserved

    @property
    def num_shared(self) -> int:
        """Blocks with more than one reference. Counted anew: a pass over the pool."""
        return int(np.count_nonzero(self._refcount > 1))

    @property
    def steps_in_flight(self) -> tuple[int, ...]:
        """Numbers of the steps begun and not ended, oldest first."""
        return self._fences.in_flight

    @property
    def last_step(self) -> int:
        """Number of the newest step begun, in flight or ended; 0 before the first."""
        return self._fences.last_number

    def refcounts(self, blocks: Any) -> IntArray:
        """References of each of `blocks`."""
        counts: IntArray = np.maximum(self._refcount[self._ids(blocks)], 0)
        return counts

    def taken_blocks(self) -> IntArray:
        """Blocks that are not free: referenced, reserved or fenced. A pass over the pool."""
        return np.flatnonzero(self._refcount != FREE)

    def count_returns(self) -> IntArray:
        """How often each block has become free since somebody first asked, [num_blocks]: a view, kept up to date."""
        self._recording = True
        returns: IntArray = self._generation.view()
        returns.flags.writeable = False
        return returns

    def allocate_one(self) -> int:
        """One block with one reference.

        Raises:
            PoolExhausted: none is free.
        """
        head = self._head
        if head == self.num_blocks:
            raise PoolExhausted(1, 0, self._num_fenced, self._num_reserved)
        self._head = head + 1
        block = self._stack[head]
        self._counts[block] = 1
        return block

    def free_one(self, block: int) -> None:
        """Drops one reference to one block.

        Raises:
            DoubleFree: nobody holds one.
            InvalidBlock: an id outside the pool.
        """
        if block < 0:  # Python would take -1 for the last block of the pool
            self._reject_outside(block)
        try:
            count = self._counts[block]
        except IndexError:
            self._reject_outside(block)
        if count == 1 and not self._guarded:
            self._counts[block] = FREE
            self._head = head = self._head - 1
            self._stack[head] = block
            if self._recording:
                self._generation[block] += 1
        elif count > 1:
            self._counts[block] = count - 1
        elif count == 1:
            self._retire(np.array([block]))
        else:
            self._reject_double_free(block)

    def allocate(self, count: int) -> IntArray:
        """`count` blocks with one reference each.

        Raises:
            PoolExhausted: fewer are free.
            TypeError, ValueError: `count` is no integer, or is negative.
        """
        blocks = self._pop(count)
        self._refcount[blocks] = 1
        return blocks

    def add_reference(self, blocks: Any) -> None:
        """One more reference to each entry of `blocks`; a block may occur several times.

        Raises:
            InvalidBlock: a block that is not referenced: its content belongs to nobody.
        """
        ids = self._ids(blocks)
        if ids.size == 0:
            return
        counts = self._refcount[ids]
        if int(counts.min()) < 1:
            self._reject_state(ids, BlockState.REFERENCED, "get a second reference")
        if self._all_distinct(ids):
            self._refcount[ids] = counts + ONE
        else:
            np.add.at(self._refcount, ids, 1)

    def free(self, blocks: Any) -> None:
        """Drops one reference for each entry of `blocks`; a block may occur as often as it is referenced.

        Raises:
            DoubleFree: more references dropped than held.
            InvalidBlock: an id outside the pool.
        """
        ids = self._ids(blocks)
        if ids.size == 0:
            return
        if not self._all_distinct(ids):
            self._free_repeated(ids)
            return
        counts = self._refcount[ids]
        if counts.tobytes() == _ONE_REFERENCE * ids.size:
            self._retire(ids)
            return
        if int(counts.min()) < 1:
            self._reject_double_free(int(ids[counts < 1][0]))
        self._refcount[ids] = counts - ONE
        self._retire(ids[counts == ONE])

    def recycle(self, blocks: Any) -> None:
        """As `free`, for blocks that no step in flight reads, by the caller's word: they are free at once.

        For a cache, whose blocks were idle before those steps began. `check()` in debug mode catches a wrong word.

        Raises:
            DoubleFree, InvalidBlock: as for `free`.
        """
        guarded, self._guarded = self._guarded, False
        try:
            self.free(blocks)
        finally:
            self._guarded = guarded

    def reserve(self, count: int) -> IntArray:
        """`count` blocks that no table names yet: for loads under way.

        Raises:
            PoolExhausted: fewer are free.
            TypeError, ValueError: `count` is no integer, or is negative.
        """
        blocks = self._pop(count)
        self._refcount[blocks] = RESERVED
        self._num_reserved += blocks.size
        return blocks

    def commit_reserved(self, blocks: Any) -> None:
        """Makes reserved blocks referenced, with a count of one."""
        self._refcount[self._reserved(blocks, "be committed")] = 1

    def release_reserved(self, blocks: Any) -> None:
        """Gives reserved blocks back; a step in flight fences them, as it may write them."""
        self._retire(self._reserved(blocks, "be released"))

    def require_step_slot(self) -> None:
        """Raises StepError if two steps are in flight."""
        self._fences.require_slot()

    def begin_step(self, reads: Any = None) -> int:
        """Tells that a step is launched and returns its number. Blocks freed from now on wait for its end.

        Args:
            reads: blocks that the step may touch. The fences do not need them; given, `check()` proves
                that none of them was recycled before the step ended.

        Raises:
            StepError: two steps are in flight already.
            InvalidBlock: a block of `reads` that nobody owns.
        """
        if reads is None:
            number = self._fences.begin()
        else:
            blocks = self._ids(reads)
            counts = self._refcount[blocks]
            orphans = blocks[(counts == FREE) | (counts == FENCED)]
            if orphans.size:
                raise InvalidBlock(f"step would read block {orphans[0]}, which nobody owns: nothing keeps its content")
            number = self._fences.begin((blocks.copy(), self._generation[blocks]))
            self._recording = True
        self._guarded = True
        return number

    def end_step(self, step: int) -> None:
        """Tells that the device has finished a step, writes and copies included.

        Raises:
            StepError: it is not the oldest step in flight.
        """
        blocks = self._fences.end(step)
        self._guarded = step != self._fences.last_number
        if blocks is not None:
            self._num_fenced -= blocks.size
            self._push(blocks)

    def _pop(self, count: int) -> IntArray:
        try:
            count = operator.index(count)  # 2.0 would make the head of the free list a fraction
        except TypeError:
            raise TypeError(f"count={count!r} must be an integer: how many blocks to hand out") from None
        if count < 0:
            raise ValueError(f"count={count} must not be negative: ask for 0 blocks or more")
        head = self._head
        end = head + count
        if end > self.num_blocks:
            raise PoolExhausted(count, self.num_blocks - head, self._num_fenced, self._num_reserved)
        self._head = end
        return self._free_stack[head:end].copy()

    def _push(self, blocks: IntArray) -> None:
        self._refcount[blocks] = FREE
        if self._recording:
            self._generation[blocks] += 1
        end = self._head
        self._head = head = end - blocks.size
        self._free_stack[head:end] = blocks

    def _retire(self, blocks: IntArray) -> None:
        """What nobody owns goes to the free list, or behind the newest fence."""
        if not self._guarded:
            self._push(blocks)
            return
        self._refcount[blocks] = FENCED
        self._fences.hold(blocks.copy())
        self._num_fenced += blocks.size

    def _all_distinct(self, ids: IntArray) -> bool:
        """Whether no block occurs twice, without sorting: each finds its own mark again."""
        if ids.size > self.num_blocks:
            return False
        marks = self._identity[: ids.size]
        self._marks[ids] = marks
        return self._marks[ids].tobytes() == marks.tobytes()

    def _free_repeated(self, ids: IntArray) -> None:
        """`free` where a block occurs more than once; each comes back once, in order of its last occurrence."""
        drops = np.bincount(ids, minlength=self.num_blocks)
        left = self._refcount[ids] - drops[ids]
        if int(left.min()) < 0:
            self._reject_double_free(int(ids[left < 0][0]))
        self._refcount[ids] = left  # equal blocks have equal counts left
        _, last = np.unique(ids[::-1], return_index=True)
        once = ids[np.sort(ids.size - 1 - last)]
        self._retire(once[self._refcount[once] == 0])

    def _reserved(self, blocks: Any, what: str) -> IntArray:
        ids = self._ids(blocks)
        if ids.size and (self._refcount[ids] != RESERVED).any():
            self._reject_state(ids, BlockState.RESERVED, what)
        if not self._all_distinct(ids):
            raise InvalidBlock(f"blocks {ids.tolist()} name one block twice: each can {what} once")
        self._num_reserved -= ids.size
        return ids

    def _ids(self, blocks: Any) -> IntArray:
        ids = as_ints(blocks)
        try:
            inside = self._identity[ids].tobytes() == ids.tobytes()  # by -1 numpy finds the last block of the pool
        except IndexError:
            inside = False
        if not inside:
            self._reject_outside(int(ids[(ids < 0) | (ids >= self.num_blocks)][0]))
        return ids

    def _reject_outside(self, block: int) -> NoReturn:
        raise InvalidBlock(f"block {block} is outside the pool: ids are 0 to {self.num_blocks - 1}")

    def _reject_state(self, blocks: IntArray, state: BlockState, what: str) -> NoReturn:
        found = [state_of(count) for count in self._refcount[blocks].tolist()]
        block, wrong = next((b, s) for b, s in zip(blocks.tolist(), found, strict=True) if s is not state)
        raise InvalidBlock(f"block {block} is {wrong} and cannot {what}: only {state} blocks can")

    def _reject_double_free(self, block: int) -> NoReturn:
        count = self._counts[block]
        raise DoubleFree(
            f"block {block} is {state_of(count)} with {max(count, 0)} references, and more were dropped: free what "
            "you were given, once"
        )

    def check(self, references: IntArray | None = None) -> None:
        """Derives every invariant of the pool anew.

        Args:
            references: how often each block is named, [num_blocks]: by table entries, caches and transfers together;
                without it the counts are only compared with each other.

        Raises:
            InvariantViolation: names the invariant and a block.
        """
        check_pool(
            refcount=self._refcount,
            generation=self._generation,
            free=self._free_stack[self._head :],
            num_fenced=self._num_fenced,
            num_reserved=self._num_reserved,
            steps=self._fences.steps,
            references=references,
        )
