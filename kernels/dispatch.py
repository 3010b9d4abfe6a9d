"""Which variant and config serve a launch: what tuning decides and the runtime looks up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .bounds import Bounds, Bucket, bucket_of
from .pool_format import PoolFormat
from .problem import Problem
from .record import TimeEvidence, Verdict


@dataclass(frozen=True)
class Winner:
    """What won one cell, and how well that is known.

    Args:
        op, model, problem, pool_format, bucket, workload: the cell.
        variant, config: what won.
        median_us: its time, in microseconds; `ci_us` its 95 % bootstrap interval.
        bandwidth_gb_s: KV bytes over the median, in 10^9 bytes/s.
        verdict, time_evidence: how right and how fast were established; those of the times that chose it.
        runner_up: candidate key of the second, empty if alone.
        margin: time of the runner-up over that of the winner, minus 1, by paired ratio where there is one.
        ties: candidates whose ratio to the winner has a confidence interval within ± 1 %.
        speedup_eager, speedup_default: time of `eager` and of the variant's default config over this time, None
            where that was not timed.
        artifact_keys: binaries that were proven and timed.
    """

    op: str
    model: str
    problem: Problem
    pool_format: PoolFormat
    bucket: Bucket
    workload: str
    variant: str
    config: dict[str, Any]
    median_us: float
    ci_us: tuple[float, float]
    bandwidth_gb_s: float
    verdict: Verdict
    time_evidence: TimeEvidence
    runner_up: str = ""
    margin: float | None = None
    ties: tuple[str, ...] = ()
    speedup_eager: float | None = None
    speedup_default: float | None = None
    artifact_keys: tuple[str, ...] = ()

    @property
    def cell(self) -> tuple[str, str, Problem, PoolFormat, Bucket, str]:
        """Identity of its cell."""
        return self.op, self.model, self.problem, self.pool_format, self.bucket, self.workload


@dataclass(frozen=True)
class DispatchTable:
    """Winners of one device: problem x format x bucket -> variant and config.

    Args:
        device: `Device.fingerprint` that the times are of.
        entries: one winner per cell.
        chosen_formats: by model, the one pool format that its pool should have (the outer decision).
        schema: version of this table's form.
    """

    device: str
    entries: tuple[Winner, ...]
    chosen_formats: dict[str, PoolFormat] = field(default_factory=dict)
    schema: int = 1

    def lookup(self, problem: Problem, pool_format: PoolFormat, bounds: Bounds, op: str = "attention") -> Winner | None:
        """The winner of the bucket of `bounds`, or of the nearest larger tuned one; None beyond the tuned range.

        Outside the tuned rectangle nothing was measured: the caller takes the variant's default config, and says so.
        """
        bucket = bucket_of(bounds)
        fits = [
            e
            for e in self.entries
            if (e.op, e.problem, e.pool_format) == (op, problem, pool_format) and _covers(e.bucket, bucket)
        ]
        return min(fits, key=lambda e: (e.bucket, e.workload), default=None)


def _covers(tuned: Bucket, asked: Bucket) -> bool:
    return (
        tuned.max_num_seqs >= asked.max_num_seqs
        and tuned.max_context_len >= asked.max_context_len
        and tuned.max_query_len == asked.max_query_len
    )
