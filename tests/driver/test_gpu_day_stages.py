"""Single stages of gpu-day: what is timed has computed, and one bad case does not end the day."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driver_kernels import H100
from vgpu_attention import require_compiler

from pagedtune.harness.case import Hazard
from pagedtune.harness.cuda_context import CudaContext, Graph, Timer
from pagedtune.harness.gpu_day import bandwidth, gate, timings
from pagedtune.harness.gpu_day.batch import Batch
from pagedtune.harness.gpu_day.cells import CELLS, DRY_CELLS, Candidate, candidates
from pagedtune.harness.gpu_day.child import Ended
from pagedtune.harness.gpu_day.device_tensors import DeviceTensors
from pagedtune.harness.gpu_day.journal import Journal
from pagedtune.harness.gpu_day.session import Session
from pagedtune.harness.verdicts import CaseResult
from pagedtune.kernels.cuda_driver import DriverError
from pagedtune.kernels.cuda_paged import CudaPaged
from pagedtune.kernels.launch import CType, KernelStep, LaunchPlan, ScalarArg
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import Status
from pagedtune.kernels.variant import BuildError

(CELL,) = DRY_CELLS


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(H100, Journal(tmp_path, "day", "emulated"), time.monotonic() + 100)


def launched(context: CudaContext, candidate: Candidate, num_pools: int = 2) -> Batch:
    require_compiler(candidate.variant.name)
    artifacts = candidate.variant.build(CELL.problem, CELL.pool_format, candidate.config, H100)
    context.driver.know(*artifacts)
    batch = Batch(CELL, context, num_pools)
    launches = batch.launches(candidate, artifacts)
    batch.forget_outputs()
    for launch in launches:
        launch()
    return batch


@pytest.mark.parametrize("variant", ["triton_split", "cuda_paged"])
def test_a_batch_on_the_device_agrees_with_float64(variant: str, context: CudaContext) -> None:
    candidate = next(c for c in candidates(CELL, H100) if c.variant.name == variant)
    assert 0 < launched(context, candidate).worst_error() < 0.5


def test_outputs_that_nothing_wrote_are_infinitely_wrong(context: CudaContext) -> None:
    batch = launched(context, Candidate(CudaPaged(), CudaPaged.config_type()))
    batch.forget_outputs()
    assert batch.worst_error() == float("inf")


def test_every_pool_has_a_table_and_an_output_of_its_own(context: CudaContext) -> None:
    """The tables scatter the blocks differently, so one pool's output under another's table is wrong."""
    batch = launched(context, Candidate(CudaPaged(), CudaPaged.config_type()))
    batch._tables.reverse()
    assert batch.worst_error() > 10


class Skewed(CudaPaged):
    """Scales ten percent too much."""

    def plan(self, problem: Problem, *args: object) -> LaunchPlan:  # type: ignore[override]
        plan = super().plan(problem, *args)  # type: ignore[arg-type]
        (step,) = plan.steps
        assert isinstance(step, KernelStep)
        scale = ScalarArg(problem.softmax_scale, CType.F32)
        assert step.args.count(scale) == 1
        args_ = tuple(replace(scale, value=scale.value * 1.1) if arg == scale else arg for arg in step.args)
        return replace(plan, steps=(replace(step, args=args_),))


def test_a_candidate_that_is_wrong_is_not_timed(session: Session, context: CudaContext) -> None:
    require_compiler("cuda_paged")
    batch = Batch(CELL, context, 1)
    assert timings._enter(session, context, batch, Candidate(Skewed(), CudaPaged.config_type()), {"cell": "c"}) is None
    (line,) = session.journal.lines("timings")
    assert line["status"] == "wrong"
    assert "times the allowed error" in line["reason"]


def test_a_launch_that_the_driver_refuses_is_a_line(session: Session, context: CudaContext) -> None:
    require_compiler("cuda_paged")
    batch = Batch(CELL, context, 1)
    context.driver.fail("cuModuleLoadData", "CUDA_ERROR_NO_BINARY_FOR_GPU")
    candidate = Candidate(CudaPaged(), CudaPaged.config_type())
    assert timings._enter(session, context, batch, candidate, {"cell": "c"}) is None
    (line,) = session.journal.lines("timings")
    assert line["status"] == "crashed"
    assert "build for this GPU's compute capability" in line["reason"]


def test_a_lost_context_costs_its_cell_and_no_other(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that broke it is named; what would have come after it in this context is not said to have failed."""
    require_compiler("cuda_paged")
    broken, sound = replace(CELL, name="broken"), replace(CELL, name="sound")
    real_replay = Graph.replay

    def replay(self: Graph) -> None:
        real_replay(self)
        if not session.journal.lines("timings"):
            self._context.driver.here.error = "CUDA_ERROR_ILLEGAL_ADDRESS"

    monkeypatch.setattr(Graph, "replay", replay)
    monkeypatch.setattr(timings, "DRY_CELLS", (broken, sound))
    monkeypatch.setattr(timings, "candidates", lambda *_: [Candidate(CudaPaged(), CudaPaged.config_type())] * 2)
    assert timings.run(session) == {"cells": 2, "done": 1}
    lines = session.journal.lines("timings")
    assert [(line["cell"], line["status"], "candidate" in line) for line in lines] == [
        ("broken", "crashed", True),
        ("broken", "crashed", False),
        ("sound", "passed", True),
        ("sound", "passed", True),
    ]
    assert "launching after a failure: CUDA_ERROR_ILLEGAL_ADDRESS" in lines[1]["reason"]


