"""The sections of a report that are tables, and its verdict."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedtune.harness.prediction import UNCERTAINTY
from pagedtune.kernels.dispatch import DispatchTable, Winner
from pagedtune.kernels.record import Record, Status, Verdict

from .formats import choose_formats
from .reasons import bests_of, reason_rows
from .select import Decision
from .tables import cell_key, default_configs, evidence_text, is_predicted, ratio_text, short_config, short_format

MAX_REASONS = 12
FAILURES = (
    Status.WRONG,
    Status.CORRUPTED,
    Status.CRASHED,
    Status.TIMEOUT,
    Status.BUILD_FAILED,
    Status.TOO_FAST,
)


@dataclass(frozen=True)
class Facts:
    """What all sections are about.

    Args:
        records: of the one device.
        table: its winners; decisions: how they were found, by cell key.
        stream_gb_s: the device's stream bandwidth, if it is known.
    """

    records: Sequence[Record]
    table: DispatchTable
    decisions: Mapping[str, Decision]
    stream_gb_s: float | None


def verdict_text(facts: Facts) -> str:
    """What won where and by how much, and on what evidence."""
    entries, stream_gb_s = facts.table.entries, facts.stream_gb_s
    if not entries:
        return "**No cell has a winner**: no candidate has both passed the gate and been timed. See *Not run* below."
    kinds = ([e for e in entries if not is_predicted(e)], [e for e in entries if is_predicted(e)])
    texts = [_verdict_on(kind, stream_gb_s, predicted) for predicted, kind in enumerate(kinds) if kind]
    return "\n\n".join(texts)


def _verdict_on(entries: Sequence[Winner], stream_gb_s: float | None, predicted: int) -> str:
    """The verdict on winners of one kind of evidence."""
    wins = Counter(e.variant for e in entries).most_common()
    won = ", ".join(f"`{variant}` won {count}" for variant, count in wins)
    what = " by predicted time, which is not measured" if predicted else ""
    lines = [f"**{won} of {len(entries)} cells{what}.**"]
    if predicted:
        lines.append(
            f"No GPU ran: kernels were proven by running their PTX on a virtual GPU, and a model (± {UNCERTAINTY:.0%}, "
            "fitted to no measurement) ranked them. All figures in this paragraph are the model's."
        )
    for title, values in (
        *(() if predicted else (("`eager`", [e.speedup_eager for e in entries]),)),
        ("the winner's own untuned config", [e.speedup_default for e in entries]),
    ):
        lines.append(_speedup_text(title, [v for v in values if v is not None], len(entries)))
    ceiling = "the data sheet's bandwidth" if predicted else "a plain read"
    if stream_gb_s:
        shares = sorted(e.bandwidth_gb_s / stream_gb_s for e in entries)
        lines.append(
            f"Winners read KV at {statistics.median(shares):.0%} of {ceiling} (median; {shares[0]:.0%} to "
            f"{shares[-1]:.0%} of {stream_gb_s:.1f} GB/s)."
        )
    ties = sum(bool(e.ties) for e in entries)
    lines.append(f"In {ties} cells the winner is tied with another candidate within ± 1 %." if ties else "")
    lines.append(_evidence_text(entries))
    return " ".join(line for line in lines if line)


def _speedup_text(title: str, values: Sequence[float], num_cells: int) -> str:
    if not values:
        return f"Speed-up over {title}: not timed beside the winners."
    mean = statistics.geometric_mean(values)
    where = "" if len(values) == num_cells else f" (timed in {len(values)} cells)"
    return f"Speed-up over {title}: {ratio_text(mean)}× geometric mean, {min(values):.2f} to {max(values):.2f}{where}."


def _evidence_text(entries: Sequence[Winner]) -> str:
    counts = Counter((e.verdict, e.time_evidence) for e in entries)
    texts = [
        f"{count} {'proven on the device' if verdict is Verdict.ON_DEVICE else verdict.value}, times {time.value}"
        for (verdict, time), count in counts.most_common()
    ]
    return f"Evidence: {'; '.join(texts)}."


def winners_section(facts: Facts) -> str:
    """One row per cell, with what its choice rests on."""
    if not facts.table.entries:
        return ""
    defaults, stream_gb_s = default_configs(facts.records), facts.stream_gb_s
    samples = {key: len(d.winner.timing.samples_us) for key, d in facts.decisions.items()}
    ordered = sorted(facts.table.entries, key=lambda e: (e.model, e.problem.key, e.pool_format, e.bucket))
    predicted = _predicted_section([e for e in ordered if is_predicted(e)], defaults, stream_gb_s)
    entries = [e for e in ordered if not is_predicted(e)]
    if not entries:
        return predicted
    headers = ("model", "problem", "format", "bucket", "variant", "config", "µs", "95 % CI", "GB/s", "% stream",
               "× eager", "× default", "runner-up", "n", "evidence")  # fmt: skip
    rows = [
        [
            e.model,
            e.problem.key,
            short_format(e.pool_format, e),
            e.bucket.key,
            e.variant,
            short_config(e.config, defaults.get((e.problem, e.pool_format, e.bucket, e.variant))),
            f"{e.median_us:,.1f}",
            f"{e.ci_us[0]:,.1f}–{e.ci_us[1]:,.1f}",
            f"{e.bandwidth_gb_s:.1f}",
            f"{e.bandwidth_gb_s / stream_gb_s:.0%}" if stream_gb_s else "",
            ratio_text(e.speedup_eager),
            ratio_text(e.speedup_default),
            f"{e.margin:+.1%}" if e.margin is not None else "",
            str(samples[cell_key(e)]),
            evidence_text(e),
        ]
        for e in entries
    ]
    legend = (
        "µs: median of one launch. × eager, × default: speed-up over torch and over the variant's untuned config, by "
        "paired rounds. runner-up: how much slower the second candidate is. n: samples. An empty field was not timed."
    )
    text = f"## Winners\n\n{markdown_table(headers, rows, right_from=6)}\n\n{legend}"
    return f"{text}\n\n{predicted}" if predicted else text


def _predicted_section(
    entries: Sequence[Winner], defaults: Mapping[tuple[Any, ...], Mapping[str, Any]], stream_gb_s: float | None
) -> str:
    """The winners whose times are predicted, in a table of their own."""
    if not entries:
        return ""
    headers = ("model", "problem", "format", "bucket", "variant", "config", "predicted µs", "predicted GB/s", "% peak",
               "predicted × default", "predicted runner-up", "verdict")  # fmt: skip
    rows = [
        [
            e.model,
            e.problem.key,
            short_format(e.pool_format, e),
            e.bucket.key,
            e.variant,
            short_config(e.config, defaults.get((e.problem, e.pool_format, e.bucket, e.variant))),
            f"{e.median_us:,.1f}",
            f"{e.bandwidth_gb_s:,.0f}",
            f"{e.bandwidth_gb_s / stream_gb_s:.0%}" if stream_gb_s else "",
            ratio_text(e.speedup_default),
            f"{e.margin:+.1%}" if e.margin is not None else "",
            e.verdict.value,
        ]
        for e in entries
    ]
    legend = (
        f"Nothing here was measured. predicted µs: a model's time for one launch on cold KV, ± {UNCERTAINTY:.0%}. "
        "% peak: of the data sheet's bandwidth. predicted runner-up: how much longer it takes; below zero "
        "where the winner was chosen among ties within ± 1 % by rule. Differences far below the model's uncertainty "
        "decide nothing: the finalists of an export made with `--allow-predicted` are settled by `calibrate` on a GPU."
    )
    return f"## Predicted winners\n\n{markdown_table(headers, rows, right_from=6)}\n\n{legend}"


def reasons_section(facts: Facts) -> str:
    """The model's reason for each predicted winner."""
    ordered = sorted(facts.table.entries, key=lambda e: (e.model, e.problem.key, e.pool_format, e.bucket))
    winners = [
        (e.model, e.problem.key, e.bucket.key, facts.decisions[cell_key(e)].winner.record)
        for e in ordered
        if is_predicted(e)
    ]
    rows = reason_rows(winners, bests_of(facts.records))
    if not rows:
        return ""
    headers = ("model", "problem", "bucket", "winner", "bounded by", "the other variants' best")
    legend = (
        "Parts of predicted times: launches of kernels, their ramp (dependent trips to memory before a block's keys "
        "arrive), and the body, which is what their waves of blocks take. A full wave draws what the bytes in flight "
        "of its blocks allow (Little's law). The best of another variant may be unproven."
    )
    return f"## Why: the model's reasons\n\n{markdown_table(headers, rows)}\n\n{legend}"


