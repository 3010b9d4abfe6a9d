"""Two result sets side by side: what became faster, what slower, and what cannot be told.

The two were measured in different sessions, so nothing is paired: a change counts only if the confidence intervals of
the two medians do not touch *and* the medians differ by more than a threshold. Even on a quiet machine two sessions
differ by one or two percent while each interval is narrower: thresholds below that make a gate that fails by itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pagedtune.harness.prediction_jobs import MODE
from pagedtune.kernels.record import Record, Status, Timing

from .errors import UsageError
from .stats import TIE_BAND
from .store import FILE_NAME, read_records

MIN_THRESHOLD = 0.005  # below this, clocks and page placement decide
DEFAULT_THRESHOLD = 0.02
VOLATILE_FACTS = ("load_1min", "clock_mhz", "foreign_share")  # differ from minute to minute and explain nothing lasting

Key = tuple[str, str, str, str]  # cell, candidate, timer mode, evidence


class Outcome(StrEnum):
    """How the second time relates to the first."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class Change:
    """One candidate in one cell, in both sets.

    Args:
        cell, candidate: what was timed.
        before, after: its times.
        outcome: how they relate; `why` says what it rests on.
    """

    cell: str
    candidate: str
    before: Timing
    after: Timing
    outcome: Outcome
    why: str

    @property
    def ratio(self) -> float:
        """Time after over time before."""
        return self.after.median_us / self.before.median_us


