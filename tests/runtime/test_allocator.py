"""What the allocator promises, operation by operation. Random sequences of them: test_allocator_machine.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.errors import (
    DoubleFree,
    InvalidBlock,
    Invariant,
    InvariantViolation,
    PoolExhausted,
    StepError,
)


def state_of(allocator: BlockAllocator) -> tuple[int, int, int, int]:
    return allocator.num_free, allocator.num_referenced, allocator.num_fenced, allocator.num_reserved


def test_a_new_pool_hands_out_its_blocks_in_order() -> None:
    allocator = BlockAllocator(6)
    assert allocator.allocate(2).tolist() == [0, 1]
    assert allocator.allocate(3).tolist() == [2, 3, 4]
    assert state_of(allocator) == (1, 5, 0, 0)


def test_what_came_back_last_is_reused_first_and_in_the_same_order() -> None:
    allocator = BlockAllocator(8)
    allocator.allocate(8)
    allocator.free([5, 1, 6])
    allocator.free([0, 7])
    assert allocator.allocate(5).tolist() == [0, 7, 5, 1, 6]


def test_allocating_too_much_changes_nothing() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(1)
    with pytest.raises(PoolExhausted, match="4 blocks asked for, 3 free") as found:
        allocator.allocate(4)
    assert (found.value.needed, found.value.free, found.value.fenced) == (4, 3, 0)
    assert state_of(allocator) == (3, 1, 0, 0)
    assert allocator.allocate(3).tolist() == [1, 2, 3]


def test_a_shared_block_comes_back_with_its_last_reference() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(2)
    allocator.add_reference(blocks)
    assert allocator.refcounts(blocks).tolist() == [2, 2]
    allocator.free(blocks)
    assert state_of(allocator) == (2, 2, 0, 0)
    allocator.free(blocks)
    assert state_of(allocator) == (4, 0, 0, 0)


def test_two_owners_that_leave_in_one_call_give_a_block_back_once() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(2)
    allocator.add_reference(blocks)
    allocator.free(np.concatenate((blocks, blocks)))
    assert state_of(allocator) == (4, 0, 0, 0)
    allocator.check(np.zeros(4, np.int64))


@pytest.mark.parametrize("blocks", [[1, 1], [0, 3], [2]])
def test_a_double_free_is_refused_whole(blocks: list[int]) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    with pytest.raises(DoubleFree, match=f"block {blocks[-1]} is"):
        allocator.free(blocks)
    assert state_of(allocator) == (2, 2, 0, 0)
    assert allocator.refcounts([0, 1]).tolist() == [1, 1]
    allocator.check()


@pytest.mark.parametrize("block", [-1, -4, -5, 4, 2**40, -(2**40)])
def test_a_block_outside_the_pool_is_refused(block: int) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(4)
    for operation in (allocator.free, allocator.add_reference, allocator.begin_step, allocator.refcounts):
        with pytest.raises(InvalidBlock, match=f"block {block} is outside the pool: ids are 0 to 3"):
            operation([block])
    allocator.check()


def test_single_blocks_follow_the_same_rules() -> None:
    allocator = BlockAllocator(3)
    assert [allocator.allocate_one() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(PoolExhausted, match="1 blocks asked for, 0 free"):
        allocator.allocate_one()
    allocator.add_reference([1])
    allocator.free_one(1)
    assert state_of(allocator) == (0, 3, 0, 0)
    allocator.free_one(1)
    allocator.free_one(2)
    with pytest.raises(DoubleFree, match="block 1 is free with 0 references"):
        allocator.free_one(1)
    assert allocator.allocate(2).tolist() == [2, 1], "singly or in bulk, the order is that of one stack"
    step = allocator.begin_step()
    allocator.free_one(2)
    assert state_of(allocator) == (0, 2, 1, 0)
    with pytest.raises(DoubleFree, match="block 2 is fenced"):
        allocator.free_one(2)
    allocator.end_step(step)
    assert allocator.allocate_one() == 2
    for block in (-1, 3, 2**40):
        with pytest.raises(InvalidBlock, match=f"block {block} is outside the pool: ids are 0 to 2"):
            allocator.free_one(block)
    allocator.check()


@pytest.mark.parametrize(("blocks", "back"), [([0, 1, 1], [0, 1]), ([1, 0, 1, 2], [0, 1, 2]), ([1, 1], [1])])
def test_a_block_named_several_times_comes_back_where_it_was_named_last(blocks: list[int], back: list[int]) -> None:
    allocator = BlockAllocator(3)
    allocator.allocate(3)
    allocator.add_reference([1])
    allocator.free(blocks)
    allocator.check()
    assert allocator.allocate(len(back)).tolist() == back


def test_a_free_block_cannot_be_shared_or_read() -> None:
    allocator = BlockAllocator(2)
    with pytest.raises(InvalidBlock, match="block 1 is free"):
        allocator.add_reference([1])
    with pytest.raises(InvalidBlock, match="block 1, which nobody owns"):
        allocator.begin_step([1])
    assert allocator.steps_in_flight == ()


def test_a_block_freed_under_a_step_waits_for_it() -> None:
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(2)
    step = allocator.begin_step(blocks)
    allocator.free(blocks)
    assert state_of(allocator) == (0, 0, 2, 0)
    with pytest.raises(PoolExhausted, match="2 fenced"):
        allocator.allocate(1)
    with pytest.raises(DoubleFree, match="is fenced"):
        allocator.free(blocks[:1])
    allocator.check()
    allocator.end_step(step)
    assert state_of(allocator) == (2, 0, 0, 0)


def test_a_block_waits_for_the_newest_step_that_was_in_flight_when_it_was_freed() -> None:
    allocator = BlockAllocator(3)
    a, b, c = allocator.allocate(3).tolist()
    first = allocator.begin_step([a, b, c])
    allocator.free([a])
    second = allocator.begin_step([b, c])
    allocator.free([b])
    allocator.end_step(first)
    assert state_of(allocator) == (1, 1, 1, 0), "a waited for the first step, b waits for the second"
    allocator.end_step(second)
    allocator.free([c])
    assert state_of(allocator) == (3, 0, 0, 0)


def test_steps_end_in_order_and_at_most_two_are_in_flight() -> None:
    allocator = BlockAllocator(1)
    with pytest.raises(StepError, match="none is in flight"):
        allocator.end_step(1)
    first, second = allocator.begin_step(), allocator.begin_step()
    assert allocator.steps_in_flight == (first, second)
    with pytest.raises(StepError, match=f"end step {first} first"):
        allocator.begin_step()
    with pytest.raises(StepError, match=f"the oldest in flight is {first}"):
        allocator.end_step(second)
    allocator.end_step(first)
    allocator.end_step(second)
    with pytest.raises(StepError):
        allocator.end_step(second)


def test_reserved_blocks_are_committed_or_given_back() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.reserve(3)
    assert state_of(allocator) == (1, 0, 0, 3)
    allocator.commit_reserved(blocks[:1])
    step = allocator.begin_step()
    allocator.release_reserved(blocks[1:])
    assert state_of(allocator) == (1, 1, 2, 0)
    allocator.end_step(step)
    assert state_of(allocator) == (3, 1, 0, 0)
    with pytest.raises(InvalidBlock, match="only reserved blocks can"):
        allocator.release_reserved(blocks[1:])
    again = allocator.reserve(1)
    with pytest.raises(InvalidBlock, match="name one block twice"):
        allocator.commit_reserved(np.concatenate((again, again)))
    assert state_of(allocator) == (2, 1, 0, 1)
    allocator.check()


@pytest.mark.parametrize("num_blocks", [0, -1, True, 1.5])
def test_a_pool_needs_blocks(num_blocks: Any) -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockAllocator(num_blocks)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="count=-1"):
        BlockAllocator(2).allocate(-1)


def lose_a_free_block(allocator: BlockAllocator, tables: BlockTables) -> None:
    allocator._head += 1


def list_a_block_twice(allocator: BlockAllocator, tables: BlockTables) -> None:
    allocator._free_stack[-1] = allocator._free_stack[-2]


def recycle_under_a_step(allocator: BlockAllocator, tables: BlockTables) -> None:
    """Freed without a fence and owned by the next one, all consistent, while the step still reads it."""
    allocator.begin_step([0, 1, 2])
    allocator._push(tables.clear(0))
    allocator._refcount[:3] = 0
    tables.append([0], [3], allocator.allocate(3))


def hold_twice(allocator: BlockAllocator, tables: BlockTables) -> None:
    allocator.begin_step()
    allocator._fences.hold(np.array([0]))


def keep_count(allocator: BlockAllocator, tables: BlockTables) -> None:
    allocator._refcount[0] += 1


@pytest.mark.parametrize(
    ("corrupt", "broken"),
    [
        (lose_a_free_block, Invariant.CONSERVATION),
        (list_a_block_twice, Invariant.FREE_LIST),
        (recycle_under_a_step, Invariant.FENCE),
        (hold_twice, Invariant.FENCE),
        (keep_count, Invariant.REFCOUNT),
    ],
)
def test_check_names_the_invariant_that_is_broken(
    corrupt: Callable[[BlockAllocator, BlockTables], None], broken: Invariant
) -> None:
    allocator, tables = BlockAllocator(8), BlockTables(1, 8, 16)
    tables.append([0], [3], allocator.allocate(3))
    allocator.check(tables.count_references(8))
    corrupt(allocator, tables)
    with pytest.raises(InvariantViolation, match=broken.name) as found:
        allocator.check(tables.count_references(8))
    assert found.value.invariant is broken


@pytest.mark.parametrize("count", [2.0, 1.5, "2", None, np.float64(2)])
@pytest.mark.parametrize("name", ["allocate", "reserve"])
def test_a_count_that_is_no_integer_changes_nothing(name: str, count: Any) -> None:
    allocator = BlockAllocator(4)
    with pytest.raises(TypeError, match="must be an integer: how many blocks"):
        getattr(allocator, name)(count)
    with pytest.raises(ValueError, match="count=-1 must not be negative"):
        getattr(allocator, name)(-1)
    assert state_of(allocator) == (4, 0, 0, 0)
    assert getattr(allocator, name)(np.int32(2)).tolist() == [0, 1]
    assert type(allocator.num_free) is int
    allocator.check()


@pytest.mark.parametrize("blocks", [[0.5], [1.0], ["1"], [True], np.array([0.0]), [2**70]])
def test_ids_that_are_no_integers_are_refused(blocks: Any) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(4)
    for operation in (allocator.free, allocator.add_reference, allocator.begin_step, allocator.refcounts):
        with pytest.raises(TypeError, match="must be integers"):
            operation(blocks)
    assert state_of(allocator) == (0, 4, 0, 0)
    assert allocator.steps_in_flight == ()
    allocator.check()


def test_a_step_number_that_compares_equal_ends_the_step() -> None:
    allocator = BlockAllocator(2)
    allocator.end_step(float(allocator.begin_step()))  # type: ignore[arg-type]
    assert allocator.steps_in_flight == ()
    assert allocator.begin_step() == 2
