"""What `pagedtune explain` says of single cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedtune.harness.prediction import UNCERTAINTY, StepPrediction, describe
from pagedtune.kernels.dispatch import Winner
from pagedtune.kernels.record import Record, Status, TimeEvidence
from pagedtune.kernels.serial import from_jsonable
from pagedtune.kernels.variant import Op

from .cache_cells import launch_text
from .select import Decision, decide_all
from .tables import cell_key, default_configs, is_predicted, short_config, winner_key

TIE_RULE = "least scratch memory, then fewest registers, then canonical order"
MAX_DETAILED = 3  # more cells than this are listed, not explained


def show_entries(console: Console, entries: list[Winner], records: Sequence[Record], device: str) -> None:
    """Explains the first few cells of `entries`, and lists the rest."""
    decisions, defaults = decide_all(records, device), default_configs(records)
    entries = sorted(entries, key=lambda e: (e.problem.key, e.pool_format.key, e.bucket))
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
    """How many candidates were left after each step; in parentheses those that it took away."""
    latest = {r.candidate_key: r for r in sorted(records, key=lambda r: r.recorded_at) if r.variant != "*"}
    counts = Counter(r.status for r in latest.values())
    rejected = counts.pop(Status.REJECTED, 0)
    steps = [f"{len(latest)} candidates"]
    if rejected:
        steps.append(f"{len(latest) - rejected} possible ({rejected} rejected)")
    screened = {r.candidate_key for r in records if r.stage == "screen"}
    proven = {r.candidate_key for r in records if r.stage == "gate" and r.status is Status.PASSED}
    failed = [f"{n} {s.value}" for s, n in sorted(counts.items()) if s not in (Status.PASSED, Status.NOT_RUN)]
    gate = f"{len(proven)} proven" + (f" ({', '.join(failed)})" if failed else "")
    if decision.winner.record.time_evidence is TimeEvidence.PREDICTED:
        steps += [f"{len(screened)} predicted", gate]  # a model ranks what is then proven
    else:
        steps += [gate, *([f"{len(screened)} screened"] if screened else [])]  # a clock, what was proven
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
