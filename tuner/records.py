"""Makes the records of a run, and finds what earlier runs have already recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedtune.kernels.artifact import content_key
from pagedtune.kernels.device import Device
from pagedtune.kernels.record import Record, Status, TimeEvidence, Timing, Verdict

from .space import Candidate, Cell
from .workers import Failure

CELL_CANDIDATE = "*"  # stands for all candidates in the record of a cell that was not reached


@dataclass(frozen=True)
class Built:
    """What building a candidate gave.

    Args:
        artifact_keys: content keys of its binaries.
        resources: registers and the like.
        workspace_bytes: scratch memory by bucket key.
        failure: status and reason if there is nothing to run.
    """

    artifact_keys: tuple[str, ...] = ()
    resources: Mapping[str, int] = field(default_factory=dict)
    workspace_bytes: Mapping[str, int] = field(default_factory=dict)
    failure: Failure | None = None


BuildKey = tuple[str, str, str]  # candidate, problem, format
Builds = Mapping[BuildKey, Built]


def build_key(cell: Cell, candidate: Candidate) -> BuildKey:
    """What a build depends on: the buckets of a problem and format share it."""
    return candidate.key, cell.problem.key, cell.pool_format.key


@dataclass(frozen=True)
class RunFacts:
    """What all records of a run share.

    Args:
        run_id: name of the run.
        device: where it runs.
        environment: versions, host, clocks.
        settings: of the run: sweep, seed, timer mode, source revision.
        code: key over the gate's and the timer's own source: a verdict or a time of another harness is not reused.
        present: whether the device is in this machine: if not, verdicts are emulated and times predicted.
    """

    run_id: str
    device: Device
    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    code: str
    present: bool = True

    def record(
        self,
        cell: Cell,
        candidate: Candidate,
        built: Built,
        stage: str,
        outcome: Failure | Timing | None,
        counters: Mapping[str, Any] | None = None,
    ) -> Record:
        """The record of `candidate` at `stage`: a failure, a time, or (None) a passed gate.

        `counters` is what a predicted time is made of.
        """
        proven = Verdict.ON_DEVICE if self.present else Verdict.EMULATED
        timed = TimeEvidence.MEASURED if self.present else TimeEvidence.PREDICTED
        timing = outcome if isinstance(outcome, Timing) else None
        status, reason = outcome if isinstance(outcome, tuple) else (Status.PASSED, "")
        passed = status is Status.PASSED
        return self._record(
            cell,
            variant=candidate.variant.name,
            config=dict(candidate.config),
            stage=stage,
            status=status,
            reason=reason,
            verdict=proven if passed else Verdict.NONE,
            timing=timing,
            time_evidence=TimeEvidence.NONE if timing is None else timed,
            artifact_keys=built.artifact_keys,
            resources={**built.resources, "workspace_bytes": built.workspace_bytes.get(cell.bucket.key, 0)},
            counters=dict(counters or {}),
            environment=dict(self.environment) if timing is not None else {},
            provenance={
                **self._provenance(cell),
                "ref": candidate.variant.ref,
                "order": candidate.order,
                "is_default": candidate.is_default,
                "source": candidate.variant.source,
            },
        )

    def not_reached(self, cell: Cell, reason: str) -> Record:
        """The record of a cell that the run did not come to."""
        return self._record(
            cell,
            variant=CELL_CANDIDATE,
            config={},
            stage="gate",
            status=Status.NOT_RUN,
            reason=reason,
            verdict=Verdict.NONE,
            provenance=self._provenance(cell),
        )

    def _record(self, cell: Cell, **fields: Any) -> Record:
        return Record(
            run_id=self.run_id,
            device=self.device.fingerprint,
            op=cell.op.value,
            model=cell.model,
            problem=cell.problem,
            pool_format=cell.pool_format,
            bucket=cell.bucket,
            workload=cell.workload.name,
            **fields,
        )

    def _provenance(self, cell: Cell) -> dict[str, Any]:
        return {
            **self.settings,
            "code": self.code,
            "bucket_weight": cell.bucket_weight,
            "num_layers": cell.num_layers,
            "mean_context": cell.mean_context,
            "stream_gb_s": self.device.bandwidth_gb_s,
        }


class History:
    """What has been recorded, as the next step of a run asks for it: only outcomes that still hold."""

    def __init__(self, facts: RunFacts, records: Iterable[Record]) -> None:
        self._facts = facts
        self._latest: dict[tuple[str, ...], Record] = {}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Takes a record in; a later one of the same identity supersedes it."""
        if record.device != self._facts.device.fingerprint:
            return
        mode = record.timing.mode if record.timing is not None else ""
        known = self._latest.get(identity := (record.key, *self._validity(record.provenance), mode))
        if known is None or known.recorded_at <= record.recorded_at:
            self._latest[identity] = record

    def find(self, cell: Cell, candidate: Candidate, built: Built, stage: str, mode: str = "") -> Record | None:
        """The outcome of `candidate` at `stage`, unless it was made by other code, binaries or timer mode.

        NOT_RUN is no outcome. A failure at a timed stage has no mode.
        """
        probe = self._facts.record(cell, candidate, built, stage, None)
        validity = self._validity(probe.provenance)
        found = [self._latest.get((probe.key, *validity, m)) for m in dict.fromkeys((mode, ""))]
        known = [r for r in found if r is not None and r.status is not Status.NOT_RUN]
        return max(known, key=lambda r: r.recorded_at, default=None)

    def knows(self, record: Record) -> bool:
        """Whether an outcome of this identity is there already, NOT_RUN included."""
        mode = record.timing.mode if record.timing is not None else ""
        return (record.key, *self._validity(record.provenance), mode) in self._latest

    @staticmethod
    def _validity(provenance: Mapping[str, Any]) -> tuple[str, str]:
        return str(provenance.get("source", "")), str(provenance.get("code", ""))


def harness_key(virtual: bool = False) -> str:
    """Key over the source of the gate and the timer, and with `virtual` over that of the virtual GPU too."""
    import pagedtune.harness.worker

    folder = Path(pagedtune.harness.worker.__file__).parent
    paths = [*sorted(folder.iterdir()), *(sorted((folder / "vgpu").rglob("*")) if virtual else ())]
    files = [p for p in paths if p.suffix in (".py", ".cpp", ".h")]
    return content_key({p.relative_to(folder).as_posix(): p.read_text() for p in files})
