"""Which executor a device gets, in the kernels and in the runtime."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from driver_bench import MakeArtifact
from driver_kernels import H100, MIXED, MIXED_ABI, NOTHING, NOTHING_ABI
from vgpu_attention import BF16, require_compiler

from pagedtune.harness.cuda_context import CudaContext
from pagedtune.harness.standin_driver import StandInDriver
from pagedtune.kernels import cuda_executor
from pagedtune.kernels.artifact import ArtifactKind
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.cuda_executor import CudaExecutor
from pagedtune.kernels.cuda_paged import CudaPaged
from pagedtune.kernels.device import DeviceKind
from pagedtune.kernels.executors import make_executor, torch_device
from pagedtune.kernels.launch import KernelStep, LaunchPlan
from pagedtune.kernels.native import NativeExecutor
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Op
from pagedtune.runtime.attention import PagedAttention
from pagedtune.runtime.dispatch import Dispatch


@pytest.fixture
def torch_on_stand_in(monkeypatch: pytest.MonkeyPatch, driver: StandInDriver) -> SimpleNamespace:
    """torch.cuda with one device, whose current stream is the attribute `stream` of what this gives."""
    state = SimpleNamespace(stream=0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=state.stream))
    monkeypatch.setattr(cuda_executor, "load_driver", lambda: driver)
    return state


def test_host_functions_and_native_libraries_run_natively() -> None:
    assert isinstance(make_executor(DeviceKind.CPU, ()), NativeExecutor)
    assert isinstance(make_executor(DeviceKind.CUDA, ()), NativeExecutor)  # a plan of host calls, on any tensors
    assert [torch_device(kind).type for kind in (DeviceKind.CPU, DeviceKind.CUDA)] == ["cpu", "cuda"]


def test_a_binary_of_the_wrong_kind_is_refused(artifact: MakeArtifact) -> None:
    cubin = artifact("mixed", MIXED, MIXED_ABI)
    with pytest.raises(ValueError, match="is a cubin binary: a cpu device runs native ones"):
        make_executor(DeviceKind.CPU, (cubin,))
    with pytest.raises(ValueError, match="is a native binary: a cuda device runs cubin ones"):
        make_executor(DeviceKind.CUDA, (replace(cubin, kind=ArtifactKind.NATIVE),))


def test_cubins_run_on_torchs_current_stream(
    torch_on_stand_in: SimpleNamespace, driver: StandInDriver, artifact: MakeArtifact
) -> None:
    kernel = artifact("nothing", NOTHING, NOTHING_ABI)
    driver.know(kernel)
    with CudaContext(driver) as context:
        executor = make_executor(DeviceKind.CUDA, (kernel,))
        assert isinstance(executor, CudaExecutor)
        launch = executor.prepare(LaunchPlan((KernelStep("nothing", (1, 1, 1), ()),), {}).bind({}))
        for torch_on_stand_in.stream in (context.stream, 0):
            launch()
            assert driver.launches[-1].stream == torch_on_stand_in.stream


def test_the_runtime_launches_through_the_driver_and_keeps_workspaces_on_the_device(
    torch_on_stand_in: SimpleNamespace, driver: StandInDriver
) -> None:
    require_compiler("cuda_paged")
    problem = Problem(4, 2, 64)
    driver.know(*CudaPaged().build(problem, BF16, CudaPaged.config_type(), H100))
    dispatch = Dispatch(H100, variants=(CudaPaged(),), fallbacks={Op.ATTENTION: ("cuda_paged",)})
    attention = PagedAttention(problem, BF16, dispatch)
    assert isinstance(attention.plan(Bounds(2, 128)).executor, CudaExecutor)
    assert attention._workspaces._device == torch.device("cuda")
    assert "cuModuleLoadData" in driver.names()
