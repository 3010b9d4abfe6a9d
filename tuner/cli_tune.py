"""`pagedtune tune` and `pagedtune winners`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pagedtune.harness.environment import environment
from pagedtune.harness.external import absolute_ref, is_foreign, require_known
from pagedtune.kernels.catalogue import find_variant, variants_for
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.record import Status
from pagedtune.kernels.serial import to_jsonable
from pagedtune.kernels.variant import Op

from .cache_cells import cache_cells_of
from .cache_view import show_cache_winners
from .cli_options import (
    DEFAULT_RESULTS,
    ConfigsOption,
    DeviceOption,
    ResultsOption,
    latest_device,
    results_of,
    split_names,
)
from .configs import Configs
from .devices import default_sweep, find_device
from .errors import UsageError
from .export_inputs import stale_winners
from .progress import make_progress
from .run import TuneResult, tune
from .select import decide_all, select
from .setup import TuneOptions
from .space import Cell, cells_of
from .store import require_usable
from .tables import console_for, disturbances, format_choices, show_formats, show_winners

DEFAULT_BUDGET_S = 180.0
MIN_BUDGET_S = 5.0
EXIT_INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    app.command("tune")(tune_command)
    app.command("winners")(winners_command)


def tune_command(
    device: DeviceOption = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAMES", help="Models, comma separated; default: the sweep's.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep", metavar="NAME", help="quick, default, full, gpu, or a YAML file; default: quick or gpu."
        ),
    ] = None,
    budget: Annotated[
        float, typer.Option("--budget", metavar="SECONDS", help="Time for proving and timing, after set-up.")
    ] = DEFAULT_BUDGET_S,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--variant", metavar="REF", help="Only these variants (repeatable): a name, or file.py:ClassName."
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; earlier records are set aside.")] = False,
    results: ResultsOption = DEFAULT_RESULTS,
    configs: ConfigsOption = None,
) -> None:
    """Find the fastest correct kernel for each cell of a sweep, and print the winners.

    Every candidate is proven against the oracle before it is timed. Stop it at any moment: the same command goes on.
    For a GPU that is not in this machine, kernels are proven on a virtual GPU and times are predicted, and say so; the
    cache operations of the sweep are then tuned too.

    Example: pagedtune tune --model llama-3-8b --sweep quick --budget 60

    With a kernel of your own: pagedtune tune --variant mine.py:MyKernel
    """
    if not MIN_BUDGET_S <= budget < float("inf"):
        raise UsageError(f"--budget {budget:g} must be at least {MIN_BUDGET_S:g} seconds")
    files = Configs(configs)
    sweep = sweep or default_sweep(device, files)
    plan, cells = files.sweep(sweep), cells_of(files, files.sweep(sweep), split_names(model))
    for ref in variant or ():
        _require_variant(ref)
    found = find_device(device, files, lambda here: require_usable(results / here.name, fresh), True)
    console = console_for()
    if found.note:
        console.print(f"note: {found.note}", markup=False)
    if not found.timed:  # only attention has a timer
        cells += cache_cells_of(files, plan, split_names(model))
    cells = _computed(cells, variant or ())
    options = TuneOptions(
        device=found.device,
        cells=cells,
        variants=_variants(variant, found.device, cells),
        sweep=plan,
        sweep_name=sweep,
        folder=results / found.device.name,
        budget_s=budget,
        fresh=fresh,
        present=found.timed,
        environment=environment(),
    )
    console.print(_headline(options), markup=False)
    try:
        with make_progress(console) as progress:
            result = tune(options, progress)
    except KeyboardInterrupt as error:
        note = "stopped; what was recorded stays, and the same command goes on from there"
        console_for(stderr=True).print(note, markup=False)
        raise typer.Exit(EXIT_INTERRUPTED) from error
    _show(console, options, result)


def _require_variant(ref: str) -> None:
    if not ref.strip():
        raise UsageError("--variant '' names no variant: `pagedtune variants` lists them; or give file.py:ClassName")
    try:
        require_known(ref)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _computed(cells: tuple[Cell, ...], refs: Sequence[str]) -> tuple[Cell, ...]:
    """The cells of what the named variants compute; all of them where one is from outside, as only workers load it."""
    if not refs or any(is_foreign(ref) for ref in refs):
        return cells
    ops = {find_variant(ref).op for ref in refs}
    return tuple(cell for cell in cells if cell.op in ops) or cells


def _variants(refs: list[str] | None, device: Device, cells: Sequence[Cell]) -> tuple[str, ...]:
    """References for workers; `eager` comes along, as the speed-ups are relative to it."""
    ours = tuple(v.name for op in dict.fromkeys(cell.op for cell in cells) for v in variants_for(device.kind, op))
    if not refs:
        return ours
    return tuple(dict.fromkeys((*(n for n in ours if n == "eager"), *(absolute_ref(r) for r in refs))))


def _headline(options: TuneOptions) -> str:
    device, models = options.device, dict.fromkeys(cell.model for cell in options.cells)
    if device.kind is DeviceKind.CPU:
        stream = f", reads {device.bandwidth_gb_s:.1f} GB/s" if device.bandwidth_gb_s else ""
        facts = f"{device.num_units} cores, {device.isa}{stream}"
    else:
        facts = f"{device.num_units} SMs, sm_{device.capability}, {device.bandwidth_gb_s:,.0f} GB/s by its data sheet"
    of_cache = sum(cell.op is not Op.ATTENTION for cell in options.cells)
    cells = f"{len(options.cells) - of_cache} cells" + (f", and {of_cache} of cache operations," if of_cache else "")
    return (
        f"{device.name}: {device.product or 'unknown product'}, {facts}\n"
        f"sweep {options.sweep_name}: {cells} of {', '.join(models)}; "
        f"budget {options.budget_s:g} s after set-up"
    )


def _show(console: Console, options: TuneOptions, result: TuneResult) -> None:
    console.print()
    show_winners(console, result.table, result.records)
    show_cache_winners(console, result.table, result.records)
    if result.table.entries:
        console.print()
        show_formats(console, format_choices(result.records, result.table))
    console.print()
    console.print(_outcomes(options, result), markup=False, soft_wrap=True)
    for line in (*_failures(result), *disturbances(result.records, result.table)):
        console.print(line, markup=False, soft_wrap=True)
    folder = options.folder
    console.print(f"written: {folder / 'records.jsonl'} (evidence), {folder / 'winners.json'} (winners)", markup=False)
    console.print(_next_steps(options, result), markup=False, soft_wrap=True)
    if not result.table.entries:
        raise typer.Exit(1)


def _outcomes(options: TuneOptions, result: TuneResult) -> str:
    counts = ", ".join(f"{n} {status.value}" for status, n in sorted(result.statuses.items()))
    seconds = f"{result.elapsed_s:.0f} s"
    cells = f"{result.cells_reached} of {result.num_cells} cells in {seconds}"
    return f"{cells}; {len(result.new)} new records" + (f": {counts}" if counts else "; everything was recorded before")


def _failures(result: TuneResult) -> list[str]:
    """One line per variant that failed in some way, with the first reason: the rest is in the records."""
    quiet = (Status.PASSED, Status.NOT_RUN, Status.REJECTED)
    lines: dict[tuple[str, Status], tuple[int, str]] = {}
    for record in result.new:
        if record.status not in quiet:
            count, reason = lines.get((record.variant, record.status), (0, record.reason))
            lines[record.variant, record.status] = (count + 1, reason)
    return [f"  {v}: {n} {status.value}, first: {reason}" for (v, status), (n, reason) in sorted(lines.items())]


def _next_steps(options: TuneOptions, result: TuneResult) -> str:
    untried = sum(r.status is Status.NOT_RUN and "budget" in r.reason for r in result.new)
    more = f"run the same command again to try the {untried} candidates and cells left; " if untried else ""
    model = next(iter(options.cells)).model
    return f"next: {more}`pagedtune explain {model}` says why; `pagedtune report` writes plots"


def winners_command(
    device: DeviceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The dispatch table as JSON, as in winners.json.")] = False,
    results: ResultsOption = DEFAULT_RESULTS,
) -> None:
    """Show the winners that the records give; nothing is run.

    Example: pagedtune winners --json | jq '.entries[] | [.model, .variant, .median_us]'
    """
    folder, records = results_of(results, device)
    fingerprint = latest_device(records)
    table = select(records, fingerprint)
    if as_json:
        print(json.dumps(to_jsonable(table), indent=1, sort_keys=True))
        return
    if not table.entries:
        raise UsageError(f"no cell in {Path(folder)} has a winner yet: run `pagedtune tune` on")
    console = console_for()
    own = [r for r in records if r.device == fingerprint]
    console.print(fingerprint.replace("|", ", "), markup=False)
    show_winners(console, table, own)
    show_cache_winners(console, table, own)
    console.print()
    show_formats(console, format_choices(records, table))
    if stale := stale_winners([d.winner.record for d in decide_all(own, fingerprint).values()]):
        names = ", ".join(sorted({r.variant for r in stale}))
        console.print(
            f"{len(stale)} of {len(table.entries)} winners are stale: the source of {names} has changed since they "
            "were tuned; tune again before an export",
            style="yellow",
        )
