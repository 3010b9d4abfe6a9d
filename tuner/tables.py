"""Tables and sentences for people; what a machine reads is `winners.json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pagedtune.harness.prediction import UNCERTAINTY
from pagedtune.kernels.dispatch import DispatchTable, Winner
from pagedtune.kernels.pool_format import PoolFormat, ScaleKind
from pagedtune.kernels.record import Record, TimeEvidence, Verdict
from pagedtune.kernels.variant import Op

from .formats import FormatChoice, choose_formats
from .select import decide_all
from .space import candidate_key

MIN_WIDTH = 120  # of a table that is not on a terminal


def console_for(stderr: bool = False) -> Console:
    """A console as wide as the terminal, and wide enough for the tables elsewhere."""
    console = Console(stderr=stderr, highlight=False, emoji=False)  # a path may hold `:name:`
    if not console.is_terminal:
        console.width = MIN_WIDTH
    return console


def show_winners(console: Console, table: DispatchTable, records: Sequence[Record]) -> None:
    """The winners of attention, one table per model and dtype; `show_cache_winners` has the others."""
    defaults = default_configs(records)
    stream_gb_s = stream_of(records)
    attention = [e for e in table.entries if e.op == Op.ATTENTION]
    ordered = sorted(attention, key=lambda e: (e.model, e.problem.key, is_predicted(e)))
    for (model, key, predicted), entries in groupby(ordered, key=lambda e: (e.model, e.problem.key, is_predicted(e))):
        view = _new_table(f"{model}  {key}" + ("  predicted, not measured" if predicted else ""), predicted)
        for entry in sorted(entries, key=lambda e: (e.pool_format, e.bucket, e.workload)):
            view.add_row(*_row(entry, defaults, stream_gb_s))
        console.print(view)
    for legend in (_legend([e for e in ordered if not is_predicted(e)], stream_gb_s), _predicted_legend(ordered)):
        if legend:
            console.print(legend, markup=False)


def is_predicted(entry: Winner) -> bool:
    """Whether a winner's time is a model's: such times have tables and columns of their own."""
    return entry.time_evidence is TimeEvidence.PREDICTED


def _new_table(title: str, predicted: bool) -> Table:
    view = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),  # leaves the room that configs need at 120 columns
    )
    view.add_column("format", no_wrap=True)
    view.add_column("bucket", no_wrap=True)
    view.add_column("variant", no_wrap=True)
    view.add_column("config", overflow="fold", max_width=44)
    measured = ("µs", "95% CI", "GB/s", "stream", "×eager", "×default")
    for name in ("predicted µs", "GB/s", "of peak", "×default", "next") if predicted else measured:
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("verdict" if predicted else "evidence", no_wrap=True)
    return view


def _row(entry: Winner, defaults: Mapping[tuple[Any, ...], Mapping[str, Any]], stream_gb_s: float | None) -> list[str]:
    default = defaults.get((entry.problem, entry.pool_format, entry.bucket, entry.variant))
    cell = [
        short_format(entry.pool_format, entry),
        entry.bucket.key + ("" if entry.workload == "ragged" else f" {entry.workload}"),
        entry.variant,
        short_config(entry.config, default),
        number(entry.median_us),
    ]
    if is_predicted(entry):
        return [
            *cell,
            number(entry.bandwidth_gb_s),
            "" if not stream_gb_s else f"{entry.bandwidth_gb_s / stream_gb_s:.0%}",
            ratio_text(entry.speedup_default),
            "" if entry.margin is None else f"{entry.margin:+.1%}",
            entry.verdict.value,
        ]
    return [
        *cell,
        f"±{_half_width(entry.ci_us, entry.median_us):.1%}",
        number(entry.bandwidth_gb_s),
        "" if not stream_gb_s else f"{entry.bandwidth_gb_s / stream_gb_s:.0%}",
        ratio_text(entry.speedup_eager),
        ratio_text(entry.speedup_default),
        evidence_text(entry),
    ]


def _half_width(ci_us: tuple[float, float], median_us: float) -> float:
    return max(ci_us[1] - median_us, median_us - ci_us[0]) / median_us


def short_format(pool_format: PoolFormat, entry: Winner | None = None) -> str:
    """A format without what the problem says already (`b16-nhd` where the KV dtype is the query's)."""
    plain = pool_format.scale_kind is ScaleKind.NONE
    if entry is not None and plain and pool_format.kv_dtype is entry.problem.q_dtype:
        return f"b{pool_format.block_size}-{pool_format.layout}"
    return pool_format.key


def short_config(config: Mapping[str, Any], default: Mapping[str, Any] | None) -> str:
    """What differs from the default config; the whole config where that is not known."""
    if default is None:
        return " ".join(f"{k}={v}" for k, v in config.items()) or "(no tunables)"
    changed = [f"{k}={v}" for k, v in config.items() if v != default.get(k)]
    return " ".join(changed) if changed else ("default" if config else "(no tunables)")


def evidence_text(entry: Winner) -> str:
    """How right and how fast are known: `measured`, with the verdict where it is not from the device."""
    if entry.verdict is Verdict.ON_DEVICE:
        return entry.time_evidence.value
    return f"{entry.time_evidence.value} ({entry.verdict.value})"


def ratio_text(ratio: float | None) -> str:
    """A speed-up, empty where it was not timed."""
    if ratio is None:
        return ""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}"


