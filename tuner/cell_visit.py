"""What every visit to a cell needs: its candidates' builds, what is known of them, and proving them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagedtune.harness.worker import WorkerError, WorkerTimeout
from pagedtune.kernels.record import Record, Status, Timing
from pagedtune.kernels.serial import to_jsonable

from .bench import Bench
from .budget import Slice
from .records import build_key
from .space import Candidate, Cell
from .workers import Failure, failure_of


class CellVisit:
    """One visit to one cell. Every outcome is a record before the next step begins."""

    def __init__(self, bench: Bench, cell: Cell, candidates: Sequence[Candidate], time: Slice) -> None:
        """`candidates` come in the order in which they are tried."""
        self._bench, self._cell, self._time = bench, cell, time
        self._built = {c.key: bench.builds[build_key(cell, c)] for c in candidates}
        self._candidates = candidates

    def _prove_batch(self, batch: Sequence[Candidate]) -> Iterator[tuple[Candidate, bool]]:
        runnable = []
        for candidate in batch:
            failure = self._built[candidate.key].failure
            if failure is None:
                runnable.append(candidate)
            else:
                self._keep(candidate, "gate", failure)
                yield candidate, False
        bench = self._bench
        limit_s = self._time.job_limit_s(bench.limit_s)
        for candidate, answer in bench.pool.map(bench.jobs.check, runnable, self._check_payload, limit_s):
            if isinstance(answer, WorkerTimeout) and limit_s < bench.limit_s:  # the budget's limit, not its own
                self._record_not_run([candidate])
                yield candidate, False
                continue
            outcome = failure_of(answer) if isinstance(answer, WorkerError) else verdict_of(answer)
            self._keep(candidate, "gate", outcome)
            bench.progress.candidate(candidate.key, "proven" if outcome is None else outcome[0].value)
            yield candidate, outcome is None

    def _record_not_run(self, candidates: Sequence[Candidate]) -> None:
        reason = "the budget of this run ended before this candidate; the same command goes on with it"
        records = [
            self._bench.facts.record(self._cell, c, self._built[c.key], "gate", (Status.NOT_RUN, reason))
            for c in candidates
        ]
        for record in self._bench.store.append(*(r for r in records if not self._bench.history.knows(r))):
            self._bench.history.add(record)

    def _check_payload(self, candidate: Candidate) -> dict[str, Any]:
        return {**self._where(), **candidate_payload(candidate), "bucket": to_jsonable(self._cell.bucket)}

    def _where(self) -> dict[str, Any]:
        return {
            "op": self._cell.op.value,
            "problem": to_jsonable(self._cell.problem),
            "pool_format": to_jsonable(self._cell.pool_format),
            "device": to_jsonable(self._bench.facts.device),
        }

    def _known(self, candidate: Candidate, stage: str) -> Record | None:
        mode = "" if stage == "gate" else self._bench.mode
        return self._bench.history.find(self._cell, candidate, self._built[candidate.key], stage, mode)

    def _keep(
        self,
        candidate: Candidate,
        stage: str,
        outcome: Failure | Timing | None,
        counters: Mapping[str, Any] | None = None,
    ) -> None:
        bench = self._bench
        bench.keep(bench.facts.record(self._cell, candidate, self._built[candidate.key], stage, outcome, counters))

    def _show_best(self, times: dict[str, float]) -> None:
        if times:
            best = min(times, key=lambda key: times[key])
            self._bench.progress.best(best, times[best])


def candidate_payload(candidate: Candidate) -> dict[str, Any]:
    """A candidate as jobs take it."""
    return {"variant": candidate.variant.ref, "config": dict(candidate.config)}


def verdict_of(answer: Sequence[dict[str, Any]]) -> Failure | None:
    """None if every case that the variant takes passed, else the first failure with the case's name."""
    failed = [case for case in answer if case["status"] not in (Status.PASSED, Status.REJECTED)]
    if failed:
        return Status(failed[0]["status"]), f"{failed[0]['case_key']}: {failed[0]['reason']}"
    if not any(case["status"] == Status.PASSED for case in answer):
        return Status.NOT_RUN, "the gate ran no case for this cell, so nothing is proven"
    return None
