"""Scheduler and prefix cache together: what is rare in the random runs of `test_prefix_sharing.py`, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.errors import InvariantViolation
from pagedtune.runtime.plan import StepPlan
from pagedtune.runtime.prefix_cache import PrefixCache
from pagedtune.runtime.prefix_sharing import PrefixSharing
from pagedtune.runtime.scheduler import Scheduler
from pagedtune.runtime.scheduler_config import SchedulerConfig
from pagedtune.runtime.sequence import Request
from pagedtune.runtime.swap import Preemption, SwapPolicy, SwapSpace

NUM_BLOCKS, NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE = 14, 4, 9, 4


def sharing_scheduler(num_blocks: int = NUM_BLOCKS, swap: SwapSpace | None = None) -> Scheduler:
    allocator = BlockAllocator(num_blocks)
    cache = PrefixCache(allocator, BLOCK_SIZE, min_copy_tokens=1)
    tables = BlockTables(NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE)
    return Scheduler(allocator, tables, SchedulerConfig(16, debug=True), swap, cache)


def launch(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def end(scheduler: Scheduler, plan: StepPlan) -> None:
    scheduler.commit(plan, np.zeros(plan.sampling.seed.size, np.int64))
    scheduler.check()


def recycle_everything(self: PrefixCache, count: int) -> int:
    """Nothing evicted waits for the steps that read it."""
    allocator = self.allocator
    guarded, allocator._guarded = allocator._guarded, False
    gone = evict(self, count)
    allocator._guarded = guarded
    return gone


evict = PrefixCache.evict


def a_fork_keeps_all(self: PrefixSharing, source: int, row: int, position: int) -> None:
    """A fork is taken to share all that its relative has stored."""
    if source in self._leases:
        self._leases[row] = self.cache.share(self._leases[source], 1 << 30)


def after_a_prompt(request: Request) -> Scheduler:
    """A scheduler in which a prompt has been computed and the next step is in flight."""
    scheduler = sharing_scheduler()
    scheduler.add(request)
    end(scheduler, launch(scheduler))
    launch(scheduler)
    return scheduler


def cancel_and_evict() -> None:
    scheduler = after_a_prompt(Request("a", tuple(range(8)), 8))
    scheduler.cancel("a")
    assert scheduler.roster.sharing is not None
    assert scheduler.roster.sharing.cache.evict(NUM_BLOCKS) == 2
    scheduler.check()
    assert scheduler.snapshot().fenced == 3  # the third block, which the step in flight writes, among them


def fork_beside_a_longer_lease() -> None:
    scheduler = after_a_prompt(Request("a", tuple(range(8)), 8, n=2))  # the second shares 7 tokens: one whole block
    scheduler.check()
    assert scheduler.snapshot().running == 2


@pytest.mark.parametrize("scenario", [cancel_and_evict, fork_beside_a_longer_lease])
def test_a_step_in_flight_and_a_fork_keep_what_they_read(scenario: Callable[[], None]) -> None:
    scenario()


@pytest.mark.parametrize(
    ("owner", "method", "fault", "scenario"),
    [
        (PrefixCache, "evict", recycle_everything, cancel_and_evict),
        (PrefixSharing, "fork", a_fork_keeps_all, fork_beside_a_longer_lease),
    ],
)
def test_a_rare_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, fault: Callable[..., Any], scenario: Callable[[], None]
) -> None:
    monkeypatch.setattr(owner, method, fault)
    with pytest.raises(InvariantViolation):
        scenario()


def test_a_sequence_that_fits_without_a_copy_does_not_wait_for_one() -> None:
    scheduler = sharing_scheduler(4)
    scheduler.add(Request("past", tuple(range(8)), 1))
    end(scheduler, launch(scheduler))  # leaves two blocks
    scheduler.add(Request("running", (20, 21, 22), 6))
    for _ in range(3):
        end(scheduler, launch(scheduler))
    scheduler.add(Request("new", (0, 1, 2, 3, 4, 5), 2))  # one block as it is, and two tokens of the other
    assert launch(scheduler).request_ids.tolist() == ["running", "new"]


def test_a_block_that_a_step_reads_is_copied_though_the_cache_gives_it_up() -> None:
    scheduler = sharing_scheduler(4)
    scheduler.add(Request("a", (0, 1, 2, 3), 6))
    scheduler.add(Request("b", (50, 51, 52, 53), 6))
    end(scheduler, launch(scheduler))
    plan = launch(scheduler)
    reads = set(plan.block_table.flatten().tolist())
    scheduler.cancel("a")
    scheduler.cancel("b")
    scheduler.add(Request("c", (0, 1, 7), 1))  # two tokens of a block of a, the least recently used in a full pool
    for _ in range(2):
        later = scheduler.schedule()
        written = set() if later is None else set((later.slot_mapping // BLOCK_SIZE).tolist())
        assert not written & reads
    end(scheduler, plan)
    end(scheduler, launch(scheduler))
    assert not scheduler.has_work


def test_prompts_are_shared_though_others_speculate() -> None:
    scheduler = sharing_scheduler()
    scheduler.add(Request("drafting", (9, 9), 8))
    end(scheduler, launch(scheduler))
    scheduler.speculate("drafting", (5,))
    scheduler.add(Request("first", tuple(range(8)), 8))
    plan = launch(scheduler)
    assert plan.num_samples is not None
    scheduler.commit(plan, np.ones(plan.sampling.seed.size, np.int64))
    scheduler.check()
    assert scheduler.roster.sharing is not None
    assert scheduler.roster.sharing.cache.num_cached == 2


@pytest.mark.parametrize("moment", ["running", "in host memory", "back"])
def test_what_was_computed_before_an_invalidation_is_not_found_after_it(moment: str) -> None:
    """Such as with old weights: also what was in host memory then, or came there later."""
    scheduler = sharing_scheduler(swap=SwapSpace(NUM_BLOCKS, policy=SwapPolicy(Preemption.SWAP)))
    sharing = scheduler.roster.sharing
    assert sharing is not None
    scheduler.add(Request("old", range(13), 9))
    end(scheduler, launch(scheduler))
    if moment == "running":
        sharing.cache.invalidate()
    scheduler.preempt("old")
    if moment == "in host memory":
        sharing.cache.invalidate()
    end(scheduler, launch(scheduler))
    if moment == "back":
        sharing.cache.invalidate()
    assert scheduler.roster.num_swapped == 1
    scheduler.cancel("old")
    scheduler.check()
    assert sharing.cache.match(range(14)).blocks.size == 0
    scheduler.add(Request("new", range(13), 2))
    assert launch(scheduler).num_tokens == 13


@pytest.mark.parametrize("ends", ["there", "after it"])
def test_a_sequence_in_host_memory_keeps_its_namespace_no_longer_than_it_lives(ends: str) -> None:
    scheduler = sharing_scheduler(swap=SwapSpace(NUM_BLOCKS, policy=SwapPolicy(Preemption.SWAP)))
    sharing = scheduler.roster.sharing
    assert sharing is not None
    scheduler.add(Request("a", range(13), 9))
    end(scheduler, launch(scheduler))
    scheduler.preempt("a")
    if ends == "after it":
        end(scheduler, launch(scheduler))
    scheduler.cancel("a")
    assert sharing.cache.match(range(13)).blocks.size == 3, "without an invalidation it leaves its blocks as others do"
    sharing.cache.evict(NUM_BLOCKS)
    assert sharing.cache._tree.all_roots == []


def test_a_cache_of_another_allocator_is_refused() -> None:
    tables = BlockTables(NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE)
    cache = PrefixCache(BlockAllocator(NUM_BLOCKS), BLOCK_SIZE)
    with pytest.raises(ValueError, match="the prefix cache has another allocator than the scheduler"):
        Scheduler(BlockAllocator(NUM_BLOCKS), tables, prefix_cache=cache)
