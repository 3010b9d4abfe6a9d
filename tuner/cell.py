"""Tunes one cell: prove, screen, finals. Nothing is timed that did not pass, and every outcome is a record."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from pagedtune.harness.worker import WorkerError, WorkerTimeout
from pagedtune.kernels.record import Status, Timing
from pagedtune.kernels.serial import from_jsonable, to_jsonable

from .cell_visit import CellVisit, candidate_payload
from .select import BASELINE
from .space import Candidate
from .workers import Failure, failure_of

SCREEN_KEEP = 1.5  # a candidate slower than this times the best screened one is dropped
FINAL_BAND = 1.10  # finalists are within this of the best screened one
MAX_FINALISTS = 6
SLOW_BASELINE = 12.0  # a slower `eager` stays out of the finals: its rounds would take all their time
DEVICE_WAIT_S = 600.0
OVERRUN_S = 60.0  # a timing job may take this much longer than its budget (filling pools) before it counts as hung


class CellRun(CellVisit):
    """One visit to one cell whose device is here."""

    def run(self) -> None:
        """All stages; what is recorded already is not done again."""
        passed = self._prove()
        times = self._screen(passed)
        self._finals(times)

    # --- prove ---------------------------------------------------------------------------------------------------

    def _prove(self) -> list[Candidate]:
        """The candidates that have passed the gate, now or earlier, in order of trial."""
        open_, passed = [], []
        for candidate in self._candidates:
            known = self._known(candidate, "gate")
            if known is None:
                open_.append(candidate)
            elif known.status is Status.PASSED:
                passed.append(candidate)
        while open_ and (self._time.may_prove or (not passed and self._time.in_budget)):
            batch, open_ = open_[: self._bench.pool.size], open_[self._bench.pool.size :]
            passed += [candidate for candidate, ok in self._prove_batch(batch) if ok]
        self._record_not_run(open_)
        return [c for c in self._candidates if c in passed]

    # --- screen --------------------------------------------------------------------------------------------------

    def _screen(self, passed: Sequence[Candidate]) -> dict[str, float]:
        """Median times in µs by candidate key: successive halving, each round twice as long per candidate."""
        times: dict[str, float] = {}
        alive: list[Candidate] = []
        for candidate in passed:
            known = self._known(candidate, "screen")
            if known is None:
                alive.append(candidate)
            elif known.timing is not None:
                times[candidate.key] = known.timing.median_us
        if len(alive) == 1 and not times:  # nothing to compare with: the finals time it
            return {alive[0].key: 0.0}
        seconds = self._time.screen_s
        while alive:
            seconds /= 2
            timed = dict(self._time_all(alive, "screen", seconds))
            good = {c.key: t.median_us for c, t in timed.items() if isinstance(t, Timing)}
            ahead = self._better_half(list(timed), good)
            for candidate, outcome in timed.items():
                if candidate not in ahead:
                    self._keep(candidate, "screen", outcome)
            times |= good
            self._show_best(times)
            alive = ahead
        return times

    @staticmethod
    def _better_half(candidates: Sequence[Candidate], times: dict[str, float]) -> list[Candidate]:
        """Who goes on to another round; nobody, once all of them can be finalists."""
        best = min(times.values(), default=0.0)
        near = sorted(
            (c for c in candidates if times.get(c.key, float("inf")) <= SCREEN_KEEP * best), key=lambda c: times[c.key]
        )
        return near[: max(MAX_FINALISTS, len(near) // 2)] if len(near) > MAX_FINALISTS < len(candidates) else []

    # --- finals --------------------------------------------------------------------------------------------------

    def _finals(self, times: dict[str, float]) -> None:
        """Times the best candidates and the two baselines in interleaved rounds; one group of records."""
        finalists = self._finalists(times)
        if not finalists or self._already_decided(finalists):
            return
        bench, group = self._bench, uuid.uuid4().hex[:12]
        timed = list(self._time_all(finalists, "final", self._time.left_s))
        if not timed:
            return
        records = [bench.facts.record(self._cell, c, self._built[c.key], "final", outcome) for c, outcome in timed]
        for record in bench.store.append_group(records, group):
            bench.history.add(record)
        self._show_best({c.key: t.median_us for c, t in timed if isinstance(t, Timing)})

    def _finalists(self, times: dict[str, float]) -> list[Candidate]:
        """The incumbent first, then those near it, then what the speed-ups are relative to."""
        by_time = sorted((c for c in self._candidates if c.key in times), key=lambda c: times[c.key])
        if not by_time:
            return []
        best = by_time[0]
        near = [c for c in by_time if times[c.key] <= FINAL_BAND * times[best.key]][:MAX_FINALISTS]
        variant = best.variant.name
        baselines = [
            c
            for c in by_time
            if (c.is_default and c.variant.name == variant)
            or (c.variant.name == BASELINE and times[c.key] <= SLOW_BASELINE * times[best.key])
        ]
        return list(dict.fromkeys((*near, *baselines)))

    def _already_decided(self, finalists: Sequence[Candidate]) -> bool:
        """Whether earlier finals had all of these (drift since then decides nothing new)."""
        known = [self._known(c, "final") for c in finalists]
        groups = {r.provenance.get("group") for r in known if r is not None}
        return None not in known and len(groups) == 1

    # --- shared --------------------------------------------------------------------------------------------------

    def _time_all(
        self, candidates: Sequence[Candidate], stage: str, wall_s: float
    ) -> Iterator[tuple[Candidate, Timing | Failure]]:
        """Times all in one job; if it dies, each alone, so that only the guilty one fails. None if the budget ends."""
        bench, clock = self._bench, self._time.clock
        sampling_s = bench.pace.sampling_s(stage, wall_s)
        payload = {
            **self._where(),
            "bucket": to_jsonable(self._cell.bucket),
            "workload": to_jsonable(self._cell.workload),
            "candidates": [candidate_payload(c) for c in candidates],
            "mode": bench.mode,
            "stage": stage,
            "budget_s": sampling_s,
            "seed": bench.seed,
        }
        bench.wait_for_device()
        start_s, full_s = clock(), 2 * sampling_s + OVERRUN_S
        limit_s = self._time.job_limit_s(full_s)
        try:
            answers = bench.pool.call(bench.jobs.time, payload, limit_s)
        except WorkerError as error:
            if isinstance(error, WorkerTimeout) and limit_s < full_s:  # it proves nothing against the candidates
                bench.progress.note(f"the budget ended while {len(candidates)} candidates of a cell were timed")
                return
            if len(candidates) == 1:
                yield candidates[0], failure_of(error)
                return
            for candidate in candidates:
                yield from self._time_all([candidate], stage, wall_s / len(candidates))
            return
        bench.pace.learn(stage, sampling_s, clock() - start_s)
        for candidate, answer in zip(candidates, answers, strict=True):
            yield candidate, timing_of(answer)


def timing_of(answer: dict[str, Any]) -> Timing | Failure:
    """A `Timing`, or the status and reason that came instead."""
    if "status" in answer:
        return Status(answer["status"]), answer["reason"]
    return from_jsonable(Timing, answer)
