"""The prefix cache against a model that knows every cached prefix by its tokens, over random operations.

The model is a dictionary: the tokens of a prefix of whole blocks -> the block that ends it. The alphabet has two tokens
and a block holds two, so that prefixes meet, split and repeat all the time; the pool is small, so that most operations
evict. Steps in flight read what the sequences name, and the allocator's own check proves that none of it is recycled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from random_runs import run

from pagedtune.runtime import prefix_node, prefix_tree
from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.errors import InvariantViolation, PoolExhausted
from pagedtune.runtime.fences import MAX_STEPS_IN_FLIGHT
from pagedtune.runtime.prefix_cache import PrefixCache
from pagedtune.runtime.prefix_events import Evicted, Namespace
from pagedtune.runtime.prefix_lease import Lease
from pagedtune.runtime.prefix_leaves import LeafQueue
from pagedtune.runtime.prefix_node import Node, SortedKeys
from pagedtune.runtime.prefix_tree import PrefixTree

OPERATIONS = int(os.environ.get("PAGEDTUNE_STATEFUL_OPS", "50000")) // 5
NUM_BLOCKS, BLOCK_SIZE, MOST_TOKENS, MOST_ROWS, MOST_PINS, MAX_PINNED = 20, 2, 14, 3, 2, 5
NAMESPACES = (Namespace(), Namespace("tenant"), Namespace("tenant", "adapter"))

Key = tuple[int, Namespace, tuple[int, ...]]  # generation of the namespace, namespace, tokens
tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=MOST_TOKENS)
a_choice = st.integers(0, 1 << 16)


@dataclass(eq=False)
class Row:
    """A sequence: its tokens so far, the blocks that it names, and what it keeps in the cache."""

    key: tuple[int, Namespace]
    tokens: list[int]
    blocks: list[int]
    lease: Lease
    stored: int  # blocks of it that its lease keeps


class PrefixMachine(RuleBasedStateMachine):
    performed: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).performed -= 1
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.cache = PrefixCache(self.allocator, BLOCK_SIZE, 1, MAX_PINNED, max_events=1000)
        self.entries: dict[Key, int] = {}
        self.used: dict[Key, int] = {}
        self.generation = dict.fromkeys(NAMESPACES, 0)
        self.rows: list[Row] = []
        self.pins: list[tuple[Lease, set[Key]]] = []
        self.copies: list[int] = []
        self.clock = 0

    # The model

    def prefixes(self, key: tuple[int, Namespace], tokens: list[int]) -> list[Key]:
        return [(*key, tuple(tokens[:end])) for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)]

    def kept(self, row: Row) -> list[Key]:
        return self.prefixes(row.key, row.tokens)[: row.stored]

    def locked(self) -> set[Key]:
        return {key for row in self.rows for key in self.kept(row)}.union(*(keys for _, keys in self.pins))

    def touch(self, keys: Any) -> None:
        self.clock += 1
        self.used |= dict.fromkeys(keys, self.clock)

    def longest(self, key: tuple[int, Namespace], tokens: list[int]) -> tuple[list[Key], int]:
        """The cached prefixes of `tokens` but the last, and the most tokens that any block behind them shares."""
        tokens = tokens[:-1]
        found = [each for each in self.prefixes(key, tokens) if each in self.entries]
        rest = tokens[len(found) * BLOCK_SIZE :][:BLOCK_SIZE]
        start = tuple(tokens[: len(found) * BLOCK_SIZE])
        shared = [0]
        for generation, namespace, other in self.entries:
            if (
                (generation, namespace) == key
                and other[: len(start)] == start
                and len(other) == len(start) + BLOCK_SIZE
            ):
                same = [a == b for a, b in zip(rest, other[len(start) :], strict=False)]
                shared.append(same.index(False) if False in same else len(same))
        return found, max(shared)

    def evicted_next(self) -> Key:
        """The least recently used prefix that nobody keeps and that no other continues."""
        continued = {(g, n, tokens[:-BLOCK_SIZE]) for g, n, tokens in self.entries}
        return min(set(self.entries) - continued - self.locked(), key=lambda each: self.used[each])

    # Operations

    def evict(self, count: int) -> None:
        self.cache.take_events()
        expected = []
        for _ in range(min(count, len(set(self.entries) - self.locked()))):
            gone = self.evicted_next()
            expected.append(self.entries.pop(gone))
        assert self.cache.evict(count) == len(expected)
        found = [block for e in self.cache.take_events()[0] if isinstance(e, Evicted) for block in e.blocks.tolist()]
        assert sorted(found) == sorted(expected)

    def allocate(self, count: int) -> list[int]:
        if count > self.allocator.num_free:
            self.evict(count - self.allocator.num_free)
        return [int(block) for block in self.allocator.allocate(count)]

    @precondition(lambda self: len(self.rows) < MOST_ROWS)
    @rule(tokens=tokens_of, namespace=st.sampled_from(NAMESPACES), computed=st.booleans())
    def start(self, tokens: list[int], namespace: Namespace, computed: bool) -> None:
        """A sequence comes in, takes what is cached and the blocks that it lacks; if there are none, it leaves."""
        key = (self.generation[namespace], namespace)
        match = self.cache.match(tokens, namespace)
        found, shared = self.longest(key, tokens)
        assert match.blocks.tolist() == [self.entries[each] for each in found]
        assert match.copy_tokens == shared
        assert match.num_idle == len(set(found) - self.locked())
        lease = self.cache.acquire(match)
        row = Row(key, tokens, match.blocks.tolist(), lease, len(found))
        self.rows.append(row)
        self.touch(found)
        if match.copy is not None:
            self.allocator.add_reference(match.copy_block)
            self.copies.append(match.copy_block)
        missing = -(-len(tokens) // BLOCK_SIZE) - len(found)
        try:
            row.blocks += self.allocate(missing)
        except PoolExhausted:
            self.finish_row(row)
            return
        if computed:
            self.store(row)

    @precondition(lambda self: self.rows)
    @rule(choice=a_choice, more=tokens_of)
    def extend(self, choice: int, more: list[int]) -> None:
        """A sequence has computed what it has, is stored, and gets more tokens."""
        row = self.rows[choice % len(self.rows)]
        self.store(row)
        tokens = (row.tokens + more)[:MOST_TOKENS]
        with suppress(PoolExhausted):
            row.blocks += self.allocate(-(-len(tokens) // BLOCK_SIZE) - len(row.blocks))
            row.tokens = tokens

    def store(self, row: Row) -> None:
        before = self.kept(row)
        prefixes = self.prefixes(row.key, row.tokens)
        known = [each for each in prefixes if each in self.entries]
        insertion = self.cache.extend(row.lease, row.tokens, np.array(row.blocks))
        assert insertion.num_new == len(prefixes) - len(known)
        for column, block in zip(insertion.columns.tolist(), insertion.blocks.tolist(), strict=True):
            assert block == self.entries[prefixes[column]]
            self.allocator.add_reference(block)
            self.allocator.free(row.blocks[column])
            row.blocks[column] = block
        self.entries |= dict(zip(prefixes, row.blocks, strict=False))
        row.stored = len(prefixes)
        self.touch(prefixes[len(before) :])

    @precondition(lambda self: self.rows)
    @rule(choice=a_choice)
    def finish(self, choice: int) -> None:
        self.finish_row(self.rows[choice % len(self.rows)])

    def finish_row(self, row: Row) -> None:
        self.touch(self.kept(row))
        self.rows.remove(row)
        self.cache.release(row.lease)
        self.allocator.free(row.blocks)

    @precondition(lambda self: 0 < len(self.rows) < MOST_ROWS)
    @rule(choice=a_choice)
    def fork(self, choice: int) -> None:
        row = self.rows[choice % len(self.rows)]
        self.touch(self.kept(row))
        whole = len(row.tokens) // BLOCK_SIZE
        self.allocator.add_reference(row.blocks[:whole])
        tokens = row.tokens[: whole * BLOCK_SIZE]
        self.rows.append(Row(row.key, tokens, row.blocks[:whole], self.cache.share(row.lease, whole), row.stored))

    @precondition(lambda self: self.entries and len(self.pins) < MOST_PINS)
    @rule(tokens=tokens_of, namespace=st.sampled_from(NAMESPACES))
    def pin(self, tokens: list[int], namespace: Namespace) -> None:
        found = set(self.longest((self.generation[namespace], namespace), tokens)[0])
        pinned: set[Key] = set().union(*(keys for _, keys in self.pins))
        if len(pinned | found) > MAX_PINNED:
            with pytest.raises(PoolExhausted):
                self.cache.pin(tokens, namespace)
            return
        self.pins.append((self.cache.pin(tokens, namespace), found))
        self.touch(found)

    @precondition(lambda self: self.pins)
    @rule(choice=a_choice)
    def unpin(self, choice: int) -> None:
        lease, keys = self.pins.pop(choice % len(self.pins))
        self.cache.release(lease)
        self.touch(keys)

    @precondition(lambda self: self.entries)
    @rule(count=st.sampled_from((1, 1, 2, 3, NUM_BLOCKS)))
    def evict_some(self, count: int) -> None:
        self.evict(count)

    @precondition(lambda self: len(self.entries) > NUM_BLOCKS // 2)
    @rule(namespace=st.sampled_from(NAMESPACES[1:]))
    def invalidate(self, namespace: Namespace) -> None:
        self.cache.invalidate(namespace)
        self.generation[namespace] += 1

    @precondition(lambda self: self.rows and len(self.allocator.steps_in_flight) < MAX_STEPS_IN_FLIGHT)
    @rule()
    def begin_step(self) -> None:
        self.allocator.begin_step([block for row in self.rows for block in row.blocks] + self.copies)
        self.allocator.free(self.copies)
        self.copies.clear()

    @precondition(lambda self: self.allocator.steps_in_flight)
    @rule()
    def end_step(self) -> None:
        self.allocator.end_step(self.allocator.steps_in_flight[0])

    @invariant()
    def everything_agrees(self) -> None:
        type(self).performed += 1
        self.cache.check()
        named = [block for row in self.rows for block in row.blocks] + self.copies
        tables = np.bincount(np.array(named, np.int64), minlength=NUM_BLOCKS)
        self.allocator.check(tables + self.cache.references(NUM_BLOCKS))
        assert self.cache.num_cached == len(self.entries)
        assert self.cache.num_evictable == len(set(self.entries) - self.locked())
        assert self.cache.num_pinned == len(set().union(*(keys for _, keys in self.pins)))

    def teardown(self) -> None:
        """Nothing is left once everybody has gone and everything is evicted."""
        for row in list(self.rows):
            self.finish_row(row)
        for lease, keys in self.pins:
            self.cache.release(lease)
            self.touch(keys)
        self.pins.clear()
        self.evict(NUM_BLOCKS)
        self.begin_step() if not self.allocator.steps_in_flight else None
        self.allocator.free(self.copies)
        self.copies.clear()
        for step in self.allocator.steps_in_flight:
            self.allocator.end_step(step)
        self.everything_agrees()
        assert self.allocator.num_free == NUM_BLOCKS
        assert not self.cache.references(NUM_BLOCKS).any()


def run_several(operations: int) -> None:
    """Runs of several seeds: a rare fault escapes some of them."""
    for number in range(6):
        run(PrefixMachine, operations, number)


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes and lists of keys so short that they fill and split."""
    monkeypatch.setattr(prefix_tree, "MAX_RUN", 3)
    monkeypatch.setattr("pagedtune.runtime.prefix_check.MAX_RUN", 3)
    monkeypatch.setattr(prefix_node, "_CHUNK", 2)


