"""`make bench-peers-emulated`: emulated figures of our kernels and the peers' for all shapes, kept with the results."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pagedtune.harness.foreign import ForeignError, has_wheel
from pagedtune.kernels.artifact import publish
from pagedtune.kernels.catalogue import variants_for
from pagedtune.kernels.cpu_facts import usable_cores
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.workload import Workload

from .bench_run import Choice
from .configs import Configs
from .emulated_bars import Bars, bars_for
from .emulated_bench import BEST, CANDIDATES, JOBS, Row, own_rows, peer_rows, tabulate
from .emulated_peer import Cell
from .emulated_view import as_json, as_markdown, show
from .errors import UsageError
from .peers_emulated import PEERS
from .tables import console_for
from .workers import WorkerPool

COMMAND = "make bench-peers-emulated"
FAMILY = ("h200",)  # whose bytes in flight are the bar for devices of its capability
PLAIN_INTERVAL_S = 20.0


@dataclass(frozen=True)
class Shape:
    """One table."""

    name: str
    what: str
    heads: tuple[int, int, int]  # query heads, KV heads, head dim
    pool_format: PoolFormat
    batch: int = 8
    context: int = 4096

    def cell(self, device: Device) -> Cell:
        """On a device."""
        problem = Problem(*self.heads, q_dtype=DType.BF16)
        return Cell(problem, self.pool_format, Workload.uniform(self.batch, self.context), device)


_BF16 = PoolFormat(16, DType.BF16)
SHAPES = (
    Shape("gqa4", "GQA 4: 32/8 heads of 128", (32, 8, 128), _BF16),
    Shape("gqa7", "GQA 7: 28/4 heads of 128", (28, 4, 128), _BF16),
    Shape("mha", "MHA: 32/32 heads of 128", (32, 32, 128), _BF16),
    Shape("dim256", "Head dim 256: 16/8 heads", (16, 8, 256), _BF16),
    Shape("block1", "Block size 1", (32, 8, 128), PoolFormat(1, DType.BF16)),
    Shape("long", "One sequence of 32k, 4 KV heads", (32, 4, 128), _BF16, 1, 32768),
    Shape("fp8", "fp8 KV", (32, 8, 128), PoolFormat(16, DType.FP8_E4M3, scale_kind=ScaleKind.PER_TENSOR)),
)


class Say:
    """Shows how far a run is: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console, self._last = console, time.monotonic()
        columns = (TextColumn("emulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Say:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` kernels."""
        self._bar.update(self._task, completed=done, total=total)
        if not self._console.is_terminal and time.monotonic() - self._last > PLAIN_INTERVAL_S:
            self._last = time.monotonic()
            self._console.print(f"{done} of {total} kernels emulated")


def emulated_tables(
    cells: Sequence[Cell], choices: Sequence[Choice], peers: bool, bars: Bars, candidates: int = CANDIDATES
) -> tuple[list[list[Row]], int]:
    """The rows of each cell, and how many kernels were looked at.

    Raises:
        ValueError: an unknown variant or tunable.
    """
    rows = [row for k, cell in enumerate(cells) for row in own_rows(k, cell, choices, candidates)]
    rows += [row for k, cell in enumerate(cells) if peers for row in peer_rows(k, cell)]
    size = max(1, min(usable_cores(), len(rows)))
    with WorkerPool(size, [f"{JOBS}:measure_variant"]) as pool, Say(console_for(stderr=True)) as say:
        found, seen = tabulate(pool, cells, rows, bars, say)
    return [[row for row in found if row.cell == k] for k in range(len(cells))], seen


def fetch_peers() -> None:
    """Downloads the peers' wheels, or finds them in the user's cache, before workers ask for them.

    Raises:
        UsageError: one cannot be had, or Triton is missing.
    """
    if find_spec("triton") is None:
        raise UsageError("the peers' kernels are compiled with Triton, which is not installed: make setup EXTRAS=gpu")
    console = console_for(stderr=True)
    try:
        for peer in PEERS:
            if not has_wheel(peer.requirement):  # hundreds of megabytes, which pip gets without a word
                console.print(f"getting the wheel of {peer.requirement} (the first time this takes minutes)")
            peer.fetch()
    except ForeignError as error:
        raise UsageError(str(error)) from error


def family(configs: Configs) -> tuple[Device, ...]:
    """Devices whose memory the bars may be set by."""
    return tuple(configs.gpu(name).device(name) for name in FAMILY if name in configs.names("gpus"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes all tables, prints and keeps them; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="Emulated figures of our CUDA variants, and of vLLM's, SGLang's and FlashInfer's decode kernels.",
    )
    parser.add_argument("--device", default="h100", help="a GPU in configs/gpus (default h100)")
    parser.add_argument("--shapes", nargs="+", choices=[s.name for s in SHAPES], help="only these (default: all)")
    parser.add_argument("--variants", nargs="+", help="only these (default: all for CUDA)")
    parser.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")
    options = parser.parse_args(arguments)
    started, configs, console = time.monotonic(), Configs(), console_for()
    shapes = [s for s in SHAPES if options.shapes is None or s.name in options.shapes]
    choices = [Choice(name, {}) for name in options.variants or [v.name for v in variants_for(DeviceKind.CUDA)]]
    try:
        device = configs.gpu(options.device).device(options.device)
        bars = bars_for(device, family(configs))
        fetch_peers()
        cells = [shape.cell(device) for shape in shapes]
        found, seen = emulated_tables(cells, choices, True, bars)
        folder = options.results / device.name / "emulated"
        folder.mkdir(parents=True, exist_ok=True)
    except (UsageError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for shape, cell, rows in zip(shapes, cells, found, strict=True):
        show(console, cell, rows, bars)
        data = as_json(cell, rows, bars, COMMAND)
        publish((json.dumps(data, indent=1, sort_keys=True) + "\n").encode(), folder / f"{shape.name}.json")
    if options.shapes is None:
        tables = [(s.what, c, r) for s, c, r in zip(shapes, cells, found, strict=True)]
        publish(as_markdown(tables, bars, COMMAND, _how(seen)).encode(), folder / "README.md")
    print(f"{seen} candidates and the chosen rows in {time.monotonic() - started:.0f} s; kept in {folder}")
    return 0


def _how(seen: int) -> str:
    notes = "; ".join(f"{peer.name}: {peer.note} ({peer.requirement})" for peer in PEERS)
    return (
        f"Rows: of each variant the default config (*) and the best {BEST} of up to {CANDIDATES - 1} neighbours of it "
        f"(fewest bars missed, then the least predicted time; {seen} candidates in all). Peers run through their own "
        f"host code, from their wheels: {notes}."
    )


if __name__ == "__main__":
    sys.exit(main())
