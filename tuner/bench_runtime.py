"""What the books of a decode step cost on this machine: `python -m pagedtune.tuner.bench_runtime`.

No device, no model: prompts of random lengths are admitted, and then every sequence gets one token in each step, as
when all decode. Times are of the host alone, on a machine that may be busy with other things: the load is printed.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.kv_ledger import KVLedger
from pagedtune.runtime.scheduler import Scheduler
from pagedtune.runtime.scheduler_config import SchedulerConfig
from pagedtune.runtime.sequence import Request

BLOCK_SIZE = 16
LONGEST_PROMPT = 512  # tokens; the books do not depend on it
GOALS_US = {64: 40.0, 256: 60.0, 4096: 200.0}  # of a step's bookkeeping, p50


@dataclass(frozen=True)
class Quantiles:
    """Times of one operation, in nanoseconds.

    Args:
        p50, p99, worst: over all samples.
    """

    p50: float
    p99: float
    worst: float

    @classmethod
    def of(cls, samples: list[int], each: int = 1) -> Quantiles:
        """Of samples that each cover `each` operations."""
        values = np.sort(np.array(samples)) / each
        return cls(float(np.quantile(values, 0.5)), float(np.quantile(values, 0.99)), float(values[-1]))

    def micros(self) -> str:
        """As a line of a table."""
        return f"p50 {self.p50 / 1e3:8.2f}  p99 {self.p99 / 1e3:8.2f}  max {self.worst / 1e3:8.2f} µs"


def _timed(operation: Callable[[], object], samples: int, each: int = 1) -> Quantiles:
    gc.collect()
    gc.disable()
    times = []
    try:
        for _ in range(samples):
            start = perf_counter_ns()
            operation()
            times.append(perf_counter_ns() - start)
    finally:
        gc.enable()
    return Quantiles.of(times, each)


def block_costs(num_blocks: int = 100_000, samples: int = 500) -> dict[int, Quantiles]:
    """Allocating and freeing k blocks, for each k, in nanoseconds a block; k = 1 through the path for single ones."""
    allocator = BlockAllocator(num_blocks)
    random = np.random.default_rng(0)
    everything = allocator.allocate(num_blocks)
    random.shuffle(everything)
    allocator.free(everything)  # churn: what is handed out is scattered over the pool

    def singles() -> None:
        allocate, free = allocator.allocate_one, allocator.free_one
        for _ in range(1000):
            free(allocate())

    costs = {1: _timed(singles, samples, 1000)}
    for k in (10, 100, 1000):

        def bulk(k: int = k) -> None:
            allocator.free(allocator.allocate(k))

        costs[k] = _timed(bulk, samples, k)
    return costs


def step_cost(num_seqs: int, steps: int = 400) -> Quantiles:
    """The books of a decode step: a token for each sequence, new blocks, copy checks, fences, differences sent."""
    max_blocks = (LONGEST_PROMPT + steps) // BLOCK_SIZE + 1
    allocator = BlockAllocator(num_seqs * max_blocks)
    tables = BlockTables(num_seqs, max_blocks, BLOCK_SIZE)
    ledger = KVLedger(allocator, tables)
    rows = np.arange(num_seqs)
    ledger.advance(rows, np.random.default_rng(0).integers(1, LONGEST_PROMPT, num_seqs))
    tables.flush()
    index = slice(0, num_seqs)

    def step() -> None:
        slots = ledger.advance_one(index, rows)
        assert slots is not None
        number, _ = ledger.begin_step()
        tables.flush()
        allocator.end_step(number)

    return _timed(step, steps)


def scheduler_cost(num_seqs: int, steps: int = 400) -> Quantiles:
    """`schedule` and `commit` of a decode step: the books, and everything that a model and a sampler need."""
    max_blocks = (LONGEST_PROMPT + steps + 32) // BLOCK_SIZE + 1
    allocator = BlockAllocator(num_seqs * max_blocks)
    config = SchedulerConfig(num_seqs * LONGEST_PROMPT, vocab_size=32000)
    scheduler = Scheduler(allocator, BlockTables(num_seqs, max_blocks, BLOCK_SIZE), config)
    lengths = np.random.default_rng(0).integers(1, LONGEST_PROMPT, num_seqs)
    for i, length in enumerate(lengths.tolist()):
        scheduler.add(Request(str(i), (7,) * length, steps + 16))
    tokens = np.full(num_seqs, 5, np.int64)

    def step() -> None:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, tokens)

    step()
    return _timed(step, steps)


def churn_cost(num_seqs: int, steps: int = 400) -> Quantiles:
    """As `scheduler_cost`, but one sequence in a hundred ends in each step and another one comes, with its prompt."""
    max_blocks = (LONGEST_PROMPT + 256) // BLOCK_SIZE + 1
    allocator = BlockAllocator(num_seqs * max_blocks)
    scheduler = Scheduler(
        allocator, BlockTables(num_seqs, max_blocks, BLOCK_SIZE), SchedulerConfig(max(2048, num_seqs), vocab_size=32000)
    )
    random = np.random.default_rng(0)
    added = 0

    def fill() -> None:
        nonlocal added
        while len(scheduler.roster.live) < num_seqs + 8:
            prompt, output = int(random.integers(1, LONGEST_PROMPT)), int(random.integers(1, 200))
            scheduler.add(Request(str(added), (7,) * prompt, output))
            added += 1

    times = []
    for step in range(steps + 2 * num_seqs):
        fill()
        start = perf_counter_ns()
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, np.full(plan.sampling.seed.size, 5, np.int64))
        if step >= 2 * num_seqs:  # until all rows are in use and their ages differ
            times.append(perf_counter_ns() - start)
    return Quantiles.of(times)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, nargs="*", default=sorted(GOALS_US))
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs; block size {BLOCK_SIZE}")
    for k, cost in block_costs().items():
        print(f"allocate and free {k:5d}: {cost.p50:8.1f} ns a block (p99 {cost.p99:.1f})")
    for num_seqs in options.sequences:
        print(f"{num_seqs:5d} sequences, books:             {step_cost(num_seqs).micros()}")
        print(f"{num_seqs:5d} sequences, schedule + commit: {scheduler_cost(num_seqs).micros()}")
        if num_seqs <= 256:  # each one more takes a step to fill up
            print(f"{num_seqs:5d} sequences, coming and going:  {churn_cost(num_seqs).micros()}")


if __name__ == "__main__":
    main()
