"""A tune that is killed with SIGKILL, again and again, and then run to its end."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from pagedtune.kernels.record import Record, Status
from pagedtune.kernels.serial import to_jsonable
from pagedtune.tuner.select import select
from pagedtune.tuner.store import FILE_NAME, read_records

SWEEP = """\
description: two dtypes, two buckets
models: [smollm2-135m]
dtypes: [fp32, bf16]
block_sizes: [16]
layouts: [nhd]
buckets:
  - {num_seqs: 1, context_len: 128, weight: 1.0}
  - {num_seqs: 2, context_len: 128, weight: 1.0}
workloads: [uniform]
"""
NUM_KILLS = 3
# Beside other tests no cell is quiet enough to end early: a tune takes all of its budget.
BUDGET_S = 20
NUM_STARTS = 8  # until nothing is left
LIMIT_S = 240.0  # for one start


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """One tune of `eager` over a sweep of four cells, always the same."""
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(SWEEP)
    options = ["--device", "cpu", "--variant", "eager", "--sweep", str(sweep), "--budget", str(BUDGET_S)]
    return [sys.executable, "-m", "pagedtune.tuner.cli", "tune", *options, "--results", str(tmp_path / "results")]


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_after(command: list[str], path: Path, num_new: int, delay_s: float) -> bool:
    """Runs `command` until it has written so many records, waits, kills it; False if it was done before."""
    target = lines_in(path) + num_new
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and lines_in(path) < target and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay_s)
        process.kill()
    return process.returncode == -signal.SIGKILL


def outcomes(records: tuple[Record, ...]) -> Counter[str]:
    """How often each outcome is there. After an edit of the gate or the timer, all is done again, and rightly."""
    return Counter(f"{r.key} by {r.provenance['code']}" for r in records if r.status is not Status.NOT_RUN)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_tune_loses_and_doubles_nothing(command: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "results" / "cpu"
    rng = random.Random()
    kills = [(rng.randint(0, 3), rng.uniform(0, 1.0)) for _ in range(NUM_KILLS)]
    print(f"killed after (records, seconds): {kills}")  # shown when the test fails
    before: tuple[Record, ...] = ()
    for num_new, delay_s in kills:
        was_killed = kill_after(command, folder / FILE_NAME, num_new, delay_s)
        after = read_records(folder)
        assert after[: len(before)] == before
        assert set(outcomes(after).values()) <= {1}
        before = after
        if not was_killed:
            break
    for _ in range(NUM_STARTS):
        finished = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert finished.returncode == 0, finished.stderr
        if "4 of 4 cells" in " ".join((finished.stdout + finished.stderr).split()):
            break
    records = read_records(folder)
    assert records[: len(before)] == before
    assert set(outcomes(records).values()) == {1}
    assert {r.status for r in records} - {Status.NOT_RUN} == {Status.PASSED}
    table = select(records, records[0].device)
    assert len(table.entries) == 4
    assert json.loads((folder / "winners.json").read_text()) == to_jsonable(table)
