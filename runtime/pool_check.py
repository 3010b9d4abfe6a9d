"""The invariants of a pool, derived from its arrays and from nothing that the allocator computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from .arrays import IntArray, true_at
from .errors import Invariant, InvariantViolation
from .fences import Step

# What the count of a block says when it is no number of references.
FREE, RESERVED, FENCED = 0, -1, -2


class BlockState(StrEnum):
    """Where a block is; exactly one of these holds."""

    FREE = "free"
    REFERENCED = "referenced"  # named by at least one table or cache
    FENCED = "fenced"  # named by none, but a step in flight may read it
    RESERVED = "reserved"  # set aside: named by no table yet


def state_of(count: int) -> BlockState:
    """The state that a block's count stands for."""
    if count > 0:
        return BlockState.REFERENCED
    return {FREE: BlockState.FREE, RESERVED: BlockState.RESERVED}.get(count, BlockState.FENCED)


def check_pool(
    *,
    refcount: IntArray,
    generation: IntArray,
    free: IntArray,
    num_fenced: int,
    num_reserved: int,
    steps: Sequence[Step],
    references: IntArray | None,
) -> None:
    """Checks the arrays of a pool, all [num_blocks] but `free`.

    Args:
        free: the live part of the free list.
        num_fenced, num_reserved: the allocator's counters.
        steps: the steps in flight.
        references: how often each block is named, or None.

    Raises:
        InvariantViolation: the first invariant that does not hold.
    """
    _check_refcounts(refcount, references)
    _check_conservation(refcount, free.size, num_fenced, num_reserved)
    _check_free_list(refcount, free)
    _check_fences(refcount, generation, steps)


def _check_conservation(refcount: IntArray, num_free: int, num_fenced: int, num_reserved: int) -> None:
    counters = ((FREE, num_free), (FENCED, num_fenced), (RESERVED, num_reserved))
    for code, counter in counters:
        found = int(np.count_nonzero(refcount == code))
        if found != counter:
            raise InvariantViolation(
                Invariant.CONSERVATION, f"{found} blocks are {state_of(code)}, but {counter} are counted so"
            )


def _check_free_list(refcount: IntArray, free: IntArray) -> None:
    times = np.bincount(free, minlength=refcount.size)
    wrong = true_at(times != (refcount == FREE))
    if wrong.size:
        block = int(wrong[0])
        state = state_of(int(refcount[block]))
        raise InvariantViolation(
            Invariant.FREE_LIST, f"block {block} is {state} and stands in the free list {times[block]} times"
        )


def _check_refcounts(refcount: IntArray, references: IntArray | None) -> None:
    wrong = true_at(refcount < FENCED)
    if wrong.size:
        raise InvariantViolation(Invariant.REFCOUNT, f"block {wrong[0]} has count {refcount[wrong[0]]}")
    if references is None:
        return
    wrong = true_at(np.maximum(refcount, 0) != references)
    if wrong.size:
        block = int(wrong[0])
        raise InvariantViolation(
            Invariant.REFCOUNT, f"block {block} has count {refcount[block]} and is named {references[block]} times"
        )


def _check_fences(refcount: IntArray, generation: IntArray, steps: Sequence[Step]) -> None:
    held = [blocks for step in steps for blocks in step.held]
    times = np.bincount(np.concatenate(held), minlength=refcount.size) if held else np.zeros(refcount.size, np.int64)
    wrong = true_at(times != (refcount == FENCED))
    if wrong.size:
        block = int(wrong[0])
        state = state_of(int(refcount[block]))
        raise InvariantViolation(Invariant.FENCE, f"block {block} is {state} and held by {times[block]} fences")
    for step in steps:
        if step.reads is None:
            continue
        recycled = step.reads[generation[step.reads] != step.generations]
        if recycled.size:
            raise InvariantViolation(
                Invariant.FENCE, f"block {recycled[0]} came back to the free list while step {step.number} reads it"
            )
