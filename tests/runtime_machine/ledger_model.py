"""Ledger, tables and allocator over random operations, against lists of tokens and a device that stores them.

The device makes a step's copies and writes when it is launched, and reads the step's sequences again when it ends:
whatever was recycled, misplaced, lost or overwritten in between shows as a wrong token. Every token is a new number.
`test_ledger_machine.py` drives this by Hypothesis, `soak.py` by the million.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.arrays import IntArray
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.errors import DoubleFree, PoolExhausted, StepError
from pagedtune.runtime.fences import MAX_STEPS_IN_FLIGHT
from pagedtune.runtime.kv_ledger import KVLedger
from pagedtune.runtime.swap import Preemption, SwapPolicy, SwapSpace

NUM_BLOCKS, NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE, HOST_BLOCKS = 20, 5, 7, 3, 8
LONGEST = MAX_BLOCKS * BLOCK_SIZE


class Device:
    """Slots that hold tokens, here and on the host; a `BlockMover`."""

    block_bytes = 1

    def __init__(self) -> None:
        self.slots = np.full((NUM_BLOCKS, BLOCK_SIZE), -1)
        self.host = np.full((HOST_BLOCKS, BLOCK_SIZE), -1)

    def save(self, blocks: IntArray, host_blocks: IntArray) -> None:
        self.host[host_blocks] = self.slots[blocks]

    def load(self, host_blocks: IntArray, blocks: IntArray) -> None:
        self.slots[blocks] = self.host[host_blocks]


@dataclass
class Flight:
    """A step in flight: what it reads, and what its tables were when it was launched."""

    number: int
    rows: list[int]
    tables: list[list[int]]
    tokens: list[list[int]]
    first_seen: list[int]
    births: list[int]


class LedgerModel:
    """See the module. Each operation takes a source of choices; `check` follows each."""

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.device = Device()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.tables = BlockTables(NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE)
        self.ledger = KVLedger(self.allocator, self.tables, window)
        self.swap = SwapSpace(HOST_BLOCKS, self.device, SwapPolicy(Preemption.SWAP))
        self.tokens: list[list[int]] = [[] for _ in range(NUM_ROWS)]
        self.births = [0] * NUM_ROWS  # so that a step's rows are known to have been given up
        self.cached: list[int] = []  # blocks that a cache holds
        self.reserved: list[int] = []
        self.parked: list[tuple[IntArray, int, list[int]]] = []
        self.flight: list[Flight] = []
        self.last_token = self.last_birth = 0

    def operations(self) -> list[Callable[[random.Random], None]]:
        """All of them; the commoner ones several times."""
        return [
            self.step, self.step, self.step, self.step_one, self.step_one, self.end, self.end, self.end, self.fork,
            self.fork, self.release, self.speculate, self.cache, self.evict, self.park, self.unpark, self.reserve,
            self.settle_reserved, self.misuse,
        ]  # fmt: skip

    def new_tokens(self, count: int) -> list[int]:
        self.last_token += count
        return list(range(self.last_token - count + 1, self.last_token + 1))

    def step(self, choose: random.Random) -> None:
        """Chunks of any size for any rows."""
        rows = sorted(choose.sample(range(NUM_ROWS), choose.randint(1, NUM_ROWS)))
        counts = [choose.randint(0, min(7, LONGEST - len(self.tokens[row]))) for row in rows]
        rows, counts = [r for r, c in zip(rows, counts, strict=True) if c], [c for c in counts if c]
        if not rows:
            return
        if len(self.flight) == MAX_STEPS_IN_FLIGHT:
            with pytest.raises(StepError):
                self.allocator.begin_step()
            return
        chosen, amounts = np.array(rows), np.array(counts)
        self.ledger.trim(chosen)
        needed, free = int(self.ledger.demand(chosen, amounts).sum()), self.allocator.num_free
        if needed > free:
            with pytest.raises(PoolExhausted):
                self.ledger.advance(chosen, amounts)
            return
        self.ledger.advance(chosen, amounts)
        assert self.allocator.num_free == free - needed, "what was asked for is what was taken"
        self.launch(rows, counts)

    def step_one(self, choose: random.Random) -> None:
        """One token for many rows, the usual step."""
        rows = [row for row in range(NUM_ROWS) if 0 < len(self.tokens[row]) < LONGEST and choose.random() < 0.9]
        if not rows or len(self.flight) == MAX_STEPS_IN_FLIGHT:
            return
        chosen = np.array(rows)
        dense = rows == list(range(len(rows))) and choose.random() < 0.5
        self.ledger.trim(chosen)
        needed, free = int(self.ledger.demand(chosen, np.ones_like(chosen)).sum()), self.allocator.num_free
        slots = self.ledger.advance_one(slice(0, len(rows)) if dense else chosen, chosen)
        assert (slots is None) == (needed > free)
        if slots is None:
            return
        positions = np.array([len(self.tokens[row]) for row in rows])
        assert slots.tolist() == self.tables.slot_mapping(chosen, positions).tolist()
        self.launch(rows, [1] * len(rows))

    def launch(self, rows: list[int], counts: list[int]) -> None:
        """The device makes the copies, then writes; `end` reads."""
        number, copies = self.ledger.begin_step(self.tables.blocks_of(np.array(rows)))
        if copies is not None:
            sources, destinations = copies[:, 0], copies[:, 1]
            assert len(set(destinations.tolist())) == destinations.size
            assert not set(sources.tolist()) & set(destinations.tolist())
            self.device.slots[destinations] = self.device.slots[sources]
        flight = Flight(number, rows, [], [], [], [])
        for row, count in zip(rows, counts, strict=True):
            start = len(self.tokens[row])
            self.tokens[row] = self.tokens[row] + self.new_tokens(count)
            positions = np.arange(start, start + count)
            slots = self.tables.slot_mapping(np.full(count, row), positions)
            self.device.slots.reshape(-1)[slots] = self.tokens[row][start:]
            if not self.births[row]:
                self.last_birth += 1
                self.births[row] = self.last_birth
            flight.first_seen.append(0 if self.window is None else max(0, start - self.window + 1))
        self.tables.flush()
        device_tables = self.tables.block_tables.tolist()
        for row in rows:
            flight.tables.append(device_tables[row])
            flight.tokens.append(self.tokens[row])
            flight.births.append(self.births[row])
        self.flight.append(flight)
        self.read(flight)

    def read(self, flight: Flight) -> None:
        for table, tokens, first in zip(flight.tables, flight.tokens, flight.first_seen, strict=True):
            found = [self.device.slots[table[i // BLOCK_SIZE], i % BLOCK_SIZE] for i in range(first, len(tokens))]
            assert found == tokens[first:], f"step {flight.number} reads {found} for {tokens[first:]}"

    def end(self, choose: random.Random) -> None:
        if not self.flight:
            with pytest.raises(StepError):
                self.allocator.end_step(1)
            return
        flight = self.flight[0]
        if len(self.flight) > 1 and choose.random() < 0.1:
            with pytest.raises(StepError):
                self.allocator.end_step(self.flight[1].number)
            return
        self.read(flight)
        self.flight.pop(0)
        births = zip(flight.rows, flight.births, flight.tokens, strict=True)
        alive = [(row, len(tokens)) for row, birth, tokens in births if self.births[row] == birth]
        rows, ends = np.array([row for row, _ in alive], np.int64), np.array([end for _, end in alive], np.int64)
        self.ledger.finish_step(flight.number, rows, ends)

    def fork(self, choose: random.Random) -> None:
        row, source = choose.randrange(NUM_ROWS), choose.randrange(NUM_ROWS)
        most = int(self.ledger.processed[source])
        if self.births[row] or not self.births[source] or not most:
            return
        position = choose.choice([most, choose.randint(1, most)])
        if not self.ledger.can_fork(source, position):
            with pytest.raises(ValueError, match="given back"):
                self.ledger.fork(source, row, position)
            return
        free = self.allocator.num_free
        self.ledger.fork(source, row, position)
        assert self.allocator.num_free == free, "a fork takes no block"
        self.adopt(row, self.tokens[source][:position])

    def adopt(self, row: int, tokens: list[int]) -> None:
        self.last_birth += 1
        self.births[row], self.tokens[row] = self.last_birth, tokens

    def release(self, choose: random.Random) -> None:
        row = choose.randrange(NUM_ROWS)
        self.ledger.release(row)
        self.births[row], self.tokens[row] = 0, []

    def speculate(self, choose: random.Random) -> None:
        """Drafts are booked and run like tokens; here some are rejected. Never with a step in flight over the row."""
        row = choose.randrange(NUM_ROWS)
        if not self.births[row] or any(row in flight.rows for flight in self.flight):
            return
        count = len(self.tokens[row]) - choose.randint(0, min(5, len(self.tokens[row]) - 1))
        if not self.ledger.can_fork(row, count):
            with pytest.raises(ValueError, match="cannot go back"):
                self.ledger.truncate(row, count)
            return
        self.ledger.truncate(row, count)
        self.tokens[row] = self.tokens[row][:count]

    def cache(self, choose: random.Random) -> None:
        """A cache takes a reference to a block of a row, full or not."""
        row = choose.randrange(NUM_ROWS)
        blocks = self.tables.blocks_of(row).tolist()
        if blocks and len(self.cached) < 6:
            block = choose.choice(blocks)
            self.allocator.add_reference([block])
            self.cached.append(block)
            for other in range(NUM_ROWS):
                if block in self.tables.blocks_of(other):
                    self.ledger.ask_before_writing(other)

    def evict(self, choose: random.Random) -> None:
        if self.cached:
            count = choose.randint(1, len(self.cached))
            self.allocator.free(self.cached[:count])
            del self.cached[:count]

    def park(self, choose: random.Random) -> None:
        """Preemption by swap: what is processed goes to the host."""
        row = choose.randrange(NUM_ROWS)
        count = int(self.ledger.processed[row])
        if not count or not self.ledger.can_fork(row, count):
            return
        first = int(self.tables.first_block[row])
        blocks = self.tables.blocks_of(row)[: -(-count // BLOCK_SIZE) - first]
        fits = blocks.size <= self.swap.allocator.num_free
        host_blocks = self.swap.try_save(blocks, count) if blocks.size else None
        if host_blocks is None:
            assert not fits or not blocks.size
            return
        self.parked.append((host_blocks, first, self.tokens[row][:count]))
        self.ledger.release(row)
        self.births[row], self.tokens[row] = 0, []

    def unpark(self, choose: random.Random) -> None:
        row = choose.randrange(NUM_ROWS)
        if not self.parked or self.births[row] or self.parked[0][0].size > self.allocator.num_free:
            return
        host_blocks, first, tokens = self.parked.pop(0)
        blocks = self.allocator.allocate(host_blocks.size)
        self.swap.load(host_blocks, blocks)
        self.ledger.adopt(row, blocks, len(tokens), first)
        self.adopt(row, tokens)

    def reserve(self, choose: random.Random) -> None:
        count = choose.randint(1, 3)
        if len(self.reserved) + count > 4 or count > self.allocator.num_free:
            return
        self.reserved += self.allocator.reserve(count).tolist()

    def settle_reserved(self, choose: random.Random) -> None:
        """A load ends well, and a cache has its blocks; or it does not."""
        if self.reserved and choose.random() < 0.5 and len(self.cached) + len(self.reserved) <= 6:
            self.allocator.commit_reserved(self.reserved)
            self.cached += self.reserved
        else:
            self.allocator.release_reserved(self.reserved)
        self.reserved = []

    def misuse(self, choose: random.Random) -> None:
        """A reference that nobody holds is dropped."""
        block = choose.randrange(NUM_BLOCKS)
        held = int(self.references()[block])
        with pytest.raises(DoubleFree):
            self.allocator.free([block] * (held + 1))
        if not held:
            with pytest.raises(DoubleFree):
                self.allocator.free_one(block)

    def references(self) -> IntArray:
        cached = np.bincount(np.array(self.cached, np.int64), minlength=NUM_BLOCKS)
        return self.tables.count_references(NUM_BLOCKS) + self.ledger.pending_references + cached

    def check(self) -> None:
        self.tables.check()
        self.allocator.check(self.references())
        self.ledger.check()
        assert self.tables.stored.tolist() == [len(tokens) for tokens in self.tokens]
        parked = [host_blocks for host_blocks, _, _ in self.parked]
        named = np.bincount(np.concatenate(parked), minlength=HOST_BLOCKS) if parked else np.zeros(HOST_BLOCKS, int)
        self.swap.allocator.check(named)
        assert self.allocator.num_reserved == len(self.reserved)

    def finish(self) -> None:
        """Everything is given up, and nothing is left."""
        for flight in self.flight:
            self.read(flight)
            self.allocator.end_step(flight.number)
        for row in range(NUM_ROWS):
            self.ledger.release(row)
        self.allocator.free(self.cached)
        self.allocator.release_reserved(self.reserved)
        assert self.allocator.num_free == NUM_BLOCKS
