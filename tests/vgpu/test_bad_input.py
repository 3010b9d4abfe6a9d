"""PTX and launches that cannot be run end with an error that says what and where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vgpu_pairs import module

from pagedtune.harness.vgpu.coverage import table
from pagedtune.harness.vgpu.ptx_parser import parse
from pagedtune.harness.vgpu.ptx_tokens import PtxError
from pagedtune.harness.vgpu.report import FaultKind
from pagedtune.harness.vgpu.run_ptx import FILE_HEADER, run_ptx
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions, load_program
from pagedtune.kernels.artifact import Artifact, ArtifactKind, KernelAbi
from pagedtune.kernels.launch import CType, KernelStep, LaunchPlan, SlotArg
from pagedtune.kernels.slot import Access, SlotSpec

PLAIN = module("", {})
LIMIT = VirtualGpuOptions(num_threads=1, max_warp_instructions=5000)


def body(text: str) -> str:
    return module(text, {})


SYNTAX = {
    "unknown character": (body("add.s32 %r1, %r2, ~5;"), "unexpected character '~'"),
    "missing semicolon": (body("add.s32 %r1, %r2, 5\nmov.u32 %r1, 0;"), "expected ','"),
    "unknown register": (body("add.s32 %r1, %q2, 5;"), "unknown register '%q2'"),
    "register beyond its range": (body("mov.u32 %r64, 5;"), "unknown register '%r64'"),
    "guard that is no predicate": (body("@%r1 mov.u32 %r2, 5;"), "not a predicate"),
    "label twice": (body("L:\nL:\n"), "label L occurs twice"),
    "body without an end": (PLAIN.rpartition("}")[0], "never closed"),
    "no header": (".visible .entry k() { ret; }", "this is not PTX"),
    "32-bit addresses": (".version 8.0\n.target sm_90\n.address_size 32\n", "64-bit"),
}
DECODING = {
    "unknown instruction": ("frobnicate.b32 %r1, %r2;", "unknown instruction 'frobnicate.b32'"),
    "unknown label": ("bra NOWHERE;", "unknown label 'NOWHERE'"),
    "unknown name": ("mov.u32 %r1, nothing;", "unknown name 'nothing'"),
    "wrong register width": ("add.s64 %rd1, %r1, %rd2;", "register %r1 is .b32, expected 64 bits"),
    "missing operand": ("add.s32 %r1, %r2;", "2 operands, expected 3"),
    "unknown comparison": ("setp.foo.s32 %p1, %r1, %r2;", "unknown comparison .foo"),
    "unknown form": ("add.frob.s32 %r1, %r2, %r3;", "not supported by the execution core"),
    "minimum with a lower bound": ("min.relu.s32 %r1, %r2, %r3;", "not supported by the execution core"),
    "choice by a flushed number": ("slct.ftz.b32.f32 %r1, %r2, %r3, %f1;", "slct with .ftz is not supported"),
    "comparison into a half": ("set.lt.f16.f16 %h1, %h2, %h3;", "set with a result of .f16 is not supported"),
    "mbarrier": ("mbarrier.init.shared::cta.b64 [%r1], 1;", "has no mbarrier"),
    "bulk copy": ("cp.async.bulk.commit_group;", "has no cp.async.bulk"),
    "wgmma": ("wgmma.fence.sync.aligned;", "has no wgmma"),
    "tcgen05": ("tcgen05.fence::before_thread_sync;", "has no tcgen05"),
    "shape of mma": (
        "mma.sync.aligned.m16n8k4.row.col.f32.f16.f16.f32 {%f1,%f2,%f3,%f4}, {%r1}, {%r2}, {%f1,%f2,%f3,%f4};",
        "is not a supported shape of mma",
    ),
    "mma of f64": (
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d1,%d2}, {%d3}, {%d4}, {%d1,%d2};",
        "not a supported shape of mma",
    ),
    "mma of integers into floats": (
        "mma.sync.aligned.m8n8k16.row.col.f32.s8.s8.f32 {%f1,%f2}, {%r1}, {%r2}, {%f1,%f2};",
        "not a supported shape of mma",
    ),
    "mma of four bits": (
        "mma.sync.aligned.m8n8k32.row.col.s32.s4.s4.s32 {%r1,%r2}, {%r3}, {%r4}, {%r1,%r2};",
        "not a supported shape of mma",
    ),
    "sparse mma": (
        "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1}, %r3, 0;",
        "has no mma.sp",
    ),
    "too many registers": (
        "atom.global.v8.f16.add.noftz {%h0,%h1,%h2,%h3,%h4,%h5,%h6,%h7}, [%rd1], {%h0,%h1,%h2,%h3,%h4,%h5,%h6,%h7};",
        "17 registers, the virtual GPU takes at most 16",
    ),
    "call of an unknown function": ("call.uni nowhere;", "function 'nowhere' has no body"),
    "bulk of registers": ("ld.global.v4.u32 {%r1, %r2}, [%rd1];", "2 registers, expected 4"),
}


@pytest.mark.parametrize("name", SYNTAX)
def test_ptx_that_does_not_parse_names_the_line(name: str) -> None:
    text, message = SYNTAX[name]
    with pytest.raises(PtxError, match=r"PTX line \d+: ") as error:
        parse(text)
    assert message in str(error.value)


@pytest.mark.parametrize("name", DECODING)
def test_an_instruction_that_cannot_run_is_named_with_its_line(name: str) -> None:
    instruction, message = DECODING[name]
    text = body(instruction)
    line = next(n for n, row in enumerate(text.splitlines(), 1) if instruction in row)
    with pytest.raises(PtxError) as error:
        load_program(text, "k")
    assert message in str(error.value)
    assert error.value.line == line


def test_the_coverage_table_lists_every_opcode_and_says_what_cannot_run() -> None:
    text = body(
        "add.s32 %r1, %r2, 5;\nadd.s32 %r1, %r1, 6;\nmbarrier.init.shared.b64 [%r1], 1;\nadd.frob.s32 %r1, %r1, 1;"
    )
    lines = table([text]).splitlines()
    assert "      2  add.s32" in lines
    assert any("mbarrier.init" in line and "NOT RUN" in line for line in lines)
    assert lines[-1] == "3 of 5 opcodes run"


def test_recursion_is_refused() -> None:
    text = f"{FILE_HEADER}.func f() {{ call.uni f; ret; }}\n.visible .entry k() {{ call.uni f; ret; }}"
    with pytest.raises(PtxError, match="recursive call of f"):
        load_program(text, "k")


def test_a_missing_entry_lists_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no entry 'other'; it has k"):
        load_program(PLAIN, "other")


X = torch.zeros(4, dtype=torch.int32)


def launch(text: str = "", **changes: object) -> None:
    arguments = {"x": (X, Access.INOUT)}
    run_ptx(module(text, arguments), "k", arguments, **changes)  # type: ignore[arg-type]


def test_launches_that_no_device_accepts() -> None:
    with pytest.raises(ValueError, match="cannot be launched"):
        launch(block=(1056, 1, 1))
    with pytest.raises(ValueError, match="cannot be launched"):
        launch(grid=(0, 1, 1))
    with pytest.raises(ValueError, match=r"60000 bytes of shared memory, the device has 50000"):
        launch(shared_bytes=60000, options=VirtualGpuOptions(shared_bytes=50000))


def test_a_block_that_the_kernel_was_not_compiled_for() -> None:
    text = module("", {}).replace("{\n.reg", ".reqntid 64\n{\n.reg", 1)
    with pytest.raises(ValueError, match=r"compiled for blocks of \(64,\), not \(32, 1, 1\)"):
        run_ptx(text, "k", {})


def test_arguments_of_the_wrong_type() -> None:
    text = module("", {"x": (X, Access.INOUT)})
    with pytest.raises(ValueError, match=r"the PTX takes \[8\] bytes, not \[4\]"):
        run_ptx(text, "k", {"n": 5})
    with pytest.raises(ValueError, match=r"takes \[8\] bytes, not \[8, 4\]"):
        run_ptx(text, "k", {"x": (X, Access.INOUT), "n": 1.5})


def test_a_kernel_compiled_for_another_architecture() -> None:
    with pytest.raises(ValueError, match="compiled for sm_90; the device is sm_80"):
        launch(options=VirtualGpuOptions(capability=80))
    launch(options=VirtualGpuOptions(capability=100))


def test_a_pointer_that_breaks_an_alignment_which_the_binary_assumes(tmp_path: Path) -> None:
    arguments = {"x": (X, Access.INOUT)}
    path = tmp_path / "k.ptx"
    path.write_text(module("", arguments))
    abi = KernelAbi((CType.POINTER,), align={0: 16})
    gpu = VirtualGpu([Artifact(ArtifactKind.CUBIN, path, "", "sm_90", {"k": abi}, {}, path)])
    step = KernelStep("k", (1, 1, 1), (SlotArg("x"),), (32, 1, 1))
    plan = LaunchPlan((step,), {"x": SlotSpec(torch.int32, (4,), Access.INOUT)})
    gpu.prepare(plan.bind({"x": torch.zeros(8, dtype=torch.int32)[:4]}))()
    with pytest.raises(ValueError, match=r"argument 0 .* but the binary assumes a multiple of 16"):
        gpu.prepare(plan.bind({"x": torch.zeros(8, dtype=torch.int32)[1:5]}))()


def test_an_endless_loop_names_its_places_its_warps_and_the_limit() -> None:
    """Three warps spin at one place, the fourth waits for them at a barrier: both are told."""
    arguments = {"x": (X, Access.INOUT)}
    body = "setp.lt.u32 %p1, %r60, 96;\nL:\n@%p1 bra L;\nbar.sync 0;"
    report = run_ptx(module(body, arguments), "k", arguments, block=(128, 1, 1), options=LIMIT)
    spin, wait = (
        next(n for n, row in enumerate(module(body, arguments).splitlines(), 1) if t in row) for t in ("bra", "bar")
    )
    said = {fault.line: str(fault) for fault in report.faults}
    assert set(said) == {spin, wait}
    assert "endless loop" in said[spin]
    assert "3 warps of the block are here; the limit is 5000 instructions a warp" in said[spin]
    assert "1 warps of the block are here" in said[wait]


def test_a_deadlock_names_where_the_warps_wait() -> None:
    arguments = {"x": (X, Access.INOUT)}
    body = "setp.lt.u32 %p1, %r60, 32;\n@%p1 bar.sync 1, 64;\n@!%p1 bar.sync 2, 64;"
    report = run_ptx(module(body, arguments), "k", arguments, block=(64, 1, 1), options=LIMIT)
    assert [f.kind for f in report.faults] == [FaultKind.DEADLOCK] * 2
    for fault, barrier in zip(report.faults, ("bar.sync 1", "bar.sync 2"), strict=True):
        assert barrier in module(body, arguments).splitlines()[fault.line - 1]
        assert "waits for threads that never come" in str(fault)
        assert "1 warps of the block are here" in str(fault)


def test_an_artifact_without_ptx(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("artifact") / "library.so"
    artifact = Artifact(ArtifactKind.NATIVE, path, "", "x86_64", {"k": KernelAbi(())})
    with pytest.raises(ValueError, match="has no PTX"):
        VirtualGpu((artifact,))
