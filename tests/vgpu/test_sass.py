"""Machine code of cubins, and issue slots, against counts by hand."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
import torch
from vgpu_attention import BF16, CASES, H100, H100_AT, Case, run

from pagedtune.harness.flow import analyse
from pagedtune.harness.issue_slots import count_slots, issue_slots
from pagedtune.harness.sass import SassClass, SassError, SassKernel, disassemble, parse_sass
from pagedtune.harness.vgpu.report import SiteReport, StepReport
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions
from pagedtune.kernels.artifact import Artifact, KernelAbi
from pagedtune.kernels.build_nvrtc import CudaKernel, build_nvrtc
from pagedtune.kernels.cubin import find_cuda_tool
from pagedtune.kernels.cuda_paged import CudaPaged, CudaPagedConfig
from pagedtune.kernels.launch import CType, KernelStep, LaunchPlan, ScalarArg, SlotArg
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.slot import Access, SlotSpec
from pagedtune.kernels.triton_split import TritonSplit, TritonSplitConfig
from pagedtune.kernels.variant import Variant

needs_tool = pytest.mark.skipif(find_cuda_tool("cuobjdump") is None, reason="cuobjdump is not installed")
needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="NVRTC is not installed")

LOOP = """
extern "C" __global__ void sums(const float* x, float* o, int n) {
    float sum = 0.0f;
    #pragma unroll 1
    for (int k = 0; k < n; ++k) sum = __fmaf_rn(sum, 0.5f, __ldg(x + k * 64 + threadIdx.x));
    o[blockIdx.x * 64 + threadIdx.x] = sum;
}
extern "C" __global__ void local_array(const int* x, int* o, int n) {
    int held[64];
    for (int k = 0; k < 64; ++k) held[k] = x[k];
    for (int k = 0; k < n; ++k) held[x[k] & 63] += held[(x[k] >> 6) & 63];
    o[threadIdx.x] = held[(n + threadIdx.x) & 63];
}
"""
ABI = KernelAbi((CType.POINTER, CType.POINTER, CType.I32))


def build(folder: Path, capability: int) -> Artifact:
    source = folder / "loop.cu"
    source.write_text(LOOP)
    return build_nvrtc(CudaKernel(source, {"sums": ABI, "local_array": ABI}), capability)


def launch(artifact: Artifact, rounds: int, blocks: int) -> StepReport:
    """`sums` over `rounds` rows with 2 warps a block."""
    tensors = {"x": torch.ones(rounds, 64), "o": torch.zeros(blocks, 64)}
    slots = {
        "x": SlotSpec(torch.float32, (rounds, 64), Access.IN),
        "o": SlotSpec(torch.float32, (blocks, 64), Access.OUT),
    }
    args = (SlotArg("x"), SlotArg("o"), ScalarArg(rounds, CType.I32))
    plan = LaunchPlan((KernelStep("sums", (blocks, 1, 1), args, (64, 1, 1)),), slots)
    gpu = VirtualGpu((artifact,), VirtualGpuOptions(num_threads=1))
    gpu.prepare(plan.bind(tensors))()
    return gpu.report.steps[0]


def listing(artifact: Artifact, entry: str) -> list[tuple[int, str]]:
    """(offset, text) of each instruction of an entry up to its last EXIT, read without the module under test."""
    tool = find_cuda_tool("cuobjdump")
    text = subprocess.run([str(tool), "-sass", str(artifact.path)], capture_output=True, text=True, check=True).stdout
    text = text.partition(f"Function : {entry}")[2].partition("Function :")[0]
    lines = [line.split("*/", 1) for line in text.splitlines() if ";" in line]
    code = [(int(a.split("/*")[1], 16), b.partition(";")[0].strip()) for a, b in lines]
    last = max(k for k, (_, line) in enumerate(code) if line.endswith("EXIT"))
    return code[: last + 1]


@needs_tool
@needs_nvrtc
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_slots_of_a_known_loop(capability: int, tmp_path: Path) -> None:
    """Each warp runs the loop's lines `rounds` times and all others once: counted on the text of the listing."""
    rounds, blocks, warps = 9, 3, 6
    artifact = build(tmp_path, capability)
    code = listing(artifact, "sums")
    branches = [(at, int(line.split("0x")[1], 16)) for at, line in code if "BRA" in line]
    start, end = next((target, at) for at, target in branches if target < at)
    inside = sum(start <= at <= end for at, _ in code)
    expected = warps * (len(code) - inside + rounds * inside)

    slots = issue_slots(artifact.path, "sums", launch(artifact, rounds, blocks))

    assert slots.matched, slots.reason
    assert slots.low <= expected <= slots.high
    assert slots.total == expected
    assert slots.main_loop == inside
    assert [(m.iterations, m.unroll, m.address) for m in slots.loops] == [(warps * rounds, 1, start)]
    assert slots.by_class["global"] == warps * (rounds + 1)
    assert slots.spills == 0


