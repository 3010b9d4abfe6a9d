"""Small PTX kernels: a body in a standard frame, and the check that a fault is found at its line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from pagedtune.harness.vgpu.report import Fault, FaultKind, RunReport
from pagedtune.harness.vgpu.run_ptx import FILE_HEADER, Argument, run_ptx
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpuOptions

MARK = "// FAULT"
TYPES = {int: "u32", float: "f32"}

# Every schedule that a correct kernel must be clean under.
SCHEDULES = {
    "plain": VirtualGpuOptions(num_threads=1),
    "reversed": VirtualGpuOptions(num_threads=1, reverse_warps=True, reverse_ctas=True),
    "interleaved": VirtualGpuOptions(num_threads=1, quantum=1),
    "early": VirtualGpuOptions(num_threads=1, async_early=True, quantum=3, shuffle_seed=7),
    "threads": VirtualGpuOptions(num_threads=2, reverse_warps=True),
}


def module(body: str, arguments: Mapping[str, Argument], prelude: str = "") -> str:
    """A module with one entry `k`: arguments are in %rd0.. (pointers), %r0.. (integers) and %f0.. (floats), in order;
    %r60 is tid.x, %r61 ctaid.x."""
    params, loads = [], []
    counts = {"rd": 0, "r": 0, "f": 0}
    for name, value in arguments.items():
        kind, register = ("u64", "rd") if not isinstance(value, int | float) else (TYPES[type(value)], "")
        register = register or ("f" if kind == "f32" else "r")
        params.append(f".param .{kind} {name}")
        loads.append(f"ld.param.{kind} %{register}{counts[register]}, [{name}];")
        counts[register] += 1
    return "\n".join(
        [
            FILE_HEADER,
            prelude,
            f".visible .entry k({', '.join(params)})",
            "{",
            ".reg .pred %p<16>; .reg .b16 %h<32>; .reg .b32 %r<64>; .reg .f32 %f<64>; .reg .b64 %rd<64>;",
            ".reg .f64 %d<32>;",
            *loads,
            "mov.u32 %r60, %tid.x;",
            "mov.u32 %r61, %ctaid.x;",
            body,
            "ret;",
            "}",
        ]
    )


@dataclass(frozen=True)
class Pair:
    """A faulty kernel and its corrected twin.

    Args:
        kind: the fault that must be reported, at the line that carries `// FAULT`.
        faulty, fixed: bodies; `fixed` may be given as replacements of parts of `faulty`.
        arguments: makes fresh arguments.
        says: what the message must contain.
        options: how the faulty kernel runs first; both then run under all schedules.
        also: kinds that the same mistake may show as under some schedule.
        twin_arguments: arguments of the twin, where they differ.
    """

    kind: FaultKind
    faulty: str
    fixed: str
    arguments: Callable[[], dict[str, Argument]]
    prelude: str = ""
    block: int = 32
    grid: int = 1
    shared_bytes: int = 0
    says: str = ""
    options: VirtualGpuOptions = field(default_factory=lambda: VirtualGpuOptions(num_threads=1))
    cooperative: bool = False
    also: tuple[FaultKind, ...] = ()
    twin_arguments: Callable[[], dict[str, Argument]] | None = None


def run_body(pair: Pair, body: str, options: VirtualGpuOptions) -> tuple[str, RunReport]:
    """The module's text and the report of one launch of it."""
    arguments = pair.arguments()
    text = module(body, arguments, pair.prelude)
    report = run_ptx(
        text, "k", arguments, (pair.grid, 1, 1), (pair.block, 1, 1), pair.shared_bytes, options, pair.cooperative
    )
    return text, report


def check_pair(pair: Pair) -> Fault:
    """Checks that the fault is found where it is marked, under every schedule, and that the twin is clean.

    Returns:
        the fault as it is first found.
    """
    first: list[Fault] = []
    for name, options in {"own": pair.options, **SCHEDULES}.items():
        text, report = run_body(pair, pair.faulty, _merged(pair.options, options))
        found = [fault for fault in report.faults if fault.kind in (pair.kind, *pair.also)]
        assert found, (name, [str(f) for f in report.faults])
        lines = [n for n, line in enumerate(text.splitlines(), 1) if MARK in line]
        assert lines or pair.kind is FaultKind.UNWRITTEN_OUTPUT, f"no line is marked {MARK}"
        found = [f for f in found if f.line in lines or not lines]
        assert found, (name, [str(f) for f in report.faults])
        assert any(pair.says in str(f) for f in found), (name, [str(f) for f in found])
        first += found
    twin = replace(pair, arguments=pair.twin_arguments or pair.arguments)
    for name, options in SCHEDULES.items():
        _, report = run_body(twin, pair.fixed, _merged(pair.options, options, faulty=False))
        assert report.clean, (name, [str(fault) for fault in report.faults])
    return first[0]


def _merged(own: VirtualGpuOptions, schedule: VirtualGpuOptions, faulty: bool = True) -> VirtualGpuOptions:
    """The schedule, with the pair's own limits and hazards; the twin does without freed and unknown memory."""
    hazards = {"freed": own.freed, "uninitialised": own.uninitialised} if faulty else {}
    return replace(schedule, max_warp_instructions=own.max_warp_instructions, **hazards)


def ints(*values: int) -> torch.Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)
