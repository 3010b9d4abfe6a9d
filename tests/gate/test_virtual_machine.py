"""The gate on the virtual GPU: what machine runs a case, what counts as dead, and which faults only it can see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.gate import run_case
from pagedtune.harness.inputs import AttentionInputs
from pagedtune.harness.machines import NativeMachine, VirtualMachine, dead_slots, machine_for, verdict_for
from pagedtune.harness.memory import Poison
from pagedtune.harness.verdicts import Check
from pagedtune.kernels import cuda_paged
from pagedtune.kernels.cuda_paged import CudaPaged
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.record import Status, Verdict
from pagedtune.kernels.triton_split import TritonSplit
from pagedtune.kernels.variant import Variant

from .toy import CPU, make_case

H100 = Device("h100", DeviceKind.CUDA, capability=90, num_units=132, shared_bytes_per_block=232448)
CASES = (
    make_case((40, 0, 17), Family.RANDOM, Hazard.TAIL_INT_MAX, Hazard.STRIDED, Hazard.OFFSET_BASE),
    make_case((33, 1), Family.CODED, Hazard.HIGH_POOL, Hazard.TAIL_FOREIGN),
    make_case((20, 7), Family.NEEDLE, Hazard.REPLAY, Hazard.TAIL_MINUS_ONE, Hazard.STRIDED_POOL),
    make_case((40,), Family.RANDOM, kv_dtype=DType.INT8),
    make_case((20, 0, 7), Family.RANDOM, Hazard.HIGH_ROWS, Hazard.REPLAY),
)


def gpu(variant: Variant, case: Case, device: Device = H100) -> tuple[Status, str, str]:
    config = variant.default_config(case.problem, case.pool_format, case.bounds, device)
    result = run_case(variant, config, case, device)
    return result.status, result.failed, result.reason


def test_a_gpu_is_emulated_and_a_cpu_is_not() -> None:
    assert isinstance(machine_for(CPU, ()), NativeMachine)
    assert isinstance(machine_for(H100, ()), VirtualMachine)
    assert verdict_for(CPU) is Verdict.ON_DEVICE
    assert verdict_for(H100) is Verdict.EMULATED


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
@pytest.mark.parametrize("variant", [TritonSplit(), CudaPaged()], ids=lambda v: v.name)
def test_right_kernels_pass(variant: Variant, case: Case) -> None:
    status, _, reason = gpu(variant, case)
    assert status is Status.PASSED, reason


def test_dead_slots_are_exactly_those_that_hold_no_token() -> None:
    case = make_case((5, 3), Family.RANDOM)
    maker = AttentionInputs(case)
    plan = CudaPaged().plan(case.problem, case.pool_format, cuda_paged.CudaPagedConfig(), case.bounds)
    dead = dead_slots(maker.make(plan, Poison.NAN))
    live = torch.from_numpy(maker.placement.live)
    assert torch.equal(dead["k_cache"].any(dim=(2, 3)), ~live)
    assert torch.equal(dead["k_cache"].all(dim=(2, 3)), ~live)
    assert not dead_slots(maker.make(plan, Poison.FINITE))


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], CudaPaged]:
    """`cuda_paged` with one text of its source replaced."""

    def plant(before: str, after: str) -> CudaPaged:
        text = cuda_paged.SOURCE.read_text()
        assert text.count(before) == 1
        path = tmp_path / "paged_attention.cu"
        path.write_text(text.replace(before, after))
        monkeypatch.setattr(cuda_paged, "SOURCE", path)
        return CudaPaged()

    return plant


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("    __syncthreads();\n", "", "race"),
        ("end = min(position + 1, (b + 1)", "end = min(position + 2, (b + 1)", "uninitialised"),
        ("if (token >= query_start_loc[num_seqs]) return;", "", "outside every allocation"),
        ("warp_acc[PT_WARPS][DV]", "warp_acc[PT_WARPS - 1][DV]", "outside every allocation"),
    ],
    ids=["no barrier", "one token too many", "padded rows", "shared memory too small"],
)
def test_faults_of_memory_and_order_are_named(
    changed: Callable[[str, str], CudaPaged], before: str, after: str, says: str
) -> None:
    case = make_case((40, 0, 17), Family.RANDOM, Hazard.LOOSE_BOUNDS)
    status, failed, reason = gpu(changed(before, after), case)
    assert (status, failed) == (Status.WRONG, Check.EMULATION.value), reason
    assert says in reason
    assert "PTX line" in reason


def test_a_device_with_less_shared_memory_than_the_kernel_wants_is_refused() -> None:
    small = Device("small", DeviceKind.CUDA, capability=90, num_units=1, shared_bytes_per_block=1024)
    with pytest.raises(ValueError, match="bytes of shared memory, the device has 1024"):
        gpu(CudaPaged(), make_case((5,), heads=(8, 2, 256, 256)), small)