@needs_tool
@needs_nvrtc
def test_local_memory_is_counted(tmp_path: Path) -> None:
    """An array indexed at run time lies in local memory: every STL and LDL of the listing is a spill."""
    artifact = build(tmp_path, 90)
    expected = sum(line.split()[0].startswith(("STL", "LDL")) for _, line in listing(artifact, "local_array"))
    assert expected > 0
    assert disassemble(artifact.path)["local_array"].spills == expected
    assert disassemble(artifact.path)["sums"].spills == 0


SPLIT_CASE = Case(Problem(8, 2, 64), BF16, (200, 64), triton=TritonSplitConfig(1, 32, 32, num_warps=4))


@needs_tool
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("variant", [TritonSplit(), CudaPaged()], ids=lambda v: str(v.name))
def test_loops_of_the_attention_kernels_are_found(variant: Variant, capability: int) -> None:
    """Keys: 200 and 64. triton_split: 7 + 2 tiles of 32 x 2 KV heads x 4 warps. cuda_paged: one warp iteration a key
    block of 16 in the outer loop: 13 + 4 blocks x 8 query heads."""
    config = SPLIT_CASE.triton if variant.name == "triton_split" else CudaPagedConfig()
    _, gpu = run(variant, config, SPLIT_CASE, VirtualGpuOptions(num_threads=1), capability)
    artifact = variant.build(SPLIT_CASE.problem, SPLIT_CASE.pool_format, config, H100_AT[capability])[0]
    step = gpu.report.steps[0]
    slots = issue_slots(artifact.path, step.entry, step)
    assert slots.matched, slots.reason
    main = max(slots.loops, key=lambda m: m.iterations * m.instructions)
    outer = {"triton_split": (7 + 2) * 2 * 4, "cuda_paged": (13 + 4) * 8}[variant.name]
    assert outer in [m.iterations for m in slots.loops]
    assert main.instructions > 50
    assert 0.9 * slots.high <= slots.total <= slots.high
    if variant.name == "triton_split":
        assert slots.by_class["tensor"] == step.counters.matrix_operations


# A listing in the form of `cuobjdump -sass`: a loop unrolled twice and its remainder, a guarded early exit, a call used
# as a jump, a function that returns, and code for diverged warps.
TEXT = """
\tFunction : hand
\t.headerflags\t@"EF_CUDA_SM80"
        /*0000*/                   S2R R0, SR_TID.X ;          /* 0x0 */
                                                               /* 0x1 */
        /*0010*/               @P0 EXIT ;                      /* 0x0 */
        /*0020*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
        /*0030*/                   LDG.E R2, [R2.64] ;
        /*0040*/                   LDG.E R3, [R2.64+0x4] ;
        /*0050*/               @P1 BRA 0x30 ;
        /*0060*/                   LDG.E R2, [R2.64] ;
        /*0070*/               @P1 BRA 0x60 ;
        /*0080*/                   BRA.DIV ~URZ, 0xd0 ;
        /*0090*/                   CALL.REL.NOINC 0x100 ;
        /*00a0*/                   CALL.REL.NOINC 0xb0 ;
        /*00b0*/                   STG.E [R2.64], R4 ;
        /*00c0*/                   EXIT ;
        /*00d0*/                   MOV R5, R6 ;
        /*00e0*/                   BRA 0x90 ;
        /*00f0*/                   BRA 0xf0;
        /*0100*/                   FFMA R1, R2, R3, R4 ;
        /*0110*/                   RET.REL.NODEC R8 0x0 ;
        /*0120*/                   NOP;
"""


def hand_kernel() -> SassKernel:
    return parse_sass(TEXT)["hand"]


def site(line: int, instruction: str, executed: int, target: int = -1, guarded: bool = False) -> SiteReport:
    return SiteReport(line, instruction, "", executed, 32 * executed, 0, 0, 0, 0, 0, guarded, target)


