"""Raw results of the core -> reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from pagedtune.kernels.launch import KernelStep

from .address_space import AddressSpace
from .core_library import RawFault, Totals
from .program import InstructionClass, Program
from .report import Counters, Fault, FaultKind, SiteReport, StepReport

_CLASS_NAMES = tuple(c.name.lower() for c in InstructionClass)
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
    if kind in (FaultKind.DEADLOCK, FaultKind.ENDLESS_LOOP):
        other = f"{raw.other_thread} warps of the block are here"
    if kind is FaultKind.ENDLESS_LOOP:
        other += f"; the limit is {raw.address} instructions a warp (VirtualGpuOptions.max_warp_instructions)"
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


def step_report(
    program: Program, space: AddressSpace, sites: npt.NDArray[np.void], totals: Totals, seconds: float
) -> StepReport:
    """Counters of one launch."""
    executed, is_write = sites["executed"], program.is_write
    sums = np.bincount(program.code["cls"], executed, len(InstructionClass)).tolist()
    by_class = {name: int(n) for name, n in zip(_CLASS_NAMES, sums, strict=True) if n}
    read, written = space.count_touched()
    counters = Counters(
        instructions=by_class,
        lane_instructions=int(sites["lanes"].sum()),
        read_sectors=int(sites["sectors"][~is_write].sum()),
        write_sectors=int(sites["sectors"][is_write].sum()),
        read_lines=int(sites["lines"][~is_write].sum()),
        write_lines=int(sites["lines"][is_write].sum()),
        unique_read_bytes=read,
        unique_written_bytes=written,
        bank_conflicts=int(sites["conflicts"].sum()),
        matrix_operations=by_class.get("matrix", 0),
        barriers=totals.barriers,
        bytes_in_flight_max=totals.most_flying,
        bytes_in_flight_mean=totals.flying_area / max(1, totals.instructions),
    )
    return StepReport(program.entry, seconds, counters, SiteTable(program, sites), totals.benign)


class SiteTable(Sequence[SiteReport]):
    """Reports of all instructions, made when they are asked for: most runs never look at them."""

    def __init__(self, program: Program, sites: npt.NDArray[np.void]) -> None:
        self._places = (program.lines, program.opcodes, program.sources)
        self._guards, self._targets = program.code["guard"], program.code["target"]
        self._sites = sites

    def __len__(self) -> int:
        return len(self._sites)

    @overload
    def __getitem__(self, index: int) -> SiteReport: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SiteReport, ...]: ...
    def __getitem__(self, index: int | slice) -> SiteReport | tuple[SiteReport, ...]:
        if isinstance(index, slice):
            return tuple(self[k] for k in range(*index.indices(len(self))))
        executed, lanes, sectors, lines, num_bytes, conflicts, flight = (int(n) for n in self._sites[index])
        lines_, opcodes, sources = self._places
        return SiteReport(
            lines_[index],
            opcodes[index],
            sources[index],
            executed,
            lanes,
            sectors,
            lines,
            num_bytes,
            conflicts,
            flight,
            bool(self._guards[index] >= 0),
            int(self._targets[index]),
        )
