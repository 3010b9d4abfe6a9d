"""Allocator and tables against a model of lists, over random operations with every invariant checked after each.

The faults planted below show that the checks can fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from random_runs import run

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.block_tables import EMPTY, BlockTables
from pagedtune.runtime.errors import DoubleFree, Invariant, InvariantViolation, PoolExhausted, StepError
from pagedtune.runtime.fences import MAX_STEPS_IN_FLIGHT

SHARDS = 2  # so that a slow machine stays within the time limit of a test
# A fifth of all: its rules are single ones, slow to draw. tests/runtime_machine has the others.
OPERATIONS = int(os.environ.get("PAGEDTUNE_STATEFUL_OPS", "100000")) // 5
NUM_BLOCKS, NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE = 24, 5, 8, 4

rows_of = st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=NUM_ROWS, unique=True)
one_row = st.integers(0, NUM_ROWS - 1)


class AllocatorMachine(RuleBasedStateMachine):
    """The model: a stack of free blocks, a list of blocks for each row, and for each step what it holds back."""

    performed: ClassVar[int] = 0  # operations, each followed by all checks

    def __init__(self) -> None:
        super().__init__()
        type(self).performed -= 1  # the checks before the first operation
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.tables = BlockTables(NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE)
        self.free = list(range(NUM_BLOCKS))[::-1]
        self.table: list[list[int]] = [[] for _ in range(NUM_ROWS)]
        self.reserved: list[int] = []
        self.steps: list[tuple[int, list[int]]] = []
        self.accepted_a_double_free = False

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def retire(self, blocks: list[int]) -> None:
        if self.steps:
            self.steps[-1][1].extend(blocks)
        else:
            self.free.extend(blocks[::-1])

    def drop(self, blocks: list[int]) -> None:
        """What no row names any more is retired, each block at its last occurrence."""
        named = {block for row in self.table for block in row}
        last = [block for i, block in enumerate(blocks) if block not in blocks[i + 1 :]]
        self.retire([block for block in last if block not in named])

    @rule(rows=rows_of, wanted=st.lists(st.integers(0, 3), min_size=NUM_ROWS, max_size=NUM_ROWS))
    def append(self, rows: list[int], wanted: list[int]) -> None:
        counts = [min(wanted[row], MAX_BLOCKS - len(self.table[row])) for row in rows]
        if sum(counts) > len(self.free):
            with pytest.raises(PoolExhausted):
                self.allocator.allocate(sum(counts))
            return
        self.tables.append(rows, counts, self.allocator.allocate(sum(counts)))
        for row, count in zip(rows, counts, strict=True):
            self.table[row] += self.take(count)

    @rule(source=one_row, fork=one_row)
    def fork_row(self, source: int, fork: int) -> None:
        if self.table[source] and not self.table[fork]:
            blocks = self.tables.blocks_of(source)
            self.allocator.add_reference(blocks)
            self.tables.append([fork], [blocks.size], blocks)
            self.table[fork] = list(self.table[source])

    @rule(rows=rows_of)
    def free_rows(self, rows: list[int]) -> None:
        self.allocator.free(self.tables.clear(rows))
        blocks = [block for row in rows for block in self.table[row]]
        for row in rows:
            self.table[row] = []
        self.drop(blocks)

    @precondition(lambda self: len(self.reserved) < 4)
    @rule(count=st.integers(1, 3))
    def reserve(self, count: int) -> None:
        if count <= len(self.free):
            taken = self.take(count)
            assert self.allocator.reserve(count).tolist() == taken
            self.reserved += taken

    @precondition(lambda self: self.reserved)
    @rule(row=one_row)
    def commit(self, row: int) -> None:
        if len(self.table[row]) < MAX_BLOCKS:
            block = self.reserved.pop()
            self.allocator.commit_reserved([block])
            self.tables.append([row], [1], [block])
            self.table[row].append(block)

    @precondition(lambda self: self.reserved)
    @rule()
    def release(self) -> None:
        self.allocator.release_reserved(self.reserved)
        self.retire(self.reserved)
        self.reserved = []

    @rule()
    def begin_step(self) -> None:
        if len(self.steps) == MAX_STEPS_IN_FLIGHT:
            with pytest.raises(StepError):
                self.allocator.begin_step()
            return
        self.tables.flush()
        named = sorted({block for row in self.table for block in row})
        self.steps.append((self.allocator.begin_step(reads=named), []))

    @precondition(lambda self: self.steps)
    @rule(newest=st.booleans())
    def end_step(self, newest: bool) -> None:
        if newest and len(self.steps) > 1:
            with pytest.raises(StepError):
                self.allocator.end_step(self.steps[-1][0])
            return
        number, held = self.steps.pop(0)
        self.allocator.end_step(number)
        self.free.extend(held[::-1])

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def free_what_nobody_holds(self, block: int) -> None:
        held = sum(row.count(block) for row in self.table)
        with suppress(DoubleFree):
            self.allocator.free([block] * (held + 1))
            self.accepted_a_double_free = True

    @rule()
    def flush(self) -> None:
        self.tables.flush()
        expected = [row + [EMPTY] * (MAX_BLOCKS - len(row)) for row in self.table]
        assert self.tables.block_tables.tolist() == expected

    @invariant()
    def every_invariant_holds(self) -> None:
        type(self).performed += 1
        self.tables.check()
        self.allocator.check(self.tables.count_references(NUM_BLOCKS))

    @invariant()
    def model_agrees(self) -> None:
        assert not self.accepted_a_double_free
        allocator = self.allocator
        fenced = sum(len(held) for _, held in self.steps)
        found = (allocator.num_free, allocator.num_fenced, allocator.num_reserved)
        assert found == (len(self.free), fenced, len(self.reserved))
        assert self.tables.blocks_of(np.arange(NUM_ROWS)).tolist() == list(chain.from_iterable(self.table))


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_invariant_holds_after_every_operation(shard: int) -> None:
    AllocatorMachine.performed = 0
    number = shard
    while (missing := OPERATIONS // SHARDS - AllocatorMachine.performed) > 0:  # Hypothesis ends some runs early
        run(AllocatorMachine, missing, number)
        number += SHARDS


Fault = Callable[..., Any]


def free_without_fence(self: BlockAllocator, blocks: Any) -> None:
    self._push(blocks)


def keep_references(self: BlockAllocator, blocks: Any) -> None:
    """A release that forgets to count."""


def accept_double_free(self: BlockAllocator, block: int) -> None:
    """Instead of raising."""


def lose_reference(self: BlockAllocator, blocks: Any) -> None:
    """A fork that forgets to count."""


def overlook_duplicates(self: BlockAllocator, blocks: Any) -> bool:
    return True


def lose_difference(self: BlockTables, index: Any) -> None:
    self._dirty.append(index[1:])


def leave_entries(self: BlockTables, rows: Any) -> Any:
    """The entries of a cleared row stay."""
    blocks = self.blocks_of(rows)
    self.num_blocks[np.asarray(rows)] = 0
    return blocks


@pytest.mark.parametrize(
    ("owner", "method", "fault", "broken"),
    [
        (BlockAllocator, "_retire", free_without_fence, Invariant.FENCE),
        (BlockAllocator, "free", keep_references, Invariant.REFCOUNT),
        (BlockAllocator, "_reject_double_free", accept_double_free, Invariant.CONSERVATION),
        (BlockAllocator, "add_reference", lose_reference, Invariant.REFCOUNT),
        (BlockAllocator, "_all_distinct", overlook_duplicates, Invariant.REFCOUNT),
        (BlockTables, "_mark", lose_difference, Invariant.TABLE_DEVICE),
        (BlockTables, "clear", leave_entries, Invariant.TABLE_SHAPE),
    ],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, fault: Fault, broken: Invariant
) -> None:
    monkeypatch.setattr(owner, method, fault)
    with pytest.raises((InvariantViolation, AssertionError, ValueError)) as found:
        run(AllocatorMachine, 2000)
    if isinstance(found.value, InvariantViolation):  # else the model saw it before the check could
        assert found.value.invariant is broken
