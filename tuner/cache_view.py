"""The winners of cache operations for people: tables of their own, beside those of attention."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from pagedtune.harness.prediction import UNCERTAINTY
from pagedtune.kernels.dispatch import DispatchTable, Winner
from pagedtune.kernels.record import Record
from pagedtune.kernels.variant import Op

from .cache_cells import launch_text
from .reasons import Budget, bests_of, budget_of, reason_of
from .report_sections import Facts, markdown_table
from .select import Decision, decide_all
from .tables import cell_key, default_configs, is_predicted, number, ratio_text, short_config, short_format

_OPS = list(Op)
_MOVED = "K and V read and written, without lists of slots and blocks"


def cache_entries(entries: Sequence[Winner]) -> list[Winner]:
    """The winners of cache operations by model, problem, evidence, format and op."""
    found = [e for e in entries if e.op != Op.ATTENTION]
    return sorted(found, key=lambda e: (*_group(e), e.pool_format, _OPS.index(Op(e.op)), e.bucket))


def _group(entry: Winner) -> tuple[str, str, bool]:
    return entry.model, entry.problem.key, is_predicted(entry)


def show_cache_winners(console: Console, table: DispatchTable, records: Sequence[Record]) -> None:
    """The winners of cache operations, one table per model and dtype; nothing where there are none."""
    entries = cache_entries(table.entries)
    if not entries:
        return
    decisions, defaults = decide_all(records, table.device), default_configs(records)
    for (model, problem, predicted), group in groupby(entries, key=_group):
        view = _new_table(f"Cache operations  {model}  {problem}", predicted)
        for entry in group:
            default = defaults.get((entry.problem, entry.pool_format, entry.bucket, entry.variant))
            view.add_row(
                short_format(entry.pool_format, entry),
                launch_text(entry.op, entry.bucket, entry.workload),
                entry.variant,
                short_config(entry.config, default),
                *_figures(entry),
                _bound(decisions[cell_key(entry)]),
            )
        console.print(view)
    console.print(
        f"operation: tokens written, blocks copied, sequences x longest context gathered. GB/s: {_MOVED}.\n"
        "bound: where most of the model's time goes; `pagedtune explain MODEL --op OP` says more. What won serves "
        "smaller launches too.",
        markup=False,
    )


def _new_table(title: str, predicted: bool) -> Table:
    view = Table(
        title=f"{title}  predicted, not measured" if predicted else title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in ("format", "operation", "variant"):
        view.add_column(name, no_wrap=True)
    view.add_column("config", overflow="fold", max_width=44)
    for name in ("predicted µs" if predicted else "µs", "GB/s", "×default", "next"):
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("bound", no_wrap=True)
    return view


def _figures(entry: Winner) -> tuple[str, ...]:
    return (
        number(entry.median_us),
        number(entry.bandwidth_gb_s),
        ratio_text(entry.speedup_default),
        "" if entry.margin is None else f"{entry.margin:+.1%}",
    )


def _bound(decision: Decision) -> str:
    budget = budget_of(decision.winner.record)
    return "" if budget is None else budget.main.bound


def cache_verdict(entries: Sequence[Winner], peak_gb_s: float | None) -> str:
    """Which variants won how many cells of cache operations, and how fast they move; empty without such cells."""
    entries = cache_entries(entries)
    if not entries:
        return ""
    wins = Counter(e.variant for e in entries).most_common()
    predicted = all(is_predicted(e) for e in entries)
    how = " by predicted time, which is not measured" if predicted else ""
    text = f"Cache operations: {', '.join(f'`{name}` won {n}' for name, n in wins)} of {len(entries)} cells{how}."
    if not peak_gb_s:
        return text
    shares = sorted(e.bandwidth_gb_s / peak_gb_s for e in entries)
    of = "the data sheet's bandwidth" if predicted else "a plain read"
    return (
        f"{text} They move K and V at {statistics.median(shares):.0%} of {of} (median; {shares[0]:.0%} to "
        f"{shares[-1]:.0%})."
    )


def _reason(entry: Winner, decisions: Mapping[str, Decision], bests: Mapping[str, Mapping[str, Budget]]) -> list[str]:
    return list(reason_of(decisions[cell_key(entry)].winner.record, bests) or ("", ""))


def cache_section(facts: Facts) -> str:
    """The winners of cache operations, each with the model's reason; empty without such cells."""
    entries = cache_entries(facts.table.entries)
    if not entries:
        return ""
    headers = ("model", "problem", "format", "operation", "bucket", "variant", "config", "predicted µs",
               "predicted GB/s", "predicted × default", "predicted runner-up", "bounded by",
               "the other variants' best", "verdict")  # fmt: skip
    bests, defaults = bests_of(facts.records), default_configs(facts.records)
    rows = [
        [
            e.model,
            e.problem.key,
            short_format(e.pool_format, e),
            launch_text(e.op, e.bucket, e.workload),
            e.bucket.key,
            e.variant,
            short_config(e.config, defaults.get((e.problem, e.pool_format, e.bucket, e.variant))),
            *_figures(e),
            *_reason(e, facts.decisions, bests),
            e.verdict.value,
        ]
        for e in entries
        if is_predicted(e)
    ]
    legend = (
        "operation: tokens written, block pairs copied, sequences x longest context gathered, blocks packed or "
        f"unpacked. predicted µs: a model's time for one launch, ± {UNCERTAINTY:.0%}, not measured; predicted GB/s: "
        f"{_MOVED}. The runtime plans these launches by the same buckets: a smaller one has the same winner."
    )
    return f"## Cache operations\n\n{markdown_table(headers, rows)}\n\n{legend}"
