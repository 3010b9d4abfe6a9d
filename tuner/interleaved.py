"""Times several operations in turns of a few each, and prints the spreads.

The first of a turn meets the caches as another operation left them; those behind it follow each other, as the steps of
a decode loop do. Both medians are shown.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from rich import box
from rich.table import Table

Operation = Callable[[], object]
TURN = 5  # operations


@dataclass(frozen=True)
class Spread:
    """Times of one operation, in microseconds.

    Args:
        name: what and whose.
        least, median, most: over all rounds.
        after_others: median of those that came first in their turn.
        rounds: how many.
    """

    name: str
    least: float
    median: float
    most: float
    after_others: float
    rounds: int


def interleaved(operations: dict[str, tuple[Operation, int]], rounds: int) -> list[Spread]:
    """Times each operation `rounds` times, up to `TURN` of them in turn; the number beside it is how many units it does
    at once."""
    times: dict[str, list[float]] = {name: [] for name in operations}
    for operation, _ in operations.values():
        operation()
    gc.collect()
    gc.disable()
    try:
        for begun in range(0, rounds, TURN):
            for name, (operation, units) in operations.items():
                for _ in range(min(TURN, rounds - begun)):
                    start = perf_counter_ns()
                    operation()
                    times[name].append((perf_counter_ns() - start) / 1e3 / units)
    finally:
        gc.enable()
    return [
        Spread(name, min(t), float(np.median(t)), max(t), float(np.median(t[::TURN])), rounds)
        for name, t in times.items()
    ]


def as_table(title: str, unit: str, rows: list[Spread], scale: float = 1.0) -> Table:
    """The rows, with ratios of the medians to the first of them."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what")
    for name in (f"min {unit}", f"median {unit}", f"max {unit}", "× first", f"after others {unit}", "rounds"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        least, median, most, after = (
            f"{value * scale:.2f}" for value in (row.least, row.median, row.most, row.after_others)
        )
        table.add_row(row.name, least, median, most, f"{row.median / rows[0].median:.1f}", after, str(row.rounds))
    return table
