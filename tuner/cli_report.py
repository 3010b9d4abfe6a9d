"""`pagedtune report`, `pagedtune compare` and `pagedtune bench`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedtune.harness.prediction_jobs import MODE

from .cli_bench import bench_command
from .cli_options import DEFAULT_RESULTS, DeviceOption, ResultsOption, latest_device, results_of
from .compare import DEFAULT_THRESHOLD, Change, Comparison, Outcome, compare, load_set, ratio_bounds
from .errors import UsageError
from .tables import console_for

MAX_ROWS = 30
CONFIRMED = (Outcome.SLOWER, Outcome.FASTER)  # shown without --all
EXIT_SLOWER = 1
STYLES = {Outcome.SLOWER: "red", Outcome.FASTER: "green", Outcome.UNCLEAR: "yellow", Outcome.SAME: ""}


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    app.command("report")(report_command)
    app.command("compare")(compare_command)
    app.command("bench")(bench_command)


def report_command(device: DeviceOption = None, results: ResultsOption = DEFAULT_RESULTS) -> None:
    """Write report.md and its plots from the records; nothing is run.

    Example: pagedtune report --results results
    """
    from .report import make_report, write_report  # pandas and matplotlib: no other command should wait for them

    folder, records = results_of(results, device)
    options = [] if results == DEFAULT_RESULTS else ["--results", str(results)]
    command = shlex.join(["pagedtune", "report", "--device", folder.name, *options])
    report = make_report(records, latest_device(records), command)
    try:
        path = write_report(report, folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}; free it or copy it elsewhere") from error
    console = console_for()
    console.print(report.verdict.replace("**", "").replace("`", ""), markup=False)
    console.print(f"written: {path} and {len(report.plots)} plots", markup=False)


def compare_command(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="Results folder, device folder or records.jsonl.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="The same, of the later state.")],
    threshold: Annotated[
        float, typer.Option("--threshold", metavar="SHARE", help="Smallest difference that counts, e.g. 0.02.")
    ] = DEFAULT_THRESHOLD,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every pair, the unchanged and the unclear ones too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The comparison as JSON.")] = False,
) -> None:
    """Set two result sets side by side, e.g. from before and after a compiler update.

    Exit code 1 only if a candidate is confirmed slower: its intervals are apart and the medians differ by the
    threshold at least. Fails never because a pair is unclear.

    Example: pagedtune compare results-gcc12 results-gcc13 --threshold 0.02
    """
    result = compare(load_set(before), load_set(after), threshold)
    if as_json:
        print(json.dumps(_as_json(result), indent=1))
    else:
        _show(console_for(), result, everything)
    if result.count(Outcome.SLOWER):
        raise typer.Exit(EXIT_SLOWER)


def _show(console: Console, result: Comparison, everything: bool) -> None:
    changes = [c for c in result.changes if everything or c.outcome in CONFIRMED]
    shown = changes if everything else changes[:MAX_ROWS]
    for predicted in (False, True):
        part = [c for c in shown if (c.before.mode == MODE) is predicted]
        if part:
            console.print(_table(part, predicted))
    if len(shown) < len(changes):
        console.print(f"... and {len(changes) - len(shown)} more rows; --all shows them", markup=False)
    for title, names in (
        ("timed before, failing now", result.broken),
        ("only in the first set", result.only_before),
        ("only in the second set", result.only_after),
    ):
        if names:
            console.print(f"{title}: {len(names)}", style="bold")
            for name in names if everything else names[:5]:
                console.print(f"  {name}", markup=False, soft_wrap=True)
    _show_environment(console, result)
    counts = ", ".join(f"{result.count(o)} {o.value}" for o in Outcome)
    mean = f"; times changed by {result.mean_ratio - 1:+.1%} (geometric mean)" if result.mean_ratio else ""
    hidden = len(result.changes) - len(changes)
    more = f"; --all shows the {hidden} unchanged and unclear ones" if hidden else ""
    console.print(f"{len(result.changes)} pairs: {counts}{mean}{more}", markup=False, soft_wrap=True)


def _table(changes: list[Change], predicted: bool) -> Table:
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="predicted, not measured" if predicted else None)
    view.add_column("cell", overflow="fold")
    view.add_column("candidate", overflow="fold")
    kind = "predicted " if predicted else ""
    for name in (f"{kind}before µs", f"{kind}after µs", "ratio", *(() if predicted else ("interval",))):
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("outcome", no_wrap=True)
    view.add_column("why", overflow="fold")
    for change in changes:
        low, high = ratio_bounds(change.before, change.after)
        view.add_row(
            change.cell.removeprefix("attention|").replace("|", " "),
            Text(change.candidate),  # its brackets are no markup
            f"{change.before.median_us:,.1f}",
            f"{change.after.median_us:,.1f}",
            f"{change.ratio:.3f}",
            *(() if predicted else (f"{low:.3f}–{high:.3f}",)),
            f"[{STYLES[change.outcome]}]{change.outcome}[/]" if STYLES[change.outcome] else change.outcome.value,
            change.why,
        )
    return view


def _show_environment(console: Console, result: Comparison) -> None:
    if not result.environment:
        console.print("environment: the same in both sets", markup=False)
        return
    console.print("environment differs:", style="bold")
    for name, (first, second) in result.environment.items():
        console.print(f"  {name}: {first} -> {second}", markup=False, soft_wrap=True)


def _as_json(result: Comparison) -> dict[str, Any]:
    return {
        "changes": [
            {
                "cell": c.cell,
                "candidate": c.candidate,
                "mode": c.before.mode,
                "evidence": "predicted" if c.before.mode == MODE else "measured",
                "before_us": c.before.median_us,
                "before_ci_us": c.before.ci_us,
                "after_us": c.after.median_us,
                "after_ci_us": c.after.ci_us,
                "ratio": c.ratio,
                "outcome": c.outcome.value,
                "why": c.why,
            }
            for c in result.changes
        ],
        "counts": {outcome.value: result.count(outcome) for outcome in Outcome},
        "mean_ratio": result.mean_ratio,
        "broken": result.broken,
        "only_before": result.only_before,
        "only_after": result.only_after,
        "environment": {name: list(pair) for name, pair in result.environment.items()},
    }
