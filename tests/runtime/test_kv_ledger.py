"""Forks, copies before writes, roll-backs and windows, block by block. At random: test_ledger_machine.py."""

from __future__ import annotations

import numpy as np
import pytest

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.arrays import IntArray
from pagedtune.runtime.block_tables import EMPTY, BlockTables
from pagedtune.runtime.errors import Invariant, InvariantViolation, PoolExhausted
from pagedtune.runtime.kv_ledger import KVLedger

BLOCK_SIZE = 4


def make(num_blocks: int = 16, window: int | None = None, null_block: int | None = None) -> KVLedger:
    return KVLedger(BlockAllocator(num_blocks), BlockTables(4, 8, BLOCK_SIZE, null_block=null_block), window)


def check(ledger: KVLedger) -> None:
    ledger.tables.check()
    count = ledger.allocator.num_blocks
    ledger.allocator.check(ledger.tables.count_references(count) + ledger.pending_references)
    ledger.check()


def advance(ledger: KVLedger, rows: list[int], counts: list[int]) -> None:
    ledger.advance(np.array(rows), np.array(counts))
    check(ledger)


def process(ledger: KVLedger) -> list[list[int]]:
    """A step from beginning to end; its copies."""
    step, copies = ledger.begin_step()
    check(ledger)
    ledger.allocator.end_step(step)
    ledger.processed[:] = ledger.stored
    check(ledger)
    return [] if copies is None else copies.tolist()


def table(ledger: KVLedger, row: int) -> list[int]:
    return ledger.tables.blocks_of(row).tolist()


def slots(ledger: KVLedger, rows: list[int]) -> list[int] | None:
    booked: IntArray | None = ledger.advance_one(np.array(rows), np.array(rows))
    check(ledger)
    return None if booked is None else booked.tolist()


def test_tokens_one_by_one_go_where_tokens_in_bulk_go() -> None:
    ledger = make()
    advance(ledger, [0, 1], [3, 4])
    assert (table(ledger, 0), table(ledger, 1)) == ([0], [1])
    assert slots(ledger, [0, 1]) == [3, 8]
    assert slots(ledger, [0, 1]) == [12, 9]
    assert (table(ledger, 0), table(ledger, 1)) == ([0, 3], [1, 2])
    assert ledger.stored[:2].tolist() == [5, 6]
    expected = ledger.tables.slot_mapping(np.array([0, 1]), np.array([4, 5])).tolist()
    assert expected == [12, 9]


def test_the_first_token_of_an_empty_row_gets_a_block_like_any_other() -> None:
    ledger = make()
    advance(ledger, [0], [2])
    ledger.release(0)
    advance(ledger, [1], [3])
    assert table(ledger, 1) == [0], "the block that row 0 had"
    assert slots(ledger, [0, 1]) == [4, 3], "slot 2 is row 1's"
    assert (table(ledger, 0), table(ledger, 1)) == ([1], [0])
    assert slots(ledger, [3]) == [8], "a row that never held anything"
    small = make(1)
    advance(small, [1], [1])
    assert slots(small, [0]) is None, "a block is lacking"


def test_nothing_changes_without_blocks() -> None:
    ledger = make(num_blocks=2)
    advance(ledger, [0, 1], [4, 3])
    assert slots(ledger, [1]) == [7]
    assert slots(ledger, [0, 1]) is None
    assert ledger.stored[:2].tolist() == [4, 4]
    with pytest.raises(PoolExhausted):
        advance(ledger, [0], [1])
    assert ledger.demand(np.array([0, 1]), np.array([1, 5])).tolist() == [1, 2]


def test_the_first_to_write_gets_a_copy_and_the_other_keeps_the_original() -> None:
    """A fork shares everything; whole blocks are never copied."""
    ledger = make()
    advance(ledger, [0], [6])
    process(ledger)
    ledger.fork(0, 1, 6)
    check(ledger)
    assert table(ledger, 1) == table(ledger, 0) == [0, 1]
    assert ledger.allocator.refcounts([0, 1]).tolist() == [2, 2]
    assert ledger.demand(np.array([1]), np.array([1])).tolist() == [1]
    assert slots(ledger, [1]) == [2 * BLOCK_SIZE + 2]
    assert (table(ledger, 0), table(ledger, 1)) == ([0, 1], [0, 2])
    assert process(ledger) == [[1, 2]]
    assert ledger.demand(np.array([0]), np.array([1])).tolist() == [0]
    assert slots(ledger, [0]) == [BLOCK_SIZE + 2]
    assert process(ledger) == [], "the last holder writes in place"
    assert ledger.allocator.refcounts([0, 1, 2]).tolist() == [2, 1, 1]


