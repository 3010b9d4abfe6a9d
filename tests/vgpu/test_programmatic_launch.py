"""Programmatic dependent launch: a kernel may start before the previous one has ended, until `griddepcontrol.wait`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vgpu_pairs import MARK, SCHEDULES

from pagedtune.harness.vgpu.report import FaultKind, RunReport
from pagedtune.harness.vgpu.run_ptx import FILE_HEADER
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions
from pagedtune.kernels.artifact import Artifact, ArtifactKind, KernelAbi
from pagedtune.kernels.launch import CType, KernelStep, LaunchAttributes, LaunchPlan, MemsetStep, SlotArg
from pagedtune.kernels.slot import Access, SlotSpec, WorkspaceSpec

# Each kernel takes x (input), w (workspace) and o (output); %rd4 and %rd5 are &w[tid] and &o[tid].
FRAME = """.visible .entry {name}(.param .u64 x, .param .u64 w, .param .u64 o) {{
.reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<8>;
ld.param.u64 %rd0, [x];
ld.param.u64 %rd1, [w];
ld.param.u64 %rd2, [o];
mov.u32 %r0, %tid.x;
mul.wide.u32 %rd3, %r0, 4;
add.s64 %rd4, %rd1, %rd3;
add.s64 %rd5, %rd2, %rd3;
add.s64 %rd6, %rd0, %rd3;
{body}
ret;
}}
"""
FIRST = """griddepcontrol.launch_dependents;
ld.global.u32 %r1, [%rd6];
st.global.u32 [%rd4], %r1;"""
READS = "ld.global.u32 %r1, [%rd4];{mark}\nst.global.u32 [%rd5], %r1;"
WAIT = "griddepcontrol.wait;\n"
# Its own input may be loaded early: that is what the attribute is for.
EARLY_INPUT = "ld.global.u32 %r2, [%rd6];\n"
ONE_WAITS = "setp.ne.u32 %p1, %r0, 0;\n@%p1 bra MET;\ngriddepcontrol.wait;\nMET:\n"
FAULTY = {
    "reads what the previous kernel wrote": EARLY_INPUT + READS.format(mark=f" {MARK}") + "\n" + WAIT,
    "overwrites what the previous kernel wrote": f"st.global.u32 [%rd4], 7; {MARK}\n{WAIT}" + READS.format(mark=""),
    "overwrites what the previous kernel reads": f"st.global.u32 [%rd6], 7; {MARK}\n{WAIT}" + READS.format(mark=""),
    "one thread waits for all": EARLY_INPUT + ONE_WAITS + READS.format(mark=f" {MARK}"),
    "never waits": READS.format(mark=f" {MARK}"),
}
CORRECT = {
    "waits first": EARLY_INPUT + WAIT + READS.format(mark=""),
    "one thread waits, then all meet": EARLY_INPUT + ONE_WAITS + "bar.sync 0;\n" + READS.format(mark=""),
}


def run(
    folder: Path, bodies: list[str], options: VirtualGpuOptions, overlap: bool = True, clear: bool = False
) -> tuple[str, RunReport]:
    """The PTX of a plan of one kernel per body, and its report."""
    ptx = FILE_HEADER + "".join(FRAME.format(name=f"k{n}", body=body) for n, body in enumerate(bodies))
    path = folder / "kernels.ptx"
    path.write_text(ptx)
    abi = KernelAbi((CType.POINTER,) * 3)
    artifact = Artifact(ArtifactKind.CUBIN, path, "", "", {f"k{n}": abi for n in range(len(bodies))}, {}, path)
    args = (SlotArg("x"), SlotArg("w"), SlotArg("o"))
    steps: list[KernelStep | MemsetStep] = [
        KernelStep(
            f"k{n}",
            (1, 1, 1),
            args,
            (64, 1, 1),
            attributes=LaunchAttributes(programmatic_dependent_launch=overlap and n > 0),
        )
        for n in range(len(bodies))
    ]
    if clear:
        steps.insert(1, MemsetStep("w"))
    slots = {n: SlotSpec(torch.int32, (64,), a) for n, a in (("x", Access.INOUT), ("o", Access.OUT))}
    plan = LaunchPlan(tuple(steps), slots, {"w": WorkspaceSpec(torch.int32, (64,))})
    tensors = {"x": torch.arange(64, dtype=torch.int32), "o": torch.zeros(64, dtype=torch.int32)}
    gpu = VirtualGpu([artifact], options)
    gpu.prepare(plan.bind(tensors | plan.allocate_workspaces()))()
    return ptx, gpu.report


def faults(folder: Path, bodies: list[str], **more: bool) -> list[tuple[FaultKind, str]]:
    """Kind and text of the lines that are faulted, under every schedule."""
    found = []
    for options in SCHEDULES.values():
        quiet = VirtualGpuOptions(**{**vars(options), "raise_faults": False})
        ptx, report = run(folder, bodies, quiet, **more)
        found += [(f.kind, ptx.splitlines()[f.line - 1]) for f in report.faults]
    return found


@pytest.mark.parametrize("name", FAULTY)
def test_access_before_the_wait_is_found_at_its_line(name: str, tmp_path: Path) -> None:
    found = faults(tmp_path, [FIRST, FAULTY[name]])
    assert len(found) == len(SCHEDULES)
    for kind, line in found:
        assert kind is FaultKind.PROGRAMMATIC_ORDER
        assert MARK in line


@pytest.mark.parametrize("name", CORRECT)
def test_access_after_the_wait_is_clean(name: str, tmp_path: Path) -> None:
    assert not faults(tmp_path, [FIRST, CORRECT[name]])


def test_without_the_attribute_the_previous_kernel_has_ended(tmp_path: Path) -> None:
    assert not faults(tmp_path, [FIRST, READS.format(mark="")], overlap=False)
    assert not faults(tmp_path, [FIRST, READS.format(mark="")], clear=True)


def test_a_kernel_that_did_not_wait_leaves_its_predecessor_in_flight(tmp_path: Path) -> None:
    """The third kernel's wait orders the second, but nobody has waited for the first."""
    third = READS.format(mark=f" {MARK}")
    idle = "mov.u32 %r1, 1;"
    assert {MARK in line for _, line in faults(tmp_path, [FIRST, idle, third])} == {True}
    assert not faults(tmp_path, [FIRST, WAIT + idle, third.replace(f" {MARK}", "")])