def number(value: float) -> str:
    """Three significant digits at least, thousands apart."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def default_configs(records: Iterable[Record]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """The config of an untuned user, by problem, format, bucket and variant."""
    return {
        (r.problem, r.pool_format, r.bucket, r.variant): r.config for r in records if r.provenance.get("is_default")
    }


def stream_of(records: Sequence[Record]) -> float | None:
    """The device's measured stream bandwidth as the latest record has it, in 10^9 bytes/s."""
    known = [r for r in records if r.provenance.get("stream_gb_s")]
    return float(max(known, key=lambda r: r.recorded_at).provenance["stream_gb_s"]) if known else None


def _predicted_legend(entries: Sequence[Winner]) -> str:
    if not any(is_predicted(e) for e in entries):
        return ""
    return (
        f"predicted µs: a model's time for one launch on cold KV, ± {UNCERTAINTY:.0%}, fitted to no measurement; GB/s, "
        "×default and next (the runner-up) follow from such times alone.\nof peak: of the data sheet's bandwidth. "
        "verdict emulated: the binary's PTX was proven on the virtual GPU. Settle the finalists on the GPU itself:\n"
        "`pagedtune export --allow-predicted`, then `python -m pagedtune_runtime calibrate` there."
    )


def _legend(entries: Sequence[Winner], stream_gb_s: float | None) -> str:
    if not entries:
        return ""
    measured = f" measured here ({stream_gb_s:.1f} GB/s)" if stream_gb_s else ""
    proven = all(e.verdict is Verdict.ON_DEVICE for e in entries)
    return (
        "µs: median of one launch on KV that no cache holds. CI: of the median. stream: KV bytes per second of the "
        f"plain read bandwidth{measured}.\n×eager, ×default: speed-up over torch and over the untuned config. "
        "config: what differs from that."
        + (" All verdicts: on-device." if proven else " Verdict: on-device unless noted.")
    )


def disturbances(records: Iterable[Record], table: DispatchTable) -> list[str]:
    """A line for people if the timer had remarks on winners, such as that others used the machine."""
    measured = [
        d.winner for d in decide_all(records, table.device).values() if not _has_predicted_time(d.winner.record)
    ]
    noted = [winner.timing.note for winner in measured if winner.timing.note]
    if not noted:
        return []
    return [f"note: the timer has remarks on {len(noted)} of {len(table.entries)} winners, e.g. {noted[0]!r}"]


def _has_predicted_time(record: Record) -> bool:
    return record.time_evidence is TimeEvidence.PREDICTED


def show_formats(console: Console, choices: Sequence[FormatChoice]) -> None:
    """The pool format chosen for each model, with the reason."""
    if not choices:
        return
    view = Table(box=None, pad_edge=False, show_header=False)
    view.add_column(no_wrap=True)
    view.add_column(no_wrap=True, style="bold")
    view.add_column(overflow="fold")
    for choice in choices:
        view.add_row(choice.model_key, "-" if choice.chosen is None else choice.chosen.key, choice.reason)
    console.print("KV pool per model (time × memory; `pagedtune explain MODEL` shows all)", style="bold")
    console.print(view)


def format_choices(records: Iterable[Record], table: DispatchTable) -> tuple[FormatChoice, ...]:
    """The outer decision behind `table`, with its costs."""
    decisions = decide_all(records, table.device)
    by_key = {(d.winner.record.cell_key): d.winner.record.provenance for d in decisions.values()}
    provenances = [by_key[cell_key(entry)] for entry in table.entries]
    return choose_formats(table.entries, provenances)


def cell_key(entry: Winner) -> str:
    """Equal to `Record.cell_key` of the cell's records."""
    return "|".join((entry.op, entry.model, entry.problem.key, entry.pool_format.key, entry.bucket.key, entry.workload))


def winner_key(entry: Winner) -> str:
    """Equal to `Record.candidate_key` of the winner's records."""
    return candidate_key(entry.variant, entry.config)
