"""Records in, winners out: a pure function, whatever the order of the records and however often each is given.

A cell is decided by its latest complete finals, in which all candidates were timed in the same interleaved rounds:
the ratio of two candidates is the median of their ratios round by round, so a slow drift of the machine cancels.
Cells without finals fall back on the screening times. A cell with any measured time is decided by those alone; where
all are predicted, they are compared with each other, and never with a measured one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedtune.kernels.dispatch import DispatchTable, Winner
from pagedtune.kernels.record import Record, Status, TimeEvidence, Timing

from .formats import choose_formats
from .stats import TIE_BAND, Interval, is_tie, ratio_interval
from .store import canonical

BASELINE = "eager"


@dataclass(frozen=True)
class Ranked:
    """A candidate's place in its cell; `ratio` is its time over the winner's: (median, low, high)."""

    record: Record
    timing: Timing
    ratio: Interval


@dataclass(frozen=True)
class Decision:
    """How a cell was decided.

    Args:
        stage: `final` or `screen`: which times decided.
        ranking: all candidates with a time, the winner first, then by ratio.
        ties: those of the ranking that cannot be told from the fastest.
        fastest: the candidate with the lowest time; differs from the winner where a tie was broken.
        screens: screening records by candidate key, for candidates that did not reach the finals.
    """

    stage: str
    ranking: tuple[Ranked, ...]
    ties: tuple[Ranked, ...]
    fastest: str
    screens: Mapping[str, Record] = field(default_factory=dict)

    @property
    def winner(self) -> Ranked:
        """The chosen candidate."""
        return self.ranking[0]


def select(records: Iterable[Record], device: str) -> DispatchTable:
    """The winners among the records of one device (`Device.fingerprint`)."""
    decisions = decide_all(records, device)
    entries = tuple(_winner(decision) for _, decision in sorted(decisions.items()))
    weights = {key: decision.winner.record.provenance for key, decision in decisions.items()}
    choices = choose_formats(entries, [weights[key] for key in sorted(decisions)])
    chosen = {c.model_key: c.chosen for c in choices if c.chosen is not None}
    return DispatchTable(device, entries, chosen)


def decide_all(records: Iterable[Record], device: str) -> dict[str, Decision]:
    """The decision of every cell that has one, by cell key."""
    unique = {canonical(r): r for r in records if r.device == device}
    ordered = [unique[text] for text in sorted(unique)]
    cells: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(ordered, key=lambda r: r.recorded_at):
        if record.status is not Status.NOT_RUN:  # says nothing about the candidate
            cells[record.cell_key].append(record)
    decided = {key: _decide(cell) for key, cell in cells.items()}
    return {key: decision for key, decision in decided.items() if decision is not None}


def _decide(records: Sequence[Record]) -> Decision | None:
    """The decision of one cell, from all its records in the order of their times."""
    usable = _one_kind([r for r in _current(records) if r.timing is not None])
    if not usable:
        return None
    mode = _timing(usable[-1]).mode
    screens = {r.candidate_key: r for r in usable if r.stage == "screen" and _timing(r).mode == mode}
    finals = _latest_finals([r for r in usable if r.stage == "final"])
    if finals:
        return _rank("final", finals, _round_ratios(finals), screens)
    return _rank("screen", [*screens.values()], [np.array([_timing(r).median_us]) for r in screens.values()], screens)


def _one_kind(records: Sequence[Record]) -> list[Record]:
    """The records of the strongest evidence for their times that the cell has."""
    for evidence in (TimeEvidence.MEASURED, TimeEvidence.TRANSFERRED, TimeEvidence.PREDICTED):
        found = [r for r in records if r.time_evidence is evidence]
        if found:
            return found
    return []


def _current(records: Sequence[Record]) -> list[Record]:
    """Without candidates that failed last, and without what was measured on an older source of a candidate."""
    latest = {record.candidate_key: record for record in records}
    return [
        r
        for r in records
        if latest[r.candidate_key].status is Status.PASSED
        and r.provenance.get("source") == latest[r.candidate_key].provenance.get("source")
    ]


def _latest_finals(records: Sequence[Record]) -> list[Record]:
    """Members of the last finals; the store never keeps a part of a group."""
    last = records[-1].provenance.get("group") if records else None
    return [r for r in records if r.provenance.get("group") == last]


def _round_ratios(finals: Sequence[Record]) -> list[np.ndarray]:
    """Per candidate, its time in every round it took part in relative to the incumbent, the first of the group."""
    rounds = [np.asarray(_timing(r).pair_ratios, dtype=np.float64) for r in finals]
    num_rounds = max(r.size for r in rounds)
    incumbent = next((i for i, r in enumerate(finals) if r.provenance.get("group_index") == 0), None)
    if incumbent is None or not num_rounds:  # nothing to pair with: only the medians can be compared
        return [np.array([_timing(r).median_us]) for r in finals]
    rounds[incumbent] = np.ones(num_rounds)
    reference_us = _timing(finals[incumbent]).median_us
    return [
        x if x.size else np.array([_timing(r).median_us / reference_us]) for r, x in zip(finals, rounds, strict=True)
    ]


def _rank(
    stage: str, records: Sequence[Record], rounds: Sequence[np.ndarray], screens: Mapping[str, Record]
) -> Decision:
    """Ranks candidates by the rounds that they ran in."""
    fastest = min(range(len(records)), key=lambda i: (float(np.median(rounds[i])), _preference(records[i])))
    tied = [
        i for i, own in enumerate(rounds) if i == fastest or _is_tie(own, rounds[fastest], records[i].time_evidence)
    ]
    winner = min(tied, key=lambda i: _preference(records[i]))
    ranked = [
        Ranked(r, _timing(r), ratio_interval(own, rounds[winner])) for r, own in zip(records, rounds, strict=True)
    ]
    others = sorted(
        (ranked[i] for i in range(len(ranked)) if i != winner), key=lambda x: (x.ratio[0], _preference(x.record))
    )
    ties = tuple(sorted((ranked[i] for i in tied if i != winner), key=lambda x: _preference(x.record)))
    return Decision(stage, (ranked[winner], *others), ties, records[fastest].candidate_key, screens)


def _is_tie(own: np.ndarray, fastest: np.ndarray, evidence: TimeEvidence) -> bool:
    """Whether two candidates cannot be told apart; a prediction has no samples, and what differs less is no finding."""
    interval = ratio_interval(own, fastest)
    if evidence is TimeEvidence.PREDICTED:
        return interval[0] <= 1 + TIE_BAND
    return is_tie(interval, min(own.size, fastest.size))


def _preference(record: Record) -> tuple[int, int, int, str]:
    """How ties are broken: scratch memory, registers, then the canonical order of candidates."""
    resources: dict[str, Any] = record.resources
    return (
        int(resources.get("workspace_bytes", 0)),
        int(resources.get("registers", 0)),
        int(record.provenance.get("order", 0)),
        record.candidate_key,
    )


def _timing(record: Record) -> Timing:
    assert record.timing is not None  # only timed records get here
    return record.timing


def _winner(decision: Decision) -> Winner:
    best = decision.winner
    record, timing = best.record, best.timing
    runner_up = decision.ranking[1] if len(decision.ranking) > 1 else None
    return Winner(
        op=record.op,
        model=record.model,
        problem=record.problem,
        pool_format=record.pool_format,
        bucket=record.bucket,
        workload=record.workload,
        variant=record.variant,
        config=record.config,
        median_us=timing.median_us,
        ci_us=timing.ci_us,
        bandwidth_gb_s=timing.bandwidth_gb_s,
        verdict=record.verdict,
        time_evidence=record.time_evidence,
        runner_up=runner_up.record.candidate_key if runner_up else "",
        margin=runner_up.ratio[0] - 1 if runner_up else None,
        ties=tuple(t.record.candidate_key for t in decision.ties),
        speedup_eager=_speedup(decision, lambda r: r.variant == BASELINE),
        speedup_default=_speedup(
            decision, lambda r: r.variant == record.variant and bool(r.provenance.get("is_default"))
        ),
        artifact_keys=record.artifact_keys,
    )


def _speedup(decision: Decision, is_reference: Callable[[Record], bool]) -> float | None:
    """Time of the reference candidate over that of the winner: in the finals, else when both were screened."""
    for ranked in decision.ranking:
        if is_reference(ranked.record):
            return ranked.ratio[0]
    own = decision.screens.get(decision.winner.record.candidate_key)
    reference = next((r for r in decision.screens.values() if is_reference(r)), None)
    if own is None or reference is None:
        return None
    return _timing(reference).median_us / _timing(own).median_us
