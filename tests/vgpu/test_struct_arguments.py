"""Kernels that take a struct by value: several arguments fill its bytes at their offsets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagedtune.harness.vgpu.virtual_gpu import VirtualGpu
from pagedtune.kernels.arguments import resolve_arguments
from pagedtune.kernels.artifact import Artifact, ArtifactKind, KernelAbi
from pagedtune.kernels.cubin import Compiled, find_cached, store
from pagedtune.kernels.launch import BoundPlan, CType, KernelStep, LaunchPlan, ScalarArg, SlotArg
from pagedtune.kernels.slot import Access, SlotSpec

# struct { float *target; int a, b; float factor; const int *source; int unused; } and a plain parameter after it:
# target = {factor, a + b + last, *source, unused}
PTX = """
.version 8.7
.target sm_90
.address_size 64
.visible .entry fill(.param .align 8 .b8 fields[40], .param .u32 last)
{
 .reg .b64 %rd<3>; .reg .b32 %r<8>; .reg .f32 %f<2>;
 ld.param.u64 %rd1, [fields];
 ld.param.v2.u32 {%r1, %r2}, [fields+8];
 ld.param.f32 %f1, [fields+16];
 ld.param.u64 %rd2, [fields+24];
 ld.param.u32 %r6, [fields+32];
 ld.param.u32 %r3, [last];
 add.s32 %r4, %r1, %r2;
 add.s32 %r4, %r4, %r3;
 ld.global.u32 %r5, [%rd2];
 st.global.f32 [%rd1], %f1;
 st.global.u32 [%rd1+4], %r4;
 st.global.u32 [%rd1+8], %r5;
 st.global.u32 [%rd1+12], %r6;
 ret;
}
"""
TYPES = (CType.I32, CType.POINTER, CType.POINTER, CType.I32, CType.F32, CType.I32)
OFFSETS = (40, 0, 24, 8, 16, 12)  # last, target, source, a, factor, b: any order
ARGS = (
    ScalarArg(100, CType.I32), SlotArg("target"), SlotArg("source"), ScalarArg(-5, CType.I32),
    ScalarArg(1.5, CType.F32), ScalarArg(7, CType.I32),
)  # fmt: skip


def bound_plan() -> tuple[BoundPlan, torch.Tensor]:
    target, source = torch.zeros(4, dtype=torch.int32), torch.tensor([1234], dtype=torch.int32)
    slots = {
        "target": SlotSpec(torch.int32, (4,), Access.OUT),
        "source": SlotSpec(torch.int32, (1,), Access.IN),
    }
    step = KernelStep("fill", (1, 1, 1), ARGS, (1, 1, 1))
    return LaunchPlan((step,), slots).bind({"target": target, "source": source}), target


def gpu_for(folder: Path, abi: KernelAbi) -> VirtualGpu:
    path = folder / "fill.ptx"
    path.write_text(PTX)
    return VirtualGpu((Artifact(ArtifactKind.CUBIN, path, "", "sm_90", {"fill": abi}, ptx_path=path),))


def test_arguments_fill_a_struct_at_their_offsets(tmp_path: Path) -> None:
    """Pointers are addresses of the virtual GPU there too, and what nobody fills is zero."""
    bound, target = bound_plan()
    gpu_for(tmp_path, KernelAbi(TYPES, offsets=OFFSETS)).prepare(bound)()
    assert target.view(torch.float32)[0] == 1.5
    assert target[1:].tolist() == [-5 + 7 + 100, 1234, 0]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ((40, 0, 24, 8, 16, 44), "bytes 44 to 48 do not lie in one parameter"),
        ((38, 0, 24, 8, 16, 12), "bytes 38 to 42 do not lie in one parameter"),
        ((40, 0, 24, 8, 16, 10), "two arguments fill byte 10"),
        ((40, 0, 24, 8, 16), "5 offsets for 6 arguments"),
        ((), r"the PTX takes \[40, 4\] bytes"),
    ],
)
def test_arguments_that_do_not_fit_the_struct_are_refused(
    tmp_path: Path, offsets: tuple[int, ...], message: str
) -> None:
    bound, _ = bound_plan()
    with pytest.raises(ValueError, match=message):
        gpu_for(tmp_path, KernelAbi(TYPES, offsets=offsets)).prepare(bound)


def test_a_promised_alignment_holds_within_a_struct(tmp_path: Path) -> None:
    bound, _ = bound_plan()
    abi = KernelAbi(TYPES, {2: 1 << 40}, offsets=OFFSETS)
    with pytest.raises(ValueError, match="argument 2"):
        gpu_for(tmp_path, abi).prepare(bound)()


def test_launches_on_a_device_refuse_structs() -> None:
    """`cuLaunchKernel` takes one address for each parameter, which an argument within a struct is not."""
    bound, _ = bound_plan()
    (step,) = bound.plan.steps
    assert isinstance(step, KernelStep)
    abi = KernelAbi(TYPES, offsets=OFFSETS)
    with pytest.raises(ValueError, match="fill: takes a struct by value"):
        resolve_arguments(bound, step, abi)
    assert len(resolve_arguments(bound, step, replace(abi, offsets=()))) == len(TYPES)


def test_offsets_are_kept_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDTUNE_CACHE", str(tmp_path))
    abi = {"fill": KernelAbi(TYPES, offsets=OFFSETS)}
    store("fill", "key", Compiled(b"binary", PTX, "none", (), "sm_90", abi, {"fill": 0}))
    found = find_cached("fill", "key")
    assert found is not None
    assert found.abi == abi
