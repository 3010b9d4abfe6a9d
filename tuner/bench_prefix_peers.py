"""Our prefix cache beside SGLang's and vLLM's: finding a prefix, and storing what a sequence has computed."""

from __future__ import annotations

from array import array

import numpy as np
import torch

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.arrays import IntArray
from pagedtune.runtime.prefix_cache import PrefixCache
from pagedtune.runtime.prefix_lease import Lease

from .interleaved import Spread, interleaved
from .peer_runtime import SglangPeer, VllmPeer

BLOCK_SIZE = 16
SHARED, OWN = 2048, 1024  # tokens of the prompts that are matched: a prefix of all, and the rest
NUM_BLOCKS = (SHARED + OWN) // BLOCK_SIZE


class OurCache:
    """Our cache, and what a scheduler does with it.

    Args:
        num_prompts: most prompts that are stored.
    """

    def __init__(self, num_prompts: int) -> None:
        self.allocator = BlockAllocator((num_prompts + 2) * NUM_BLOCKS)
        self.cache = PrefixCache(self.allocator, BLOCK_SIZE)

    def live(self, tokens: IntArray) -> None:
        """All that a sequence asks of the cache: match, lease, blocks of its own, insertion, release."""
        match = self.cache.match(tokens)
        lease = self.cache.acquire(match)
        own = np.concatenate((match.blocks, self.allocator.allocate(NUM_BLOCKS - match.blocks.size)))
        self.cache.extend(lease, tokens, own)
        self.cache.release(lease)
        self.allocator.free(own)

    def computed(self, tokens: IntArray) -> tuple[Lease, IntArray, IntArray]:
        """A sequence before its insertion: a lease of nothing, its tokens, and blocks for those not cached."""
        found = self.cache.match(tokens).blocks
        own = np.concatenate((found, self.allocator.allocate(NUM_BLOCKS - found.size)))
        return self.cache.acquire(self.cache.match(())), tokens, own

    def insert(self, lease: Lease, tokens: IntArray, own: IntArray) -> None:
        """Stores from the first token on: finds what is there, adds the rest, and lets go of it."""
        self.cache.extend(lease, tokens, own)
        self.cache.release(lease)


def bench_prefix(vllm: VllmPeer, sglang: SglangPeer, rounds: int, entries: int = 64) -> list[Spread]:
    """Finding 3072 cached tokens among `entries` prompts that share 2048, and storing another prompt's own 1024."""
    random = np.random.default_rng(0)
    shared = random.integers(0, 32000, SHARED)

    def prompts(count: int) -> list[IntArray]:
        return [np.concatenate((shared, random.integers(0, 32000, OWN))) for _ in range(count)]

    known, inserted, lived = prompts(entries), prompts(rounds + 1), prompts(rounds + 1)
    ours, radix = OurCache(entries + 2 * rounds + 2), sglang.radix(BLOCK_SIZE)
    manager = vllm.manager((entries + 2) * NUM_BLOCKS, BLOCK_SIZE, caching=True)
    slots = torch.arange(SHARED + OWN)
    for number, tokens in enumerate(known):
        ours.live(tokens)
        sglang.insert(radix, _array(tokens), slots)
        request = vllm.request(str(number), tokens.size, vllm.hashes(tokens.tolist(), BLOCK_SIZE))
        if number >= entries // 2 - 1:  # its pool need not hold more
            manager.allocate_slots(request, tokens.size)
            manager.free(request)
    query = np.append(known[entries // 2], 0)
    key, listed = _array(query), query.tolist()
    hashed = vllm.request("query", query.size, vllm.hashes(listed, BLOCK_SIZE))
    _require_equal_hits(ours.cache.match(query).blocks.size * BLOCK_SIZE, sglang.match(radix, key), manager, hashed)
    ours_inserted, ours_lived = iter([ours.computed(tokens) for tokens in inserted]), iter(lived)
    theirs_inserted, theirs_lived = (iter([_array(tokens) for tokens in each]) for each in (inserted, lived))
    return interleaved(
        {
            "ours: match (packing included)": (lambda: ours.cache.match(query), 1),
            "SGLang: match_prefix (token array given)": (lambda: sglang.match(radix, key), 1),
            "vLLM: get_computed_blocks (hashes given)": (lambda: manager.get_computed_blocks(hashed), 1),
            "vLLM: hashing the 3072 tokens": (lambda: vllm.hashes(listed, BLOCK_SIZE), 1),
            "ours: insert 1024 new, release (blocks given)": (lambda: ours.insert(*next(ours_inserted)), 1),
            "SGLang: insert 1024 new (slots, token array given)": (
                lambda: sglang.insert(radix, next(theirs_inserted), slots), 1,
            ),
            "ours: match, lease, allocate, insert, release, free": (lambda: ours.live(next(ours_lived)), 1),
            "SGLang: match, lock, insert, unlock (slots given)": (
                lambda: sglang.live(radix, next(theirs_lived), slots), 1,
            ),
        },
        rounds,
    )  # fmt: skip


def _array(tokens: IntArray) -> array[int]:
    return array("q", tokens.tolist())


def _require_equal_hits(ours: int, sglang: int, manager: object, request: object) -> None:
    theirs = manager.get_computed_blocks(request)[1]  # type: ignore[attr-defined]
    if not ours == sglang == theirs == SHARED + OWN:
        raise RuntimeError(f"the caches found {ours}, {sglang} and {theirs} of {SHARED + OWN} tokens: not comparable")
