"""Raw results of the core -> reports."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagedtune.kernels.launch import KernelStep

from .address_space import AddressSpace, Bitmap
from .core_library import RawFault
from .program import InstructionClass, Program
from .report import Counters, Fault, FaultKind, SiteReport, StepReport

_SPACE_NAMES = {0: "", 1: "global", 2: "shared", 3: "local"}


def describe_fault(raw: RawFault, program: Program, space: AddressSpace, step: KernelStep) -> Fault:
    """A fault in the terms of the PTX and the tensors."""
    kind = FaultKind(raw.kind)
    where = _SPACE_NAMES[raw.space] if raw.size else ""
    other = ""
    if raw.other_pc >= 0:
        block = _block(raw.other_cta, step)
        other = (
            f"clashes with PTX line {program.lines[raw.other_pc]} ({program.opcodes[raw.other_pc]}) "
            f"of block {block}, thread {raw.other_thread}"
        )
    return Fault(
        kind,
        program.entry,
        program.lines[raw.pc],
        program.opcodes[raw.pc],
        program.sources[raw.pc],
        _block(raw.cta, step),
        raw.thread,
        raw.address,
        raw.size,
        where,
        space.describe(raw.alloc, raw.address) if where == "global" else "",
        other,
    )


def _block(linear: int, step: KernelStep) -> tuple[int, int, int]:
    x, y, _ = step.grid
    return linear % x, linear // x % y, linear // x // y


def _count(bits: Bitmap) -> int:
    return int(np.bitwise_count(bits).sum())


def step_report(
    program: Program, space: AddressSpace, sites: npt.NDArray[np.void], totals: tuple[int, int], seconds: float
) -> StepReport:
    """Counters of one launch."""
    classes = program.code["cls"]
    executed = sites["executed"]
    by_class = {c.name.lower(): int(executed[classes == c].sum()) for c in InstructionClass}
    is_write = np.array([o.startswith(("st", "atom", "red")) for o in program.opcodes], np.bool_)
    counters = Counters(
        instructions={name: count for name, count in by_class.items() if count},
        lane_instructions=int(sites["lanes"].sum()),
        read_sectors=int(sites["sectors"][~is_write].sum()),
        write_sectors=int(sites["sectors"][is_write].sum()),
        read_lines=int(sites["lines"][~is_write].sum()),
        write_lines=int(sites["lines"][is_write].sum()),
        unique_read_bytes={a.name: n for a in space.allocations if (n := _count(a.read))},
        unique_written_bytes={a.name: n for a in space.allocations if (n := _count(a.written))},
        bank_conflicts=int(sites["conflicts"].sum()),
        matrix_operations=by_class["matrix"],
        barriers=totals[0],
        busiest_block=totals[1],
    )
    rows = tuple(
        SiteReport(program.lines[k], program.opcodes[k], program.sources[k], *(int(v) for v in sites[k]))
        for k in range(len(sites))
    )
    return StepReport(program.entry, seconds, counters, rows)
