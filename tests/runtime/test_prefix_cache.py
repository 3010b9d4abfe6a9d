"""What a prefix cache finds, keeps, gives back and tells. At random: test_prefix_cache_machine.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.errors import DoubleFree, PoolExhausted
from pagedtune.runtime.prefix_cache import PrefixCache
from pagedtune.runtime.prefix_events import Evicted, Hit, Invalidated, Namespace, Stored
from pagedtune.runtime.prefix_node import MAX_RUN, SortedKeys, common_bytes, common_tokens, pack

BLOCK_SIZE = 4


class Pool:
    """A cache, and sequences that come, are computed and go."""

    def __init__(self, num_blocks: int = 64, **options: int) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.cache = PrefixCache(self.allocator, BLOCK_SIZE, **options)

    def serve(self, tokens: npt.ArrayLike, namespace: Namespace | None = None) -> list[int]:
        """Runs a sequence from its match to its release; returns the blocks that it had."""
        name = namespace or Namespace()
        match = self.cache.match(tokens, name)
        lease = self.cache.acquire(match)
        count = -(-len(np.asarray(tokens)) // BLOCK_SIZE) - match.blocks.size
        if count > self.allocator.num_free:
            self.cache.evict(count - self.allocator.num_free)
        blocks = np.concatenate((match.blocks, self.allocator.allocate(count)))
        self.cache.extend(lease, tokens, blocks)
        self.cache.release(lease)
        self.allocator.free(blocks)
        self.check()
        return [int(block) for block in blocks]

    def check(self) -> None:
        self.cache.check()
        self.allocator.check(self.cache.references(self.allocator.num_blocks))


def test_a_prompt_that_is_cached_whole_still_leaves_a_token_to_compute() -> None:
    pool = Pool()
    blocks = pool.serve(range(12))
    match = pool.cache.match(range(12))
    assert match.blocks.tolist() == blocks[:2]
    assert (match.copy_block, match.copy_tokens) == (blocks[2], 3)
    longer = pool.cache.match(range(13))
    assert (longer.blocks.tolist(), longer.copy) == (blocks, None)


@pytest.mark.parametrize("tokens", [[], [0], [9, 1, 2, 3, 4]])
def test_nothing_is_found_where_nothing_fits(tokens: list[int]) -> None:
    pool = Pool()
    pool.serve(range(12))
    match = pool.cache.match(tokens)
    assert (match.blocks.tolist(), match.copy_tokens, match.num_idle) == ([], 0, 0)


def test_one_different_token_ends_the_match_at_its_block_and_the_rest_is_copied() -> None:
    pool = Pool()
    blocks = pool.serve(range(16))
    match = pool.cache.match([0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11])
    assert match.blocks.tolist() == blocks[:1]
    assert (match.copy_block, match.copy_tokens) == (blocks[1], 3)


def test_a_copy_for_too_few_tokens_is_not_offered() -> None:
    pool = Pool(min_copy_tokens=3)
    pool.serve(range(8))
    assert pool.cache.match([0, 1, 2, 3, 4, 5, 99]).copy is None
    assert pool.cache.match([0, 1, 2, 3, 4, 5, 6, 99]).copy_tokens == 3


def test_no_block_is_copied_for_no_token_of_it() -> None:
    pool = Pool(min_copy_tokens=0)
    pool.serve(range(8))
    assert pool.cache.match([90, 91, 92, 93, 94]).copy_block == -1
    assert pool.cache.match([0, 91, 92, 93, 94]).copy_tokens == 1


@pytest.mark.parametrize(
    "tokens", [[0.9, 1.5, 2.0, 3.0, 4.0], "01234", ["0", "1"], [[0, 1], [2, 3]], 7, [True, False], 2**32 + np.arange(5)]
)
def test_what_are_no_tokens_is_not_cut_to_those_of_somebody_else(tokens: Any) -> None:
    pool = Pool(max_pinned_blocks=8)
    pool.serve(range(8))
    for use in (pool.cache.match, pool.cache.pin):
        with pytest.raises(ValueError, match=r"expected integers in one dimension|token ids are below 2\^31"):
            use(tokens)
    assert pool.cache.num_pinned == 0


def test_the_best_of_many_continuations_is_copied() -> None:
    pool = Pool(num_blocks=2000, min_copy_tokens=1)
    start = [7] * BLOCK_SIZE
    by_last = {n: pool.serve([*start, n // 100, n // 10 % 10, n % 10, 5])[1] for n in range(0, 1000, 3)}
    match = pool.cache.match([*start, 4, 3, 5, 6, 0])  # 435 is a multiple of 3
    assert (match.copy_block, match.copy_tokens) == (by_last[435], 3)
    assert pool.cache.match([*start, 4, 3, 99, 6, 0]).copy_tokens == 2


def test_namespaces_share_nothing() -> None:
    pool = Pool()
    tenant, adapter = Namespace("a"), Namespace("a", "lora")
    blocks = {name: pool.serve(range(12), name) for name in (Namespace(), tenant, adapter)}
    assert len({block for each in blocks.values() for block in each}) == 9
    for name, own in blocks.items():
        assert pool.cache.match(range(13), name).blocks.tolist() == own
    assert pool.cache.match(range(13), Namespace("b")).blocks.size == 0


def test_an_invalidated_namespace_is_empty_and_its_blocks_come_back() -> None:
    pool = Pool(num_blocks=8)
    pool.serve(range(16))
    lease = pool.cache.acquire(match := pool.cache.match(range(9)))
    pool.cache.invalidate()
    assert pool.cache.match(range(17)).blocks.size == 0
    pool.allocator.free(match.blocks)
    pool.cache.release(lease)
    new = pool.serve(range(16))
    assert pool.cache.match(range(17)).blocks.tolist() == new
    assert pool.cache.evict(100) == 8
    assert pool.allocator.num_free == 8


def test_an_evicted_block_is_never_found() -> None:
    pool = Pool(num_blocks=4)
    pool.serve(range(12))
    assert pool.cache.evict(1) == 1
    match = pool.cache.match(range(13))
    assert (match.blocks.size, match.copy) == (2, None)
    pool.serve(range(100, 116))
    assert pool.cache.match(range(13)).blocks.size == 0
    assert pool.cache.num_cached == 4


def test_the_least_recently_used_chain_goes_first_its_end_before_its_start() -> None:
    pool = Pool(num_blocks=12, max_events=100)
    old, new = pool.serve(range(100, 116)), pool.serve(range(200, 216))
    pool.serve(range(100, 106))  # uses the first block of the old one
    pool.cache.take_events()
    for _ in range(7):
        pool.cache.evict(1)
    gone = [int(event.blocks[0]) for event in pool.cache.take_events()[0] if isinstance(event, Evicted)]
    assert gone == [*old[:0:-1], *new[::-1]]


def test_what_a_lease_keeps_stays() -> None:
    pool = Pool(num_blocks=8)
    blocks = pool.serve(range(32))
    lease = pool.cache.acquire(match := pool.cache.match(range(9)))
    assert (match.num_idle, pool.cache.num_evictable) == (2, 6)
    assert pool.cache.evict(100) == 6
    assert pool.cache.match(range(32)).blocks.tolist() == blocks[:2]
    pool.allocator.free(match.blocks)
    pool.cache.release(lease)
    assert pool.cache.evict(100) == 2


def test_a_forks_lease_keeps_the_prefix_when_the_parent_has_gone() -> None:
    pool = Pool()
    pool.serve(range(16))
    lease = pool.cache.acquire(match := pool.cache.match(range(9)))
    fork = pool.cache.share(lease, 2)
    pool.cache.release(lease)
    assert pool.cache.num_evictable == 2
    pool.cache.release(fork)
    assert pool.cache.num_evictable == 4
    pool.allocator.free(match.blocks)


def test_pins_keep_no_more_than_they_may() -> None:
    pool = Pool(num_blocks=16, max_pinned_blocks=3)
    pool.serve(range(16))
    with pytest.raises(PoolExhausted, match="4 blocks asked for, 3 free"):
        pool.cache.pin(range(17))
    pin = pool.cache.pin(range(13))
    assert pin.num_blocks == pool.cache.num_pinned == 3
    shared = pool.cache.pin(range(9))  # on the same path: costs nothing
    assert pool.cache.evict(100) == 1
    for each in (pin, shared):
        pool.cache.release(each)
    assert (pool.cache.evict(100), pool.cache.num_pinned) == (3, 0)


def test_a_pin_grows_no_further_than_pins_may() -> None:
    pool = Pool(num_blocks=16, max_pinned_blocks=3)
    pool.serve(range(8))
    pin = pool.cache.pin(range(5))
    blocks = pool.allocator.allocate(4)
    with pytest.raises(PoolExhausted, match="3 blocks asked for, 2 free"):  # one that is cached, and two new ones
        pool.cache.extend(pin, range(16), blocks)
    pool.cache.check()
    assert (pin.num_blocks, pool.cache.num_pinned, pool.cache.num_cached) == (1, 1, 2)
    pool.cache.extend(pin, range(12), blocks)
    assert pool.cache.num_pinned == 3
    pool.cache.release(pin)
    pool.allocator.free(blocks)
    pool.check()


def test_a_lease_ends_once() -> None:
    pool = Pool(num_blocks=16, max_pinned_blocks=4)
    pool.serve(range(16))
    pin, other = pool.cache.pin(range(13)), pool.cache.pin(range(13))
    blocks = pool.allocator.allocate(4)
    pool.cache.release(pin)
    for use in (
        lambda: pool.cache.release(pin),
        lambda: pool.cache.share(pin, 1),
        lambda: pool.cache.extend(pin, range(16), blocks),
    ):
        with pytest.raises(DoubleFree, match="this lease on 3 blocks was released already"):
            use()
    assert pool.cache.evict(100) == 1, "the other lease still keeps its blocks"
    pool.cache.release(other)
    assert (pool.cache.evict(100), pool.cache.num_pinned) == (3, 0)
    pool.allocator.free(blocks)
    pool.check()


@pytest.mark.parametrize("name", ["min_copy_tokens", "max_pinned_blocks", "max_events"])
@pytest.mark.parametrize("value", [-7, 1.5, "2"])
def test_counts_are_not_negative(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r} must be an integer of at least 0"):
        Pool(**{name: value})
    pool = Pool()
    pool.serve(range(16))
    with pytest.raises(ValueError, match=f"count={value!r} must be an integer of at least 0"):
        pool.cache.evict(value)
    assert (pool.cache.num_cached, pool.cache.evict(np.int64(1)), pool.cache.evict(0)) == (4, 1, 0)


def test_of_two_copies_the_cache_keeps_one_and_says_which() -> None:
    pool = Pool()
    empty = [pool.cache.acquire(pool.cache.match(range(8))) for _ in range(2)]
    first, second = pool.allocator.allocate(2), pool.allocator.allocate(2)
    assert pool.cache.extend(empty[0], range(8), first).num_new == 2
    insertion = pool.cache.extend(empty[1], range(8), second)
    assert insertion.num_new == 0
    assert (insertion.columns.tolist(), insertion.blocks.tolist()) == ([0, 1], first.tolist())
    assert pool.cache.statistics.duplicate_blocks == 2
    assert pool.allocator.refcounts(second).tolist() == [1, 1]


def test_blocks_idle_before_a_step_began_are_free_at_once_and_others_when_it_ends() -> None:
    pool = Pool(num_blocks=8)
    idle = pool.serve(range(100, 108))
    lease = pool.cache.acquire(pool.cache.match(range(8)))
    blocks = pool.allocator.allocate(2)
    pool.cache.extend(lease, range(8), blocks)
    step = pool.allocator.begin_step(blocks)
    pool.cache.release(lease)
    pool.allocator.free(blocks)
    assert pool.cache.evict(4) == 4
    assert (pool.allocator.num_free, pool.allocator.num_fenced) == (6, 2)
    pool.check()
    pool.allocator.end_step(step)
    assert pool.allocator.num_free == 8
    assert set(idle).isdisjoint(blocks.tolist())


def test_a_block_that_a_step_copies_is_not_recycled_before_it_ends() -> None:
    pool = Pool(num_blocks=8)
    pool.serve(range(8))
    match = pool.cache.match([0, 1, 2, 3, 4, 5, 6, 99, 100])
    lease = pool.cache.acquire(match)
    pool.allocator.add_reference(match.copy_block)
    step = pool.allocator.begin_step([*match.blocks, match.copy_block])
    pool.allocator.free(match.copy_block)
    assert pool.cache.evict(8) == 1
    assert pool.allocator.num_fenced == 1
    pool.allocator.end_step(step)
    pool.cache.release(lease)
    pool.allocator.free(match.blocks)
    assert pool.cache.evict(8) == 1
    assert pool.allocator.num_free == 8


def test_an_outdated_match_is_refused() -> None:
    pool = Pool()
    pool.serve(range(12))
    match = pool.cache.match(range(12))
    pool.cache.evict(1)
    with pytest.raises(ValueError, match="call match again"):
        pool.cache.acquire(match)


def test_a_router_can_follow_the_content_by_the_events() -> None:
    pool = Pool(num_blocks=12, max_events=1000)
    rng = np.random.default_rng(0)
    left = pool.cache.acquire(pool.cache.match((), Namespace("1")))
    for number in range(50):
        pool.serve(rng.integers(0, 2, int(rng.integers(1, 33))), Namespace(str(rng.integers(2))))
        if number in (25, 48):
            pool.cache.invalidate(Namespace("1"))
    pool.cache.evict(1)
    own = pool.allocator.allocate(1)
    pool.cache.extend(left, range(4), own)  # of a sequence that ran then: nobody finds it
    pool.cache.release(left)
    pool.allocator.free(own)
    events, lost = pool.cache.take_events()
    assert lost == 0
    chains: dict[int, tuple[Namespace | None, tuple[int, ...]]] = {}
    for event in events:
        if isinstance(event, Stored):
            name, tokens = chains.get(event.parent, (event.namespace, ()))
            for block, own in zip(
                event.blocks, np.frombuffer(event.tokens, np.int32).reshape(-1, BLOCK_SIZE), strict=True
            ):
                tokens += tuple(own.tolist())
                chains[int(block)] = (name, tokens)
        elif isinstance(event, Evicted):
            for block in event.blocks:
                del chains[int(block)]
        elif isinstance(event, Invalidated):
            gone = {block: (None, tokens) for block, (name, tokens) in chains.items() if name == event.namespace}
            chains |= gone
    assert len(chains) == pool.cache.num_cached
    assert any(name is None for name, _ in chains.values())
    for block, (name, tokens) in chains.items():
        if name is not None:
            assert pool.cache.match((*tokens, 0), name).blocks[-1] == block
            assert block == next(at for at, chain in chains.items() if chain == (name, tokens)), "found once"
    hits = [event for event in events if isinstance(event, Hit)]
    assert sum(hit.num_tokens for hit in hits) == pool.cache.statistics.hit_tokens > 0


def test_lost_events_are_counted() -> None:
    pool = Pool(max_events=2)
    for start in range(0, 50, 10):
        pool.serve(range(start, start + 8))
    events, lost = pool.cache.take_events()
    assert (len(events), lost) == (2, 3)


def test_runs_longer_than_a_node_are_found_whole() -> None:
    pool = Pool(num_blocks=1 + 3 * MAX_RUN)
    tokens = np.arange(BLOCK_SIZE * (3 * MAX_RUN + 1))
    blocks = pool.serve(tokens)
    assert pool.cache.match(np.append(tokens, 0)).blocks.tolist() == blocks
    assert pool.cache.evict(MAX_RUN + 7) == MAX_RUN + 7
    assert pool.cache.match(tokens).blocks.tolist() == blocks[: 2 * MAX_RUN - 6]


@given(
    same=st.lists(st.integers(0, 2**31 - 1), max_size=8),
    rest=st.lists(st.sampled_from([0, 1, 255, 256, 1 << 16, 1 << 24, 2**31 - 1]), max_size=4),
    other=st.lists(st.sampled_from([0, 1, 255, 256, 1 << 16, 1 << 24, 2**31 - 1]), max_size=4),
)
def test_common_tokens_are_counted_one_by_one(same: list[int], rest: list[int], other: list[int]) -> None:
    a, b = same + rest, same + other
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_tokens(pack(a), pack(b)) == expected
    assert common_bytes(pack([9, *a]), 4, pack(b)) == 4 * expected


def test_sorted_keys_find_the_neighbours_of_any_key() -> None:
    rng = np.random.default_rng(1)
    keys, expected = SortedKeys(), set[bytes]()
    for _ in range(5000):
        key = rng.bytes(2)
        if key in expected and rng.random() < 0.7:
            keys.remove(key)
            expected.remove(key)
        elif key not in expected:
            keys.add(key)
            expected.add(key)
    ordered = sorted(expected)
    assert list(keys) == ordered
    for probe in (rng.bytes(2) for _ in range(500)):
        near = [
            max((k for k in ordered if k < probe), default=None),
            min((k for k in ordered if k >= probe), default=None),
        ]
        assert sorted(keys.neighbours(probe)) == sorted(k for k in near if k is not None)
