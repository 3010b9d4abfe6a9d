"""The stand-in driver itself: it refuses what the driver refuses, and reports faults as silicon does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driver_bench import OUT, Bench, MakeArtifact, mixed_plan
from driver_kernels import H100, MIXED, MIXED_ABI, STORE, STORE_ABI

from pagedtune.harness.cuda_context import CudaContext, Timer
from pagedtune.harness.standin_driver import StandInDriver
from pagedtune.harness.vgpu.report import FaultKind
from pagedtune.kernels.cuda_driver import DriverError
from pagedtune.kernels.cuda_executor import CudaExecutor
from pagedtune.kernels.launch import CType, KernelStep, LaunchPlan, ScalarArg, SlotArg, WorkspaceSpec


def status(result: tuple[Any, ...]) -> str:
    return str(result[0].name)


def store_at(context: CudaContext, artifact: MakeArtifact, offset: int) -> Callable[[], None]:
    """A launch that stores one word `offset` bytes from the start of a tensor of 64 bytes."""
    bench = Bench(context, {"words": torch.zeros(16, dtype=torch.int32)}, artifact("store", STORE, STORE_ABI))
    step = KernelStep("store", (1, 1, 1), (SlotArg("words"), ScalarArg(offset, CType.I64)), (1, 1, 1))
    launch = bench.prepare(LaunchPlan((step,), {}, {"words": WorkspaceSpec(torch.int32, (16,))}))
    launch_and_keep: Callable[[], None] = lambda _bench=bench: launch()  # noqa: E731
    return launch_and_keep


@pytest.mark.parametrize(
    ("offset", "name", "kind"),
    [
        (64, "CUDA_ERROR_ILLEGAL_ADDRESS", FaultKind.OUT_OF_BOUNDS),
        (-4, "CUDA_ERROR_ILLEGAL_ADDRESS", FaultKind.OUT_OF_BOUNDS),
        (2, "CUDA_ERROR_MISALIGNED_ADDRESS", FaultKind.MISALIGNED),
    ],
)
def test_a_fault_shows_at_the_next_call_and_ends_the_context(
    context: CudaContext, artifact: MakeArtifact, offset: int, name: str, kind: FaultKind
) -> None:
    store_at(context, artifact, offset)()  # a launch does not wait, so it cannot fail yet
    for _ in range(2):
        with pytest.raises(DriverError, match="start a new process") as caught:
            context.synchronise()
        assert caught.value.name == name
    assert context.driver.faults[0].kind is kind


def test_use_of_freed_memory_is_a_fault(context: CudaContext, artifact: MakeArtifact) -> None:
    kernel = artifact("mixed", MIXED, MIXED_ABI)
    out = torch.zeros(32, dtype=torch.int64)
    context.driver.know(kernel)
    memory = context.upload(out)
    executor = CudaExecutor((kernel,), context.driver, lambda: context.stream, lambda _: memory.address)
    launch = executor.prepare(mixed_plan().bind({"out": out}))
    memory.free()
    memory.free()  # a second time does nothing
    launch()
    with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        context.synchronise()
    assert context.driver.faults[0].kind is FaultKind.USE_AFTER_FREE


def test_wrong_packing_gives_wrong_answers(mixed: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in reads through the pointers: were the float packed as an integer, the result would show it."""
    import ctypes

    from pagedtune.kernels import arguments

    right = arguments._c_value
    monkeypatch.setattr(
        arguments, "_c_value", lambda ctype, value: ctypes.c_int32(2) if ctype is CType.F32 else right(ctype, value)
    )
    mixed.prepare(mixed_plan())()
    assert (mixed.fetch("out") == (1 << 40) - 5).all()  # 2 read as a float is far below 1


def test_launch_on_a_stream_that_is_gone(mixed: Bench) -> None:
    launch = mixed.prepare(mixed_plan())
    driver = mixed.context.driver
    assert status(driver.cuStreamDestroy(mixed.context.stream)) == "CUDA_SUCCESS"
    with pytest.raises(DriverError, match=r"CUDA_ERROR_INVALID_HANDLE .* no longer exists"):
        launch()


def test_handles_of_another_context_are_refused(artifact: MakeArtifact) -> None:
    kernel = artifact("mixed", MIXED, MIXED_ABI)
    driver = StandInDriver(H100, (kernel,), num_devices=2)
    driver.cuInit(0)
    first, second = CudaContext(driver, 0), CudaContext(driver, 1)
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
    out = torch.zeros(32, dtype=torch.int64)
    memory = first.upload(out)
    bound = mixed_plan().bind({"out": out})
    for stream, expected in ((first.stream, ""), (second.stream, "CUDA_ERROR_INVALID_HANDLE")):
        launch = CudaExecutor((kernel,), driver, lambda s=stream: s, lambda _: memory.address).prepare(bound)
        if expected:
            with pytest.raises(DriverError, match=expected):
                launch()
        else:
            launch()
    driver.cuCtxSetCurrent(0)
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_CONTEXT"):
        launch()


@pytest.mark.parametrize("act", ["allocate", "wait", "copy", "load"])
def test_what_a_capture_forbids_breaks_it(context: CudaContext, artifact: MakeArtifact, act: str) -> None:
    memory = context.allocate(8)
    kernel = artifact("mixed", MIXED, MIXED_ABI)
    context.driver.know(kernel)
    forbidden = {
        "allocate": lambda: context.allocate(8),
        "wait": context.synchronise,
        "copy": lambda: memory.copy_from(torch.zeros(2, dtype=torch.int32)),
        "load": lambda: CudaExecutor((kernel,), context.driver),
    }[act]
    with pytest.raises(DriverError, match="do it before the capture") as caught:
        context.capture(lambda: forbidden() and None)
    assert caught.value.name == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert context.capture(lambda: memory.fill(1)) is not None  # the stream can capture again


