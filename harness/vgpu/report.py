"""What a run on the virtual GPU tells: faults and counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class FaultKind(Enum):
    """Kinds of fault; values are those of the core. `UNWRITTEN_OUTPUT` is found after a launch."""

    OUT_OF_BOUNDS = 1
    MISALIGNED = 2
    USE_AFTER_FREE = 3
    UNINITIALISED_BRANCH = 4
    UNINITIALISED_ADDRESS = 5
    UNINITIALISED_OUTPUT = 6
    RACE_SHARED = 7
    RACE_GLOBAL = 8
    DIVERGENT_BARRIER = 9
    BARRIER_MISUSE = 10
    DEADLOCK = 11
    ENDLESS_LOOP = 12
    ASYNC_UNWAITED = 13
    MUTATED_INPUT = 14
    TRAP = 15
    DIVERGENT_SYNC = 16
    UNINITIALISED_OPERAND = 17
    UNWRITTEN_OUTPUT = 18
    PROGRAMMATIC_ORDER = 19


WHAT = {
    FaultKind.OUT_OF_BOUNDS: "access outside every allocation",
    FaultKind.MISALIGNED: "misaligned access",
    FaultKind.USE_AFTER_FREE: "access to freed memory",
    FaultKind.UNINITIALISED_BRANCH: "guard or branch depends on uninitialised data",
    FaultKind.UNINITIALISED_ADDRESS: "address depends on uninitialised data",
    FaultKind.UNINITIALISED_OUTPUT: "stored output depends on uninitialised data",
    FaultKind.RACE_SHARED: "race on shared memory",
    FaultKind.RACE_GLOBAL: "race on global memory",
    FaultKind.DIVERGENT_BARRIER: "barrier that only part of a warp reaches",
    FaultKind.BARRIER_MISUSE: "barrier with a wrong id or thread count",
    FaultKind.DEADLOCK: "deadlock: waits for threads that never come",
    FaultKind.ENDLESS_LOOP: "endless loop: the instruction limit is reached",
    FaultKind.ASYNC_UNWAITED: "access to the destination of an asynchronous copy before its wait",
    FaultKind.MUTATED_INPUT: "store to an input",
    FaultKind.TRAP: "trap",
    FaultKind.DIVERGENT_SYNC: "warp instruction whose member lanes do not all arrive",
    FaultKind.UNINITIALISED_OPERAND: "control operand depends on uninitialised data",
    FaultKind.UNWRITTEN_OUTPUT: "output that is not written completely",
    FaultKind.PROGRAMMATIC_ORDER: "access to the previous kernel's data before griddepcontrol.wait",
}


@dataclass(frozen=True)
class Fault:
    """One fault: the first of its kind at its instruction.

    Args:
        kind: what went wrong.
        entry: kernel.
        line: PTX line (0 where no instruction is to blame).
        instruction: opcode there.
        source: source line of the kernel, if the PTX has it.
        cta: block index (x, y, z).
        thread: linear thread index in the block.
        address: in the state space `space` (virtual address, or offset for shared and local).
        size: bytes of the access.
        allocation: allocation that was hit, or missed by the least distance, e.g. `k_cache+4096 (8 past its end)`.
        other: for a race, the access it clashes with.
    """

    kind: FaultKind
    entry: str
    line: int = 0
    instruction: str = ""
    source: str = ""
    cta: tuple[int, int, int] = (0, 0, 0)
    thread: int = 0
    address: int = 0
    size: int = 0
    space: str = ""
    allocation: str = ""
    other: str = ""

    def __str__(self) -> str:
        text = f"{self.entry}: {WHAT[self.kind]}"
        if self.line:
            text += f" at PTX line {self.line} ({self.instruction})"
        if self.source:
            text += f" from {self.source}"
        if self.kind is not FaultKind.UNWRITTEN_OUTPUT:
            text += f", block {self.cta}, thread {self.thread}"
        if self.space:
            text += f": {self.size} bytes at {self.space} {self.address:#x}"
        return text + (f", {self.allocation}" if self.allocation else "") + (f"; {self.other}" if self.other else "")


@dataclass(frozen=True)
class SiteReport:
    """Counters of one instruction of the PTX.

    Args:
        line, instruction, source: where it is.
        executed: warp instructions.
        lanes: lane instructions.
        sectors, lines: 32-byte sectors and 128-byte lines of global memory, each warp access counted by itself.
        bytes: bytes that lanes asked for (global and shared).
        conflicts: extra passes of shared memory.
        flight: bytes asked of global memory, each times the warp instructions that its block issued until it was
            waited for or its value was read.
        guarded: whether it runs under a predicate.
        target: for a branch, the index of the site it leads to, else -1.
    """

    line: int
    instruction: str
    source: str
    executed: int
    lanes: int
    sectors: int
    lines: int
    bytes: int
    conflicts: int
    flight: int = 0
    guarded: bool = False
    target: int = -1


@dataclass(frozen=True)
class Counters:
    """Sums of one launch.

    Args:
        instructions: warp instructions by class.
        lane_instructions: over all lanes.
        read_sectors, write_sectors: 32-byte sectors of global loads (asynchronous ones too) and of stores and atomics.
        read_lines, write_lines: the same in 128-byte lines.
        unique_read_bytes, unique_written_bytes: distinct bytes by allocation.
        bank_conflicts: extra passes of shared memory.
        matrix_operations: `mma` warp instructions.
        barriers: warp arrivals at CTA barriers.
        bytes_in_flight_max: most bytes that one CTA had asked global memory for and not yet waited for: asynchronous
            copies until the wait of their group (bytes of their sources), loads until an instruction other than a
            move reads their result (32 bytes a sector).
        bytes_in_flight_mean: the same, averaged over all CTAs and the instructions that they issue.
    """

    instructions: dict[str, int]
    lane_instructions: int
    read_sectors: int
    write_sectors: int
    read_lines: int
    write_lines: int
    unique_read_bytes: dict[str, int]
    unique_written_bytes: dict[str, int]
    bank_conflicts: int
    matrix_operations: int
    barriers: int
    bytes_in_flight_max: int = 0
    bytes_in_flight_mean: float = 0.0


@dataclass(frozen=True)
class StepReport:
    """One kernel launch."""

    entry: str
    seconds: float
    counters: Counters
    sites: Sequence[SiteReport]
    benign_races: int = 0  # unordered stores of the value that is there already: see VirtualGpuOptions.strict_stores


@dataclass(frozen=True)
class RunReport:
    """One run of a plan."""

    steps: tuple[StepReport, ...] = ()
    faults: tuple[Fault, ...] = ()
    num_faults: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def clean(self) -> bool:
        """Whether nothing went wrong."""
        return not self.faults


class VirtualGpuError(RuntimeError):
    """A run with faults; the message lists them, `report` has the details."""

    def __init__(self, report: RunReport) -> None:
        lines = [str(fault) for fault in report.faults[:8]]
        more = len(report.faults) - len(lines)
        super().__init__("\n".join(lines) + (f"\n... and {more} more" if more > 0 else ""))
        self.report = report
