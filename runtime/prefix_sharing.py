"""How a scheduler uses a prefix cache: what a sequence takes from it when it gets a row, and leaves in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .arrays import IntArray
from .errors import Invariant, InvariantViolation
from .kv_ledger import KVLedger
from .prefix_cache import PrefixCache
from .prefix_lease import Lease, PrefixMatch
from .rows import RunningRows
from .sequence import Sequence


class PrefixSharing:
    """Leases of the running rows on a prefix cache.

    A row that starts takes the cached prefix of its tokens, its last block in part if need be: the ledger copies that
    before the row writes to it. What a row has computed is stored when a step over its prompt has ended, for those
    that come meanwhile, and when it leaves, whichever way. Only tokens count whose step has ended. Where the cache
    has a block already, the row is given that one instead of its own, so that every block that a row's lease keeps
    is one that its table names: a sequence that runs alone can have all others.

    Args:
        cache: shared with nobody else.
        ledger, rows: of the scheduler.

    Raises:
        ValueError: a cache of other blocks, or a window.
    """

    def __init__(self, cache: PrefixCache, ledger: KVLedger, rows: RunningRows) -> None:
        _require_same_blocks(cache, ledger)
        self.cache, self._ledger, self._rows = cache, ledger, rows
        self._leases: dict[int, Lease] = {}
        self._last: tuple[Sequence | None, PrefixMatch] = (None, cache.match(()))  # the queue's head asks every step

    @property
    def num_evictable(self) -> int:
        """Blocks that the cache would give back, at once or when the steps in flight have ended."""
        return self.cache.num_evictable

    def match(self, sequence: Sequence, with_copy: bool = True) -> PrefixMatch | None:
        """What a waiting sequence would find; None if it does not want to share, or comes with K and V of its own."""
        namespace = sequence.request.namespace
        if namespace is None or sequence.parked is not None:
            return None
        asked, match = self._last
        if asked is not sequence or match.num_queried != sequence.tokens.size or not self.cache.is_current(match):
            match = self.cache.match(sequence.tokens, namespace)
        else:
            match = self.cache.recount(match)  # whoever kept those blocks may have left since
        self._last = sequence, match
        return match if with_copy else replace(match, copy=None)

    def bring(self, row: int, match: PrefixMatch) -> None:
        """Gives the empty `row` what was found for its sequence."""
        copied = [] if match.copy is None else [match.copy.block]
        self._leases[row] = self.cache.acquire(match)
        self._ledger.allocator.add_reference(copied)
        if match.blocks.size or copied:
            blocks = np.concatenate((match.blocks, copied)).astype(np.int64)
            self._ledger.adopt(row, blocks, match.num_tokens(self.cache.block_size), overwrites=bool(copied))

    def keep(self, row: int) -> Lease | None:
        """For a row that leaves with its own K and V, to host memory: what `begin` wants when it is back."""
        lease = self._leases.get(row)
        return None if lease is None else self.cache.share(lease, 0)

    def begin(self, row: int, lease: Lease | None) -> None:
        """Lets a row that brings its own K and V, from host memory, leave them in the cache later."""
        if lease is not None:
            self._leases[row] = lease

    def fork(self, source: int, row: int, position: int) -> None:
        """Lets `row`, which has just been given the first `position` tokens of `source`, keep what that one keeps."""
        lease = self._leases.get(source)
        if lease is not None:
            self._leases[row] = self.cache.share(lease, position // self.cache.block_size)

    def store(self, row: int) -> None:
        """Puts the whole blocks of `row` that steps have processed into the cache."""
        lease = self._leases.get(row)
        if lease is None:
            return
        known = min(int(self._ledger.processed[row]), int(self._rows.num_tokens[row]))
        count = known // self.cache.block_size
        if count <= lease.num_blocks:
            return
        tables = self._ledger.tables
        insertion = self.cache.extend(lease, self._rows.tokens[row, :known], tables.blocks_of(row)[:count])
        if insertion.columns.size:
            self._ledger.allocator.add_reference(insertion.blocks)
            own = tables.replace(np.full(insertion.columns.size, row), insertion.columns, insertion.blocks)
            self._ledger.allocator.free(own)

    def leave(self, row: int) -> None:
        """Stores what `row` has, and ends its lease. To be called before its tokens and blocks are given up."""
        self.store(row)
        lease = self._leases.pop(row, None)
        if lease is not None:
            self.cache.release(lease)

    def make_room(self, needed: int, spare: int = 0) -> None:
        """Evicts until `needed` blocks are free, and `spare` more, as far as the cache has so many.

        Some of them may only be free when the steps in flight have ended.
        """
        allocator = self._ledger.allocator
        short = needed - allocator.num_free
        left = short + spare if short > 0 else 0
        while left > 0:
            before = allocator.num_free + allocator.num_fenced
            if self.cache.evict(left) == 0:
                return
            left -= allocator.num_free + allocator.num_fenced - before  # one that is to be copied is not free yet

    def references(self) -> IntArray:
        """The cache's references to each block of the pool, [num_blocks]."""
        return self.cache.references(self._ledger.allocator.num_blocks)

    def check(self) -> None:
        """Derives anew that every lease keeps what its row names, under the row's tokens.

        Raises:
            InvariantViolation: names a row, or what is wrong with the tree.
        """
        self.cache.check()
        size = self.cache.block_size
        for row, lease in self._leases.items():
            nodes = list(lease.node.path())[::-1]
            blocks = np.concatenate([node.blocks for node in nodes])
            tokens = np.frombuffer(b"".join(node.key for node in nodes), np.int32)
            named = self._ledger.tables.blocks_of(row)[: lease.num_blocks]
            own = self._rows.tokens[row, : named.size * size]
            if not np.array_equal(blocks, named) or not np.array_equal(tokens, own):
                detail = f"the lease of row {row} keeps blocks {blocks.tolist()}, its table names {named.tolist()}"
                raise InvariantViolation(Invariant.PREFIX_TREE, detail)


def _require_same_blocks(cache: PrefixCache, ledger: KVLedger) -> None:
    """Raises ValueError unless the cache can keep the blocks of the ledger."""
    if ledger.window is not None:
        raise ValueError(f"window={ledger.window}: blocks behind it are given back, so no prefix stays to share")
    if cache.allocator is not ledger.allocator:
        raise ValueError("the prefix cache has another allocator than the scheduler: build both with one")
    if cache.block_size != ledger.tables.block_size:
        raise ValueError(
            f"the prefix cache has blocks of {cache.block_size} tokens and the tables of "
            f"{ledger.tables.block_size}: build both with one size"
        )