@dataclass(frozen=True)
class Comparison:
    """Everything that `pagedtune compare` shows.

    Args:
        changes: all pairs, the largest slow-down first.
        only_before, only_after: candidates that were timed in one set alone, as `cell candidate`.
        broken: candidates that were timed before and fail now, with status and reason.
        environment: facts that differ, with the values of both sets.
    """

    changes: tuple[Change, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    broken: tuple[str, ...]
    environment: Mapping[str, tuple[str, str]]

    def count(self, outcome: Outcome) -> int:
        """Pairs with this outcome."""
        return sum(change.outcome is outcome for change in self.changes)

    @property
    def mean_ratio(self) -> float | None:
        """Geometric mean of all ratios."""
        return statistics.geometric_mean([c.ratio for c in self.changes]) if self.changes else None


def load_set(path: Path) -> tuple[Record, ...]:
    """The records at `path`: a records file, a device's folder, or a results folder with one device.

    Raises:
        UsageError: nothing there, several devices, or a file that cannot be read.
    """
    if path.is_file():
        if path.name != FILE_NAME:
            raise UsageError(f"{path} is not called {FILE_NAME}: name that file, its folder, or the results folder")
        return _nonempty(path, read_records(path.parent))
    if (path / FILE_NAME).is_file():
        return _nonempty(path, read_records(path))
    devices = sorted(p.parent for p in path.glob(f"*/{FILE_NAME}"))
    if len(devices) > 1:
        raise UsageError(f"{path} has records of {', '.join(d.name for d in devices)}: name one of these folders")
    if not devices:
        raise UsageError(f"no {FILE_NAME} in {path}: name a results folder, a device's folder in it, or the file")
    return _nonempty(path, read_records(devices[0]))


def _nonempty(path: Path, records: tuple[Record, ...]) -> tuple[Record, ...]:
    if not any(r.timing is not None for r in records):
        raise UsageError(f"{path} holds no times: run `pagedtune tune` first")
    return records


def compare(before: Sequence[Record], after: Sequence[Record], threshold: float = DEFAULT_THRESHOLD) -> Comparison:
    """Pairs the candidates of two sets by cell, config, timer mode and evidence.

    Args:
        before, after: the records of the two sets.
        threshold: smallest relative difference that counts, at least 0.005.

    Raises:
        UsageError: the threshold is too low, or the sets have nothing in common.
    """
    if not MIN_THRESHOLD <= threshold < 1:
        raise UsageError(f"threshold {threshold:g} must be at least {MIN_THRESHOLD:g} and below 1")
    first, second = latest_times(before), latest_times(after)
    common = first.keys() & second.keys()
    if not common:
        _refuse_other_evidence(first, second)
        raise UsageError(
            f"the two sets have no candidate in common ({len(first)} and {len(second)} timed): compare runs of the "
            "same sweep on the same kind of device"
        )
    changes = [_change(key, _timing(first[key]), _timing(second[key]), threshold) for key in common]
    return Comparison(
        changes=tuple(sorted(changes, key=lambda c: (-c.ratio, c.cell, c.candidate))),
        only_before=_names(first.keys() - second.keys()),
        only_after=_names(second.keys() - first.keys()),
        broken=_broken(first, after),
        environment=environment_differences(before, after),
    )


def _refuse_other_evidence(first: Mapping[Key, Record], second: Mapping[Key, Record]) -> None:
    """Says so where the same candidates were measured in one set and predicted in the other."""
    kinds = [sorted({evidence for *_, evidence in keys}) for keys in (first, second)]
    if kinds[0] != kinds[1] and {key[:2] for key in first} & {key[:2] for key in second}:
        raise UsageError(
            f"the times of the first set are {', '.join(kinds[0])}, those of the second {', '.join(kinds[1])}: a "
            "predicted time is no measurement and is never set against one; compare sets of the same kind"
        )


def latest_times(records: Iterable[Record]) -> dict[Key, Record]:
    """The record with the time that counts for each candidate: of the last finals, else of the last screening."""
    best: dict[Key, Record] = {}
    for record in records:
        if record.timing is None:
            continue
        key = (record.cell_key, record.candidate_key, record.timing.mode, record.time_evidence.value)
        known = best.get(key)
        if known is None or _weight(record) >= _weight(known):
            best[key] = record
    return best


def _weight(record: Record) -> tuple[bool, str]:
    return record.stage == "final", record.recorded_at


def judge(before: Timing, after: Timing, threshold: float) -> tuple[Outcome, str]:
    """The outcome for two times of one candidate, with the reason."""
    ratio = after.median_us / before.median_us
    if before.mode == MODE:  # no samples: what differs is the model, the kernel or its counts, and exactly so
        changed = abs(ratio - 1) >= threshold
        outcome = (Outcome.SLOWER if ratio > 1 else Outcome.FASTER) if changed else Outcome.SAME
        return outcome, "both predicted, not measured"
    low, high = ratio_bounds(before, after)
    disturbed = [name for name, t in (("first", before), ("second", after)) if "others used" in t.note]
    if disturbed:
        return Outcome.UNCLEAR, f"others used the cores: {', '.join(disturbed)} set"
    if low > 1 and ratio >= 1 + threshold:
        return Outcome.SLOWER, "intervals apart"
    if high < 1 and ratio <= 1 / (1 + threshold):
        return Outcome.FASTER, "intervals apart"
    band = max(threshold, TIE_BAND)
    if low >= 1 - band and high <= 1 + band:
        return Outcome.SAME, f"within ± {band:.1%}"
    return Outcome.UNCLEAR, "intervals overlap" if low <= 1 <= high else "apart, but below the threshold"


def ratio_bounds(before: Timing, after: Timing) -> tuple[float, float]:
    """The lowest and highest ratio that the two intervals allow: (low, high); above or below 1 if they are apart."""
    return after.ci_us[0] / before.ci_us[1], after.ci_us[1] / before.ci_us[0]


def _change(key: Key, before: Timing, after: Timing, threshold: float) -> Change:
    outcome, why = judge(before, after, threshold)
    return Change(key[0], key[1], before, after, outcome, why)


def _timing(record: Record) -> Timing:
    if record.timing is None:
        raise ValueError(f"{record.key} has no time")
    return record.timing


def _names(keys: Iterable[Key]) -> tuple[str, ...]:
    return tuple(sorted({f"{cell} {candidate}" for cell, candidate, _, _ in keys}))


def _broken(first: Mapping[Key, Record], after: Sequence[Record]) -> tuple[str, ...]:
    """Candidates with a time before whose last word now is a failure."""
    timed = {(cell, candidate) for cell, candidate, _, _ in first}
    latest = {(r.cell_key, r.candidate_key): r for r in sorted(after, key=lambda r: r.recorded_at)}
    harmless = (Status.PASSED, Status.NOT_RUN)
    found = [r for key, r in latest.items() if key in timed and r.status not in harmless]
    return tuple(sorted(f"{r.cell_key} {r.candidate_key}: {r.status.value}, {r.reason.splitlines()[0]}" for r in found))


def environment_differences(before: Iterable[Record], after: Iterable[Record]) -> dict[str, tuple[str, str]]:
    """Facts of the timed records that the two sets do not share, and the device if it differs."""
    first, second = _facts(before), _facts(after)
    names = [n for n in dict.fromkeys((*first, *second)) if n not in VOLATILE_FACTS]
    pairs = {n: (first.get(n, "-"), second.get(n, "-")) for n in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _facts(records: Iterable[Record]) -> dict[str, str]:
    found: dict[str, dict[str, None]] = {}
    for record in records:
        if record.timing is None:
            continue
        facts: Mapping[str, Any] = {"device": record.device, **record.environment}
        for name, value in facts.items():
            found.setdefault(name, {})[str(value)] = None
    return {name: ", ".join(sorted(values)) for name, values in found.items()}
