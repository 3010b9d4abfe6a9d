"""`pagedtune explain`: why a cell has the config that it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pagedtune.kernels.bounds import Bounds, bucket_of
from pagedtune.kernels.dispatch import DispatchTable, Winner
from pagedtune.kernels.variant import Op

from .cache_view import show_cache_winners
from .cli_options import DEFAULT_RESULTS, DeviceOption, ResultsOption, latest_device, results_of
from .errors import UsageError, unknown_name
from .explain_view import show_entries
from .formats import FormatChoice
from .select import select as select_winners
from .tables import (
    console_for,
    format_choices,
)


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command("explain")(explain_command)


def explain_command(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A model that was tuned.")] = None,
    problem: Annotated[
        str | None, typer.Option("--problem", metavar="KEY", help="A problem instead, e.g. 32/8x128-bf16.")
    ] = None,
    bucket: Annotated[str | None, typer.Option("--bucket", metavar="KEY", help="A bucket, e.g. n8-c1024.")] = None,
    pool: Annotated[
        str | None,
        typer.Option("--format", metavar="KEY", help="A pool format, e.g. b16-nhd-bf16; default: as chosen."),
    ] = None,
    op: Annotated[
        Op, typer.Option("--op", help="A cache operation in place of attention; a token or block is a sequence.")
    ] = Op.ATTENTION,
    num_seqs: Annotated[int | None, typer.Option("--num-seqs", help="Sequences of a batch, with --context.")] = None,
    context: Annotated[int | None, typer.Option("--context", help="Longest context in it, in tokens.")] = None,
    device: DeviceOption = None,
    results: ResultsOption = DEFAULT_RESULTS,
) -> None:
    """Say why: the path to a config, what came second and by how much, what tied, and on what evidence.

    Example: pagedtune explain llama-3-8b --bucket n8-c1024

    For a batch of your own: pagedtune explain llama-3-8b --num-seqs 5 --context 700

    For a cache operation: pagedtune explain llama-3-8b --op kv_write
    """
    folder, records = results_of(results, device)
    fingerprint = latest_device(records)
    records = tuple(r for r in records if r.device == fingerprint)
    table = select_winners(records, fingerprint)
    named = _chosen_entries(table, model, problem)
    entries = _of_op(named, op)
    console = console_for()
    console.print(f"records of {fingerprint.replace('|', ', ')} in {folder}", markup=False)
    choices = [c for c in format_choices(records, table) if any(c.model_key == _model_key(e) for e in entries)]
    for choice in choices if op is Op.ATTENTION else ():
        _show_choice(console, choice)
    chosen = {c.model_key: c.chosen for c in choices}
    if pool is not None:
        entries = _only(entries, "format", pool, lambda e: e.pool_format.key)
    else:
        entries = [e for e in entries if chosen.get(_model_key(e)) in (None, e.pool_format)]
    if (num_seqs is None) != (context is None):
        raise UsageError("--num-seqs and --context describe a batch together: give both, or a bucket with --bucket")
    if num_seqs is not None and context is not None:
        entries = _serving(console, table, entries, num_seqs, context)
    if bucket is not None:
        entries = _only(entries, "bucket", bucket, lambda e: e.bucket.key)
    show_entries(console, entries, records, fingerprint)
    if op is Op.ATTENTION:
        console.print()
        show_cache_winners(console, replace(table, entries=tuple(named)), records)


def _of_op(entries: list[Winner], op: Op) -> list[Winner]:
    """The entries of one op."""
    found = [e for e in entries if e.op == op]
    if not found and op is not Op.ATTENTION:
        raise UsageError(f"{op} was not tuned here; there are {', '.join(dict.fromkeys(e.op for e in entries))}")
    return found


def _chosen_entries(table: DispatchTable, model: str | None, problem: str | None) -> list[Winner]:
    entries = list(table.entries)
    if not entries:
        raise UsageError("no cell has a winner yet: run `pagedtune tune` first")
    if model is None and problem is None:
        raise UsageError(f"name a model ({', '.join(sorted({e.model for e in entries}))}) or a --problem")
    if model is not None:
        entries = _only(entries, "model", model, lambda e: e.model)
    if problem is not None:
        entries = _only(entries, "problem", problem, lambda e: e.problem.key)
    return entries


def _only(entries: list[Winner], kind: str, wanted: str, key_of: object) -> list[Winner]:
    assert callable(key_of)
    found = [e for e in entries if key_of(e) == wanted]
    if not found:
        raise unknown_name(kind, wanted, {key_of(e) for e in entries}, " (what was tuned)")
    return found


def _model_key(entry: Winner) -> str:
    return f"{entry.model}/{entry.problem.q_dtype}"


def _serving(
    console: Console, table: DispatchTable, entries: list[Winner], num_seqs: int, context: int
) -> list[Winner]:
    """What the runtime would take for a batch, through the same lookup."""
    try:
        bounds = Bounds(num_seqs, context)
    except ValueError as error:
        raise UsageError(str(error)) from error
    asked = bucket_of(bounds)
    asked_of = dict.fromkeys((e.problem, e.pool_format, bounds, e.op) for e in entries)
    found = [table.lookup(*asking) for asking in asked_of]
    served = [e for e in found if e is not None]
    if not served:
        raise UsageError(
            f"{num_seqs} sequences of {context} tokens (bucket {asked.key}) lie beyond what was tuned "
            f"({', '.join(sorted({e.bucket.key for e in entries}))}): the runtime takes the default config there"
        )
    for entry in served:
        how = "tuned itself" if entry.bucket == asked else f"served by the next larger tuned one, {entry.bucket.key}"
        console.print(f"{num_seqs} sequences of up to {context} tokens: bucket {asked.key}, {how}", markup=False)
    return [e for e in served if e in entries] or served


def _show_choice(console: Console, choice: FormatChoice) -> None:
    console.print()
    chosen = choice.chosen.key if choice.chosen is not None else "none"
    console.print(f"{choice.model_key}: pool format {chosen}", style="bold", markup=False)
    console.print(f"  {choice.reason}", markup=False, soft_wrap=True)
    if len(choice.costs) > 1:
        view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        view.add_column("format")
        for name in ("µs a layer", "KV memory", "wasted", "cost"):
            view.add_column(name, justify="right")
        for cost in choice.costs:
            ratio = cost.cost / choice.costs[0].cost
            view.add_row(
                cost.pool_format.key, f"{cost.time_us:,.1f}", f"{cost.memory:.3f}", f"{cost.wasted:.2%}", f"{ratio:.3f}"
            )
        console.print(view)
        console.print("  cost: time × memory, relative to the best; lower is better, ±1% is a tie", markup=False)