def test_all_writing_at_once_all_but_one_copy() -> None:
    ledger = make()
    advance(ledger, [0], [5])
    process(ledger)
    for row in (1, 2, 3):
        ledger.fork(0, row, 5)
    assert ledger.demand(np.arange(4), np.ones(4, np.int64)).tolist() == [1, 1, 1, 0]
    advance(ledger, [0, 1, 2, 3], [1, 4, 1, 1])
    assert [table(ledger, row)[:2] for row in range(4)] == [[0, 2], [0, 3], [0, 4], [0, 1]]
    assert process(ledger) == [[1, 2], [1, 3], [1, 4]]
    assert ledger.allocator.refcounts([0, 1, 2, 3, 4]).tolist() == [4, 1, 1, 1, 1]


def test_a_fork_at_a_block_edge_copies_nothing() -> None:
    ledger = make()
    advance(ledger, [0], [8])
    process(ledger)
    ledger.fork(0, 1, 8)
    ledger.fork(0, 2, 4)
    assert slots(ledger, [0, 1, 2]) == [8, 12, 16]
    assert process(ledger) == []


def test_both_ends_of_a_copy_are_fenced_until_its_step_has_ended() -> None:
    ledger = make(num_blocks=4)
    advance(ledger, [0], [6])
    process(ledger)
    ledger.fork(0, 1, 6)
    ledger.fork(0, 2, 6)
    slots(ledger, [1, 2])
    ledger.release(0)  # the source of both copies has no table left
    assert ledger.allocator.num_free == 0
    step, copies = ledger.begin_step()
    assert copies is not None
    assert copies.tolist() == [[1, 2], [1, 3]]
    check(ledger)
    assert ledger.allocator.num_fenced == 1, "the source"
    ledger.release(2)
    assert ledger.allocator.num_fenced == 2, "and now a destination"
    check(ledger)
    ledger.allocator.end_step(step)
    assert (ledger.allocator.num_free, ledger.allocator.num_fenced) == (2, 0)


def test_a_source_may_be_further_on() -> None:
    ledger = make()
    advance(ledger, [0], [11])
    process(ledger)
    ledger.fork(0, 1, 6)
    assert slots(ledger, [0]) == [11], "the source fills another block and need not ask"
    assert process(ledger) == []
    assert slots(ledger, [1]) == [3 * BLOCK_SIZE + 2]
    assert process(ledger) == [[1, 3]]


@pytest.mark.parametrize("position", [0, 7, 100])
def test_only_what_is_processed_can_be_forked(position: int) -> None:
    ledger = make()
    advance(ledger, [0], [6])
    process(ledger)
    slots(ledger, [0])  # the seventh is booked, its step has not ended
    with pytest.raises(ValueError, match="6 of its tokens are processed"):
        ledger.fork(0, 1, position)
    check(ledger)


def test_rolling_back_gives_blocks_back_and_never_writes_to_shared_ones() -> None:
    ledger = make()
    advance(ledger, [0], [6])
    process(ledger)
    ledger.fork(0, 1, 6)
    advance(ledger, [1], [5])  # drafts, into a copy and a new block
    assert table(ledger, 1) == [0, 2, 3]
    process(ledger)
    ledger.truncate(1, 7)
    check(ledger)
    assert (table(ledger, 1), int(ledger.processed[1])) == ([0, 2], 7)
    assert slots(ledger, [1]) == [2 * BLOCK_SIZE + 3]
    ledger.truncate(1, 3)  # into the block that row 0 still names
    check(ledger)
    assert slots(ledger, [1]) == [2 * BLOCK_SIZE + 3]
    assert process(ledger) == [[0, 2]]
    with pytest.raises(ValueError, match="holds 4 tokens and cannot go back to 5"):
        ledger.truncate(1, 5)


def test_a_block_that_a_cache_holds_is_copied_before_it_is_written() -> None:
    ledger = make()
    advance(ledger, [0], [6])
    process(ledger)
    ledger.allocator.add_reference([1])
    ledger.ask_before_writing(0)
    assert slots_with_foreign(ledger, [0], [1]) == [2 * BLOCK_SIZE + 2]
    step, copies = ledger.begin_step()
    assert copies is not None
    assert copies.tolist() == [[1, 2]]
    ledger.allocator.end_step(step)
    ledger.allocator.free([1])
    check(ledger)


