"""The models by the million: `PYTHONPATH=build/imports python -m tests.runtime_machine.soak --operations 10000000`.

Invariants are checked after every operation; memory must not grow after the first tenth.
"""

from __future__ import annotations

import argparse
import gc
import time

import psutil

from .machine import drive
from .test_ledger_machine import MODELS as LEDGER_MODELS
from .test_scheduler_machine import MODELS as SCHEDULER_MODELS

GROWTH_BYTES = 32 << 20  # what an allocator of memory may keep


def main() -> None:
    """Runs, reports every tenth, and fails on the first violation or on growing memory."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
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
