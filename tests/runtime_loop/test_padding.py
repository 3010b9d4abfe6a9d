"""Padding of captured graphs and of launches: it writes nowhere, and nothing of an earlier step is left in it."""

from __future__ import annotations

import pytest
import torch

from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.graph_batch import GraphBatch
from pagedtune.runtime.kv_cache import KVCache
from pagedtune.runtime.plan import StepPlan
from pagedtune.runtime.scheduler import Scheduler
from pagedtune.runtime.scheduler_config import SchedulerConfig
from pagedtune.runtime.sequence import Request

BLOCK_SIZE, NUM_BLOCKS = 4, 12


def decode_plan(scheduler: Scheduler) -> StepPlan:
    while True:
        plan = scheduler.schedule()
        assert plan is not None
        if plan.bounds.max_query_len == 1:
            return plan
        scheduler.commit(plan, [1] * int(plan.samples.sum()))


def busy(names: str) -> Scheduler:
    scheduler = Scheduler(BlockAllocator(NUM_BLOCKS), BlockTables(8, 6, BLOCK_SIZE), SchedulerConfig(64))
    for name in names:
        scheduler.add(Request(name, (1, 2, 3, 4, 5), 9))
    return scheduler


def write_all(pool: torch.Tensor, slots: torch.Tensor, skip_negative: bool) -> None:
    """A kernel that writes a 7 for every token of its bucket, as a graph replays it."""
    flat = pool.view(-1, pool.shape[-1])
    flat[slots[slots >= 0] if skip_negative else slots] = 7.0


@pytest.mark.parametrize("null_slots", [False, True])
def test_padded_rows_can_write_nowhere(null_slots: bool) -> None:
    """Slot -1 taken for an index would be the last slot of the pool, which is live here."""
    cache = KVCache(
        Problem(1, 1, 2, q_dtype=DType.FP32), PoolFormat(BLOCK_SIZE, DType.FP32), 1, NUM_BLOCKS, null_block=True
    )
    assert cache.null_block == NUM_BLOCKS
    pool = cache.k_cache(0)
    pool.zero_()
    batch = GraphBatch(8, 6, BLOCK_SIZE, cache.null_block, null_slots=null_slots)
    scheduler = busy("abcde")
    plan = decode_plan(scheduler)
    bucket = batch.load(plan)
    assert bucket == 8
    write_all(pool, batch.slot_mapping[:bucket], skip_negative=not null_slots)
    live = set(plan.slot_mapping.tolist())
    written = set(torch.nonzero(pool[:NUM_BLOCKS].reshape(-1, 2)[:, 0]).flatten().tolist())
    assert written == live, "every real slot, and no other of a block that an allocator hands out"
    assert batch.query_start_loc.tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5]
    assert batch.context_lens[5:].tolist() == [0, 0, 0]
    assert (batch.block_table[5:bucket] == cache.null_block).all()


def test_nothing_of_an_earlier_step_is_left() -> None:
    batch = GraphBatch(8, 6, BLOCK_SIZE, null_block=NUM_BLOCKS)
    scheduler = busy("abcde")
    plan = decode_plan(scheduler)
    batch.load(plan)
    scheduler.commit(plan, [1] * 5)
    for name in "bcde":
        scheduler.cancel(name)
    assert batch.load(decode_plan(scheduler)) == 1
    assert batch.slot_mapping[1:].tolist() == [-1] * 7
    assert (batch.block_table[1:] == NUM_BLOCKS).all(), "a smaller bucket, too, leaves no table behind"
    assert batch.context_lens[1:].tolist() == [0] * 7


def test_the_null_block_reads_as_zeros_and_belongs_to_nobody() -> None:
    cache = KVCache(Problem(1, 1, 2, q_dtype=DType.FP32), PoolFormat(4, DType.FP32), 2, 3, debug=True, null_block=True)
    for pool in (cache.k_cache(1), cache.v_cache(1)):
        assert pool.shape[0] == 4
        assert (pool[3] == 0).all()
        assert pool[:3].isnan().all(), "poison, in debug mode"
    assert all(tensor.shape[1] == 3 for tensor in cache.block_tensors())
    assert cache.num_bytes == (3 + 1 + 2) * cache.block_bytes
    cache.k_cache(0)[3] = 5.0
    cache.check()


def test_what_no_graph_can_take_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a null block"):
        GraphBatch(4, 4, 4, null_slots=True)
    scheduler = busy("ab")
    plan = scheduler.schedule()
    assert plan is not None
    with pytest.raises(ValueError, match="2 sequences with 10 query tokens"):
        GraphBatch(4, 6, 4).load(plan)
