"""PTX as typed data: what the parser makes and the decoder reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

TYPE_BYTES = {
    **dict.fromkeys(("b8", "u8", "s8"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 8),
    "b128": 16,
    "pred": 1,
}


class Reg(NamedTuple):
    """A register, by its name made unique over the scopes of its function."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register, e.g. `%tid.x`."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate: an integer, a number that is written as a decimal float, or the bits of a float.

    Args:
        value: the number, or the bits.
        bits: 32 or 64 where `value` holds the bits of an f32 or f64, else 0.
    """

    value: int | float
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Symbol:
    """The name of a variable, parameter, function or label, with the scope it is looked up from."""

    name: str
    scope: int


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, ...}`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`."""

    base: Reg | Symbol | Imm
    offset: int


@dataclass(frozen=True, slots=True)
class Pair:
    """`p|q`: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Not:
    """`!p`: a negated predicate source."""

    of: Reg


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: a destination that is thrown away, or an absent source."""


@dataclass(frozen=True, slots=True)
class Group:
    """`(a, b)`: arguments of a call."""

    items: tuple[Operand, ...]


Operand = Reg | Special | Imm | Symbol | Vector | Address | Pair | Not | Sink | Group


class Instruction(NamedTuple):
    """One instruction.

    Args:
        opcode: with all modifiers, e.g. `ld.global.v4.b32`.
        operands: in written order.
        line: line of the PTX text.
        guard: predicate register of `@p`, or None.
        guard_negated: whether it is `@!p`.
        source: line of the source file from the last `.loc` as `file:line`, or "".
    """

    opcode: str
    operands: tuple[Operand, ...]
    line: int
    guard: Reg | None = None
    guard_negated: bool = False
    source: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """A branch target, unique over the scopes of its function."""

    name: str


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable or parameter in memory.

    Args:
        name: as written.
        space: `shared`, `local`, `global`, `const` or `param`.
        type: element type.
        num_bytes: size; 0 for an array whose size is set at launch.
        align: alignment in bytes.
        data: initial bytes, None where there are none.
    """

    name: str
    space: str
    type: str
    num_bytes: int
    align: int
    data: bytes | None = None


@dataclass(slots=True)
class Scope:
    """Names of one block: registers, numbered register ranges, variables, labels and branch tables."""

    parent: int | None
    registers: dict[str, Reg] = field(default_factory=dict)
    ranges: dict[str, tuple[int, str]] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Function:
    """An entry or a device function.

    Args:
        name: symbol.
        is_entry: whether it can be launched.
        params: formal parameters.
        results: formal results (device functions only).
        body: instructions and labels; empty for a function that is declared elsewhere.
        scopes: all blocks; 0 is the function's own.
        directives: performance directives with their numbers, e.g. `reqntid: (128,)`.
        line: where it starts.
    """

    name: str
    is_entry: bool
    params: tuple[Variable, ...]
    results: tuple[Variable, ...] = ()
    body: list[Instruction | Label] = field(default_factory=list)
    scopes: list[Scope] = field(default_factory=list)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    line: int = 0


@dataclass(frozen=True, slots=True)
class Module:
    """One PTX text.

    Args:
        version, target: of its header, e.g. `8.7` and `sm_90a`.
        functions: entries and device functions by symbol.
        variables: of module scope, by name.
    """

    version: str
    target: str
    functions: Mapping[str, Function]
    variables: Mapping[str, Variable]