@pytest.mark.slow
def test_the_cache_agrees_with_the_model_after_every_operation() -> None:
    PrefixMachine.performed, number = 0, 0
    while (missing := OPERATIONS - PrefixMachine.performed) > 0:  # Hypothesis ends some runs early
        run(PrefixMachine, missing, number)
        number += 1


def match_by_first_block_only(data: bytes, start: int, key: bytes) -> int:
    return min(len(data) - start, len(key))


def lock_only_the_end(self: PrefixTree, node: Node, until: Node | None, is_pin: bool) -> None:
    node.locks += 1
    self.num_evictable -= node.blocks.size


def newest_first(self: LeafQueue) -> Node | None:
    candidates = [node for _, _, node in self._heap if node.locks == 0 and node.parent and not node.children]
    if not candidates:
        return None
    node = max(candidates, key=lambda each: each.last_use)
    self._heap = [entry for entry in self._heap if entry[2] is not node]
    node.queued = False
    return node


def forget_what_steps_read(self: PrefixTree, node: Node, is_pin: bool, step: int) -> None:
    unlock(self, node, is_pin, 0)


unlock = PrefixTree.unlock


def one_side_only(self: SortedKeys, key: bytes) -> list[bytes]:
    return neighbours(self, key)[:1]


neighbours = SortedKeys.neighbours


def keep_the_root(self: PrefixTree, namespace: Namespace) -> None:
    """Invalidation that forgets to do anything."""


@pytest.mark.parametrize(
    ("owner", "method", "fault"),
    [
        (prefix_node, "common_bytes", match_by_first_block_only),
        (PrefixTree, "lock", lock_only_the_end),
        (PrefixTree, "unlock", forget_what_steps_read),
        (PrefixTree, "orphan", keep_the_root),
        (LeafQueue, "pop", newest_first),
        (SortedKeys, "neighbours", one_side_only),
    ],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, fault: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, method, fault)
    with pytest.raises((InvariantViolation, AssertionError, ValueError)):
        run_several(6000)