@pytest.mark.parametrize(("clock", "disturbed"), [(1200, False), (1190, True), (None, False)])
def test_a_sample_at_a_low_clock_is_disturbed(
    clock: int | None, disturbed: bool, context: CudaContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below 75 % of the base clock of 1590 MHz, which is 1192.5 MHz."""
    monkeypatch.setattr(Timer, "elapsed_us", lambda _: 30.0)
    entrant: Any = SimpleNamespace(graph=context.capture(lambda: None), num_launches=12)
    nvml: Any = SimpleNamespace(base_clock_mhz=lambda: 1590, sm_clock_mhz=lambda: clock)
    sample = timings.GraphSampler(context, [entrant], nvml).sample(0)
    assert (sample.time_us, sample.disturbed) == (2.5, disturbed)


def test_an_emulated_device_gives_no_sample(context: CudaContext) -> None:
    entrant: Any = SimpleNamespace(graph=context.capture(lambda: None), num_launches=1)
    with pytest.raises(RuntimeError, match="the stand-in device has no time"):
        timings.GraphSampler(context, [entrant], None).sample(0)


def test_pools_in_rotation_exceed_five_times_the_cache() -> None:
    for cell in CELLS:
        l2 = H100.l2_bytes or 0
        pools = max(1, -(-bandwidth.COLD_FACTOR * l2 // cell.kv_bytes))
        assert pools * cell.kv_bytes >= 5 * l2
    assert CELLS[0].kv_bytes == 8192 * 8 * 128 * 2 * 2  # tokens, KV heads, dims, K and V, bytes


def test_the_reading_kernel_reads_every_byte_once(context: CudaContext, session: Session) -> None:
    """Each thread adds the exclusive or of four words for each of its vectors; the sum over the buffer is known."""
    require_compiler("cuda_paged")
    kernel = bandwidth.read_kernel(H100)
    assert kernel.ptx_path is not None
    assert ".global.add" not in kernel.ptx_path.read_text()  # all warps would queue for one place
    context.driver.know(kernel)
    tensors = DeviceTensors(context)
    words = torch.zeros(5 * 1024 + 12, dtype=torch.int32)
    words[::4] = torch.arange(len(words) // 4, dtype=torch.int32)  # one word of each vector: the or is that word
    buffer = tensors.upload(words.view(torch.uint8))
    small = replace(H100, num_units=1)
    (launch,) = bandwidth.read_launches(context, small, kernel, tensors, [buffer])
    sink = next(t for t, _ in tensors._memory.values() if t.dtype == torch.int32)
    launch()
    context.synchronise()
    assert tensors.fetch(sink).sum() == sum(range(len(words) // 4))
    assert context.driver.faults == []


def in_this_process(function: Callable[[], Any], _: float, nested: bool = False) -> Ended:
    """Stands in for `run_in_child`: a child that ends at once is one that raises SystemExit."""
    assert nested
    try:
        return Ended("done", function())
    except SystemExit:
        return Ended("crashed", message="ended without a word")


def test_the_gate_goes_on_after_cases_that_raise_or_end_the_process(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = []

    def fake_case(variant: Any, config: Any, case: Any, device: Any, machines: Any) -> CaseResult:
        number = len(session.journal.lines("gate"))
        if number == 1:
            raise DriverError("CUDA_ERROR_ILLEGAL_ADDRESS", "the context is lost")
        if number == 2:
            raise BuildError("the compiler is missing")
        if number == 4:
            raise SystemExit
        return CaseResult(case.key, Status.PASSED, error_ratio=0.25)

    real_open = Session.open

    def counting_open(self: Session) -> CudaContext:
        contexts.append(1)
        return real_open(self)

    monkeypatch.setattr(gate, "run_case", fake_case)
    monkeypatch.setattr(gate, "run_in_child", in_this_process)
    monkeypatch.setattr(Session, "open", counting_open)
    counts = gate.gate(session)
    lines = session.journal.lines("gate")
    assert [(line["status"], line["reason"]) for line in lines] == [
        ("passed", ""),
        ("crashed", "the context is lost"),
        ("build_failed", "the compiler is missing"),
        ("passed", ""),
        ("crashed", "ended without a word"),
        *[("passed", "")] * (3 * len(gate.VARIANTS) - 5),
    ]
    total = 3 * len(gate.VARIANTS)
    assert counts == {"planned": total, "run": total, "build_failed": 1, "crashed": 2, "passed": total - 3}
    assert len(contexts) == 3  # a fresh one after the fault and after the crash


def test_a_case_that_never_ends_is_recorded_and_costs_its_own_time(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kernel that waits for ever: nothing in the process can be asked to give up."""

    def fake_case(variant: Any, config: Any, case: Any, device: Any, machines: Any) -> CaseResult:
        if len(session.journal.lines("gate")) == 1:
            ctypes.PyDLL(None).sleep(100)  # keeps the interpreter's lock
        return CaseResult(case.key, Status.PASSED)

    monkeypatch.setattr(gate, "run_case", fake_case)
    monkeypatch.setattr(gate, "CASE_S", 0.5)
    counts = gate.gate(session)
    total = 3 * len(gate.VARIANTS)
    assert counts == {"planned": total, "run": total, "passed": total - 1, "timeout": 1}
    stuck = session.journal.lines("gate")[1]
    assert (stuck["status"], stuck["reason"]) == ("timeout", "did not end in its time, 0 s")


def test_variants_take_turns_and_the_order_is_by_lot(session: Session) -> None:
    planned, other = (gate.planned_cases(H100, dry=False, seed=seed) for seed in (0, 1))
    assert [each.variant for each in planned[: 3 * len(gate.VARIANTS)]] == list(gate.VARIANTS) * 3
    assert [each.case.key for each in planned] != [each.case.key for each in other]
    assert {each.case.key for each in planned} == {each.case.key for each in other}
    of_caches = {Hazard.SKIPPED_TOKENS, Hazard.HIGH_STAGING}
    for name in gate.VARIANTS:
        met = {hazard for each in planned if each.variant == name for hazard in each.case.hazards}
        assert set(Hazard) - met == of_caches | {Hazard.HIGH_ROWS}, name
