"""Times several operations in turns, so that each meets the caches as the others left them, and prints the spreads."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from rich import box
from rich.table import Table

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
