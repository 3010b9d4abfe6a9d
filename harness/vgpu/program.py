"""The decoded program: what the execution core runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .ptx_module import Variable

MAX_OPS, NUM_P = 16, 8

# Layout of `Instr` in core/state.h; `key` becomes the handler when the program is linked.
INSTRUCTION = np.dtype(
    [
        ("key", "i8"),
        ("guard", "i4"),
        ("guard_negated", "i2"),
        ("waits", "i2"),
        ("num_ops", "i4"),
        ("target", "i4"),
        ("ops", "i4", MAX_OPS),
        ("p", "i4", NUM_P),
        ("imm", "i8"),
        ("line", "i4"),
        ("cls", "i4"),
    ]
)

# Address map, as in core/state.h.
SHARED_WINDOW, LOCAL_WINDOW = 0x7F00_0000_0000, 0x7E00_0000_0000
SHARED_START, LOCAL_START = 1024, 256
MODULE_BASE, PARAM_BASE = 0x6000_0000_0000, 0x6F00_0000_0000

SPECIALS = (
    "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z",
    "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid",
    "%lanemask_eq", "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt", "%dynamic_smem_size",
    "%total_smem_size", "zero", "one",
)  # fmt: skip


class InstructionClass(IntEnum):
    """What an instruction is counted as."""

    INTEGER = 0
    FLOAT = 1
    HALF = 2
    CONVERT = 3
    MOVE = 4
    PREDICATE = 5
    SPECIAL_FUNCTION = 6
    GLOBAL = 7
    SHARED = 8
    LOCAL = 9
    PARAM = 10
    ASYNC = 11
    ATOMIC = 12
    MATRIX = 13
    WARP = 14
    BARRIER = 15
    CONTROL = 16


class Operation(NamedTuple):
    """One instruction of the core: a handler's name with register rows (`ops`) and parameters (`p`, `imm`)."""

    key: str
    ops: tuple[int, ...] = ()
    p: tuple[int, ...] = ()
    imm: int = 0
    cls: InstructionClass = InstructionClass.INTEGER
    target: str = ""


@dataclass(frozen=True)
class Param:
    """A kernel parameter: where it lies among the parameters, and its type."""

    offset: int
    num_bytes: int
    type: str


@dataclass
class Program:
    """One entry, decoded.

    Args:
        entry, target: symbol, and what the PTX was compiled for.
        code: instructions, dtype `INSTRUCTION`.
        keys: handler names that `code["key"]` indexes.
        opcodes, lines, sources: PTX text of each instruction, its line, and its source line or "".
        num_units: size of a warp's register file in units of 64 bytes.
        consts: (unit, bytes per lane or 0 for a predicate, value) of each constant row.
        specials: unit of each special register, -1 where unused.
        params: kernel parameters in order.
        static_shared, local_bytes: memory of a CTA and of a thread, in bytes.
        use_starts, uses: for each instruction, the global loads whose result it reads (`load_uses.py`).
        variables: module variables with their virtual addresses.
        block: block size that the kernel was compiled for (0: any), from `.reqntid`; `max_threads` from `.maxntid`.
    """

    entry: str
    target: str
    code: npt.NDArray[np.void]
    keys: tuple[str, ...]
    opcodes: tuple[str, ...]
    lines: tuple[int, ...]
    sources: tuple[str, ...]
    num_units: int
    consts: tuple[tuple[int, int, int], ...]
    specials: tuple[int, ...]
    params: tuple[Param, ...]
    static_shared: int
    local_bytes: int
    use_starts: npt.NDArray[np.int32]
    uses: npt.NDArray[np.int32]
    variables: dict[int, Variable] = field(default_factory=dict)
    block: tuple[int, ...] = ()
    max_threads: int = 0
    uses_dynamic_shared: bool = False

    @cached_property
    def is_write(self) -> npt.NDArray[np.bool_]:
        """Which instructions store, atomics included."""
        return np.array([o.startswith(("st", "atom", "red")) for o in self.opcodes], np.bool_)

    @property
    def names(self) -> tuple[str, ...]:
        """Handler name of each instruction (of a program that is not linked yet)."""
        return tuple(self.keys[k] for k in self.code["key"])

    @property
    def param_bytes(self) -> int:
        """Size of all parameters."""
        return max((p.offset + p.num_bytes for p in self.params), default=0)