def slots_with_foreign(ledger: KVLedger, rows: list[int], foreign: list[int]) -> list[int]:
    booked = ledger.advance_one(np.array(rows), np.array(rows))
    count = ledger.allocator.num_blocks
    references = ledger.tables.count_references(count) + ledger.pending_references
    ledger.allocator.check(references + np.bincount(foreign, minlength=count))
    ledger.check()
    assert booked is not None
    return booked.tolist()


def test_adopted_blocks_are_the_rows_own() -> None:
    ledger = make()
    ledger.adopt(2, ledger.allocator.allocate(1), 7, first_block=1)
    check(ledger)
    assert slots(ledger, [2]) == [3]
    ledger.tables.flush()
    assert ledger.tables.block_tables[2].tolist() == [EMPTY, 0, *[EMPTY] * 6]


@pytest.mark.parametrize("null_block", [None, 99])
def test_a_window_gives_back_what_no_query_can_see_and_not_before(null_block: int | None) -> None:
    ledger = make(window=5, null_block=null_block)
    gone = EMPTY if null_block is None else null_block
    advance(ledger, [0], [11])
    step, _ = ledger.begin_step()
    ledger.trim(np.array([0]))
    assert ledger.tables.first_block[0] == 0, "booked, but not processed: it may yet be computed anew"
    ledger.processed[0] = 11
    ledger.trim(np.array([0]))  # the next query is at 11 and sees 7 to 11: block 0 is out of sight
    check(ledger)
    assert ledger.allocator.num_fenced == 1, "the step in flight may read it"
    ledger.allocator.end_step(step)
    ledger.tables.flush()
    assert ledger.tables.block_tables[0].tolist() == [gone, 1, 2, *[EMPTY] * 5]
    assert ledger.can_fork(0, 10)
    assert not ledger.can_fork(0, 7)
    ledger.fork(0, 1, 10)
    check(ledger)
    assert table(ledger, 1) == [1, 2]
    ledger.release(0)
    ledger.release(1)
    check(ledger)
    assert ledger.allocator.num_free == 16


@pytest.mark.parametrize("forked", [False, True])
def test_a_row_that_would_outgrow_the_tables_changes_nothing(forked: bool) -> None:
    ledger = make(num_blocks=32)
    advance(ledger, [0, 1, 2], [31, 2, 30])
    process(ledger)
    if forked:
        ledger.fork(1, 3, 2)
    rows = [0, 1, 2, 3] if forked else [0, 1, 2]
    for _ in range(1 if forked else 2):
        ledger.release(2)  # a shorter row elsewhere gives a full one no room
        advance(ledger, [2], [4])
    assert slots(ledger, [0]) is not None
    assert ledger.stored[0] == 32
    before = ledger.stored.tolist(), ledger.tables.num_blocks.tolist(), ledger.allocator.num_free
    with pytest.raises(ValueError, match="row 0 would name 9 blocks: the tables have 8"):
        slots(ledger, rows)
    with pytest.raises(ValueError, match="row 0 would name 9 blocks: the tables have 8"):
        ledger.advance(np.array(rows), np.ones(len(rows), np.int64))
    assert before == (ledger.stored.tolist(), ledger.tables.num_blocks.tolist(), ledger.allocator.num_free)
    check(ledger)
    assert process(ledger) == []


def test_a_row_fills_the_tables_token_by_token_and_no_further() -> None:
    ledger = make(num_blocks=17)
    advance(ledger, [0, 1], [1, 1])
    for _ in range(31):
        assert slots(ledger, [0]) is not None
    with pytest.raises(ValueError, match="row 0 would name 9 blocks"):
        slots(ledger, [0])
    for _ in range(31):
        assert slots(ledger, [1]) is not None, "another row's end does not matter"
    with pytest.raises(ValueError, match="row 1 would name 9 blocks"):
        slots(ledger, [1])
    check(ledger)


def test_check_finds_a_row_that_would_not_ask() -> None:
    ledger = make()
    advance(ledger, [0], [6])
    process(ledger)
    ledger.fork(0, 1, 6)
    ledger._asking.discard(1)
    with pytest.raises(InvariantViolation, match="row 1 spans 2 blocks and may grow to 6 unasked") as found:
        ledger.check()
    assert found.value.invariant is Invariant.WRITER


def test_check_finds_a_writer_of_a_shared_block() -> None:
    ledger = make()
    advance(ledger, [0], [6])
    process(ledger)
    ledger.fork(0, 1, 6)
    ledger._limit[1] = 8
    ledger._next_slot[1] = ledger._next_slot[0]
    with pytest.raises(InvariantViolation, match="row 1 holds 6 tokens") as found:
        ledger.check()
    assert found.value.invariant is Invariant.WRITER
