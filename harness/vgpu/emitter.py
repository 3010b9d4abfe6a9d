"""Register rows, constants, addresses and names of a program in the making."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .program import (
    LOCAL_START,
    MAX_OPS,
    MODULE_BASE,
    PARAM_BASE,
    SHARED_START,
    SPECIALS,
    InstructionClass,
    Operation,
    Param,
)
from .ptx_module import (
    TYPE_BYTES,
    Address,
    Function,
    Imm,
    Instruction,
    Module,
    Not,
    Operand,
    Reg,
    Sink,
    Special,
    Symbol,
    Variable,
)
from .ptx_tokens import PtxError

TRASH = 0  # the first row takes what nobody reads
UNIT_BYTES, LANES = 64, 32


class Emitted(NamedTuple):
    """An instruction with its origin; a branch target is a label until the end."""

    operation: Operation
    instruction: Instruction
    guard: int
    guard_negated: bool
    reads: list[int]  # rows of registers that the instruction reads and writes
    writes: list[int]


@dataclass
class Frame:
    """One inlined copy of a function: the prefix of its registers, where its parameters lie (local offsets), and the
    rows of those registers that it used."""

    function: Function
    prefix: str
    params: dict[str, int] = field(default_factory=dict)
    locals: dict[tuple[int, str], int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)


def row_units(width: int) -> int:
    """Units of a row of `width` bytes per lane (0 is a predicate)."""
    return 1 if width == 0 else max(1, LANES * max(width, 2) // UNIT_BYTES)


_REGISTER_BYTES = {type: 0 if type == "pred" else max(width, 2) for type, width in TYPE_BYTES.items()}
_MASKS = {width: (1 << (8 * max(width, 1))) - 1 for width in (0, 1, 2, 4, 8, 16)}


class Emitter:
    """Collects the instructions of one entry."""

    def __init__(self, module: Module, entry: Function) -> None:
        self.module = module
        self.entry = entry
        self.emitted: list[Emitted] = []
        self.labels: dict[str, int] = {}
        self.frame = Frame(entry, "")
        self.instruction: Instruction
        self._units = row_units(8)
        self._sizes = {TRASH: row_units(8)}
        self._register_rows: list[int] = []
        self._consts: dict[tuple[int, int], int] = {}
        self._specials: dict[str, int] = {}
        self._shared: dict[tuple[str, str], int] = {}
        self._globals: dict[str, int] = {}
        self.variables: dict[int, Variable] = {}
        self.static_shared = 0
        self.local_bytes = 0
        self.dynamic_symbols: list[Emitted] = []
        self.params = self._lay_out_params()
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.dynamic_offset: int | None = None

    # ---- layout
    def _lay_out_params(self) -> dict[str, Param]:
        params: dict[str, Param] = {}
        offset = 0
        for variable in self.entry.params:
            offset = -(-offset // variable.align) * variable.align
            params[variable.name] = Param(offset, variable.num_bytes, variable.type)
            offset += variable.num_bytes
        return params

    def lay_out_shared(self) -> None:
        """Places the static shared variables of the module and of every function, then the dynamic ones."""
        owners = [("", v) for v in self.module.variables.values()]
        for function in self.module.functions.values():
            owners += [(function.name, v) for scope in function.scopes for v in scope.variables.values()]
        dynamic = []
        for owner, variable in owners:
            if variable.space != "shared":
                continue
            if variable.num_bytes == 0:
                dynamic.append((owner, variable))
                continue
            self.static_shared = -(-self.static_shared // variable.align) * variable.align
            self._shared[owner, variable.name] = SHARED_START + self.static_shared
            self.static_shared += variable.num_bytes
        if self.static_shared and dynamic:
            self.static_shared = -(-self.static_shared // 128) * 128
        for owner, variable in dynamic:
            self._shared[owner, variable.name] = SHARED_START + self.static_shared

    def allocate_local(self, num_bytes: int, align: int) -> int:
        """A piece of the thread's local memory, as a local address."""
        self.local_bytes = -(-self.local_bytes // align) * align
        at = self.local_bytes
        self.local_bytes += num_bytes
        return LOCAL_START + at

    def _global_address(self, variable: Variable) -> int:
        if variable.name not in self._globals:
            address = MODULE_BASE + (len(self._globals) << 32)
            self._globals[variable.name] = address
            self.variables[address] = variable
        return self._globals[variable.name]

    # ---- rows
    def _new_row(self, width: int) -> int:
        unit, size = self._units, row_units(width)
        self._units += size
        self._sizes[unit] = size
        return unit

    @property
    def register_rows(self) -> tuple[int, ...]:
        """Rows that hold registers, in the order of their first use."""
        return tuple(self._register_rows)

    @property
    def row_sizes(self) -> Mapping[int, int]:
        """Units of each row."""
        return self._sizes

    @property
    def num_units(self) -> int:
        """Size of a warp's register file."""
        return self._units

    @property
    def consts(self) -> tuple[tuple[int, int, int], ...]:
        """Constant rows."""
        return tuple((unit, width, value) for (width, value), unit in self._consts.items())

    @property
    def specials(self) -> tuple[int, ...]:
        """Rows of the special registers."""
        return tuple(self._specials.get(name, -1) for name in SPECIALS)

    def constant(self, value: int, width: int) -> int:
        """A row that holds `value` in every lane."""
        key = (width, value & _MASKS[width])
        row = self._consts.get(key)
        if row is None:
            row = self._consts[key] = self._new_row(width)
        return row

    def temporary(self, width: int) -> int:
        """A row of its own."""
        return self._new_row(width)

    def register(self, reg: Reg, written: bool = False) -> int:
        """The row of a register that the current instruction reads, or writes."""
        row = self.frame.rows.get(reg.name)
        if row is None:
            row = self._register_row(reg)
        (self.writes if written else self.reads).append(row)
        return row

    def _register_row(self, reg: Reg) -> int:
        if reg.type == "b128":
            raise self.error("128-bit registers are not supported")
        row = self.frame.rows[reg.name] = self._new_row(0 if reg.type == "pred" else TYPE_BYTES[reg.type])
        self._register_rows.append(row)
        return row

    # ---- operands
    def error(self, message: str) -> PtxError:
        """An error at the current instruction."""
        return PtxError(self.instruction.line, f"{self.instruction.opcode}: {message}")

    def destination(self, operand: Operand, width: int) -> int:
        """The row that a result of `width` bytes (0: predicate) goes to."""
        if isinstance(operand, Reg):
            self._check_width(operand, width)
            row = self.frame.rows.get(operand.name)
            if row is None:
                row = self._register_row(operand)
            self.writes.append(row)
            return row
        if isinstance(operand, Sink):
            return TRASH
        raise self.error(f"a register was expected, not {operand}")

    def _check_width(self, reg: Reg, width: int) -> None:
        if _REGISTER_BYTES[reg.type] != (width if width != 1 else 2):
            expected = f"{8 * width} bits" if width else "a predicate"
            raise self.error(f"register {reg.name.partition('@')[0]} is .{reg.type}, expected {expected}")

    def source(self, operand: Operand, type: str) -> int:
        """The row of a source operand of a type."""
        if isinstance(operand, Reg):
            if _REGISTER_BYTES[operand.type] != _REGISTER_BYTES[type]:
                self._check_width(operand, 0 if type == "pred" else TYPE_BYTES[type])
            row = self.frame.rows.get(operand.name)
            if row is None:
                row = self._register_row(operand)
            self.reads.append(row)
            return row
        width = 0 if type == "pred" else TYPE_BYTES[type]
        if isinstance(operand, Imm):
            return self.constant(self.immediate(operand, type), width)
        if isinstance(operand, Special):
            return self.special(operand, width)
        if isinstance(operand, Symbol):
            return self.constant(self.symbol_address(operand), width)
        if isinstance(operand, Sink):
            return self.constant(0, width)
        raise self.error(f"a value was expected, not {operand}")

    def predicate(self, operand: Operand) -> tuple[int, int]:
        """Row of a predicate source, and 1 where it is negated."""
        if isinstance(operand, Not):
            return self.source(operand.of, "pred"), 1
        return self.source(operand, "pred"), 0

    def immediate(self, imm: Imm, type: str) -> int:
        """Bits of an immediate of a type."""
        width = 1 if type == "pred" else TYPE_BYTES[type]
        if type == "pred":
            return 1 if imm.value else 0
        if imm.bits and isinstance(imm.value, int):
            if type == "f64" and imm.bits == 32:
                value = struct.unpack("<f", struct.pack("<I", imm.value))[0]
                return int(struct.unpack("<Q", struct.pack("<d", value))[0])
            if imm.bits != 8 * width:
                raise self.error(f"a {imm.bits}-bit float where .{type} is expected")
            return imm.value
        if isinstance(imm.value, float):
            if type not in ("f32", "f64", "b32", "b64"):
                raise self.error(f"the number {imm.value} where .{type} is expected")
            code = ("<f", "<I") if width == 4 else ("<d", "<Q")
            return int(struct.unpack(code[1], struct.pack(code[0], imm.value))[0])
        return imm.value & _MASKS[width]

    def special(self, operand: Special, width: int) -> int:
        """The row of a special register that does not change while a thread runs."""
        name = operand.name
        fixed = {
            "%clusterid": "%ctaid", "%nclusterid": "%nctaid",
        }  # fmt: skip
        base, _, axis = name.partition(".")
        if base in fixed:
            name = f"{fixed[base]}.{axis}"
        elif base in ("%cluster_ctaid", "%cluster_ctarank", "%is_explicit_cluster"):
            name = "zero"
        elif base in ("%cluster_nctaid", "%cluster_nctarank"):
            name = "one"
        if name not in SPECIALS:
            raise self.error(f"special register {operand.name} cannot be read here")
        if name not in self._specials:
            self._specials[name] = self._new_row(4)
        if width == 4:
            return self._specials[name]
        wide = self.temporary(8 if width == 8 else 2)
        kind = 3 if width == 8 else 1
        self.emit(Operation("cvt", (wide, self._specials[name]), (0, 0, 0, 0, width, 4, kind, 2)))
        return wide

    def zero(self) -> int:
        """A 32-bit zero."""
        return self.constant(0, 4)

    # ---- names
    def find_variable(self, symbol: Symbol) -> tuple[int, Variable] | None:
        """The variable that a symbol names and the scope that declares it (-1 is the module's)."""
        scope: int | None = symbol.scope
        while scope is not None:
            names = self.frame.function.scopes[scope]
            if symbol.name in names.variables:
                return scope, names.variables[symbol.name]
            scope = names.parent
        variable = self.module.variables.get(symbol.name)
        return None if variable is None else (-1, variable)

    def find_label(self, symbol: Symbol) -> str:
        """The unique label that a symbol names."""
        scope: int | None = symbol.scope
        while scope is not None:
            names = self.frame.function.scopes[scope]
            if symbol.name in names.labels:
                return self.frame.prefix + names.labels[symbol.name]
            scope = names.parent
        raise self.error(f"unknown label {symbol.name!r}")

    def symbol_address(self, symbol: Symbol) -> int:
        """Address of a variable or parameter in its own state space."""
        if symbol.name in self.frame.params:
            return self.frame.params[symbol.name]
        found = self.find_variable(symbol)
        if found is None:
            if not self.frame.prefix and symbol.name in self.params:
                return PARAM_BASE + self.params[symbol.name].offset
            raise self.error(f"unknown name {symbol.name!r}")
        scope, variable = found
        if variable.space == "shared":
            owner = self.frame.function.name if scope >= 0 else ""
            return self._shared[owner, variable.name]
        if variable.space in ("local", "param"):
            key = (scope, variable.name)
            if key not in self.frame.locals:
                self.frame.locals[key] = self.allocate_local(variable.num_bytes, variable.align)
            return self.frame.locals[key]
        return self._global_address(variable)

    def address(self, operand: Operand) -> tuple[int, int, int]:
        """Row, bytes per lane and constant offset of an address."""
        if not isinstance(operand, Address):
            raise self.error("an address in brackets was expected")
        base = operand.base
        if isinstance(base, Reg):
            width = TYPE_BYTES[base.type]
            if base.type == "pred" or width < 4:
                raise self.error(f"register {base.name.partition('@')[0]} of .{base.type} cannot hold an address")
            return self.register(base), width, operand.offset
        if isinstance(base, Symbol):
            return self.constant(self.symbol_address(base), 8), 8, operand.offset
        return self.constant(int(base.value), 8), 8, operand.offset

    # ---- output
    def start(self, instruction: Instruction) -> None:
        """What follows belongs to `instruction`."""
        self.instruction = instruction
        self.reads, self.writes = [], []

    def emit(self, operation: Operation, guard: tuple[int, bool] | None = None) -> None:
        """Appends an instruction under the current one's guard, or under `guard`."""
        if len(operation.ops) > MAX_OPS:
            raise self.error(f"{len(operation.ops)} registers, the virtual GPU takes at most {MAX_OPS}")
        if guard is None:
            guard = self.guard() if self.instruction.guard else (-1, False)
        row, negated = guard
        self.emitted.append(Emitted(operation, self.instruction, row, negated, self.reads, self.writes))

    def guard(self) -> tuple[int, bool]:
        """Row of the current guard (-1: none), and whether it is negated."""
        if self.instruction.guard is None:
            return -1, False
        return self.register(self.instruction.guard), self.instruction.guard_negated

    def place_label(self, label: str) -> None:
        """A branch target here."""
        self.labels[label] = len(self.emitted)


def class_of(type: str) -> InstructionClass:
    """How arithmetic on a type is counted."""
    if type in ("f32", "f64", "tf32"):
        return InstructionClass.FLOAT
    return InstructionClass.HALF if type in ("f16", "f16x2", "bf16", "bf16x2") else InstructionClass.INTEGER
