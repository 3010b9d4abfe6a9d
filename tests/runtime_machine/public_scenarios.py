"""What must hold of the runtime, each in a few lines: it fails when the public bug it stands for is planted."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import numpy as np
import torch

from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.runtime import swap as swap_module
from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.errors import InvalidBlock, RequestTooLarge
from pagedtune.runtime.graph_batch import GraphBatch
from pagedtune.runtime.kv_cache import KVCache
from pagedtune.runtime.kv_ledger import KVLedger
from pagedtune.runtime.scheduler import Scheduler
from pagedtune.runtime.scheduler_config import SchedulerConfig
from pagedtune.runtime.sequence import Request
from pagedtune.runtime.staging import Staging
from pagedtune.runtime.swap import Preemption, SwapPolicy, SwapSpace

from .ledger_model import LedgerModel
from .machine import drive
from .scheduler_model import SchedulerModel


def random_ledger() -> None:
    """Any operations on the ledger."""
    drive([partial(LedgerModel, window) for window in (None, 4)], 1500, run_length=150)


def random_scheduler() -> None:
    """Any operations on the scheduler."""
    models = [partial(SchedulerModel, window, Preemption.SWAP) for window in (None, 4)]
    drive(models, 1500, run_length=150)


def make(num_blocks: int = 16, rows: int = 4, **config: Any) -> Scheduler:
    """A scheduler over blocks of 4 tokens."""
    return Scheduler(BlockAllocator(num_blocks), BlockTables(rows, 12, 4), SchedulerConfig(32, **config))


def slots_far_out() -> None:
    tables = BlockTables(1, 1, 256)
    tables.append([0], [1], [2**31 - 1])
    assert tables.slot_mapping(np.array([0]), np.array([255])).tolist() == [(2**31 - 1) * 256 + 255]


def window_under_a_failed_step() -> None:
    """What a step in flight was to process may have to be processed again."""
    ledger = KVLedger(BlockAllocator(8), BlockTables(1, 8, 4), window=5)
    ledger.advance(np.array([0]), np.array([12]))
    ledger.begin_step()
    ledger.trim(np.array([0]))
    assert ledger.tables.first_block[0] == 0


def staged_twice() -> None:
    """A slow device reads what it was sent in the order of launch, after the host has gone on."""
    staging = Staging(torch.device("cpu"), copies=True)
    first = staging.send(1, (1,), [np.array([1, 2, 3])])[0]
    second = staging.send(2, (1, 2), [np.array([4, 5, 6])])[0]
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [4, 5, 6])


def share_what_is_free() -> None:
    allocator = BlockAllocator(2)
    try:
        allocator.add_reference([1])
    except InvalidBlock:
        return
    raise AssertionError("a free block got a reference")


def host_memory_comes_back_once() -> None:
    swap = SwapSpace(4, None, SwapPolicy(Preemption.SWAP))
    saved = swap.try_save(np.arange(3), 12)
    assert saved is not None
    swap.load(saved, np.arange(3))
    assert swap.allocator.num_free == 4
    swap.allocator.check(np.zeros(4, np.int64))


def nothing_keeps_what_has_ended() -> None:
    scheduler = make()
    scheduler.add(Request("a", (1, 2, 3), 4, n=2))
    kept = weakref.ref(scheduler.roster.live["a"])
    scheduler.cancel("a")
    gc.collect()
    assert kept() is None


def too_large_is_refused() -> None:
    try:
        make(num_blocks=2).add(Request("a", tuple(range(20)), 4))
    except RequestTooLarge:
        return
    raise AssertionError("it waits for ever")


def a_long_prompt_is_admitted_when_all_of_it_fits() -> None:
    scheduler = make(num_blocks=10)
    for name in ("a", "b"):
        scheduler.add(Request(name, tuple(range(30)), 5))
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, [1] * int(plan.samples.sum()))
    assert scheduler.roster.num_preemptions == 0


def nobody_is_preempted_in_vain() -> None:
    scheduler = make(num_blocks=4)
    for name in ("a", "b", "c"):
        scheduler.add(Request(name, (1, 2, 3), 9))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, [1] * 3)
    scheduler.schedule()
    scheduler.schedule()
    assert scheduler.roster.num_preemptions == 1


def samples_count_once() -> None:
    scheduler = make()
    scheduler.add(Request("a", tuple(range(10)), 8, n=3))
    for _ in range(3):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, [1] * int(plan.samples.sum()))
    snapshot = scheduler.snapshot()
    # 2 full blocks once, and for each sample its own third: 12 tokens of the first, 11 of those that branched off
    assert snapshot.live_tokens == 8 + 4 + 3 + 3
    assert snapshot.waste_tokens >= 0


def who_was_first_goes_on_first() -> None:
    """What was swapped out comes back before anybody new gets in."""
    scheduler = Scheduler(
        BlockAllocator(8), BlockTables(2, 12, 4), SchedulerConfig(32), SwapSpace(8, None, SwapPolicy(Preemption.SWAP))
    )
    for name in ("a", "b", "c"):
        scheduler.add(Request(name, tuple(range(10)), 9))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, [1, 1])
    scheduler.preempt("b")
    plan = scheduler.schedule()
    assert plan is not None
    assert "b" in plan.request_ids


def the_last_freed_is_the_first_reused() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(3)
    allocator.free([2, 1])
    assert allocator.allocate(2).tolist() == [2, 1]


def both_k_and_v_are_copied() -> None:
    cache = KVCache(Problem(2, 1, 8, q_dtype=DType.FP32), PoolFormat(4, DType.FP32), 2, 3)
    pools = [pool(layer) for layer in range(2) for pool in (cache.k_cache, cache.v_cache)]
    for pool in pools:
        pool.copy_(torch.arange(pool.numel()).view(pool.shape))
    swap_module.copy_blocks(cache, torch.tensor([[0, 2]]))
    for pool in pools:
        assert torch.equal(pool[2], pool[0])


def padding_writes_nowhere_and_reads_nothing_old() -> None:
    """Five sequences, then one, in graphs of eight rows: only live slots are written, and no old table is left."""
    scheduler, batch = make(num_blocks=10, rows=8), GraphBatch(8, 12, 4, null_block=10)
    for name in "abcde":
        scheduler.add(Request(name, (1, 2, 3, 4, 5), 9))
    for names in ("abcde", "a"):
        plan = scheduler.schedule()
        assert plan is not None
        if plan.bounds.max_query_len > 1:
            scheduler.commit(plan, [1] * 5)
            plan = scheduler.schedule()
            assert plan is not None
        batch.load(plan)
        pool = np.zeros(11 * 4)
        slots = batch.slot_mapping.numpy()
        pool[slots[slots >= 0]] = 1  # what the kernel that writes K and V does
        assert np.flatnonzero(pool[:40]).tolist() == sorted(plan.slot_mapping.tolist())
        assert (batch.block_table[len(names) :] == 10).all()
        assert not batch.context_lens[len(names) :].any()
        scheduler.commit(plan, [1] * len(names))
        for name in "bcde":
            if name in scheduler.roster.live:
                scheduler.cancel(name)
