"""`make bench-runtime`: the bookkeeping of our runtime beside vLLM's and SGLang's, in one process, in turns.

All of it is host code in Python: ours on numpy, vLLM's on Python objects, SGLang's on CPU tensors of torch (on a GPU
it keeps its lists there, which this does not show). Peers run from the single source files of their wheels with
everything around them stubbed. What is not timed is named in each row.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.kv_ledger import KVLedger
from pagedtune.runtime.prefix_cache import PrefixCache
from pagedtune.runtime.scheduler import Scheduler
from pagedtune.runtime.scheduler_config import SchedulerConfig
from pagedtune.runtime.sequence import Request

from .bench_prefix_peers import BLOCK_SIZE, OWN, SHARED, bench_prefix
from .interleaved import Operation, Spread, as_table, interleaved
from .peer_runtime import SglangDecode, SglangPeer, VllmDecode, VllmPeer
from .tables import console_for

TREE = Path(__file__).resolve().parents[1]
LONGEST = 512


def our_books(lengths: Sequence[int], steps: int) -> Operation:
    """A decode step of our books: slots, new blocks, copy checks, fences, table differences sent."""
    columns = (max(lengths) + steps) // BLOCK_SIZE + 2
    allocator = BlockAllocator(len(lengths) * columns)
    tables = BlockTables(len(lengths), columns, BLOCK_SIZE)
    ledger = KVLedger(allocator, tables)
    rows, index = np.arange(len(lengths)), slice(0, len(lengths))
    ledger.advance(rows, np.asarray(lengths))
    tables.flush()

    def step() -> None:
        if ledger.advance_one(index, rows) is None:
            raise RuntimeError("the pool is exhausted: the benchmark made it too small")
        number, _ = ledger.begin_step()
        tables.flush()
        allocator.end_step(number)

    return step


def our_scheduler(lengths: Sequence[int], steps: int) -> Operation:
    """`schedule` and `commit` of a decode step, prefix cache on: everything that a model and a sampler need."""
    columns = (max(lengths) + steps) // BLOCK_SIZE + 2
    allocator = BlockAllocator(len(lengths) * columns)
    config = SchedulerConfig(len(lengths) * LONGEST, vocab_size=32000)
    cache = PrefixCache(allocator, BLOCK_SIZE)
    scheduler = Scheduler(allocator, BlockTables(len(lengths), columns, BLOCK_SIZE), config, prefix_cache=cache)
    for number, length in enumerate(lengths):
        scheduler.add(Request(str(number), (number, *(7,) * (length - 1)), steps + 8))
    tokens = np.full(len(lengths), 5)

    def step() -> None:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, tokens)

    return step


def bench_steps(vllm: VllmPeer, sglang: SglangPeer, num_seqs: int, rounds: int) -> list[Spread]:
    """A decode step over `num_seqs` sequences."""
    lengths = np.random.default_rng(0).integers(1, LONGEST, num_seqs).tolist()
    steps = rounds + 2
    return interleaved(
        {
            "ours: books": (our_books(lengths, steps), 1),
            "ours: schedule + commit": (our_scheduler(lengths, steps), 1),
            "vLLM: allocate_slots, caching on (hashes given)": (
                VllmDecode(vllm, lengths, steps, BLOCK_SIZE, caching=True).step, 1,
            ),
            "vLLM: allocate_slots, caching off": (VllmDecode(vllm, lengths, steps, BLOCK_SIZE, caching=False).step, 1),
            "SGLang: alloc_decode, table (CPU tensors)": (SglangDecode(sglang, lengths, steps, BLOCK_SIZE).step, 1),
        },
        rounds,
    )  # fmt: skip


def bench_blocks(vllm: VllmPeer, sglang: SglangPeer, count: int, rounds: int) -> list[Spread]:
    """Allocating and freeing `count` blocks at a time, for each block."""
    num_blocks, repeats = 100_000, max(1, 200 // count)
    ours, pool = BlockAllocator(num_blocks), vllm.pool(num_blocks, caching=True)
    pages = sglang.allocator(num_blocks, BLOCK_SIZE)

    def our_own() -> None:
        for _ in range(repeats):
            if count == 1:
                ours.free_one(ours.allocate_one())
            else:
                ours.free(ours.allocate(count))

    def theirs() -> None:
        for _ in range(repeats):
            pool.free_blocks(pool.get_new_blocks(count))

    def paged() -> None:
        for _ in range(repeats):
            pages.free_segment(pages.alloc(count * BLOCK_SIZE), start_pos=0)

    units = count * repeats
    return interleaved(
        {
            "ours": (our_own, units), "vLLM: BlockPool": (theirs, units),
            "SGLang: paged free list (CPU tensors)": (paged, units),
        },
        rounds,
    )  # fmt: skip


def main() -> int:
    """Runs everything and prints the tables; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make bench-runtime", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="of each comparison (default 200)")
    parser.add_argument("--folder", type=Path, default=TREE / "build" / "peers", help="where the peers' wheels go")
    arguments = parser.parse_args()
    console = console_for()
    torch.set_num_threads(1)
    vllm, sglang = VllmPeer(arguments.folder), SglangPeer(arguments.folder)
    rounds = arguments.rounds
    console.print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs at the start; block size {BLOCK_SIZE}")
    for num_seqs in (64, 256, 4096):
        rows = bench_steps(vllm, sglang, num_seqs, max(10, rounds // (1 if num_seqs < 1000 else 5)))
        console.print(as_table(f"decode step, {num_seqs} sequences", "µs", rows))
    for count in (1, 10, 100, 1000):
        title = f"allocate and free, {count} at a time, each block"
        console.print(as_table(title, "ns", bench_blocks(vllm, sglang, count, rounds), 1e3))
    title = f"prefix of {SHARED + OWN} tokens"
    console.print(as_table(title, "µs", bench_prefix(vllm, sglang, rounds)))
    for finder in (vllm.finder, sglang.finder):
        console.print(f"stubbed: {', '.join(finder.replaced)}", markup=False)
    console.print(f"load {os.getloadavg()[0]:.1f} at the end")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