def test_a_broken_capture_cannot_be_ended_well(context: CudaContext) -> None:
    driver = context.driver
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    assert status(driver.cuStreamBeginCapture(context.stream, mode)) == "CUDA_SUCCESS"
    assert status(driver.cuMemAlloc(8)) == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert status(driver.cuStreamEndCapture(context.stream)) == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"


def test_the_default_stream_may_not_wait_for_a_capture(context: CudaContext) -> None:
    driver, memory = context.driver, context.allocate(8)
    blocking = int(driver.cuStreamCreate(0)[1])
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    assert status(driver.cuStreamBeginCapture(0, mode)) == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    driver.cuStreamBeginCapture(blocking, mode)
    assert status(driver.cuMemsetD8Async(memory.address, 0, 8, 0)) == "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"


def test_order_of_life(mixed: Bench) -> None:
    driver = StandInDriver(H100)
    assert status(driver.cuMemAlloc(8)) == "CUDA_ERROR_NOT_INITIALIZED"
    driver.cuInit(0)
    assert status(driver.cuMemAlloc(8)) == "CUDA_ERROR_INVALID_CONTEXT"
    assert status(mixed.context.driver.cuMemAlloc(0)) == "CUDA_ERROR_INVALID_VALUE"
    assert status(mixed.context.driver.cuMemAlloc(1 << 50)) == "CUDA_ERROR_OUT_OF_MEMORY"
    assert status(mixed.context.driver.cuModuleLoadData(b"anything")) == "CUDA_ERROR_INVALID_IMAGE"
    with pytest.raises(AttributeError, match="has no cuMemAllocManaged"):
        _ = driver.cuMemAllocManaged


def test_copies_stay_within_an_allocation(context: CudaContext) -> None:
    memory = context.allocate(64)
    source = torch.arange(20, dtype=torch.int32)
    with pytest.raises(ValueError, match="80 bytes at offset 0 do not fit into 64"):
        memory.copy_from(source)
    assert status(context.driver.cuMemcpyHtoDAsync(memory.address, source.data_ptr(), 80, context.stream)) == (
        "CUDA_ERROR_INVALID_VALUE"
    )
    memory.copy_from(source[:8], offset=32)
    back = torch.zeros(8, dtype=torch.int32)
    memory.copy_to(back, offset=32)
    assert back.tolist() == list(range(8))


def test_nothing_takes_time_here(context: CudaContext) -> None:
    memory = context.allocate(8)
    timer = Timer(context)
    assert timer.around(context.capture(lambda: memory.fill(1))) is None
    assert status(context.driver.cuEventElapsedTime(*timer._events)) == "CUDA_ERROR_NOT_SUPPORTED"


def test_memory_goes_back_when_nothing_refers_to_it(context: CudaContext) -> None:
    memory = context.allocate(64)
    address = memory.address
    del memory
    assert status(context.driver.cuMemFree(address)) == "CUDA_ERROR_INVALID_VALUE"  # it is free already


def test_memory_may_go_back_while_a_kernel_is_being_launched(mixed: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector picks its moment: here, in the middle of collecting what the kernel may touch."""
    from pagedtune.harness.vgpu.address_space import AddressSpace

    spare = [mixed.context.allocate(64) for _ in range(8)]
    add = AddressSpace.add

    def add_and_collect(self: AddressSpace, *args: Any) -> None:
        if spare:
            spare.pop()
        add(self, *args)

    monkeypatch.setattr(AddressSpace, "add", add_and_collect)
    mixed.prepare(mixed_plan())()
    assert not spare
    assert (mixed.fetch("out") == (1 << 40) - 5 + 2).all()


def test_memory_that_is_dropped_during_a_capture_goes_back_after_it(context: CudaContext) -> None:
    kept = context.allocate(8)
    spare = [context.allocate(8)]
    address = spare[0].address

    def launch() -> None:
        spare.clear()  # freeing it now would break the capture
        kept.fill(1)

    context.capture(launch).replay()
    back = torch.zeros(8, dtype=torch.uint8)
    kept.copy_to(back)
    assert back.tolist() == [1] * 8
    assert status(context.driver.cuMemFree(address)) == "CUDA_ERROR_INVALID_VALUE"  # it is free already


def test_the_device_is_described_as_the_driver_tells_it(context: CudaContext) -> None:
    device = context.device()
    facts = ("name", "product", "capability", "num_units", "registers_per_unit", "shared_bytes_per_block", "l2_bytes")
    assert [getattr(device, f) for f in facts] == [getattr(H100, f) for f in facts]
    assert device.bandwidth_gb_s is None  # the stand-in has no memory clock


def test_every_call_is_one_of_the_bindings_with_as_many_arguments() -> None:
    """The bindings embed their signatures as the first line of each docstring: `cuMemFree(dptr)`."""
    from cuda.bindings import driver as real

    mine = {name: getattr(StandInDriver, name) for name in dir(StandInDriver) if name.startswith("cu")}
    calls = {name: function for name, function in mine.items() if callable(function)}
    assert len(calls) > 30
    for name, function in calls.items():
        signature = getattr(real, name).__doc__.splitlines()[0]
        inside = signature.partition("(")[2].rpartition(")")[0]
        assert len([part for part in inside.split(",") if part]) == len(inspect.signature(function).parameters) - 1, (
            name
        )


def test_a_plan_of_nothing_prepares_to_nothing(context: CudaContext) -> None:
    executor = CudaExecutor((), context.driver)
    executor.prepare(LaunchPlan((), OUT).bind({"out": torch.zeros(32, dtype=torch.int64)}))()
    assert context.driver.launches == []
