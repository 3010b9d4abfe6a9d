"""Tables on the host, on the device, and the slots that follow from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedtune.runtime.arrays import blocks_for
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.errors import Invariant, InvariantViolation


@pytest.fixture
def tables() -> BlockTables:
    return BlockTables(max_num_seqs=3, max_blocks=4, block_size=16)


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3), (38, 3), (48, 3), (49, 4)]
)
def test_blocks_at_the_edges(tables: BlockTables, tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks
    assert tables.missing_blocks(np.array([1]), np.array([tokens])).tolist() == [blocks]


def test_only_differences_are_sent(tables: BlockTables) -> None:
    tables.append([2, 0], [2, 1], [7, 3, 9])
    assert (tables.block_tables == -1).all(), "nothing reaches the device before flush"
    assert tables.flush() == 3
    assert tables.block_tables.tolist() == [[9, -1, -1, -1], [-1] * 4, [7, 3, -1, -1]]
    tables.append([0], [1], [4])
    tables.set_context_lens(np.array([0]), np.array([17]))
    assert tables.flush() == 1, "lengths are not counted: they go along as they are"
    assert tables.flush() == 0
    assert tables.block_tables[0].tolist() == [9, 4, -1, -1]
    assert tables.context_lens.tolist() == [17, 0, 0]
    tables.check()


def test_the_device_tensors_stay_where_they_are(tables: BlockTables) -> None:
    before = tables.block_tables.data_ptr(), tables.context_lens.data_ptr()
    tables.append([1], [4], [0, 1, 2, 3])
    tables.flush()
    assert (tables.block_tables.data_ptr(), tables.context_lens.data_ptr()) == before
    assert (tables.block_tables.dtype, tables.context_lens.dtype) == (torch.int32, torch.int32)


def test_a_cleared_row_is_empty_and_can_be_filled_again_before_the_flush(tables: BlockTables) -> None:
    tables.append([0, 1], [3, 1], [5, 6, 7, 8])
    tables.set_context_lens(np.array([0, 1]), np.array([40, 2]))
    tables.flush()
    assert tables.clear([1, 0]).tolist() == [8, 5, 6, 7]
    tables.append([0], [1], [2])
    tables.check()
    tables.flush()
    assert tables.block_tables.tolist() == [[2, -1, -1, -1], [-1] * 4, [-1] * 4]
    assert tables.context_lens.tolist() == [0, 0, 0]
    tables.check()


def test_a_full_row_refuses_whole(tables: BlockTables) -> None:
    tables.append([0], [3], [1, 2, 3])
    with pytest.raises(ValueError, match="row 0 would name 5 blocks: the tables have 4"):
        tables.append([1, 0], [1, 2], [4, 5, 6])
    assert tables.num_blocks.tolist() == [3, 0, 0]
    with pytest.raises(ValueError, match="do not add up"):
        tables.append([1], [2], [4])
    tables.check()


def test_a_batch_is_in_the_order_asked_for(tables: BlockTables) -> None:
    tables.append([0, 1, 2], [1, 2, 1], [10, 20, 21, 30])
    tables.set_context_lens(np.arange(3), np.array([16, 17, 3]))
    tables.flush()
    table, lens = tables.batch(np.array([2, 0]))
    assert (table.tolist(), lens.tolist()) == ([[30], [10]], [3, 16])
    table, lens = tables.batch(np.array([0, 1]))
    assert (table.tolist(), lens.tolist()) == ([[10, -1], [20, 21]], [16, 17])
    assert table.data_ptr() == tables.block_tables.data_ptr(), "the first rows in order need no copy"


@pytest.mark.parametrize("position", [-1, 32, 63])
def test_a_slot_outside_the_row_is_refused(tables: BlockTables, position: int) -> None:
    tables.append([1], [2], [3, 4])
    with pytest.raises(ValueError, match=f"position {position} of row 1 lies outside its 2 blocks"):
        tables.slot_mapping(np.array([1]), np.array([position]))


def test_slots_beyond_32_bits() -> None:
    tables = BlockTables(1, 1, 256)
    tables.append([0], [1], [2**31 - 1])
    assert tables.slot_mapping(np.array([0]), np.array([255])).tolist() == [(2**31 - 1) * 256 + 255]


@given(
    block_size=st.integers(1, 9),
    lens=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_every_token_has_its_own_slot_in_its_own_block(block_size: int, lens: list[int], seed: int) -> None:
    counts = [-(-n // block_size) for n in lens]
    tables = BlockTables(len(lens), 30, block_size)
    blocks = np.random.default_rng(seed).permutation(1000)[: sum(counts)]
    tables.append(np.arange(len(lens)), counts, blocks)
    rows = np.repeat(np.arange(len(lens)), lens)
    positions = np.array([position for n in lens for position in range(n)], np.int64)
    slots = tables.slot_mapping(rows, positions)
    tables.flush()
    table = tables.block_tables.tolist()
    expected = [table[r][p // block_size] * block_size + p % block_size for r, p in zip(rows, positions, strict=True)]
    assert slots.tolist() == expected
    assert len(set(expected)) == len(expected)


def test_check_finds_a_lost_difference(tables: BlockTables) -> None:
    tables.append([1], [2], [3, 4])
    tables._dirty.clear()
    with pytest.raises(InvariantViolation, match=r"entry \[1, 0\]") as found:
        tables.check()
    assert found.value.invariant is Invariant.TABLE_DEVICE


def test_check_finds_a_row_with_a_hole(tables: BlockTables) -> None:
    tables.append([1], [2], [3, 4])
    tables._host_tables[1, 0] = -1
    with pytest.raises(InvariantViolation, match="row 1") as found:
        tables.check()
    assert found.value.invariant is Invariant.TABLE_SHAPE
