"""CudaExecutor against the stand-in driver: what reaches the driver, in which order, with which attributes."""

from __future__ import annotations

import struct

import pytest
import torch
from driver_bench import OUT, Bench, MakeArtifact, mixed_plan
from driver_kernels import COUNT, COUNT_ABI, H100, MIXED, MIXED_ABI, STORE, STORE_ABI
from vgpu_attention import CASES, attention, require_compiler, tensors_of

from pagedtune.harness.cuda_context import CudaContext
from pagedtune.harness.standin_driver import StandInDriver
from pagedtune.kernels.artifact import Resources
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.cuda_driver import DriverError
from pagedtune.kernels.cuda_executor import CudaExecutor
from pagedtune.kernels.cuda_paged import CudaPaged, CudaPagedConfig
from pagedtune.kernels.launch import (
    Access,
    CallStep,
    CType,
    KernelStep,
    LaunchAttributes,
    LaunchPlan,
    MemsetStep,
    ScalarArg,
    SlotArg,
    SlotSpec,
    WorkspaceSpec,
)
from pagedtune.kernels.triton_split import TritonSplit
from pagedtune.kernels.variant import Variant


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("variant", [TritonSplit(), CudaPaged()], ids=lambda v: v.name)
def test_attention_through_the_driver_is_that_of_float64(variant: Variant, name: str, context: CudaContext) -> None:
    require_compiler(variant.name)
    case = CASES[name]
    config = case.triton if variant.name == "triton_split" else CudaPagedConfig()
    artifacts = variant.build(case.problem, case.pool_format, config, H100)
    bounds = Bounds(len(case.lens), max(case.lens), max(case.tokens))
    plan = variant.plan(case.problem, case.pool_format, config, bounds)
    bench = Bench(context, tensors_of(case) | plan.allocate_workspaces(), *artifacts)
    bench.prepare(plan)()
    out, lse = attention(case, bench.tensors)
    bound = 2 * torch.finfo(case.problem.q_dtype.torch).eps * (1 + out.abs())
    assert ((bench.fetch("out").double() - out).abs() <= bound).all()
    assert ((bench.fetch("lse").double() - lse).abs() <= 2.0**-20 * lse.abs().clamp(min=1)).all()
    assert context.driver.faults == []
    entries = [record.entry for record in context.driver.launches]
    assert entries == [step.entry for step in plan.steps if isinstance(step, KernelStep)]


def test_each_argument_arrives_with_its_own_type_and_width(mixed: Bench) -> None:
    mixed.prepare(mixed_plan())()
    assert (mixed.fetch("out") == (1 << 40) - 5 + 2).all()
    (launch,) = mixed.context.driver.launches
    assert launch.params == struct.pack("<Qqif", mixed.memory["out"].address, 1 << 40, -5, 2.75)


def test_a_prepared_launch_makes_one_driver_call(mixed: Bench) -> None:
    launch = mixed.prepare(mixed_plan())
    launch()
    driver = mixed.context.driver
    driver.calls.clear()
    launch()
    assert driver.names() == ["cuLaunchKernelEx"]


def test_memsets_and_kernels_run_in_order_on_the_callers_stream(context: CudaContext, artifact: MakeArtifact) -> None:
    tensors = {"counter": torch.full((3,), 9, dtype=torch.int32)}
    bench = Bench(context, tensors, artifact("count", COUNT, COUNT_ABI))
    step = KernelStep("count", (2, 1, 1), (SlotArg("counter"),), (32, 1, 1))
    plan = LaunchPlan((MemsetStep("counter"), step), {}, {"counter": WorkspaceSpec(torch.int32, (3,))})
    launch = bench.prepare(plan)
    context.driver.calls.clear()
    launch()
    launch()
    assert bench.fetch("counter").tolist() == [64, 0, 0]
    made = [call for call in context.driver.calls if call.name in ("cuMemsetD8Async", "cuLaunchKernelEx")]
    assert [call.name for call in made] == ["cuMemsetD8Async", "cuLaunchKernelEx"] * 2
    assert made[0].args[1:] == (0, 12, context.stream)


def test_the_stream_is_asked_for_at_every_launch(context: CudaContext, artifact: MakeArtifact) -> None:
    out = torch.zeros(32, dtype=torch.int64)
    memory, current = context.upload(out), [context.stream]
    kernel = artifact("mixed", MIXED, MIXED_ABI)
    context.driver.know(kernel)
    other = int(context.call("cuStreamCreate", 1, doing="making another stream"))
    executor = CudaExecutor((kernel,), context.driver, lambda: current[0], lambda _: memory.address)
    launch = executor.prepare(mixed_plan().bind({"out": out}))
    for stream in (context.stream, other, 0, other):
        current[0] = stream
        launch()
    assert [made.stream for made in context.driver.launches] == [context.stream, other, 0, other]


