"""Plans of several steps on the virtual GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from pagedtune.harness.vgpu.virtual_gpu import VirtualGpu
from pagedtune.kernels.artifact import Artifact, ArtifactKind, KernelAbi
from pagedtune.kernels.launch import CType, KernelStep, LaunchPlan, ScalarArg, SlotArg, WorkspaceSpec

# target[index] = index + 1
PTX = """
.version 8.7
.target sm_90
.address_size 64
.visible .entry put(.param .u64 target, .param .u64 index)
{
 .reg .b64 %rd<5>; .reg .b32 %r<3>;
 ld.param.u64 %rd1, [target]; ld.param.u64 %rd2, [index];
 shl.b64 %rd3, %rd2, 2;
 add.s64 %rd4, %rd1, %rd3;
 cvt.u32.u64 %r1, %rd2;
 add.u32 %r2, %r1, 1;
 st.global.u32 [%rd4], %r2;
 ret;
}
"""


def test_two_launches_of_one_kernel_keep_their_own_arguments(tmp_path: Path) -> None:
    path = tmp_path / "put.ptx"
    path.write_text(PTX)
    abi = {"put": KernelAbi((CType.POINTER, CType.I64))}
    gpu = VirtualGpu((Artifact(ArtifactKind.CUBIN, path, "", "sm_90", abi, ptx_path=path),))
    steps = tuple(KernelStep("put", (1, 1, 1), (SlotArg("words"), ScalarArg(index, CType.I64))) for index in (0, 3))
    words = torch.zeros(4, dtype=torch.int32)
    plan = LaunchPlan(steps, {}, {"words": WorkspaceSpec(torch.int32, (4,))})
    gpu.prepare(plan.bind({"words": words}))()
    assert words.tolist() == [1, 0, 0, 4]
