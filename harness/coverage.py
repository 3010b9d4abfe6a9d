"""What a check covered: for each variant and op, every value of every dimension with what became of its cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from pagedtune.harness.case import Case
from pagedtune.harness.checking import Outcome
from pagedtune.kernels.record import Status
from pagedtune.kernels.variant import Op


@dataclass(frozen=True)
class Tally:
    """Counts of cases by what became of them; `worst` is the largest error ratio, None where nothing was measured."""

    passed: int = 0
    failed: int = 0
    not_run: int = 0
    rejected: int = 0
    worst: float | None = None

    @property
    def ran(self) -> int:
        """Cases with a verdict."""
        return self.passed + self.failed

    @property
    def is_green(self) -> bool:
        """Whether something ran, and everything that should have run passed. What nobody ran is never green."""
        return self.passed > 0 and self.failed == 0 and self.not_run == 0

    def plus(self, outcome: Outcome) -> Tally:
        """This tally and one more outcome."""
        worst = self.worst
        if outcome.error_ratio is not None:
            worst = outcome.error_ratio if worst is None else _larger(worst, outcome.error_ratio)
        return replace(
            self,
            passed=self.passed + (outcome.status is Status.PASSED),
            failed=self.failed + outcome.failed,
            not_run=self.not_run + (outcome.status is Status.NOT_RUN),
            rejected=self.rejected + (outcome.status is Status.REJECTED),
            worst=worst,
        )


@dataclass
class Coverage:
    """Tallies of one variant: in total, and by dimension and value in the order of first appearance."""

    variant: str
    op: Op
    total: Tally = Tally()
    by_value: dict[str, dict[str, Tally]] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Counts one outcome in every dimension."""
        self.total = self.total.plus(outcome)
        for dimension, values_of in DIMENSIONS.items():
            tallies = self.by_value.setdefault(dimension, {})
            for value in values_of(outcome.planned.case):
                tallies[value] = tallies.get(value, Tally()).plus(outcome)


def coverage_of(outcomes: Iterable[Outcome]) -> tuple[Coverage, ...]:
    """One coverage per variant and op, values sorted within each dimension."""
    found: dict[tuple[str, Op], Coverage] = {}
    for outcome in outcomes:
        planned = outcome.planned
        key = (planned.ref, planned.op)
        found.setdefault(key, Coverage(planned.variant, planned.op)).add(outcome)
    for coverage in found.values():
        coverage.by_value = {
            dimension: dict(sorted(tallies.items(), key=lambda item: _natural(item[0])))
            for dimension, tallies in coverage.by_value.items()
        }
    return tuple(found.values())


def shortfall(coverage: Coverage, allow_missing: bool) -> str:
    """Why this variant does not count as checked, or nothing.

    A rejected case is a limit that the variant states itself: it is shown and does not fail. A variant that rejects
    everything proves nothing, and does.
    """
    total = coverage.total
    if total.failed:
        return f"{total.failed} of {total.ran} cases that ran failed"
    if total.not_run and not allow_missing:
        return f"{total.not_run} cases were not run (--allow-missing accepts that)"
    if not total.ran and not total.not_run:
        return "it rejects every case, so nothing was checked"
    return ""


def missing(outcomes: Iterable[Outcome], status: Status) -> Mapping[tuple[str, Op, str], int]:
    """How many cases have `status`, by variant, op and reason."""
    counts: dict[tuple[str, Op, str], int] = {}
    for outcome in outcomes:
        if outcome.status is status:
            key = (outcome.planned.variant, outcome.planned.op, outcome.reason)
            counts[key] = counts.get(key, 0) + 1
    return counts


def _features(case: Case) -> tuple[str, ...]:
    problem = case.problem
    present = {
        "window": problem.window is not None,
        "soft_cap": problem.soft_cap is not None,
        "sinks": problem.sinks,
        "alibi": problem.alibi,
        "scale": problem.scale is not None,
    }
    return tuple(name for name, is_there in present.items() if is_there) or ("plain",)


def _head_dim(case: Case) -> str:
    dim, dim_v = case.problem.head_dim, case.problem.head_dim_v
    return str(dim) if dim == dim_v else f"{dim}v{dim_v}"


DIMENSIONS: Mapping[str, Callable[[Case], tuple[str, ...]]] = {
    "family": lambda case: (case.family.value,),
    "hazard": lambda case: tuple(hazard.value for hazard in case.hazards) or ("plain",),
    "feature": _features,
    "q dtype": lambda case: (case.problem.q_dtype.value,),
    "kv dtype": lambda case: (case.pool_format.kv_dtype.value,),
    "head dim": lambda case: (_head_dim(case),),
    "GQA ratio": lambda case: (str(case.problem.gqa_ratio),),
    "block size": lambda case: (str(case.pool_format.block_size),),
    "layout": lambda case: (case.pool_format.layout.value,),
    "scales": lambda case: (case.pool_format.scale_kind.value,),
    "queries": lambda case: ("1",) if case.problem.max_query_len == 1 else (">1",),
    "lengths": lambda case: (case.workload.name,),
}


def _larger(a: float, b: float) -> float:
    return a if math.isnan(a) or a >= b else b  # NaN is the worst of all, and stays


def _natural(value: str) -> tuple[int, str]:
    """Numbers by size, before words."""
    digits = value.partition("v")[0]
    return (int(digits), value) if digits.isdigit() else (1 << 30, value)
