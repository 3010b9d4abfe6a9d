"""Blocks kept after their sequences have gone, found again by the exact tokens that they hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..kernels.problem import require_positive
from .allocator import BlockAllocator
from .arrays import IntArray
from .errors import PoolExhausted
from .prefix_events import (
    DEFAULT_NAMESPACE,
    NO_BLOCK,
    Event,
    EventLog,
    Evicted,
    Hit,
    Invalidated,
    Namespace,
    PrefixStatistics,
    Stored,
)
from .prefix_lease import Insertion, Lease, PrefixMatch
from .prefix_node import TOKEN_BYTES, Node, Place, Root, best_continuation, pack, walk
from .prefix_tree import PrefixTree
from .validation import count_of

_NONE = np.empty(0, np.int64)


class PrefixCache:
    """A radix tree over exact tokens, a whole block at a time; no hash stands for tokens anywhere.

    The cache holds one reference to each of its blocks, so that nobody else's release frees them. A sequence that
    uses a prefix holds references of its own, from its table, and a `Lease`, which keeps the path from being
    evicted. Only whole blocks are kept, and only blocks whose content the device has written: the caller inserts
    after the end of the step that wrote them.

    Eviction takes the end of the least recently used chain. What a step in flight may still read goes behind its
    fence; the rest, idle since before those steps began, is free at once.

    No cost depends on the size of the pool: a walk compares whole runs of tokens, `evict` touches what it evicts and
    what was used since it was queued. Memory is bounded by the blocks of the pool.

    Args:
        allocator: owner of the blocks.
        block_size: tokens of one block.
        min_copy_tokens: fewest tokens for which a block is copied, at least one; default a quarter of a block.
        max_pinned_blocks: most blocks that pins may keep. A scheduler must hold back as many when it judges
            whether a request fits the pool.
        max_events: events kept for `take_events`; 0 records none.

    Attributes:
        allocator: owner of the blocks.
        statistics: counts since the start.

    Raises:
        ValueError: a block size below 1, or a negative count.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        min_copy_tokens: int | None = None,
        max_pinned_blocks: int = 0,
        max_events: int = 0,
    ) -> None:
        require_positive("block_size", block_size)
        self.block_size = block_size
        if min_copy_tokens is None:
            min_copy_tokens = max(1, block_size // 4)
        self.min_copy_tokens = max(1, count_of("min_copy_tokens", min_copy_tokens))
        self.max_pinned_blocks = count_of("max_pinned_blocks", max_pinned_blocks)
        self.statistics = PrefixStatistics()
        self.allocator = allocator
        self._tree = PrefixTree(block_size * TOKEN_BYTES)
        self._events = EventLog(count_of("max_events", max_events))

    @property
    def num_cached(self) -> int:
        """Blocks in the cache."""
        return self._tree.num_cached

    @property
    def num_evictable(self) -> int:
        """Those of them that no lease keeps: the cache alone names them."""
        return self._tree.num_evictable

    @property
    def num_pinned(self) -> int:
        """Those of them that pins keep."""
        return self._tree.num_pinned

    def match(self, tokens: npt.ArrayLike, namespace: Namespace = DEFAULT_NAMESPACE) -> PrefixMatch:
        """Looks for the longest cached prefix of `tokens`, [n], and changes nothing.

        At least one token is left over, as a sequence needs a query to continue from.

        Raises:
            ValueError: `tokens` are no integers in one dimension, or one is not below 2^31.
        """
        data = pack(tokens)
        queried = len(data) // TOKEN_BYTES
        root = self._tree.roots.get(namespace)
        if root is None or queried < 2:
            return PrefixMatch(namespace, queried, _NONE, 0, None, None, self._tree.version)
        data = data[:-TOKEN_BYTES]
        runs: list[IntArray] = []
        place = walk(root, data, 0, self._tree.unit, runs)
        copy = best_continuation(place, data, self._tree.unit)
        if copy is not None and copy.num_tokens < self.min_copy_tokens:
            copy = None
        return PrefixMatch(namespace, queried, _joined(runs), place.num_idle, copy, place, self._tree.version)

    def acquire(self, match: PrefixMatch) -> Lease:
        """Takes a lease on the blocks of `match`, and a reference to each for the caller's table.

        To use `match.copy_block`, the caller takes a reference to it, and drops that one after `begin_step` of the
        step that copies it, which must be the next to begin: until then nothing else keeps it as it is.

        Raises:
            ValueError: the cache has changed since the match.
        """
        lease = self._take(match, is_pin=False)
        if match.copy is not None:
            lease.node.children[match.copy.key].read_until = self.allocator.last_step + 1
        self.allocator.add_reference(match.blocks)
        self._count_query(match)
        return lease

    def is_current(self, match: PrefixMatch) -> bool:
        """Whether the cache has the blocks that it had when it gave this match; leases may have come and gone."""
        return match.version == self._tree.version

    def recount(self, match: PrefixMatch) -> PrefixMatch:
        """A current match with `num_idle` as it is now: leases that begin or end change it, and nothing else."""
        idle = 0 if match.place is None else match.place.num_idle
        return match if idle == match.num_idle else replace(match, num_idle=idle)

    def share(self, lease: Lease, num_blocks: int) -> Lease:
        """A second lease, on the first `num_blocks` blocks at most, for a fork of its sequence.

        Raises:
            DoubleFree: the lease has ended.
        """
        lease.require_live()
        node, start = lease.node, lease.num_blocks - lease.node.blocks.size
        count = min(num_blocks, lease.num_blocks)
        while start >= count and node.parent is not None:
            node = node.parent
            start -= node.blocks.size
        node = self._tree.cut(Place(node, count - start, 0))
        self._tree.lock(node, None, is_pin=False)
        return Lease(node, count)

    def extend(self, lease: Lease, tokens: npt.ArrayLike, blocks: IntArray) -> Insertion:
        """Stores what a sequence has computed, and moves its lease to the end of it.

        Args:
            lease: the sequence's.
            tokens: [n]: its tokens from the first; those of whole blocks count.
            blocks: int64: its blocks from the first, all of them written by steps that have ended.

        Raises:
            DoubleFree: the lease has ended.
            PoolExhausted: it is a pin, and pins would keep more than `max_pinned_blocks`.
        """
        lease.require_live()
        tokens = np.asarray(tokens)
        start, unit = lease.num_blocks, self._tree.unit
        count = min(int(blocks.size), tokens.size // self.block_size)
        if count <= start:
            return Insertion(0, _NONE, _NONE)
        data = pack(tokens[start * self.block_size : count * self.block_size])
        runs: list[IntArray] = []
        place = walk(lease.node, data, 0, unit, runs)
        found = _joined(runs)
        if lease.is_pin:
            self._require_pinnable(place, count - start - found.size)
        own = blocks[start : start + found.size]
        differs = _NONE if found.tobytes() == own.tobytes() else np.flatnonzero(found != own)
        node = self._tree.cut(place)
        self._tree.lock(node, lease.node, lease.is_pin)
        lease.node, lease.num_blocks = node, count
        new = blocks[start + found.size : count]
        if new.size:
            self._store(lease, data[found.size * unit :], new)
        self.statistics.duplicate_blocks += differs.size
        return Insertion(new.size, start + differs, found[differs])

    def release(self, lease: Lease) -> None:
        """Ends a lease, once: its blocks can be evicted, the last ones first, unless another lease keeps them.

        Raises:
            DoubleFree: it has ended already; nothing was changed.
        """
        lease.require_live()
        lease.is_released = True
        self._tree.unlock(lease.node, lease.is_pin, self.allocator.last_step)

    def pin(self, tokens: npt.ArrayLike, namespace: Namespace = DEFAULT_NAMESPACE) -> Lease:
        """Keeps what is cached of `tokens` from being evicted until `release`; the lease tells how much that is.

        Raises:
            PoolExhausted: pins would keep more than `max_pinned_blocks`.
        """
        match = self.match(tokens, namespace)
        if match.place is not None:
            self._require_pinnable(match.place)
        return self._take(match, is_pin=True)

    def evict(self, count: int) -> int:
        """Gives back up to `count` blocks, least recently used first, and returns how many.

        Those that a step in flight may read are fenced until it ends, the others are free at once.

        Raises:
            ValueError: `count` is no integer, or is negative.
        """
        count = count_of("count", count)
        steps = self.allocator.steps_in_flight
        free: list[IntArray] = []
        fenced: list[IntArray] = []
        left = count
        while left > 0 and (node := self._tree.leaves.pop()) is not None:
            cut = max(0, node.blocks.size - left)
            gone = node.blocks[cut:][::-1]
            (fenced if steps and node.read_until >= steps[0] else free).append(gone)
            left -= gone.size
            self._tree.shorten(node, cut)
        if free or fenced:
            self.allocator.recycle(_joined(free))
            self.allocator.free(_joined(fenced))
            gone = _joined(free + fenced)
            self.statistics.evicted_blocks += gone.size
            if self._events:
                self._events.add(Evicted(gone))
        return count - max(left, 0)

    def invalidate(self, namespace: Namespace | None = None) -> None:
        """Makes a namespace, or all, start empty: after a change of weights, or when a tenant leaves.

        Sequences that run keep what they have; what was cached is evicted like the rest and never found again.
        """
        for name in [*self._tree.roots] if namespace is None else [namespace]:
            if self._tree.orphan(name) and self._events:
                self._events.add(Invalidated(name))

    def take_events(self) -> tuple[tuple[Event, ...], int]:
        """The events since the last call, oldest first, and how many older ones were lost."""
        return self._events.take()

    def references(self, num_pool_blocks: int) -> IntArray:
        """The cache's references to each block of the pool, [num_pool_blocks]: 0 or 1."""
        return np.bincount(self._tree.all_blocks, minlength=num_pool_blocks)

    def check(self) -> None:
        """Derives every invariant of the tree anew.

        Raises:
            InvariantViolation: names the invariant and a block.
        """
        self._tree.check()

    def _require_pinnable(self, place: Place, num_new: int = 0) -> None:
        """Raises PoolExhausted unless pins may keep what leads to `place`, and `num_new` blocks behind it."""
        more = num_new + sum(count for node, count in place.runs() if node.pins == 0)
        if self.num_pinned + more > self.max_pinned_blocks:
            raise PoolExhausted(more, self.max_pinned_blocks - self.num_pinned, 0, self.allocator.num_reserved)

    def _take(self, match: PrefixMatch, is_pin: bool) -> Lease:
        if not self.is_current(match):
            raise ValueError("the prefix cache has changed since this match: call match again, then acquire at once")
        if match.place is None:
            node: Node = self._tree.roots.setdefault(match.namespace, Root(match.namespace))
        else:
            node = self._tree.cut(match.place)
        self._tree.lock(node, None, is_pin)
        return Lease(node, match.blocks.size, is_pin)

    def _store(self, lease: Lease, key: bytes, blocks: IntArray) -> None:
        """Puts `blocks` behind the lease's node, and moves the lease to the last of them."""
        node = lease.node
        if self._events:
            parent = int(node.blocks[-1]) if node.blocks.size else NO_BLOCK
            self._events.add(Stored(self._tree.namespace_of(node), parent, blocks.copy(), key))
        self.allocator.add_reference(blocks)
        self.statistics.stored_blocks += blocks.size
        lease.node = self._tree.grow(node, key, blocks, lease.is_pin)

    def _count_query(self, match: PrefixMatch) -> None:
        found = match.num_tokens(self.block_size)
        self.statistics.count_query(match.num_queried, found, match.copy_tokens)
        if self._events and found:
            self._events.add(Hit(match.namespace, found, match.num_queried))


def _joined(runs: list[IntArray]) -> IntArray:
    return np.concatenate(runs) if runs else _NONE
