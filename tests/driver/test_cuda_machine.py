"""The gate on a CUDA device: the same cases, judged from the bytes that come back."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from driver_kernels import H100, STORE, STORE_ABI, make_artifact
from vgpu_attention import require_compiler

from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.cuda_context import CudaContext
from pagedtune.harness.cuda_machine import CudaMachine
from pagedtune.harness.gate import run_case
from pagedtune.harness.inputs import Inputs
from pagedtune.harness.machines import Machine
from pagedtune.harness.memory import GUARD_BYTES, Poison, carve
from pagedtune.harness.standin_driver import StandInDriver
from pagedtune.harness.verdicts import CaseResult
from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.cuda_driver import DriverError
from pagedtune.kernels.cuda_paged import CudaPaged
from pagedtune.kernels.device import Device
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.launch import Access, CType, KernelStep, LaunchPlan, ScalarArg, SlotArg, SlotSpec
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import Status
from pagedtune.kernels.triton_split import TritonSplit, TritonSplitConfig
from pagedtune.kernels.variant import Config, Op, Variant
from pagedtune.kernels.workload import Workload

PROBLEM, FORMAT = Problem(4, 2, 64), PoolFormat(16, DType.BF16)


def gate_case(*hazards: Hazard, family: Family = Family.NEEDLE) -> Case:
    return Case(Op.ATTENTION, PROBLEM, FORMAT, Workload((33, 16, 1)), family, hazards, seed=3)


def on_stand_in(variant: Variant, config: Config, case: Case, context: CudaContext) -> CaseResult:
    require_compiler(variant.name)

    def machines(_: Device, artifacts: Sequence[Artifact]) -> Machine:
        context.driver.know(*artifacts)
        return CudaMachine(artifacts, context)

    return run_case(variant, config, case, H100, machines)


@pytest.mark.parametrize(
    "hazards",
    [
        (),
        (Hazard.STRIDED, Hazard.OFFSET_BASE, Hazard.TAIL_MINUS_ONE),
        (Hazard.STRIDED_POOL, Hazard.REPLAY, Hazard.TAIL_FOREIGN),
        (Hazard.LOOSE_BOUNDS, Hazard.NO_LSE, Hazard.SHARED_BLOCKS),
        (Hazard.HIGH_POOL,),
        (Hazard.HIGH_ROWS, Hazard.REPLAY),
    ],
    ids=lambda hazards: "+".join(hazards) or "plain",
)
@pytest.mark.parametrize(
    ("variant", "config"),
    [(TritonSplit(), TritonSplitConfig(4, 32, 32)), (CudaPaged(), CudaPaged.config_type())],
    ids=("triton_split", "cuda_paged"),
)
def test_both_variants_pass_the_gate_through_the_driver(
    variant: Variant, config: Config, hazards: tuple[Hazard, ...], context: CudaContext
) -> None:
    result = on_stand_in(variant, config, gate_case(*hazards), context)
    assert result.status is Status.PASSED, result.reason
    assert result.checks["inputs"] == result.checks["guards"] == 0.0
    assert 0 < result.error_ratio <= 1
    assert context.driver.faults == []


class Skewed(CudaPaged):
    """Scales one percent too much: the gate must see it through the driver as well."""

    def plan(self, problem: Problem, *args: object) -> LaunchPlan:  # type: ignore[override]
        plan = super().plan(problem, *args)  # type: ignore[arg-type]
        (step,) = plan.steps
        assert isinstance(step, KernelStep)
        scale = ScalarArg(problem.softmax_scale, CType.F32)
        assert step.args.count(scale) == 1
        args_ = tuple(replace(scale, value=scale.value * 1.01) if arg == scale else arg for arg in step.args)
        return replace(plan, steps=(replace(step, args=args_),))


def test_a_wrong_scale_is_found_on_the_device(context: CudaContext) -> None:
    case = gate_case(family=Family.RANDOM)
    result = on_stand_in(Skewed(), CudaPaged.config_type(), case, context)
    assert result.status is Status.WRONG


def store_inputs() -> tuple[LaunchPlan, Inputs]:
    """A launch of `store` on an output with guards, and an input beside it."""
    args = (SlotArg("out"), ScalarArg(0, CType.I64))
    slots = {"out": SlotSpec(torch.int32, (4,), Access.OUT), "data": SlotSpec(torch.int32, (4,), Access.IN)}
    plan = LaunchPlan((KernelStep("store", (1, 1, 1), args, (1, 1, 1)),), slots)
    carved = {name: carve((4,), torch.int32, Poison.NAN, offset=1) for name in slots}
    inputs = Inputs(carved, {}, {name: spec.access for name, spec in slots.items()}, Poison.NAN)
    inputs.freeze()
    return plan, inputs


@pytest.mark.parametrize("offset", [-4, 16, 16 + GUARD_BYTES - 4])
def test_a_write_into_the_guards_on_the_device_is_seen_on_the_host(
    offset: int, context: CudaContext, tmp_path: Path
) -> None:
    kernel = make_artifact(tmp_path, "store", STORE, STORE_ABI)
    context.driver.know(kernel)
    plan, inputs = store_inputs()
    (step,) = plan.steps
    assert isinstance(step, KernelStep)
    stray = replace(plan, steps=(replace(step, args=(step.args[0], ScalarArg(offset, CType.I64))),))
    with CudaMachine((kernel,), context) as machine:
        machine.prepare(stray, inputs)()
    assert inputs.slots["out"].changed_outside() == offset // 4
    assert inputs.slots["data"].changed_anywhere() is None


def test_addresses_on_the_device_have_the_alignment_of_the_host(context: CudaContext, tmp_path: Path) -> None:
    kernel = make_artifact(tmp_path, "store", STORE, STORE_ABI)
    context.driver.know(kernel)
    plan, inputs = store_inputs()
    CudaMachine((kernel,), context).prepare(plan, inputs)()
    address = int.from_bytes(context.driver.launches[0].params[:8], "little")
    assert address % 256 == inputs.slots["out"].view.data_ptr() % 256
    assert inputs.slots["out"].view.tolist()[0] == 7


def test_a_write_past_the_guards_is_a_fault_of_the_device(context: CudaContext, tmp_path: Path) -> None:
    kernel = make_artifact(tmp_path, "store", STORE, STORE_ABI)
    context.driver.know(kernel)
    plan, inputs = store_inputs()
    (step,) = plan.steps
    assert isinstance(step, KernelStep)
    stray = replace(plan, steps=(replace(step, args=(step.args[0], ScalarArg(1 << 20, CType.I64))),))
    launch = CudaMachine((kernel,), context).prepare(stray, inputs)
    with pytest.raises(DriverError, match=r"waiting for store: CUDA_ERROR_ILLEGAL_ADDRESS .*compute-sanitizer"):
        launch()


def test_no_room_for_a_high_pool_is_not_a_failure() -> None:
    driver = StandInDriver(replace(H100, memory_bytes=1 << 30))
    driver.cuInit(0)
    with CudaContext(driver) as context:
        result = on_stand_in(CudaPaged(), CudaPaged.config_type(), gate_case(Hazard.HIGH_POOL), context)
    assert result.status is Status.NOT_RUN
    assert "CUDA_ERROR_OUT_OF_MEMORY" in result.reason


def test_the_device_has_its_memory_back_after_a_case(context: CudaContext) -> None:
    """At once: high pools take gigabytes each, and the garbage collector may not come by for many cases."""
    gc.collect()
    gc.disable()
    try:
        result = on_stand_in(CudaPaged(), CudaPaged.config_type(), gate_case(Hazard.HIGH_POOL), context)
        names = context.driver.names()
    finally:
        gc.enable()
    assert result.passed
    assert names.count("cuMemAlloc") == names.count("cuMemFree") > 0
