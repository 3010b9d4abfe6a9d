"""`pagedtune explain`: why a cell has the config that it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedtune.harness.prediction import UNCERTAINTY, StepPrediction, describe
from pagedtune.kernels.bounds import Bounds, bucket_of
from pagedtune.kernels.dispatch import DispatchTable, Winner
from pagedtune.kernels.record import Record, Status, TimeEvidence
from pagedtune.kernels.serial import from_jsonable
from pagedtune.kernels.variant import Op

from .cache_cells import launch_text
from .cache_view import show_cache_winners
from .cli_options import DEFAULT_RESULTS, DeviceOption, ResultsOption, latest_device, results_of
from .errors import UsageError, unknown_name
from .formats import FormatChoice
from .select import Decision, decide_all
from .select import select as select_winners
from .tables import (
    cell_key,
    console_for,
    default_configs,
    format_choices,
    is_predicted,
    short_config,
    winner_key,
)

TIE_RULE = "least scratch memory, then fewest registers, then canonical order"
MAX_DETAILED = 3  # more cells than this are listed, not explained


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
    _show_entries(console, entries, records, fingerprint)
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


def _show_entries(console: Console, entries: list[Winner], records: Sequence[Record], device: str) -> None:
    decisions, defaults = decide_all(records, device), default_configs(records)
    for entry in entries[:MAX_DETAILED]:
        mine = [r for r in records if r.cell_key == cell_key(entry)]
        default = defaults.get((entry.problem, entry.pool_format, entry.bucket, entry.variant))
        console.print()
        _show_decision(console, entry, decisions[cell_key(entry)], mine, short_config(entry.config, default))
    if len(entries) > MAX_DETAILED:
        rest = ", ".join(f"{e.problem.q_dtype} {e.bucket.key}" for e in entries[MAX_DETAILED:])
        console.print(f"\n{len(entries) - MAX_DETAILED} more cells ({rest}): narrow it with --bucket", markup=False)


def _show_decision(console: Console, entry: Winner, decision: Decision, records: Sequence[Record], config: str) -> None:
    launch = "" if entry.op == Op.ATTENTION else f"{launch_text(entry.op, entry.bucket, entry.workload)}: "
    console.print(
        f"{launch}{entry.model} {entry.problem.key} in {entry.pool_format.key}, bucket {entry.bucket.key} "
        f"({entry.workload})",
        style="bold",
        markup=False,
    )
    kind = "predicted " if is_predicted(entry) else ""
    lines = [
        f"winner: {entry.variant}, {config}: {kind}{entry.median_us:,.1f} µs "
        f"[{entry.ci_us[0]:,.1f}, {entry.ci_us[1]:,.1f}], {entry.bandwidth_gb_s:.1f} GB/s",
        f"path: {_path(decision, records)}",
        f"why: {_why(entry, decision)}",
        f"evidence: verdict {entry.verdict}, time {entry.time_evidence}"
        + (f", binary {', '.join(entry.artifact_keys)}" if entry.artifact_keys else ""),
    ]
    if is_predicted(entry):
        lines += prediction_lines(decision.winner.record)
    elif decision.winner.timing.note:
        lines.append(f"note: {decision.winner.timing.note}")
    for line in lines:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    console.print(_ranking(entry, decision))


def _path(decision: Decision, records: Sequence[Record]) -> str:
    latest = {r.candidate_key: r for r in sorted(records, key=lambda r: r.recorded_at) if r.variant != "*"}
    counts = Counter(r.status for r in latest.values())
    proven = {r.candidate_key for r in records if r.stage == "gate" and r.status is Status.PASSED}
    screened = {r.candidate_key for r in records if r.stage == "screen"}
    failed = ", ".join(f"{n} {s.value}" for s, n in sorted(counts.items()) if s is not Status.PASSED)
    steps = [f"{len(latest)} candidates" + (f" ({failed})" if failed else ""), f"{len(proven)} proven"]
    if decision.winner.record.time_evidence is TimeEvidence.PREDICTED:
        steps.insert(1, f"{len(screened)} predicted")
    elif screened:
        steps.append(f"{len(screened)} screened")
    if decision.stage == "final":
        rounds = max(len(r.timing.samples_us) for r in decision.ranking)
        steps.append(f"{len(decision.ranking)} in the finals of {rounds} interleaved rounds")
    return " → ".join(steps)


def _why(entry: Winner, decision: Decision) -> str:
    if is_predicted(entry):
        return _why_predicted(entry, decision)
    if decision.stage == "screen":
        return "fastest when screened; there were no finals, so run the same tune again"
    if len(decision.ranking) == 1:
        return "the only candidate in the finals: no other one passed and came near it when screened"
    second, (_, low, high) = decision.ranking[1], decision.ranking[1].ratio
    margin = f"{second.ratio[0] - 1:+.1%} [{low - 1:+.1%}, {high - 1:+.1%}]"
    if not entry.ties:
        return f"fastest; the runner-up {entry.runner_up} takes {margin} time"
    ties = f"ties within ±1% with {len(entry.ties)} other(s); chosen by {TIE_RULE}"
    fastest = "" if decision.fastest == winner_key(entry) else f"; the lowest median is {decision.fastest}'s"
    return f"{ties}{fastest}; runner-up {entry.runner_up} {margin}"


def _why_predicted(entry: Winner, decision: Decision) -> str:
    if len(decision.ranking) == 1:
        return "the only proven candidate; its time is predicted"
    text = f"lowest predicted time of those proven; the runner-up {entry.runner_up} is predicted at {entry.margin:+.1%}"
    if entry.ties:
        text = f"predicted within ±1% of {len(entry.ties)} other(s), which says nothing; chosen by {TIE_RULE}"
    if entry.op != Op.ATTENTION:
        return f"{text}. Only a GPU can settle it, and `calibrate` settles attention alone"
    return f"{text}. Only a GPU can settle it: export with --allow-predicted, then calibrate"


def prediction_lines(record: Record) -> list[str]:
    """What a predicted time is made of, step by step, and what its counts rest on."""
    lines = [f"not measured: a model's time, ± {UNCERTAINTY:.0%}, fitted to no measurement"]
    if "predicted" in record.counters:
        steps = from_jsonable(tuple[StepPrediction, ...], record.counters["predicted"])
        lines += [f"model: {describe(step)}" for step in steps]
        lines.append(f"counts: {record.counters['extrapolation']['how']}")
    return lines


def _ranking(entry: Winner, decision: Decision) -> Table:
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    view.add_column("candidate", overflow="fold", ratio=1)
    predicted = is_predicted(entry)
    for name in ("predicted µs", "time / winner") if predicted else ("µs", "time / winner", "95% CI"):
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("", no_wrap=True)
    for i, ranked in enumerate(decision.ranking):
        key = ranked.record.candidate_key
        mark = "winner" if i == 0 else "tie" if key in entry.ties else ""
        middle, low, high = ranked.ratio
        interval = () if predicted else (f"[{low:.3f}, {high:.3f}]",)
        view.add_row(Text(key), f"{ranked.timing.median_us:,.1f}", f"{middle:.3f}", *interval, mark)
    return view