def test_launch_attributes_reach_the_driver(mixed: Bench) -> None:
    plain, both = LaunchAttributes(), LaunchAttributes(cooperative=True, programmatic_dependent_launch=True)
    for attributes in (plain, both):
        mixed.prepare(mixed_plan(attributes=attributes))()
    with pytest.raises(DriverError, match=r"launching mixed .* clusters of \(2, 1, 1\).*NOT_SUPPORTED"):
        mixed.prepare(mixed_plan(grid=(2, 1, 1), cluster=(2, 1, 1)))()
    seen = [(made.cooperative, made.programmatic, made.cluster) for made in mixed.context.driver.launches]
    assert seen == [(False, False, (1, 1, 1)), (True, True, (1, 1, 1)), (False, False, (2, 1, 1))]


def opt_ins(driver: StandInDriver) -> list[int]:
    return [call.args[2] for call in driver.calls if call.name == "cuFuncSetAttribute"]


@pytest.mark.parametrize(("of_step", "of_binary", "asked"), [(0, 0, []), (49152, 0, []), (49153, 0, [49153])])
def test_more_shared_memory_than_48_kib_is_asked_for(
    context: CudaContext, artifact: MakeArtifact, of_step: int, of_binary: int, asked: list[int]
) -> None:
    kernel = artifact("mixed", MIXED, MIXED_ABI, Resources(16, 0, of_binary))
    bench = Bench(context, {"out": torch.zeros(32, dtype=torch.int64)}, kernel)
    bench.prepare(mixed_plan(shared_bytes=of_step))()
    assert opt_ins(context.driver) == asked


def test_dynamic_shared_memory_of_the_binary_counts_and_a_later_plan_takes_none_away(
    context: CudaContext, artifact: MakeArtifact
) -> None:
    kernel = artifact("mixed", MIXED, MIXED_ABI, Resources(16, 0, 60_000))
    bench = Bench(context, {"out": torch.zeros(32, dtype=torch.int64)}, kernel)
    large, small = bench.prepare(mixed_plan(shared_bytes=100_000)), bench.prepare(mixed_plan(shared_bytes=1))
    small()
    large()
    assert opt_ins(context.driver) == [100_000]
    assert [made.shared_bytes for made in context.driver.launches] == [60_000, 100_000]


def test_static_shared_memory_counts_towards_the_opt_in(context: CudaContext, artifact: MakeArtifact) -> None:
    kernel = artifact("mixed", MIXED, MIXED_ABI, Resources(16, 40_000, 0))
    bench = Bench(context, {"out": torch.zeros(32, dtype=torch.int64)}, kernel)
    bench.prepare(mixed_plan(shared_bytes=10_000))
    assert opt_ins(context.driver) == [10_000]


def test_a_capture_takes_the_launch_and_replays_it(context: CudaContext, artifact: MakeArtifact) -> None:
    tensors = {"counter": torch.zeros(1, dtype=torch.int32)}
    bench = Bench(context, tensors, artifact("count", COUNT, COUNT_ABI))
    step = KernelStep("count", (1, 1, 1), (SlotArg("counter"),), (32, 1, 1))
    plan = LaunchPlan((step, step), {}, {"counter": WorkspaceSpec(torch.int32, (1,))})
    graph = context.capture(bench.prepare(plan))
    assert bench.fetch("counter").tolist() == [0]
    graph.replay()
    graph.replay()
    assert bench.fetch("counter").tolist() == [4 * 32]


def test_a_host_call_runs_on_the_bound_tensors(context: CudaContext) -> None:
    seen: list[torch.Tensor] = []
    tensor = torch.zeros(32, dtype=torch.int64)
    plan = LaunchPlan((CallStep(lambda tensors: seen.append(tensors["out"])),), OUT)
    CudaExecutor((), context.driver).prepare(plan.bind({"out": tensor}))()
    assert seen[0] is tensor


def test_an_absent_slot_is_a_null_pointer(context: CudaContext, artifact: MakeArtifact) -> None:
    bench = Bench(context, {}, artifact("store", STORE, STORE_ABI))
    args = (SlotArg("target"), ScalarArg(0, CType.I64))
    slots = {"target": SlotSpec(torch.int32, (1,), Access.OUT, optional=True)}
    bench.prepare(LaunchPlan((KernelStep("store", (1, 1, 1), args, (32, 1, 1)),), slots))()
    assert context.driver.launches[0].params == bytes(16)