def formats_section(facts: Facts) -> str:
    """The pool format that each model should have, with the reason."""
    provenances = [facts.decisions[cell_key(entry)].winner.record.provenance for entry in facts.table.entries]
    choices = choose_formats(facts.table.entries, provenances)
    rows = [[c.model_key, c.chosen.key if c.chosen else "not decided", c.reason] for c in choices]
    return "## Pool format per model\n\n" + markdown_table(("model", "format", "why"), rows) if rows else ""


def not_run_section(records: Sequence[Record]) -> str:
    """What has no time, and why: not reached, refused, or failed."""
    latest = {(r.cell_key, r.candidate_key): r for r in sorted(records, key=lambda r: r.recorded_at)}.values()
    without = [r for r in latest if r.status is not Status.PASSED]
    if not without:
        return "## Not run\n\nNothing was left out: every candidate of every cell has an outcome."
    reasons = Counter((r.status.value, r.variant, r.reason.splitlines()[0]) for r in without)
    rows = [[str(n), status, variant, reason] for (status, variant, reason), n in reasons.most_common(MAX_REASONS)]
    more = len(reasons) - len(rows)
    text = "## Not run\n\n" + markdown_table(("outcomes", "status", "variant", "reason"), rows)
    failed = sum(r.status in FAILURES for r in without)
    summary = f"{failed} candidates failed." if failed else "No candidate failed."
    rest = f" {more} more reasons are in `records.jsonl`." if more > 0 else ""
    return f"{text}\n\n{summary}{rest} `*` stands for all candidates of a cell that the budget did not reach."


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]], right_from: int | None = None) -> str:
    """A table; columns from `right_from` on are set flush right."""
    marks = ["--:" if right_from is not None and i >= right_from else "---" for i in range(len(headers))]
    lines = [headers, marks, *([_escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("*", "\\*")
