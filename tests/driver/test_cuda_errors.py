"""What CudaExecutor refuses, and what its errors say."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from driver_bench import MIXED_STEP, Bench, MakeArtifact, mixed_plan
from driver_kernels import H100, MIXED, MIXED_ABI

from pagedtune.harness.cuda_context import CudaContext
from pagedtune.harness.nvidia import probe_nvidia
from pagedtune.harness.standin_driver import StandInDriver
from pagedtune.kernels.artifact import ArtifactKind, Resources
from pagedtune.kernels.cuda_driver import HINTS, DriverError, DriverUnavailable, load_driver
from pagedtune.kernels.cuda_executor import CudaExecutor
from pagedtune.kernels.launch import CType, LaunchAttributes, LaunchPlan, MemsetStep, ScalarArg, WorkspaceSpec

# What does not fit is refused when it is prepared.


def test_arguments_of_another_type_are_refused(mixed: Bench) -> None:
    args = (*MIXED_STEP.args[:2], ScalarArg(5, CType.I64), MIXED_STEP.args[3])
    with pytest.raises(ValueError, match="mixed: argument 2 does not fit the binary"):
        mixed.prepare(mixed_plan(args=args))
    with pytest.raises(ValueError, match="the number of arguments does not fit"):
        mixed.prepare(mixed_plan(args=MIXED_STEP.args[:3]))


def test_the_address_on_the_device_must_have_the_alignment_that_was_compiled_in(
    context: CudaContext, artifact: MakeArtifact
) -> None:
    kernel = artifact("mixed", MIXED, replace(MIXED_ABI, align={0: 16}))
    context.driver.know(kernel)
    out = torch.zeros(32, dtype=torch.int64)
    executor = CudaExecutor((kernel,), context.driver, pointer_of=lambda _: 0x1008)
    with pytest.raises(ValueError, match=r"argument 0 .*'out'.* is 0x1008, but the binary assumes a multiple of 16"):
        executor.prepare(mixed_plan().bind({"out": out}))


def test_an_unknown_entry_and_a_native_library_are_refused(mixed: Bench) -> None:
    with pytest.raises(ValueError, match=r"no artifact has the entry 'other'; there are \['mixed'\]"):
        mixed.prepare(mixed_plan(entry="other"))
    native = replace(next(iter(mixed.context.driver._known.values())), kind=ArtifactKind.NATIVE)
    with pytest.raises(ValueError, match="is a native binary: a GPU runs cubins"):
        CudaExecutor((native,), mixed.context.driver)


# What the driver refuses says what was being done, the driver's own words, and what to do.


def test_a_binary_of_another_architecture(context: CudaContext, artifact: MakeArtifact) -> None:
    kernel = artifact("mixed", MIXED, MIXED_ABI, target="sm_100")
    context.driver.know(kernel)
    with pytest.raises(DriverError) as caught:
        CudaExecutor((kernel,), context.driver)
    assert caught.value.name == "CUDA_ERROR_NO_BINARY_FOR_GPU"
    assert str(caught.value) == (
        f"loading {kernel.path.name}, built for sm_100: CUDA_ERROR_NO_BINARY_FOR_GPU (no kernel image is available for "
        "execution on the device): the binary is for another architecture: build for this GPU's compute capability"
    )


@pytest.mark.parametrize(
    ("call", "status", "expected"),
    [
        ("cuModuleLoadData", "CUDA_ERROR_INVALID_IMAGE", "loading .* delete it from the cache"),
        ("cuModuleLoadData", "CUDA_ERROR_OUT_OF_MEMORY", "loading .* free device memory"),
        ("cuModuleGetFunction", "CUDA_ERROR_NOT_FOUND", "looking up mixed in .* another version of the kernel"),
        ("cuFuncSetAttribute", "CUDA_ERROR_INVALID_VALUE", "allowing mixed 60000 bytes of dynamic and 0 of static"),
        ("cuLaunchKernelEx", "CUDA_ERROR_INVALID_VALUE", r"launching mixed .*: grid \(1, 1, 1\), block \(32, 1, 1\)"),
        ("cuLaunchKernelEx", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "16 registers a thread, 0 static and 60000 dynamic"),
        ("cuLaunchKernelEx", "CUDA_ERROR_INVALID_CONTEXT", "launching .*torch.cuda.set_device"),
        ("cuLaunchKernelEx", "CUDA_ERROR_ILLEGAL_ADDRESS", "launching .* compute-sanitizer"),
    ],
)
def test_errors_name_the_call_its_sizes_and_the_way_out(
    context: CudaContext, artifact: MakeArtifact, call: str, status: str, expected: str
) -> None:
    kernel = artifact("mixed", MIXED, MIXED_ABI, Resources(16, 0, 60_000))
    context.driver.fail(call, status)
    with pytest.raises(DriverError, match=expected) as caught:
        Bench(context, {"out": torch.zeros(32, dtype=torch.int64)}, kernel).prepare(mixed_plan())()
    assert caught.value.name == status
    assert status in str(caught.value)


def test_a_failed_memset_is_named(context: CudaContext) -> None:
    plan = LaunchPlan((MemsetStep("partials"),), {}, {"partials": WorkspaceSpec(torch.float32, (8,))})
    launch = Bench(context, {"partials": torch.zeros(8)}).prepare(plan)
    context.driver.fail("cuMemsetD8Async", "CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(DriverError, match="filling workspace 'partials', 32 bytes: CUDA_ERROR_INVALID_VALUE"):
        launch()


def test_what_cannot_be_launched_is_refused_by_the_driver(mixed: Bench) -> None:
    for changes, name in (
        ({"block": (2048, 1, 1)}, "CUDA_ERROR_INVALID_VALUE"),
        ({"grid": (1, 70_000, 1)}, "CUDA_ERROR_INVALID_VALUE"),
        ({"shared_bytes": 300_000}, "CUDA_ERROR_INVALID_VALUE"),
        (
            {"grid": (1 << 20, 1, 1), "attributes": LaunchAttributes(cooperative=True)},
            "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
        ),
    ):
        with pytest.raises(DriverError) as caught:
            mixed.prepare(mixed_plan(**changes))()
        assert caught.value.name == name


def test_every_hint_is_about_an_error_that_the_driver_has(driver: StandInDriver) -> None:
    assert [name for name in HINTS if not hasattr(driver.CUresult, name)] == []


def test_without_a_current_context_the_primary_one_is_used(artifact: MakeArtifact, driver: StandInDriver) -> None:
    kernel = artifact("mixed", MIXED, MIXED_ABI)
    driver.know(kernel)
    CudaExecutor((kernel,), driver)
    assert driver.names()[1:5] == ["cuCtxGetCurrent", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    fresh = StandInDriver(H100)
    fresh.cuInit(0)
    with pytest.raises(DriverError, match="opening CUDA device 3: CUDA_ERROR_INVALID_DEVICE"):
        CudaExecutor((), fresh, ordinal=3)


def test_a_closed_executor_has_unloaded_its_binaries(mixed: Bench) -> None:
    launch = mixed.prepare(mixed_plan())
    mixed.executor.close()
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_HANDLE"):
        launch()


@pytest.mark.skipif(probe_nvidia() is not None, reason="this machine has an NVIDIA GPU")
def test_a_machine_without_a_driver_says_so() -> None:
    with pytest.raises(DriverUnavailable, match=r"install NVIDIA's driver|does not start|CUDA_ERROR_NO_DEVICE"):
        load_driver()


def test_loading_reports_missing_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DriverUnavailable, match="pip install 'cuda-bindings>=13'"):
        load_driver()
