"""Stage `timings`: cold-cache times of both variants by graph replay, interleaved and paired."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagedtune.harness.cuda_context import CudaContext, Graph, Timer
from pagedtune.harness.gpu_day import facts
from pagedtune.harness.gpu_day.bandwidth import ASSUMED_L2_BYTES, COLD_FACTOR, NO_TIME, WARM_UP_S, in_turn
from pagedtune.harness.gpu_day.batch import Batch
from pagedtune.harness.gpu_day.cells import CELLS, DRY_CELLS, Candidate, Cell, candidates
from pagedtune.harness.gpu_day.child import run_in_child
from pagedtune.harness.gpu_day.session import Session, introduce
from pagedtune.harness.nvml import Nvml, find_nvml
from pagedtune.harness.roofline import floor_us
from pagedtune.harness.statistics import bootstrap_ci, median
from pagedtune.harness.timing import Measured, Sample, final
from pagedtune.kernels.cuda_driver import DriverError
from pagedtune.kernels.variant import BuildError

MIN_LAUNCHES = 12  # of one replay: the two events around it cost about a microsecond
MIN_CLOCK_SHARE = 0.75  # of the base clock, below which a sample is not believed
MIN_CELL_S = 5.0
OVERTIME_S = 10.0  # for what a cell does before it is timed, in case nothing of it has been built yet


@dataclass(frozen=True)
class Entrant:
    """A candidate that can be timed: the graph of its launches over all pools."""

    candidate: Candidate
    graph: Graph
    num_launches: int
    error: float


class GraphSampler:
    """Takes samples of one replay; `harness/timing.py` says of which candidate, and when enough is known."""

    min_block_s = 0.25
    max_foreign_share = 0.0

    def __init__(self, context: CudaContext, entrants: Sequence[Entrant], nvml: Nvml | None) -> None:
        self._entrants, self._timer, self._nvml = entrants, Timer(context), nvml
        base = nvml.base_clock_mhz() if nvml else None
        self._least_mhz = MIN_CLOCK_SHARE * base if base else 0.0

    def now_s(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def sample(self, candidate: int) -> Sample:
        """Time of one launch in microseconds, over one replay."""
        entrant = self._entrants[candidate]
        elapsed_us = self._timer.around(entrant.graph)
        if elapsed_us is None:
            raise RuntimeError(NO_TIME)
        clock = self._nvml.sm_clock_mhz() if self._nvml else None
        return Sample(elapsed_us / entrant.num_launches, clock is not None and clock < self._least_mhz)

    def start_block(self) -> None:
        """Nothing to watch: the device is ours."""

    def foreign_share(self) -> float:
        """None: the device is ours."""
        return 0.0


def builds(session: Session) -> list[tuple[str, Any]]:
    """What must be built for this stage, as the build stage takes it."""
    return [
        (c.variant.name, (cell.problem, cell.pool_format, c.config))
        for cell in (DRY_CELLS if session.dry else CELLS)
        for c in candidates(cell, session.device)
    ]


def run(session: Session) -> dict[str, Any]:
    """Times each cell for an equal part of what is left."""
    cells = DRY_CELLS if session.dry else CELLS
    done = 0
    for index, cell in enumerate(cells):
        limit_s = session.left_s / (len(cells) - index)
        if not session.dry and limit_s < MIN_CELL_S:
            session.journal.add("timings", cell=cell.name, status="not_run", reason="no time left")
            continue
        # A process of its own: a launch that never ends or breaks the context costs one cell, not those after it.
        most_s = min(limit_s + OVERTIME_S, session.left_s - 1)
        ended = run_in_child(partial(_in_own_context, session, cell, limit_s), most_s, nested=True)
        if ended.status == "done":
            done += 1
        else:
            status = "timeout" if ended.status == "timeout" else "crashed"
            session.journal.add("timings", cell=cell.name, status=status, reason=ended.message[:600])
    return {"cells": len(cells), "done": done}


def _in_own_context(session: Session, cell: Cell, limit_s: float) -> None:
    with session.open() as context:
        nvml = None if session.dry else find_nvml(facts.pci_bus_id(context))
        _time_cell(session, context, cell, nvml, limit_s)


def _time_cell(session: Session, context: CudaContext, cell: Cell, nvml: Nvml | None, limit_s: float) -> None:
    end_s = time.monotonic() + limit_s - 1
    spread = COLD_FACTOR * (session.device.l2_bytes or ASSUMED_L2_BYTES)
    num_pools = 2 if session.dry else max(1, -(-spread // cell.kv_bytes))
    batch = Batch(cell, context, num_pools, session.seed)
    head = {"cell": cell.name, "kv_bytes": cell.kv_bytes, "pools": num_pools, "mode": "graph-cold"}
    before = nvml.state() if nvml else None
    entrants = [e for c in candidates(cell, session.device) if (e := _enter(session, context, batch, c, head))]
    if entrants and not session.dry:
        _warm_up(context, entrants)
        budget_s = max(1.0, end_s - time.monotonic())
        measured = final(GraphSampler(context, entrants, nvml), len(entrants), budget_s, session.seed)
        state = {"before": before, "after": nvml.state() if nvml else None}
        for entrant, result in zip(entrants, measured, strict=True):
            session.journal.add("timings", **head, **_line(session, cell, entrant, result), nvml=state)
    for entrant in entrants if session.dry else ():
        labels = {**_names(entrant.candidate), "status": "passed", "error": entrant.error}
        session.journal.add("timings", **head, **labels, time_us=None, reason=NO_TIME)
    batch.free()


def _enter(
    session: Session, context: CudaContext, batch: Batch, candidate: Candidate, head: dict[str, Any]
) -> Entrant | None:
    """A candidate, launched once on every pool and found right; None, with a line that says why, if it cannot run."""
    cell = batch.cell
    try:
        artifacts = candidate.variant.build(cell.problem, cell.pool_format, candidate.config, session.device)
        introduce(context, artifacts)
        launches = batch.launches(candidate, artifacts)
        number = -(-MIN_LAUNCHES // len(launches)) * len(launches) if not session.dry else len(launches)
        graph = context.capture(in_turn(launches, number))
        batch.forget_outputs()
        graph.replay()
        context.synchronise(f"waiting for {candidate.label}")
        error = batch.worst_error(session.seed)
    except (BuildError, DriverError, ValueError) as problem:
        session.journal.add("timings", **head, **_names(candidate), status="crashed", reason=str(problem)[:600])
        context.synchronise("launching after a failure")  # in a context that is lost, all others would seem to fail
        return None
    if error > 1:
        reason = f"{error:.2f} times the allowed error"
        session.journal.add("timings", **head, **_names(candidate), status="wrong", reason=reason)
        return None
    return Entrant(candidate, graph, number, error)


def _names(candidate: Candidate) -> dict[str, str]:
    return {"candidate": candidate.label, "config": candidate.config.key}


def _warm_up(context: CudaContext, entrants: Sequence[Entrant]) -> None:
    end_s = time.monotonic() + WARM_UP_S
    while time.monotonic() < end_s:
        for entrant in entrants:
            entrant.graph.replay()
        context.synchronise("warming up")


def _line(session: Session, cell: Cell, entrant: Entrant, result: Measured) -> dict[str, Any]:
    centre = median(result.times_us)
    floor = floor_us(cell.kv_bytes, session.bandwidth_gb_s) if session.bandwidth_gb_s else 0.0
    return {
        **_names(entrant.candidate),
        "status": "too_fast" if centre < floor else "passed",
        "error": entrant.error,
        "time_us": centre,
        "ci_us": list(bootstrap_ci(result.times_us)),
        "gb_s": cell.kv_bytes / centre / 1e3,
        "ratio": median(result.ratios) if result.ratios else None,
        "ratio_ci": list(bootstrap_ci(result.ratios)) if result.ratios else None,
        "samples": len(result.times_us),
        "rejected": result.rejected,
        "notes": list(result.notes),
    }
