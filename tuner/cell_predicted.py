"""Ranks one cell for a device that is not in this machine: predict, then prove the best.

Predicting is cheap and proving is not, so every candidate is predicted first, as far as the budget goes, and then the
best are proven on the virtual GPU, in order, until FINALISTS of them have passed. Only those get a time in the records,
and none that is slower than one whose proof the budget cut short: it would win for want of the better one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedtune.harness.worker import WorkerError, WorkerTimeout
from pagedtune.kernels.record import Record, Status, Timing
from pagedtune.kernels.serial import from_jsonable, to_jsonable

from .cell_visit import CellVisit
from .space import Candidate
from .workers import Failure, failure_of

MAX_PREDICTED = 28  # new candidates of a visit; another run goes on with the next ones
FINALISTS = 3  # that are proven: what calibration on a device later chooses among


@dataclass(frozen=True)
class Predicted:
    """A candidate's predicted time with the terms it is made of."""

    timing: Timing
    counters: Mapping[str, Any]


class PredictedRun(CellVisit):
    """One visit to one cell whose device is not here."""

    def run(self) -> None:
        """All stages; what is recorded already is not done again."""
        predicted = self._predict(self._without_failures())
        by_time = sorted((c for c in self._candidates if c.key in predicted), key=lambda c: _time_of(predicted[c.key]))
        self._show_best({c.key: _time_of(predicted[c.key]) for c in by_time})
        proven = self._prove_best(by_time, predicted)
        self._record_slower(by_time, predicted, proven)

    def _without_failures(self) -> list[Candidate]:
        """Candidates that are built, fit on the device, and have not failed before; the others get their record."""
        open_ = []
        for candidate in self._candidates:
            failure = self._built[candidate.key].failure
            known = self._known(candidate, "gate")
            if failure is not None and known is None:
                self._keep(candidate, "gate", failure)
            elif failure is None and (known is None or known.status is Status.PASSED):
                open_.append(candidate)
        return open_

    # --- predict -------------------------------------------------------------------------------------------------

    def _predict(self, candidates: Sequence[Candidate]) -> dict[str, Predicted]:
        """Predictions by candidate key; the defaults come first, so a short budget has what speed-ups relate to."""
        predicted: dict[str, Predicted] = {}
        open_: list[Candidate] = []
        for candidate in candidates:
            known = self._known(candidate, "screen")
            if known is None:
                open_.append(candidate)
            elif known.timing is not None:
                predicted[candidate.key] = Predicted(known.timing, known.counters)
        open_, later = open_[:MAX_PREDICTED], open_[MAX_PREDICTED:]
        while open_ and (self._time.may_prove or (not predicted and self._time.in_budget)):
            batch, open_ = open_[: self._bench.pool.size], open_[self._bench.pool.size :]
            predicted |= self._predict_batch(batch)
        self._record_not_run([*open_, *later])
        return predicted

    def _predict_batch(self, batch: Sequence[Candidate]) -> dict[str, Predicted]:
        bench, found = self._bench, dict[str, Predicted]()
        limit_s = self._time.job_limit_s(bench.limit_s)
        for candidate, answer in bench.pool.map(bench.jobs.predict, batch, self._payload, limit_s):
            if isinstance(answer, WorkerTimeout) and limit_s < bench.limit_s:  # the budget's limit, not its own
                self._record_not_run([candidate])
                continue
            outcome = failure_of(answer) if isinstance(answer, WorkerError) else _prediction(answer)
            if isinstance(outcome, Predicted):
                found[candidate.key] = outcome
            else:
                self._keep(candidate, "screen", outcome)
            bench.progress.candidate(candidate.key, "predicted" if isinstance(outcome, Predicted) else outcome[0].value)
        return found

    def _payload(self, candidate: Candidate) -> dict[str, Any]:
        return {**self._check_payload(candidate), "workload": to_jsonable(self._cell.workload)}

    # --- prove ---------------------------------------------------------------------------------------------------

    def _prove_best(self, by_time: Sequence[Candidate], predicted: Mapping[str, Predicted]) -> list[Candidate]:
        """Proves candidates from the best on until enough have passed, and the winner's default config."""
        proven: list[Candidate] = []
        open_, batch_s, clock = list(by_time), 0.0, self._time.clock
        while open_ and len(proven) < FINALISTS and (self._time.left_s > batch_s or self._first_of(proven)):
            size = min(self._bench.pool.size, FINALISTS - len(proven))
            batch, open_, start_s = open_[:size], open_[size:], clock()
            proven += self._prove_and_time(batch, predicted)
            batch_s = max(batch_s, clock() - start_s)
            if any(self._known(c, "gate") is None for c in batch):  # the budget cut it short
                return proven
        if proven and self._time.left_s > batch_s:
            best = min(proven, key=lambda c: _time_of(predicted[c.key]))
            default = [c for c in open_ if c.is_default and c.variant.name == best.variant.name]
            proven += self._prove_and_time(default, predicted)
        return proven

    def _first_of(self, proven: Sequence[Candidate]) -> bool:
        """Whether the cell's slice may be overrun: only for its first proven candidate, and within the budget."""
        return not proven and self._time.in_budget

    def _prove_and_time(self, batch: Sequence[Candidate], predicted: Mapping[str, Predicted]) -> list[Candidate]:
        """Those of the batch that pass the gate, now or earlier, each with a record of its time."""
        known = {c.key: self._known(c, "gate") for c in batch}
        passed = [c for c in batch if _passed(known[c.key])]
        passed += [c for c, ok in self._prove_batch([c for c in batch if known[c.key] is None]) if ok]
        cut_us = min(
            (_time_of(predicted[c.key]) for c in batch if self._known(c, "gate") is None), default=float("inf")
        )
        passed = [c for c in passed if _time_of(predicted[c.key]) <= cut_us]
        for candidate in passed:
            if self._known(candidate, "screen") is None:
                outcome = predicted[candidate.key]
                self._keep(candidate, "screen", outcome.timing, outcome.counters)
        return passed

    def _record_slower(
        self, by_time: Sequence[Candidate], predicted: Mapping[str, Predicted], proven: Iterable[Candidate]
    ) -> None:
        """Says of the others why they have no time: what is not proven gets none, and keeps what was counted."""
        best_us = min((_time_of(predicted[c.key]) for c in proven), default=None)
        if best_us is None:
            return
        done = {c.key for c in proven}
        reasons = {
            c: f"not proven: predicted at {_time_of(predicted[c.key]) / best_us:.2f} times the best proven candidate"
            for c in by_time
            if c.key not in done and self._known(c, "gate") is None
        }
        records = [
            self._bench.facts.record(
                self._cell, c, self._built[c.key], "screen", (Status.NOT_RUN, reason), predicted[c.key].counters
            )
            for c, reason in reasons.items()
        ]
        for record in self._bench.store.append(*(r for r in records if not self._bench.history.knows(r))):
            self._bench.history.add(record)


def _time_of(predicted: Predicted) -> float:
    return predicted.timing.median_us


def _passed(record: Record | None) -> bool:
    return record is not None and record.status is Status.PASSED


def _prediction(answer: Mapping[str, Any]) -> Predicted | Failure:
    if "status" in answer:
        return Status(answer["status"]), str(answer["reason"])
    return Predicted(from_jsonable(Timing, answer["timing"]), answer["counters"])