def test_blocks_of_a_listing() -> None:
    kernel = hand_kernel()
    assert [[i.address for i in block] for block in kernel.blocks] == [
        [0x0, 0x10], [0x20], [0x30, 0x40, 0x50], [0x60, 0x70], [0x80, 0x90], [0xA0], [0xB0, 0xC0], [0x100, 0x110],
    ]  # fmt: skip
    assert [loop.blocks for loop in kernel.flow.loops] == [{2}, {3}]
    assert kernel.calls == {4: 7}
    assert kernel.counts[SassClass.GLOBAL] == 4
    assert kernel.counts[SassClass.CONTROL] == 8


def test_slots_of_an_unrolled_loop() -> None:
    """10 warps of which 4 exit early; 6 x 7 rounds: 3 of two rounds and 1 of one for each warp.

    2 x 10 + 6 x 1 (move) + 18 x 3 + 6 x 2 + 6 x 5 (branch, two calls, store, exit) + 6 x 2 (function)
    """
    sites = [
        site(1, "mov.u32", 10),
        site(2, "ret", 4, guarded=True),
        site(3, "mov.u32", 6),
        site(4, "ld.global.u32", 42),
        site(5, "bra", 36, target=3, guarded=True),
        site(6, "st.global.u32", 6),
        site(7, "ret", 6),
    ]
    slots = count_slots(hand_kernel(), sites)
    assert slots.matched
    assert [(m.iterations, m.unroll) for m in slots.loops] == [(42, 2)]
    assert slots.total == 2 * 10 + 6 + 18 * 3 + 6 * 2 + 6 * (1 + 1 + 1 + 2) + 6 * 2
    assert slots.by_class["float"] == 6


def test_a_loop_without_counterpart_is_named() -> None:
    """The PTX loop holds a barrier, which no loop of the binary has."""
    sites = [
        site(1, "mov.u32", 2),
        site(9, "bar.sync", 8),
        site(10, "bra", 6, target=1, guarded=True),
        site(11, "ret", 2),
    ]
    slots = count_slots(hand_kernel(), sites)
    assert not slots.matched
    assert "PTX line 9" in slots.reason
    assert [m.matched for m in slots.loops] == [False]


def test_a_loop_with_a_few_accesses_split_in_two() -> None:
    """8 rounds of 41 loads of shared memory for 40 in the PTX: no other loop, and not unrolled. 50 would be another."""

    def kernel(loads: int) -> SassKernel:
        lines = [*(["LDS R2, [R3]"] * loads), "@P0 BRA 0x0", "EXIT"]
        rows = [f"        /*{16 * k:04x}*/                   {line} ;" for k, line in enumerate(lines)]
        return parse_sass("\n".join(["\tFunction : made", *rows]))["made"]

    sites = [
        *(site(k, "ld.shared.b32", 8) for k in range(40)),
        site(40, "bra", 8, target=0, guarded=True),
        site(41, "ret", 2),
    ]
    slots = count_slots(kernel(41), sites)
    assert [(m.matched, m.iterations, m.unroll, m.instructions) for m in slots.loops] == [(True, 8, 1, 42)]
    assert not count_slots(kernel(50), sites).matched


def test_dominators_and_nested_loops() -> None:
    """0 -> 1 -> 2 -> 3 -> (2 | 4) ; 4 -> (1 | 5); 0 -> 6 -> 5."""
    flow = analyse([[1, 6], [2], [3], [2, 4], [1, 5], [], [5]])
    assert flow.dominators[4] == {0, 1, 2, 3, 4}
    assert flow.post_dominators[1] == {1, 2, 3, 4, 5}
    assert [(loop.header, loop.blocks, loop.parent) for loop in flow.loops] == [(1, {1, 2, 3, 4}, -1), (2, {2, 3}, 0)]
    assert flow.loop_of == (-1, 0, 1, 1, 0, -1, -1)
    assert flow.equivalent(0, 5)
    assert flow.equivalent(1, 4)
    assert not flow.equivalent(1, 2)
    assert not flow.equivalent(0, 6)
    assert not flow.irreducible
    assert analyse([[1, 2], [2], [1]]).irreducible


@needs_tool
def test_what_is_no_cubin(tmp_path: Path) -> None:
    path = tmp_path / "x.cubin"
    path.write_bytes(b"not a cubin")
    with pytest.raises(SassError, match="no machine code"):
        disassemble(path)


@needs_tool
def test_an_entry_that_is_missing() -> None:
    case = CASES["plain"]
    artifact = TritonSplit().build(case.problem, case.pool_format, case.triton, H100)[0]
    _, gpu = run(TritonSplit(), case.triton, case, VirtualGpuOptions(num_threads=1))
    with pytest.raises(SassError, match="no entry 'other'; it has attention_split"):
        issue_slots(artifact.path, "other", gpu.report.steps[0])
