"""`make bench-runtime`: the bookkeeping of our runtime beside vLLM's and SGLang's, in one process, interleaved.

All of it is host code in Python: ours on numpy, vLLM's on Python objects, SGLang's on CPU tensors of torch (on a GPU
it keeps its lists there, which this does not show). Peers run from the single source files of their wheels with
everything around them stubbed. What is not timed is named in each row.
"""

from __future__ import annotations

import argparse
import gc
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import torch
from rich import box
from rich.table import Table

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.kv_ledger import KVLedger
from pagedtune.runtime.prefix_cache import PrefixCache
from pagedtune.runtime.scheduler import Scheduler, SchedulerConfig
from pagedtune.runtime.sequence import Request

from .peer_runtime import SglangDecode, SglangPeer, VllmDecode, VllmPeer
from .tables import console_for

TREE = Path(__file__).resolve().parents[1]
BLOCK_SIZE, LONGEST = 16, 512
SHARED, OWN = 2048, 1024  # tokens of the prompts that are matched: a prefix of all, and the rest
Operation = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """Times of one operation, in microseconds.

    Args:
        name: what and whose.
        least, median, most: over all rounds.
        rounds: how many.
    """

    name: str
    least: float
    median: float
    most: float
    rounds: int


def interleaved(operations: dict[str, tuple[Operation, int]], rounds: int) -> list[Spread]:
    """Times each operation once a round, in turn; the number beside it is how many units it does at once."""
    times: dict[str, list[float]] = {name: [] for name in operations}
    for operation, _ in operations.values():
        operation()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, (operation, units) in operations.items():
                start = perf_counter_ns()
                operation()
                times[name].append((perf_counter_ns() - start) / 1e3 / units)
    finally:
        gc.enable()
    return [Spread(name, min(t), float(np.median(t)), max(t), rounds) for name, t in times.items()]


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


def bench_prefix(vllm: VllmPeer, sglang: SglangPeer, rounds: int, entries: int = 64) -> list[Spread]:
    """Finding 3072 cached tokens among `entries` prompts that share 2048, and storing another prompt's own 1024."""
    random = np.random.default_rng(0)
    shared = random.integers(0, 32000, SHARED)
    prompts = [np.concatenate((shared, random.integers(0, 32000, OWN))) for _ in range(entries + rounds + 1)]
    found = prompts[entries // 2]
    blocks = (SHARED + OWN) // BLOCK_SIZE
    allocator = BlockAllocator((entries + rounds + 2) * blocks)
    cache, radix = PrefixCache(allocator, BLOCK_SIZE), sglang.radix(BLOCK_SIZE)
    manager = vllm.manager((entries + 2) * blocks, BLOCK_SIZE, caching=True)
    slots = torch.arange(SHARED + OWN)

    def store(tokens: np.ndarray) -> None:
        match = cache.match(tokens)
        lease = cache.acquire(match)
        own = np.concatenate((match.blocks, allocator.allocate(blocks - match.blocks.size)))
        cache.extend(lease, tokens, own)
        cache.release(lease)
        allocator.free(own)

    for number, tokens in enumerate(prompts[:entries]):
        store(tokens)
        sglang.insert(radix, array("q", tokens.tolist()), slots)
        request = vllm.request(str(number), tokens.size, vllm.hashes(tokens.tolist(), BLOCK_SIZE))
        if number >= entries // 2 - 1:  # its pool need not hold more
            manager.allocate_slots(request, tokens.size)
            manager.free(request)
    query, key, listed = np.append(found, 0), array("q", [*found.tolist(), 0]), [*found.tolist(), 0]
    hashed = vllm.request("query", query.size, vllm.hashes(listed, BLOCK_SIZE))
    _require_equal_hits(cache.match(query).blocks.size * BLOCK_SIZE, sglang.match(radix, key), manager, hashed)
    new, theirs = iter(prompts[entries:]), iter([array("q", p.tolist()) for p in prompts[entries:]])
    return interleaved(
        {
            "ours: match (packing included)": (lambda: cache.match(query), 1),
            "SGLang: match_prefix (token array given)": (lambda: sglang.match(radix, key), 1),
            "vLLM: get_computed_blocks (hashes given)": (lambda: manager.get_computed_blocks(hashed), 1),
            "vLLM: hashing the 3072 tokens": (lambda: vllm.hashes(listed, BLOCK_SIZE), 1),
            "ours: match, acquire, store 1024, release": (lambda: store(next(new)), 1),
            "SGLang: insert (1024 new)": (lambda: sglang.insert(radix, next(theirs), slots), 1),
        },
        rounds,
    )


def _require_equal_hits(ours: int, sglang: int, manager: object, request: object) -> None:
    theirs = manager.get_computed_blocks(request)[1]  # type: ignore[attr-defined]
    if not ours == sglang == theirs == SHARED + OWN:
        raise RuntimeError(f"the caches found {ours}, {sglang} and {theirs} of {SHARED + OWN} tokens: not comparable")


def as_table(title: str, unit: str, rows: list[Spread], scale: float = 1.0) -> Table:
    """The rows, with ratios to the first of them."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what")
    for name in (f"min {unit}", f"median {unit}", f"max {unit}", "× first", "rounds"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        values = (f"{value * scale:.2f}" for value in (row.least, row.median, row.most))
        table.add_row(row.name, *values, f"{row.median / rows[0].median:.1f}", str(row.rounds))
    return table


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
