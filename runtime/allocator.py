"""Blocks of the one KV pool: who owns which, which are free, and which a step in flight still reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels.problem import require_positive
from .arrays import IntArray, as_ints
from .errors import DoubleFree, InvalidBlock, PoolExhausted
from .fences import StepFences
from .pool_check import BlockState, check_pool


class BlockAllocator:
    """Hands out the blocks of a pool, by reference counts, in bulk, safely while steps are in flight.

    Every operation is all or nothing and costs a fixed number of vector operations, however many blocks it
    moves: for many sequences at once, allocate the sum and let `BlockTables.append` share it out.

    Order is part of the contract: a new pool hands out 0, 1, 2, ...; blocks that come back are reused first
    (their lines may still be in a cache), and `free(x)` followed by `allocate(len(x))` gives x again.

    Life of a block: FREE -> REFERENCED (`allocate`), count raised by `add_reference` and lowered by `free`; at
    zero -> FREE, or FENCED until the newest step in flight has ended. `reserve` makes FREE -> RESERVED, then
    `commit_reserved` -> REFERENCED or `release_reserved` -> as at zero.

    Args:
        num_blocks: blocks of the pool; ids are 0 .. num_blocks - 1.
    """

    def __init__(self, num_blocks: int) -> None:
        require_positive("num_blocks", num_blocks)
        self.num_blocks = num_blocks
        self._refcount = np.zeros(num_blocks, np.int64)
        self._state = np.full(num_blocks, BlockState.FREE, np.uint8)
        self._generation = np.zeros(num_blocks, np.int64)  # times that the block came back to the free list
        self._free_stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int64)
        self._scratch = np.zeros(num_blocks, np.int64)
        self._num_free = num_blocks
        self._num_fenced = 0
        self._num_reserved = 0
        self._fences = StepFences()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return self._num_free

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
        """Blocks that tables name."""
        return self.num_blocks - self._num_free - self._num_fenced - self._num_reserved

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
        counts: IntArray = self._refcount[self._ids(blocks)]
        return counts

    def allocate(self, count: int) -> IntArray:
        """`count` blocks with one reference each.

        Raises:
            PoolExhausted: fewer are free.
        """
        blocks = self._pop(count)
        self._refcount[blocks] = 1
        self._state[blocks] = BlockState.REFERENCED
        return blocks

    def add_reference(self, blocks: Any) -> None:
        """One more reference to each entry of `blocks`; a block may occur several times.

        Raises:
            InvalidBlock: a block that is not referenced: its content belongs to nobody.
        """
        blocks = self._ids(blocks)
        self._require(blocks, BlockState.REFERENCED, "get a second reference")
        np.add.at(self._refcount, blocks, 1)

    def free(self, blocks: Any) -> None:
        """Drops one reference for each entry of `blocks`; a block may occur as often as it is referenced.

        Raises:
            DoubleFree: more references dropped than held.
            InvalidBlock: an id outside the pool.
        """
        self._retire(self._unnamed(self._ids(blocks)))

    def recycle(self, blocks: Any) -> None:
        """As `free`, for blocks that no step in flight reads, by the caller's word: they are free at once.

        For a cache, whose blocks were idle before those steps began. `check()` in debug mode catches a wrong word.

        Raises:
            DoubleFree, InvalidBlock: as for `free`.
        """
        self._push(self._unnamed(self._ids(blocks)))

    def reserve(self, count: int) -> IntArray:
        """`count` blocks that no table names yet: for loads under way and speculative slots.

        Raises:
            PoolExhausted: fewer are free.
        """
        blocks = self._pop(count)
        self._state[blocks] = BlockState.RESERVED
        self._num_reserved += count
        return blocks

    def commit_reserved(self, blocks: Any) -> None:
        """Makes reserved blocks referenced, with a count of one."""
        blocks = self._reserved(blocks, "be committed")
        self._refcount[blocks] = 1
        self._state[blocks] = BlockState.REFERENCED

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
            return self._fences.begin(None, None)
        blocks = self._ids(reads)
        orphans = blocks[self._refcount[blocks] + (self._state[blocks] == BlockState.RESERVED) == 0]
        if orphans.size:
            raise InvalidBlock(f"step would read block {orphans[0]}, which nobody owns: nothing keeps its content")
        return self._fences.begin(blocks.copy(), self._generation[blocks])

    def end_step(self, step: int) -> None:
        """Tells that the device has finished a step, writes and copies included.

        Raises:
            StepError: it is not the oldest step in flight.
        """
        blocks = self._fences.end(step)
        self._num_fenced -= blocks.size
        self._push(blocks)

    def _pop(self, count: int) -> IntArray:
        if count < 0:
            raise ValueError(f"count={count} must not be negative")
        top = self._num_free
        if count > top:
            raise PoolExhausted(count, top, self._num_fenced, self._num_reserved)
        self._num_free = top - count
        return self._free_stack[top - count : top][::-1].copy()

    def _push(self, blocks: IntArray) -> None:
        self._state[blocks] = BlockState.FREE
        self._generation[blocks] += 1
        self._free_stack[self._num_free : self._num_free + blocks.size] = blocks[::-1]
        self._num_free += blocks.size

    def _retire(self, blocks: IntArray) -> None:
        """What nobody owns goes to the free list, or behind the newest fence."""
        if not self._fences:
            self._push(blocks)
            return
        self._state[blocks] = BlockState.FENCED
        self._fences.hold(blocks)
        self._num_fenced += blocks.size

    def _unnamed(self, blocks: IntArray) -> IntArray:
        """Drops one reference for each entry of `blocks`; returns those that nobody names any more, each once."""
        if blocks.size == 0:
            return blocks
        left = self._drop_references(blocks)
        if int(left.min()) < 0:
            np.add.at(self._refcount, blocks, 1)
            self._reject_double_free(blocks[left < 0])
        return self._distinct(blocks[left == 0])

    def _drop_references(self, blocks: IntArray) -> IntArray:
        np.subtract.at(self._refcount, blocks, 1)
        return self._refcount[blocks]

    def _reserved(self, blocks: Any, what: str) -> IntArray:
        ids = self._ids(blocks)
        self._require(ids, BlockState.RESERVED, what)
        if self._distinct(ids).size != ids.size:
            raise InvalidBlock(f"blocks {ids.tolist()} name one block twice: each can {what} once")
        self._num_reserved -= ids.size
        return ids

    def _distinct(self, blocks: IntArray) -> IntArray:
        """Each block once, in order of its last occurrence, without sorting."""
        order = np.arange(blocks.size)
        self._scratch[blocks] = order
        last: IntArray = blocks[self._scratch[blocks] == order]
        return last

    def _ids(self, blocks: Any) -> IntArray:
        ids = as_ints(blocks)
        # As unsigned, a negative id is a huge one: numpy would take -1 for the last block of the pool.
        if ids.size and int(ids.view(np.uint64).max()) >= self.num_blocks:
            bad = ids[(ids < 0) | (ids >= self.num_blocks)]
            raise InvalidBlock(f"block {bad[0]} is outside the pool: ids are 0 to {self.num_blocks - 1}")
        return ids

    def _require(self, blocks: IntArray, state: BlockState, what: str) -> None:
        wrong = blocks[self._state[blocks] != state]
        if wrong.size:
            found = BlockState(self._state[wrong[0]]).name.lower()
            raise InvalidBlock(f"block {wrong[0]} is {found} and cannot {what}: only {state.name.lower()} blocks can")

    def _reject_double_free(self, blocks: IntArray) -> None:
        block, held = int(blocks[0]), int(self._refcount[blocks[0]])
        state = BlockState(self._state[block]).name.lower()
        raise DoubleFree(
            f"block {block} is {state} with {held} references, and more were dropped: free what you were given, once"
        )

    def check(self, table_references: IntArray | None = None) -> None:
        """Derives every invariant of the pool anew.

        Args:
            table_references: table entries that name each block, [num_blocks]; without it the counts are only
                compared with the states.

        Raises:
            InvariantViolation: names the invariant and a block.
        """
        check_pool(
            refcount=self._refcount,
            state=self._state,
            generation=self._generation,
            free=self._free_stack[: self._num_free],
            num_fenced=self._num_fenced,
            num_reserved=self._num_reserved,
            steps=self._fences.steps,
            table_references=table_references,
        )
