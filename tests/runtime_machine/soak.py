"""Long runs, by a seed: `PYTHONPATH=build/imports python -m tests.runtime_machine.soak --operations 10000000`, and
`--requests 200000` for one scheduler that lives through all of them.

The models check every invariant after every operation; the scheduler every thousand steps, with its pool full all the
time. Memory must not grow after the first tenth.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from contextlib import suppress

import psutil

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.errors import InvalidRequest
from pagedtune.runtime.sampling import SamplingParams
from pagedtune.runtime.scheduler import Scheduler
from pagedtune.runtime.scheduler_config import SchedulerConfig
from pagedtune.runtime.sequence import Request
from pagedtune.runtime.swap import Preemption, SwapPolicy, SwapSpace

from .machine import drive
from .test_ledger_machine import MODELS as LEDGER_MODELS
from .test_scheduler_machine import MODELS as SCHEDULER_MODELS

NUM_ROWS = 32
GROWTH_BYTES = 32 << 20  # what an allocator of memory may keep


def live_through(num_requests: int, seed: int) -> None:
    """One scheduler: requests that never end to come, cancels and forks at random, twice as many as fit."""
    choose, process, start, first = random.Random(seed), psutil.Process(), time.perf_counter(), 0
    tables = BlockTables(NUM_ROWS, 16, 8)
    swap = SwapSpace(64, None, SwapPolicy(Preemption.SWAP))
    scheduler = Scheduler(BlockAllocator(NUM_ROWS * 3), tables, SchedulerConfig(256), swap)
    added = steps = cancelled = forked = tenth = 0
    while added < num_requests:
        live = list(scheduler.roster.live)
        for _ in range(max(0, 2 * NUM_ROWS - len(live))):
            added += 1
            prompt = tuple(choose.randrange(1000) for _ in range(choose.randint(1, 60)))
            scheduler.add(Request(str(added), prompt, choose.randint(1, 40), n=choose.choice((1, 1, 1, 3))))
        if choose.random() < 0.3:
            scheduler.cancel(choose.choice(live))
            cancelled += 1
        elif choose.random() < 0.3 and (name := choose.choice(live)) in scheduler.roster.live:
            with suppress(InvalidRequest):  # nothing is left to generate
                scheduler.fork(name, f"fork {steps}", sampling=SamplingParams(1.0))
                forked += 1
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, [choose.randrange(1000) for _ in range(int(plan.samples.sum()))])
        steps += 1
        if steps % 1000 == 0:
            scheduler.check()
        if added * 10 // num_requests > tenth:
            tenth += 1
            gc.collect()
            memory = process.memory_info().rss
            first = first or memory
            print(
                f"{added} requests, {steps} steps; {memory >> 20} MiB, {time.perf_counter() - start:.0f} s", flush=True
            )
    gc.collect()
    memory, preempted = process.memory_info().rss, scheduler.roster.num_preemptions
    for name in list(scheduler.roster.live):
        if name in scheduler.roster.live:
            scheduler.cancel(name)
    scheduler.check()
    assert scheduler.allocator.num_free == scheduler.allocator.num_blocks
    print(
        f"{added} requests in {steps} steps: {cancelled} cancelled, {forked} forked, {preempted} preempted, every "
        f"block back; {first >> 20} MiB after a tenth, {memory >> 20} at the end, {time.perf_counter() - start:.0f} s"
    )
    if memory - first > GROWTH_BYTES:
        raise SystemExit("memory grew")


def main() -> None:
    """Runs, reports every tenth, and fails on the first violation or on growing memory."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, help="instead: so many through one scheduler")
    options = parser.parse_args()
    if options.requests:
        live_through(options.requests, options.seed)
        return
    process, start, done, first = psutil.Process(), time.perf_counter(), 0, 0
    for tenth in range(10):
        for models in (LEDGER_MODELS, SCHEDULER_MODELS):
            done += drive(models, options.operations // 20, options.seed + tenth * 10**6)
        gc.collect()
        memory = process.memory_info().rss
        first = first or memory
        print(f"{done} operations, no violation; {memory >> 20} MiB, {time.perf_counter() - start:.0f} s", flush=True)
    if memory - first > GROWTH_BYTES:
        raise SystemExit(f"memory grew from {first >> 20} to {memory >> 20} MiB after the first tenth")


if __name__ == "__main__":
    main()
