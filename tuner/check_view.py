"""How `pagedtune check` looks: progress on stderr, coverage and failures on stdout, readable at 100 columns."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from pagedtune.harness.checking import Listing, Outcome
from pagedtune.harness.coverage import Coverage, Tally, missing
from pagedtune.kernels.record import Status

WIDTH = 100  # of everything that is not a terminal
LABEL_WIDTH = 12
MAX_SHOWN_RATIO = 1e6  # above it an error has no measure: the answer is not finite where it must be
PLAIN_AFTER_S, PLAIN_EVERY_S = 2.0, 5.0  # to the first progress line where there is no terminal, and between them
LEGEND = "passed/due   ✗ failed   ? not run   – rejected by the variant   ≤ worst error / allowed error"
T = TypeVar("T")


def console_for(stderr: bool = False) -> Console:
    """A console as wide as the terminal, or as `WIDTH` where there is none."""
    console = Console(stderr=stderr, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def with_progress(
    items: Iterable[T], total: int, what: str, describe: Callable[[T], str], notice: Callable[[T], str] = lambda _: ""
) -> Iterator[T]:
    """Passes `items` on and shows on stderr how far it is: a bar on a terminal, now and then a line elsewhere.

    `what` are the items, e.g. `cases`; `describe` is what one was about, `notice` what is to be said of it at once, if
    anything. Both are asked about every item.
    """
    console = console_for(stderr=True)
    show = _with_bar if console.is_terminal else _with_lines
    for item in show(items, total, what, describe, console):
        if text := notice(item):
            console.print(text, style="red", soft_wrap=True, markup=False)
        yield item


def _with_lines(
    items: Iterable[T], total: int, what: str, describe: Callable[[T], str], console: Console
) -> Iterator[T]:
    due = time.monotonic() + PLAIN_AFTER_S
    for done, item in enumerate(items, 1):
        description = describe(item)
        if time.monotonic() >= due:
            due = time.monotonic() + PLAIN_EVERY_S
            console.print(f"{done} of {total} {what}: {description}", soft_wrap=True, markup=False)
        yield item


def _with_bar(items: Iterable[T], total: int, what: str, describe: Callable[[T], str], console: Console) -> Iterator[T]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        for item in items:
            progress.update(task, advance=1, description=f"{what}: {describe(item)}")
            yield item


def totals(coverages: Sequence[Coverage], num_variants: int, where: str) -> str:
    """How much ran over all variants, and how much the variants themselves ruled out."""
    ran, rejected = (sum(getattr(c.total, name) for c in coverages) for name in ("ran", "rejected"))
    variants = "variant" if num_variants == 1 else "variants"
    limits = f", {rejected} rejected by the {variants}" if rejected else ""
    return f"{ran} cases ran{limits} ({num_variants} {variants} {where})"


def show_coverage(console: Console, coverages: Sequence[Coverage]) -> None:
    """One block per variant and op: a line of totals, then a line per dimension with all its values."""
    if coverages:
        console.print(Text(LEGEND, style="dim"))
    for coverage in coverages:
        total = coverage.total
        worst = "" if total.worst is None else f", worst ≤{_ratio(total.worst)}"
        counts = f"{total.passed} passed, {total.failed} failed, {total.not_run} not run, {total.rejected} rejected"
        console.print()
        console.print(
            Text.assemble((f"{coverage.variant} {coverage.op}", "bold"), f": {total.ran} ran: {counts}{worst}")
        )
        for dimension, tallies in coverage.by_value.items():
            for line in _wrapped(dimension, [_cell(value, tally) for value, tally in tallies.items()], console.width):
                console.print(line)


def _wrapped(label: str, cells: Sequence[Text], width: int) -> Iterator[Text]:
    line = Text(f"  {label:<{LABEL_WIDTH}}")
    for cell in cells:
        if line.cell_len + cell.cell_len + 2 > width and line.cell_len > LABEL_WIDTH + 2:
            yield line
            line = Text(" " * (LABEL_WIDTH + 2))
        line = Text.assemble(line, cell, "  ")
    yield line


def _cell(value: str, tally: Tally) -> Text:
    due = tally.ran + tally.not_run
    parts = [value, f"{tally.passed}/{due}" if due else ""]
    parts += [f"{mark}{count}" for mark, count in (("✗", tally.failed), ("?", tally.not_run)) if count]
    parts += [f"–{tally.rejected}"] if tally.rejected else []
    parts += [f"≤{_ratio(tally.worst)}"] if tally.worst is not None else []
    style = "red" if tally.failed else "yellow" if tally.not_run else "green" if tally.is_green else "dim"
    return Text(" ".join(part for part in parts if part), style=style)


def _ratio(worst: float) -> str:
    return f"{worst:.2g}" if worst < MAX_SHOWN_RATIO else "∞"


def show_failures(console: Console, outcomes: Sequence[Outcome], listings: Sequence[Listing], repeat: str) -> None:
    """Every failure with its reason and the command that repeats it; `repeat` holds the options common to all."""
    for listing in listings:
        if listing.broken:
            console.print(f"\nFAILED {listing.broken}", style="red", soft_wrap=True, markup=False)
    for outcome in outcomes:
        if not outcome.failed:
            continue
        planned = outcome.planned
        command = f"pagedtune check {shlex.quote(planned.ref)} {repeat} --only {shlex.quote(planned.case.key)}"
        console.print(f"\n{failure_line(outcome)}", style="red", soft_wrap=True, markup=False)
        console.print(f"  {outcome.reason}\n  {command}", soft_wrap=True, markup=False)


def failure_line(outcome: Outcome) -> str:
    """What failed, in a line."""
    planned = outcome.planned
    config = ",".join(f"{name}={value}" for name, value in planned.config.items())
    return f"FAILED {outcome.status} {planned.variant}{f'[{config}]' if config else ''} {planned.case.key}"


def show_missing(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Cases without a verdict, counted by reason: those that were not run, and those that a variant rejects."""
    for status, title in ((Status.NOT_RUN, "NOT RUN"), (Status.REJECTED, "REJECTED")):
        counts = missing(outcomes, status)
        if counts:
            console.print(f"\n{title}", style="bold")
        for (variant, op, reason), count in counts.items():
            console.print(f"  {variant} {op}: {count} x {reason}", soft_wrap=True, markup=False)
