"""One outcome, and the closed sets of how it can be known. Failure is data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .bounds import Bucket
from .pool_format import PoolFormat
from .problem import Problem

SCHEMA_VERSION = 1


class Status(StrEnum):
    """What became of a candidate."""

    PASSED = "passed"
    WRONG = "wrong"  # an answer outside the bound, or a broken promise of determinism or invariance
    CORRUPTED = "corrupted"  # wrote outside its output, or changed an input
    CRASHED = "crashed"  # raised, or ended its process
    TIMEOUT = "timeout"
    BUILD_FAILED = "build_failed"
    REJECTED = "rejected"  # by the variant's own constraints or the static check; never run
    TOO_FAST = "too_fast"  # below the roofline floor: a failure of the kernel or of the timer
    NOT_RUN = "not_run"  # with its reason: no device, no budget


class Verdict(StrEnum):
    """How correctness was established."""

    NONE = "none"
    EMULATED = "emulated"
    ON_DEVICE = "on-device"


class TimeEvidence(StrEnum):
    """How a time was obtained. Predicted and measured times never share a column."""

    NONE = "none"
    PREDICTED = "predicted"
    MEASURED = "measured"
    TRANSFERRED = "transferred"  # measured on another card of the family


@dataclass(frozen=True)
class Timing:
    """Times of one candidate in one cell.

    Args:
        mode: what was timed and how, part of the cell's key: e.g. `cold` (rotating pools beyond the last-level
            cache) or `hot`.
        samples_us: each sample, in the order taken, in microseconds.
        median_us: their median.
        ci_us: 95 % bootstrap confidence interval of the median, in microseconds.
        kv_bytes: KV bytes that one launch must read; of a cache operation, read and write together.
        rejected: samples dropped because something else used the machine.
        note: what the reader must know, e.g. that the budget ended before the target interval.
        pair_ratios: in finals, time ratio to the incumbent in each interleaved round (empty otherwise).
        ratio_ci: 95 % bootstrap interval of the median ratio to the incumbent.
    """

    mode: str
    samples_us: tuple[float, ...]
    median_us: float
    ci_us: tuple[float, float]
    kv_bytes: int
    rejected: int = 0
    note: str = ""
    pair_ratios: tuple[float, ...] = ()
    ratio_ci: tuple[float, float] | None = None

    @property
    def bandwidth_gb_s(self) -> float:
        """KV bytes over the median time, in 10^9 bytes/s."""
        return self.kv_bytes / self.median_us / 1e3


@dataclass(frozen=True)
class Record:
    """One outcome of one candidate in one cell.

    Args:
        run_id: the tune that made it.
        device: `Device.fingerprint`.
        op: what was computed.
        model: name of the model config it came from.
        problem, pool_format, bucket: the cell.
        workload: name of the distribution of lengths within the bucket.
        variant, config: the candidate; `config` by tunable.
        stage: `gate`, `screen` or `final`.
        status: what became of it; `reason` says why unless it passed.
        verdict, time_evidence: how the two were obtained.
        timing: only where the status is passed.
        artifact_keys: content keys of the binaries.
        environment: versions, host, clocks: what a later reader needs to judge a time.
        provenance: source revision and settings of the run.

    Raises:
        ValueError: a combination that cannot be: a time without a passed verdict, evidence without a time, or a
            failure without a reason.
    """

    run_id: str
    device: str
    op: str
    model: str
    problem: Problem
    pool_format: PoolFormat
    bucket: Bucket
    workload: str
    variant: str
    config: dict[str, Any]
    stage: str
    status: Status
    verdict: Verdict
    time_evidence: TimeEvidence = TimeEvidence.NONE
    reason: str = ""
    timing: Timing | None = None
    artifact_keys: tuple[str, ...] = ()
    resources: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    recorded_at: str = ""
    schema: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        passed = self.status is Status.PASSED
        if (self.timing is None) != (self.time_evidence is TimeEvidence.NONE):
            raise ValueError(f"time_evidence={self.time_evidence} does not fit timing={self.timing is not None}")
        if self.timing is not None and not (passed and self.verdict is not Verdict.NONE):
            raise ValueError(f"a time needs a passed verdict, not status={self.status}, verdict={self.verdict}")
        if not passed and not self.reason:
            raise ValueError(f"status={self.status} needs a reason")

    @property
    def candidate_key(self) -> str:
        """Identity of variant and config, e.g. `cpu_split[split_tokens=512]`."""
        inner = ",".join(f"{k}={v}" for k, v in self.config.items())
        return f"{self.variant}[{inner}]"

    @property
    def cell_key(self) -> str:
        """Identity of where it ran: what its time may be compared with."""
        return "|".join((self.op, self.model, self.problem.key, self.pool_format.key, self.bucket.key, self.workload))

    @property
    def key(self) -> str:
        """Identity of the outcome within a result set: a second record of this key supersedes the first."""
        return f"{self.device}|{self.cell_key}|{self.candidate_key}|{self.stage}|{','.join(self.artifact_keys)}"
