"""Public bugs of other prefix caches, by their numbers in `tests/runtime_machine/public_bugs.py`, planted and found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedtune.runtime import prefix_node
from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.prefix_cache import PrefixCache
from pagedtune.runtime.prefix_node import Place
from pagedtune.runtime.prefix_sharing import PrefixSharing
from pagedtune.runtime.prefix_tree import PrefixTree
from pagedtune.runtime.scheduler import Scheduler
from pagedtune.runtime.scheduler_config import SchedulerConfig
from pagedtune.runtime.sequence import Request

BLOCK_SIZE = 4


def make(num_blocks: int, pinned: int = 0) -> tuple[Scheduler, PrefixCache]:
    allocator = BlockAllocator(num_blocks)
    cache = PrefixCache(allocator, BLOCK_SIZE, max_pinned_blocks=pinned)
    tables = BlockTables(4, 16, BLOCK_SIZE)
    return Scheduler(allocator, tables, SchedulerConfig(64), prefix_cache=cache), cache


def finish(scheduler: Scheduler, *requests: Request) -> None:
    """Runs requests to their end; every sampled token is 5."""
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None, "requests are live and no step is planned"
        scheduler.commit(plan, np.full(plan.sampling.seed.size, 5))


def nothing_unwritten_is_found() -> None:
    """14: a chunk whose step never ended is not in the cache."""
    scheduler, cache = make(16)
    scheduler.add(Request("a", tuple(range(12)), 4))
    assert scheduler.schedule() is not None
    scheduler.cancel("a")
    assert cache.match(range(12)).blocks.size == 0


def hits_are_paid_for() -> None:
    """15: 2 blocks free, 6 cached and idle, 1 in use: no room for 4 more behind a prefix of these 6."""
    scheduler, cache = make(9)
    finish(scheduler, Request("a", tuple(range(24)), 1))
    scheduler.add(Request("b", (99,), 8))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, [5])
    scheduler.add(Request("c", tuple(range(36)), 1))
    assert scheduler.schedule() is not None
    assert (scheduler.snapshot().running, cache.num_cached) == (1, 6)


def pins_stay() -> None:
    """17: what is pinned is not evicted."""
    scheduler, cache = make(16, pinned=4)
    finish(scheduler, Request("a", tuple(range(16)), 1))
    cache.pin(range(13))
    cache.evict(100)
    assert cache.match(range(16)).blocks.size == 3


def outputs_are_kept() -> None:
    """20: a sequence stores its blocks before it gives them up."""
    scheduler, cache = make(16)
    finish(scheduler, Request("a", tuple(range(6)), 8))
    assert cache.match([*range(6), *[5] * 8]).blocks.size == 3


def what_is_evicted_is_gone() -> None:
    """21 and 25: a block that was given to somebody else is not found under its old tokens."""
    scheduler, cache = make(16)
    finish(scheduler, Request("a", tuple(range(16)), 1))
    cache.evict(2)
    assert cache.match(range(16)).blocks.size == 2


def a_query_is_left() -> None:
    """23: a prompt that is cached whole, and fills its blocks, still has a token to compute."""
    scheduler, _ = make(16)
    for name in ("a", "b"):
        finish(scheduler, Request(name, tuple(range(16)), 2))


def partly_filled_blocks_are_not_kept() -> None:
    """24: only whole blocks, so that no shorter content of one can come back."""
    scheduler, cache = make(16)
    finish(scheduler, Request("a", tuple(range(6)), 1))
    assert cache.num_cached == 1


def tokens_decide() -> None:
    """27: a prompt that differs in one token, anywhere, matches up to there."""
    scheduler, cache = make(16)
    finish(scheduler, Request("a", tuple(range(16)), 1))
    for position in range(16):
        prompt = np.arange(17)
        prompt[position] = 99
        assert cache.match(prompt).blocks.size == position // BLOCK_SIZE


def store_what_is_booked(self: PrefixSharing, row: int) -> None:
    self._ledger.processed[row] = self._rows.num_scheduled[row]
    store(self, row)


no_idle_hits = property(lambda place: 0)


def lock_nothing(self: PrefixTree, *arguments: Any) -> None:
    pass


def leave_first(self: PrefixSharing, row: int) -> None:
    lease = self._leases.pop(row, None)
    if lease is not None:
        self.cache.release(lease)


def keep_the_entry(self: PrefixTree, leaf: Any, num_blocks: int) -> None:
    gone = leaf.blocks.size - num_blocks
    self.num_cached -= gone
    self.num_evictable -= gone


def match_everything(self: PrefixCache, tokens: Any, *namespace: Any) -> Any:
    return match(self, np.append(tokens, 0), *namespace) if len(tokens) else match(self, tokens, *namespace)


def round_up(self: PrefixCache, lease: Any, tokens: Any, blocks: Any) -> Any:
    missing = -len(tokens) % BLOCK_SIZE
    more = self.allocator.allocate(1) if missing else np.empty(0, np.int64)
    return extend(self, lease, np.append(tokens, [0] * missing), np.append(blocks, more))


def by_the_first_block(data: bytes, start: int, key: bytes) -> int:
    return min(len(data) - start, len(key))


store, match, extend = PrefixSharing.store, PrefixCache.match, PrefixCache.extend


@pytest.mark.parametrize(
    ("owner", "method", "fault", "scenario"),
    [
        (PrefixSharing, "store", store_what_is_booked, nothing_unwritten_is_found),
        (Place, "num_idle", no_idle_hits, hits_are_paid_for),
        (PrefixTree, "lock", lock_nothing, pins_stay),
        (PrefixSharing, "leave", leave_first, outputs_are_kept),
        (PrefixTree, "shorten", keep_the_entry, what_is_evicted_is_gone),
        (PrefixCache, "match", match_everything, a_query_is_left),
        (PrefixCache, "extend", round_up, partly_filled_blocks_are_not_kept),
        (prefix_node, "common_bytes", by_the_first_block, tokens_decide),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, fault: Any, scenario: Callable[[], None]
) -> None:
    scenario()
    monkeypatch.setattr(owner, method, fault)
    with pytest.raises(Exception) as found:
        scenario()
    assert not isinstance(found.value, (AttributeError, TypeError, NameError)), "the fault itself is broken"


def test_a_cache_of_another_block_size_is_refused() -> None:
    """26: granularities are not mixed."""
    allocator = BlockAllocator(8)
    with pytest.raises(ValueError, match="blocks of 8 tokens and the tables of 4"):
        Scheduler(allocator, BlockTables(1, 4, BLOCK_SIZE), prefix_cache=PrefixCache(allocator, 8))
