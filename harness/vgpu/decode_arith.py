"""Decoding of arithmetic, logic, comparisons and conversions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .emitter import TRASH, Emitter, class_of
from .program import InstructionClass, Operation
from .ptx_module import TYPE_BYTES, Imm, Instruction, Operand, Pair, Reg, Sink

FLAGS = {"ftz": 1, "sat": 2, "rz": 4, "rm": 8, "rp": 16, "NaN": 32, "relu": 64, "xorsign": 128, "abs": 256}
_SILENT = ("rn", "approx", "full")
ROUNDINGS = {"rn": 0, "rz": 1, "rm": 2, "rp": 3, "rna": 4, "rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}

# Operand types by letter: T the instruction's type, W twice its width, U u32.
SIGNATURES = {
    **dict.fromkeys(("add", "sub", "mul", "div", "rem", "min", "max", "and", "or", "xor", "copysign"), "TTT"),
    **dict.fromkeys(("addc", "subc", "mul24"), "TTT"),
    **dict.fromkeys(("not", "cnot", "neg", "abs", "sqrt", "rcp", "rsqrt", "sin", "cos", "lg2", "ex2"), "TT"),
    **dict.fromkeys(("tanh", "brev"), "TT"),
    **dict.fromkeys(("popc", "clz", "bfind"), "UT"),
    **dict.fromkeys(("shl", "shr", "szext"), "TTU"),
    **dict.fromkeys(("fma", "mad", "madc", "sad"), "TTTT"),
    "bfe": "TTUU",
    "bfi": "TTTUU",
    "bmsk": "TUU",
    "fns": "UUUU",
}
_BITWISE = ("and", "or", "xor", "not", "cnot", "shl", "popc", "clz", "brev", "bfi", "fns", "bmsk")
_SPECIAL_FUNCTIONS = ("sin", "cos", "lg2", "ex2", "tanh", "rcp", "rsqrt", "sqrt")
_BOOLS = {"and": 1, "or": 2, "xor": 3}
_UNSIGNED_COMPARE = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_COMPARES = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
CVT_TYPES = {
    t: k for k, t in enumerate(("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f16", "bf16", "f32", "f64"))
}
_PACKED = ("f16x2", "bf16x2")
_PACKED_CVT = ("f16x2", "bf16x2", "e4m3x2", "e5m2x2", "tf32")
_PACKED_BYTES = {"f16x2": 4, "bf16x2": 4, "e4m3x2": 2, "e5m2x2": 2, "tf32": 4, "f32": 4}
# Conversions with a handler over whole rows, where nothing but the types is given.
_FAST_CVT = {
    ("s64", "s32"), ("u64", "u32"), ("u32", "u64"), ("f32", "bf16"), ("f32", "f16"), ("bf16", "f32"), ("f16", "f32"),
    ("f32", "s32"),
}  # fmt: skip


def operands_of(e: Emitter, instruction: Instruction, count: int) -> Sequence[Operand]:
    """The operands, of which there must be `count`."""
    if len(instruction.operands) != count:
        raise e.error(f"{len(instruction.operands)} operands, expected {count}")
    return instruction.operands


def take_flags(modifiers: Sequence[str]) -> tuple[int, list[str]]:
    """Sum of the flags among `modifiers`, and the other modifiers."""
    flags, rest = 0, []
    for word in modifiers:
        if word in FLAGS:
            flags |= FLAGS[word]
        elif word not in _SILENT:
            rest.append(word)
    return flags, rest


class _Arithmetic(NamedTuple):
    """What an opcode says, together with the number of its operands."""

    name: str
    type: str
    width: int = 0  # bytes of the result
    sources: tuple[str, ...] = ()  # types
    key: str = ""
    p: tuple[int, ...] = ()
    cls: InstructionClass = InstructionClass.INTEGER


@lru_cache(maxsize=4096)
def _arithmetic(opcode: str, count: int) -> _Arithmetic:
    name, *modifiers = opcode.split(".")
    type = modifiers[-1]
    if type not in TYPE_BYTES or type == "pred":
        return _Arithmetic(name, type)
    flags, sub = take_flags(modifiers[:-1])
    signature = SIGNATURES[name]
    if "wide" in sub:
        signature = {"mul": "WTT", "mad": "WTTW"}[name]
    if name in ("min", "max") and count == 4:
        name, signature = f"{name}3", "TTTT"
    wide = f"b{16 * TYPE_BYTES[type]}"
    types = [{"T": type, "U": "u32", "W": wide}[letter] for letter in signature]
    key, flags = _arithmetic_key(name, sub, type, flags, modifiers)
    cls = InstructionClass.SPECIAL_FUNCTION if name in _SPECIAL_FUNCTIONS else class_of(type)
    return _Arithmetic(name, type, TYPE_BYTES[types[0]], tuple(types[1:]), key, (flags,), cls)


def _arithmetic_key(name: str, sub: list[str], type: str, flags: int, modifiers: Sequence[str]) -> tuple[str, int]:
    integer = type[0] in "usb" and not type.startswith("bf")
    bits = type.lstrip("usbf")
    if integer:
        saturates = bool(flags & FLAGS["sat"])
        if flags & FLAGS["relu"]:
            sub = [*sub, "relu"]
        if saturates:
            sub = [*sub, "sat"]
        elif name in _BITWISE:
            type = f"b{bits}"
        elif name in ("neg", "abs"):
            type = f"s{bits}"
        elif (
            name in ("add", "sub", "addc", "subc", "madc") or (name in ("mul", "mad") and "lo" in sub) or type[0] == "b"
        ):
            type = f"u{bits}"
        if "cc" in modifiers and "hi" in sub:
            type = f"{type[0]}{bits}"
        return ".".join((name, *sub, type)), 0
    if name == "mad":
        name = "fma"
    # Where there is a correctly rounded form too, the approximate one is another operation.
    exact_too = ("div", "rcp", "sqrt") if type == "f32" else ("rcp", "rsqrt") if type == "f64" else ()
    if name in exact_too and ("approx" in modifiers or "full" in modifiers):
        kind = "full" if "full" in modifiers else "approx"
        return f"{name}.{kind}.{type}", flags
    return ".".join((name, *sub, type)), flags


def arithmetic(e: Emitter, instruction: Instruction) -> None:
    """Everything in `SIGNATURES`."""
    name, type, width, types, key, p, cls = _arithmetic(instruction.opcode, len(instruction.operands))
    if type == "pred":
        _predicate_logic(e, instruction, name)
        return
    if not key:
        raise e.error(f"unknown type .{type}")
    dst, *sources = operands_of(e, instruction, 1 + len(types))
    if isinstance(dst, Pair):
        raise e.error("two destinations")
    e.emit(Operation(key, (e.destination(dst, width), *map(e.source, sources, types)), p, 0, cls))


def _predicate_logic(e: Emitter, instruction: Instruction, name: str) -> None:
    count = 2 if name in ("not", "mov") else 3
    operands = operands_of(e, instruction, count)
    sources = [e.predicate(o) for o in operands[1:]]
    ops = (e.destination(operands[0], 0), *(row for row, _ in sources))
    negated = tuple(n for _, n in sources)
    e.emit(Operation(f"{name}.pred", ops, negated, cls=InstructionClass.PREDICATE))


def select(e: Emitter, instruction: Instruction) -> None:
    """selp, slct."""
    name, *modifiers = instruction.opcode.split(".")
    operands = operands_of(e, instruction, 4)
    if name == "selp":
        type = modifiers[-1]
        width = TYPE_BYTES[type]
        row, negated = e.predicate(operands[3])
        ops = (e.destination(operands[0], width), e.source(operands[1], type), e.source(operands[2], type), row)
        e.emit(Operation(f"selp.b{8 * width}", ops, (negated,), cls=InstructionClass.MOVE))
        return
    flags, (type, control) = take_flags(modifiers)
    if flags:
        raise e.error("slct with .ftz is not supported")
    width = TYPE_BYTES[type]
    sources = (e.source(operands[1], type), e.source(operands[2], type), e.source(operands[3], control))
    ops = (e.destination(operands[0], width), *sources)
    e.emit(Operation(f"slct.b{8 * width}.{control}", ops, cls=InstructionClass.MOVE))


class _Comparison(NamedTuple):
    """What the opcode of setp or set says."""

    name: str
    boolean: int
    type: str
    suffix: str  # of the key
    p: tuple[int, int]  # flags, index of the comparison
    result: str = ""  # type of what set writes
    unknown: str = ""  # a comparison that does not exist


@lru_cache(maxsize=4096)
def _comparison(opcode: str) -> _Comparison:
    name, *modifiers = opcode.split(".")
    flags, words = take_flags(modifiers)
    comparison = _UNSIGNED_COMPARE.get(words[0], words[0])
    if comparison not in _COMPARES:
        return _Comparison(name, 0, "", "", (0, 0), unknown=words[0])
    boolean = _BOOLS.get(words[1], 0)
    types = words[2:] if boolean else words[1:]
    type = types[-1]
    key = type.replace("b", "u") if type[0] == "b" and not type.startswith("bf") else type
    suffix = key if type in _PACKED else f"{comparison}.{key}"
    return _Comparison(name, boolean, type, suffix, (flags & 1, _COMPARES.index(comparison)), types[0])


def compare(e: Emitter, instruction: Instruction) -> None:
    """setp, set."""
    name, boolean, type, suffix, (flags, index), result, unknown = _comparison(instruction.opcode)
    if unknown:
        raise e.error(f"unknown comparison .{unknown}")
    operands = operands_of(e, instruction, 4 if boolean else 3)
    dst = operands[0]
    a, b = e.source(operands[1], type), e.source(operands[2], type)
    if name == "set":
        if boolean:
            raise e.error("set with a boolean operation is not supported")
        if TYPE_BYTES[result] != 4:
            raise e.error(f"set with a result of .{result} is not supported")
        one = {"f32": 1, "f16x2": 0x3C00, "bf16x2": 0x3F80}.get(result, 0xFFFF if type in _PACKED else 0)
        ops: tuple[int, ...] = (e.destination(dst, TYPE_BYTES[result]), a, b)
        e.emit(Operation(f"set.{suffix}", ops, (0, 0, flags, one, index), cls=InstructionClass.PREDICATE))
        return
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, Sink())
    row, negated = e.predicate(operands[3]) if boolean else (TRASH, 0)
    ops = (e.destination(first, 0), e.destination(second, 0), a, b, row)
    p = (boolean, negated, flags, 0, index)
    e.emit(Operation(f"setp.{suffix}", ops, p, 0, InstructionClass.PREDICATE))


def test_property(e: Emitter, instruction: Instruction) -> None:
    """testp."""
    _, what, type = instruction.opcode.split(".")
    dst, a = operands_of(e, instruction, 2)
    ops = (e.destination(dst, 0), e.source(a, type))
    e.emit(Operation(f"testp.{what}.{type}", ops, cls=InstructionClass.PREDICATE))


def bit_fields(e: Emitter, instruction: Instruction) -> None:
    """prmt, lop3, shf, dp4a, dp2a."""
    name, *modifiers = instruction.opcode.split(".")
    if name == "lop3":
        *operands_, table = operands_of(e, instruction, 5)
        if not isinstance(table, Imm):
            raise e.error("the table must be a number")
        ops = _words(e, operands_)
        e.emit(Operation("lop3", ops, (int(table.value),)))
        return
    ops = _words(e, operands_of(e, instruction, 4))
    if name == "prmt":
        modes = ("b32", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
        mode = modes.index(modifiers[-1]) if modifiers[-1] in modes else -1
        if mode < 0:
            raise e.error(f"unknown mode .{modifiers[-1]}")
        e.emit(Operation("prmt", ops, (mode,), cls=InstructionClass.MOVE))
    elif name == "shf":
        e.emit(Operation("shf", ops, (int(modifiers[0] == "l"), int(modifiers[1] == "clamp"))))
    else:
        e.emit(Operation(instruction.opcode.replace("b32", "u32"), ops))


def _words(e: Emitter, operands: Sequence[Operand]) -> tuple[int, ...]:
    return (e.destination(operands[0], 4), *(e.source(o, "b32") for o in operands[1:]))


class _Conversion(NamedTuple):
    """What the opcode of cvt says."""

    dtype: str
    stype: str
    flags: int = 0
    rounding: int = 0
    whole: int = 0
    finite: int = 0
    unknown: str = ""  # a modifier that does not exist


@lru_cache(maxsize=4096)
def _conversion(opcode: str) -> _Conversion:
    _, *modifiers = opcode.split(".")
    dtype, stype = modifiers[-2], modifiers[-1]
    flags = rounding = whole = finite = 0
    for word in modifiers[:-2]:
        if word in FLAGS and word not in ("rz", "rm", "rp"):
            flags |= FLAGS[word]
        elif word in ROUNDINGS:
            rounding, whole = ROUNDINGS[word], int(word.endswith("i"))
        elif word == "satfinite":
            finite = 1
        else:
            return _Conversion(dtype, stype, unknown=word)
    return _Conversion(dtype, stype, flags, rounding, whole, finite)


def convert(e: Emitter, instruction: Instruction) -> None:
    """cvt, scalar and packed."""
    dtype, stype, flags, rounding, whole, finite, unknown = _conversion(instruction.opcode)
    if unknown:
        raise e.error(f"unknown modifier .{unknown}")
    if dtype in _PACKED_CVT:
        _convert_packed(e, instruction, dtype, stype, (flags, rounding, whole, finite))
        return
    if dtype not in CVT_TYPES or stype not in CVT_TYPES or finite:
        raise e.error("conversion is not supported")
    dst, src = operands_of(e, instruction, 2)
    d_row, d_width = _wide_operand(e, dst, dtype, written=True)
    s_row, s_width = _wide_operand(e, src, stype)
    exact = d_width == max(TYPE_BYTES[dtype], 2) and s_width == max(TYPE_BYTES[stype], 2)
    types = (CVT_TYPES[dtype], CVT_TYPES[stype])
    p = (flags, rounding, whole, 0, d_width, s_width, *types)
    plain = exact and not (flags or rounding or whole)
    key = f"cvt.fast.{dtype}.{stype}" if plain and (dtype, stype) in _FAST_CVT else "cvt"
    e.emit(Operation(key, (d_row, s_row), p, 0, InstructionClass.CONVERT))


def _wide_operand(e: Emitter, operand: Operand, type: str, written: bool = False) -> tuple[int, int]:
    """Row and bytes of a register that may be wider than the type, or of an immediate."""
    width = TYPE_BYTES[type]
    if isinstance(operand, Reg):
        actual = 0 if operand.type == "pred" else max(TYPE_BYTES[operand.type], 2)
        if actual < width:
            raise e.error(f"register {operand.name.partition('@')[0]} of .{operand.type} is too narrow for .{type}")
        return e.register(operand, written), actual
    return e.source(operand, f"b{8 * max(width, 2)}" if not isinstance(operand, Imm) else type), max(width, 2)


def _convert_packed(e: Emitter, instruction: Instruction, dtype: str, stype: str, p: tuple[int, ...]) -> None:
    source_types = {"f32": "f32", "f16x2": "b32", "bf16x2": "b32", "e4m3x2": "b16", "e5m2x2": "b16"}
    if stype not in source_types:
        raise e.error(f"conversion from .{stype} is not supported")
    count = 3 if stype == "f32" and dtype != "tf32" else 2
    operands = operands_of(e, instruction, count)
    sources = tuple(e.source(o, source_types[stype]) for o in operands[1:])
    ops = (e.destination(operands[0], _PACKED_BYTES[dtype]), *sources)
    e.emit(Operation(f"cvt.{dtype}.{stype}", ops, p, cls=InstructionClass.CONVERT))
