"""The invariants of a pool, derived from its arrays and from nothing that the allocator computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from .arrays import IntArray
from .errors import Invariant, InvariantViolation
from .fences import Step


class BlockState(IntEnum):
    """Where a block is; exactly one of these holds."""

    FREE = 0
    REFERENCED = 1  # named by at least one table
    FENCED = 2  # named by none, but a step in flight may read it
    RESERVED = 3  # set aside: named by no table yet


def check_pool(
    *,
    refcount: IntArray,
    state: npt.NDArray[np.uint8],
    generation: IntArray,
    free: IntArray,
    num_fenced: int,
    num_reserved: int,
    steps: Sequence[Step],
    table_references: IntArray | None,
) -> None:
    """Checks the arrays of a pool, all [num_blocks] but `free`.

    Args:
        free: the live part of the free list.
        num_fenced, num_reserved: the allocator's counters.
        steps: the steps in flight.
        table_references: table entries naming each block, or None.

    Raises:
        InvariantViolation: the first invariant that does not hold.
    """
    _check_conservation(state, free.size, num_fenced, num_reserved)
    _check_free_list(state, free)
    _check_refcounts(refcount, state, table_references)
    _check_fences(state, generation, steps)


def _check_conservation(state: npt.NDArray[np.uint8], num_free: int, num_fenced: int, num_reserved: int) -> None:
    found = np.bincount(state, minlength=len(BlockState))
    counters = {BlockState.FREE: num_free, BlockState.FENCED: num_fenced, BlockState.RESERVED: num_reserved}
    for kind, counter in counters.items():
        if int(found[kind]) != counter:
            raise InvariantViolation(
                Invariant.CONSERVATION, f"{found[kind]} blocks are {kind.name.lower()}, but {counter} are counted so"
            )


def _check_free_list(state: npt.NDArray[np.uint8], free: IntArray) -> None:
    times = np.bincount(free, minlength=state.size)
    wrong = np.flatnonzero(times != (state == BlockState.FREE))
    if wrong.size:
        block = int(wrong[0])
        name = BlockState(state[block]).name.lower()
        raise InvariantViolation(
            Invariant.FREE_LIST, f"block {block} is {name} and stands in the free list {times[block]} times"
        )


def _check_refcounts(refcount: IntArray, state: npt.NDArray[np.uint8], table_references: IntArray | None) -> None:
    wrong = np.flatnonzero((refcount > 0) != (state == BlockState.REFERENCED))
    wrong = np.union1d(wrong, np.flatnonzero(refcount < 0))
    if wrong.size:
        block = int(wrong[0])
        name = BlockState(state[block]).name.lower()
        raise InvariantViolation(Invariant.REFCOUNT, f"block {block} is {name} with count {refcount[block]}")
    if table_references is None:
        return
    wrong = np.flatnonzero(refcount != table_references)
    if wrong.size:
        block = int(wrong[0])
        raise InvariantViolation(
            Invariant.REFCOUNT, f"block {block} has count {refcount[block]}, tables name it {table_references[block]}×"
        )


def _check_fences(state: npt.NDArray[np.uint8], generation: IntArray, steps: Sequence[Step]) -> None:
    held = [blocks for step in steps for blocks in step.held]
    times = np.bincount(np.concatenate(held), minlength=state.size) if held else np.zeros(state.size, np.int64)
    wrong = np.flatnonzero(times != (state == BlockState.FENCED))
    if wrong.size:
        block = int(wrong[0])
        name = BlockState(state[block]).name.lower()
        raise InvariantViolation(Invariant.FENCE, f"block {block} is {name} and held by {times[block]} fences")
    for step in steps:
        if step.reads is None:
            continue
        recycled = step.reads[generation[step.reads] != step.generations]
        if recycled.size:
            raise InvariantViolation(
                Invariant.FENCE, f"block {recycled[0]} came back to the free list while step {step.number} reads it"
            )
