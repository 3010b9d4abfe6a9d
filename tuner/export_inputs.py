"""What an export starts from: winners that still hold, with the records that they follow from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pagedtune.kernels.catalogue import VARIANTS
from pagedtune.kernels.dispatch import DispatchTable, Winner
from pagedtune.kernels.record import Record, TimeEvidence, Verdict
from pagedtune.kernels.serial import from_jsonable
from pagedtune.kernels.variant import Op
from pagedtune.runtime.exported.manifest import Finalist, Finalists

from .errors import UsageError, unknown_name
from .jobs import identify_variant
from .select import Decision, decide_all, select
from .store import read_records

MAX_FINALISTS = 4
SHOWN = 4  # of a list of faults in a message
_CATALOGUE = frozenset(variant.name for variant in VARIANTS)


@dataclass(frozen=True)
class ExportInputs:
    """What goes into a package.

    Args:
        table: the winners of the chosen models.
        records: of each entry, the record whose time made it the winner, in the same order.
        finalists: of each cell, those that calibration settles among.
    """

    table: DispatchTable
    records: tuple[Record, ...]
    finalists: tuple[Finalists, ...]


def read_inputs(folder: Path, models: Sequence[str] = (), allow_predicted: bool = False) -> ExportInputs:
    """The winners in a results folder, checked.

    Args:
        folder: e.g. `results/cpu`.
        models: only these; all without.
        allow_predicted: whether entries whose time was only predicted may ship.

    Raises:
        UsageError: no winners, or winners that do not follow from the records, come from another source than that of
            the tree, are not proven, or are predicted without leave.
    """
    table = _read_winners(folder)
    records = tuple(r for r in read_records(folder) if r.device == table.device)
    if select(records, table.device) != table:
        raise UsageError(
            f"{folder / 'winners.json'} does not follow from the records beside it: run `pagedtune tune` once more"
        )
    table = _of_models(table, models)
    decisions = {d.winner.record.cell_key: d for d in decide_all(records, table.device).values()}
    chosen = [decisions[_cell_key(entry)] for entry in table.entries]
    winners = tuple(decision.winner.record for decision in chosen)
    _require_proven(table.entries, allow_predicted)
    _require_current(winners)
    finalists = tuple(_finalists(e, d) for e, d in zip(table.entries, chosen, strict=True))
    return ExportInputs(table, winners, finalists)


def _read_winners(folder: Path) -> DispatchTable:
    path = folder / "winners.json"
    try:
        table = from_jsonable(DispatchTable, json.loads(path.read_bytes()), path.name)
    except FileNotFoundError as error:
        raise UsageError(f"no winners in {folder}: run `make tune` (or `pagedtune tune`) first") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}; run `pagedtune tune` once more") from error
    if not table.entries:
        raise UsageError(f"{path} has no winners yet: run `make tune` (or `pagedtune tune`) on")
    return table


def _of_models(table: DispatchTable, models: Sequence[str]) -> DispatchTable:
    known = dict.fromkeys(entry.model for entry in table.entries)
    for name in models:
        if name not in known:
            raise unknown_name("model", name, known, " have winners; `pagedtune tune --model` makes them for others")
    if not models:
        return table
    formats = {key: value for key, value in table.chosen_formats.items() if key.partition("/")[0] in models}
    return replace(table, entries=tuple(e for e in table.entries if e.model in models), chosen_formats=formats)


def _require_proven(entries: Iterable[Winner], allow_predicted: bool) -> None:
    unproven = [_shown(e) for e in entries if e.verdict is Verdict.NONE]
    if unproven:
        raise UsageError(f"winners without a passed verdict cannot ship: {_some(unproven)}; tune again")
    predicted = [_shown(e) for e in entries if e.time_evidence is TimeEvidence.PREDICTED]
    if predicted and not allow_predicted:
        raise UsageError(
            f"the times of {len(predicted)} winners are only predicted: {_some(predicted)}; measure them, or ship them "
            "with --allow-predicted and let the user calibrate"
        )


def stale_winners(winners: Sequence[Record]) -> list[Record]:
    """Those whose variant's source is not the one that was tuned; variants from outside the tree are not looked at."""
    sources = {name: _source_of(name) for name in dict.fromkeys(r.variant for r in winners) if name in _CATALOGUE}
    return [r for r in winners if r.provenance.get("source") != sources.get(r.variant, r.provenance.get("source"))]


def _require_current(winners: Sequence[Record]) -> None:
    """Refuses stale winners, and those that are not of this tree."""
    for name in dict.fromkeys(r.variant for r in winners):
        _source_of(name)
    stale = [_record_shown(r) for r in stale_winners(winners)]
    if stale:
        raise UsageError(
            f"{len(stale)} of {len(winners)} winners are stale, as the source of their variant has changed since they "
            f"were tuned: {_some(stale)}; tune again"
        )


def _source_of(variant: str) -> str:
    if variant not in _CATALOGUE:
        raise UsageError(
            f"the winner {variant} is not among the variants of this tree, whose host sides are what ships: add it to "
            "kernels/catalogue.py, or tune without it"
        )
    return str(identify_variant({"variant": variant})["source"])


def _finalists(entry: Winner, decision: Decision) -> Finalists:
    """The winner, those that tie with it, and the next ones; with a predicted time the best guess is one of several.
    Of a cache operation the winner alone: calibration settles attention."""
    ties = {t.record.candidate_key for t in decision.ties}
    others = sorted(decision.ranking[1:], key=lambda r: (r.record.candidate_key not in ties, r.ratio[0]))
    chosen = [decision.winner, *others][: MAX_FINALISTS if entry.op == Op.ATTENTION else 1]
    known = [r for r in chosen if r.record.variant in _CATALOGUE]
    candidates = tuple(Finalist(r.record.variant, dict(r.record.config), r.timing.median_us) for r in known)
    return Finalists(entry.op, entry.model, entry.problem, entry.pool_format, entry.bucket, entry.workload, candidates)


def _cell_key(entry: Winner) -> str:
    parts = (entry.op, entry.model, entry.problem.key, entry.pool_format.key, entry.bucket.key, entry.workload)
    return "|".join(parts)


def _shown(entry: Winner) -> str:
    return f"{entry.variant} for {entry.model} {entry.problem.key} {entry.pool_format.key} {entry.bucket.key}"


def _record_shown(record: Record) -> str:
    return f"{record.variant} for {record.model} {record.problem.key} {record.pool_format.key} {record.bucket.key}"


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more


def compiler_of(environment: Mapping[str, object]) -> str:
    """The compiler that a record's binaries were built with, as far as the record says."""
    return str(environment.get("compiler", "an unknown compiler"))
