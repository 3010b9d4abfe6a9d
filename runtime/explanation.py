"""Why a kernel serves a launch, in words and with its evidence."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.bounds import Bounds, Bucket
from ..kernels.record import TimeEvidence, Verdict
from .dispatch import Selection
from .ladder import Rung


@dataclass(frozen=True)
class Explanation:
    """Which kernel serves a launch, and why.

    Args:
        bounds: of the launch.
        bucket: those the kernel is planned for.
        variant, config: the kernel; `config` as its canonical key.
        rung: how well the choice is founded.
        why: in one sentence.
        verdict, time_evidence: how right and how fast were established for this cell: `none` where no table decides,
            and no time where splits were recomputed; `transferred` where another device was measured.
        median_us: the time at the bounds of the table's cell, in microseconds, where there is one.
        artifact_keys: content keys of the binaries.
        passed_over: better choices that could not be taken, and why not.
    """

    bounds: Bounds
    bucket: Bucket
    variant: str
    config: str
    rung: Rung
    why: str
    verdict: Verdict = Verdict.NONE
    time_evidence: TimeEvidence = TimeEvidence.NONE
    median_us: float | None = None
    artifact_keys: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        time = "not measured" if self.median_us is None else f"{self.median_us:.1f} us, {self.time_evidence}"
        lines = [
            f"{self.bucket.key}: {self.variant}[{self.config}]",
            f"  rung {self.rung}: {self.why}",
            f"  verdict {self.verdict}, time {time}",
            *(f"  passed over: {reason}" for reason in self.passed_over),
        ]
        return "\n".join(lines)


def explain(bounds: Bounds, selection: Selection) -> Explanation:
    """The explanation of a choice that was made for `bounds`."""
    winner = selection.winner
    verdict, evidence, median_us = Verdict.NONE, TimeEvidence.NONE, None
    if winner is not None:
        verdict = winner.verdict
    if winner is not None and winner.config == selection.config.as_dict():  # else splits were recomputed
        evidence, median_us = winner.time_evidence, winner.median_us
        if selection.rung is not Rung.EXACT and evidence is TimeEvidence.MEASURED:
            evidence = TimeEvidence.TRANSFERRED
    return Explanation(
        bounds=bounds,
        bucket=selection.bucket,
        variant=selection.variant.name,
        config=selection.config.key,
        rung=selection.rung,
        why=selection.why,
        verdict=verdict,
        time_evidence=evidence,
        median_us=median_us,
        artifact_keys=tuple(artifact.key for artifact in selection.artifacts),
        passed_over=selection.passed_over,
    )
