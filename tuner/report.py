"""`report.md`: the verdict first, then what it rests on. A function of the records; nothing is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedtune.kernels.artifact import publish
from pagedtune.kernels.record import Record, TimeEvidence
from pagedtune.kernels.variant import Op

from .cache_view import cache_section, cache_verdict
from .frames import evidence_kinds, of_kind, timed_frame
from .plots import Plot, Scope, make_plots
from .report_sections import (
    Facts,
    formats_section,
    markdown_table,
    not_run_section,
    reasons_section,
    verdict_text,
    winners_section,
)
from .select import decide_all, select
from .tables import stream_of

REPORT_NAME, PLOT_FOLDER = "report.md", "plots"


@dataclass(frozen=True)
class Report:
    """A report before it is written.

    Args:
        verdict: the first paragraph, also for the terminal.
        markdown: the whole text; it refers to the plots as `plots/NAME.png`.
        plots: those that have a picture.
    """

    verdict: str
    markdown: str
    plots: tuple[Plot, ...]


def make_report(records: Sequence[Record], device: str, command: str) -> Report:
    """The report on the records of one device (`Device.fingerprint`).

    Args:
        records: of any devices; the others only count as left out.
        device: the one that it is about.
        command: what reproduces it.
    """
    own = [r for r in records if r.device == device]
    attention = [r for r in own if r.op == Op.ATTENTION]
    every, facts = _facts(own, device), _facts(attention, device)  # figures on attention alone are not mixed up
    plots = _plots(facts)
    of_cache = cache_verdict(every.table.entries, every.stream_gb_s)
    verdict = "\n\n".join(text for text in (verdict_text(facts) if attention or not of_cache else "", of_cache) if text)
    parts = [
        f"# pagedtune on {device.split('|', maxsplit=1)[0]}",
        verdict,
        _notes(every, len(records) - len(own)),
        _environment(every),
        winners_section(facts),
        reasons_section(facts),
        formats_section(facts),
        cache_section(every),
        _figures(plots, command),
        not_run_section(own),
        _reproduce(own, command),
    ]
    markdown = "\n\n".join(part for part in parts if part) + "\n"
    return Report(verdict, markdown, tuple(p for p in plots if p.png))


def _facts(records: Sequence[Record], device: str) -> Facts:
    return Facts(records, select(records, device), decide_all(records, device), stream_of(records))


def write_report(report: Report, folder: Path) -> Path:
    """Writes `report.md` and the plots, and removes plots of earlier reports; the path of the report.

    Raises:
        OSError: the folder cannot be written.
    """
    plot_folder = folder / PLOT_FOLDER
    for plot in report.plots:
        publish(plot.png, plot_folder / f"{plot.name}.png")
    publish(report.markdown.encode(), folder / REPORT_NAME)
    current = {f"{plot.name}.png" for plot in report.plots}
    for path in plot_folder.glob("*.png"):
        if path.name not in current:
            path.unlink()
    return folder / REPORT_NAME


def _notes(facts: Facts, num_foreign: int) -> str:
    """What limits the times: disturbed or short measurements, and records that are not part of this."""
    notes: Counter[str] = Counter()
    measured = [d for d in facts.decisions.values() if d.winner.record.time_evidence is not TimeEvidence.PREDICTED]
    for decision in measured:
        note = decision.winner.timing.note
        notes["others used the cores while they were timed"] += "others used" in note
        notes["the time budget ended short of ± 0.5 %"] += "short of" in note
        notes["decided on screening times alone"] += decision.stage == "screen"
    lines = [f"- {count} of {len(facts.decisions)} winners: {text}" for text, count in notes.items() if count]
    predicted = len(facts.decisions) - len(measured)
    if predicted:
        lines.append(f"- {predicted} of {len(facts.decisions)} winners: their times are predicted, not measured")
    if num_foreign:
        lines.append(f"- {num_foreign} records of other machines in the same folder are left out")
    return "Read with care:\n\n" + "\n".join(lines) if lines else ""


def _environment(facts: Facts) -> str:
    """Every fact of the timed records; where runs differ, all values, or the range of numbers."""
    values: dict[str, dict[Any, None]] = {"device": {facts.table.device.replace("|", ", "): None}}
    for record in sorted((r for r in facts.records if r.timing is not None), key=lambda r: r.recorded_at):
        for name, value in record.environment.items():
            values.setdefault(name, {})[value if isinstance(value, float) else str(value)] = None
    rows = [[name, _joined(list(found))] for name, found in values.items()]
    return "## Environment\n\n" + markdown_table(("fact", "value"), rows)


def _joined(values: Sequence[Any]) -> str:
    if len(values) > 1 and all(isinstance(v, float) for v in values):
        return f"{min(values):g} to {max(values):g}"
    shown = "; ".join(str(v) for v in values[:4])
    return shown if len(values) <= 4 else f"{shown}; and {len(values) - 4} more"


def _plots(facts: Facts) -> list[Plot]:
    frame = timed_frame(facts.decisions, facts.stream_gb_s)
    name = ", ".join(facts.table.device.split("|")[:2])
    return [
        plot
        for evidence, mode in evidence_kinds(frame)
        for plot in make_plots(of_kind(frame, evidence, mode), Scope(name, evidence, mode, facts.stream_gb_s))
    ]


def _figures(plots: Sequence[Plot], command: str) -> str:
    if not plots:
        return "## Figures\n\nNone: nothing has been timed."
    parts = [
        f"### {p.title}\n\n![{p.title}]({PLOT_FOLDER}/{p.name}.png)\n\n{p.text} Drawn by `{command}`."
        if p.png
        else f"### {p.title}\n\n{p.text}"
        for p in plots
    ]
    return "## Figures\n\n" + "\n\n".join(parts)


def _reproduce(own: Sequence[Record], command: str) -> str:
    sweeps = list(dict.fromkeys(str(r.provenance["sweep"]) for r in own if "sweep" in r.provenance))
    tunes = "\n".join(f"pagedtune tune --device {own[0].device.split('|')[0]} --sweep {s}" for s in sweeps)
    text = f"{tunes}\n{command}" if tunes else command
    return f"## Reproduce\n\n```\n{text}\n```\n\nAll figures and tables come from `records.jsonl` beside this file."
