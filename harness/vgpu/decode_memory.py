"""Decoding of moves, loads, stores, atomics, asynchronous copies and fences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .decode_arith import operands_of
from .emitter import Emitter
from .program import InstructionClass, Operation
from .ptx_module import TYPE_BYTES, Address, Imm, Instruction, Not, Operand, Reg, Special, Symbol, Vector

SPACES = {"global": 1, "const": 1, "shared": 2, "local": 3, "param": 1}
_IGNORED = ("weak", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "unified", "noftz", "gpu", "sys")
STRONG, ACQUIRE, RELEASE, CTA_SCOPE, READ_ONLY = 1, 2, 4, 8, 16
_ORDER = {
    "volatile": STRONG, "relaxed": STRONG, "mmio": STRONG, "acquire": STRONG | ACQUIRE, "release": STRONG | RELEASE,
    "acq_rel": STRONG | ACQUIRE | RELEASE, "nc": READ_ONLY,
    "cta": CTA_SCOPE, "cluster": CTA_SCOPE,  # a cluster is one CTA here
}  # fmt: skip
ATOM_OPS = {o: k for k, o in enumerate(("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas"))}
ATOM_TYPES = {
    "u32": 0, "b32": 0, "s32": 1, "u64": 2, "b64": 2, "s64": 3, "f32": 4, "f64": 5, "f16": 6, "bf16": 7, "f16x2": 8,
    "bf16x2": 9, "b16": 10,
}  # fmt: skip
_CLASSES = {
    0: InstructionClass.GLOBAL,
    1: InstructionClass.GLOBAL,
    2: InstructionClass.SHARED,
    3: InstructionClass.LOCAL,
}


def move(e: Emitter, instruction: Instruction) -> None:
    """mov."""
    type = instruction.opcode.rpartition(".")[2]
    dst, src = operands_of(e, instruction, 2)
    if type == "pred":
        row, negated = e.predicate(src)
        e.emit(Operation("mov.pred", (e.destination(dst, 0), row), (negated,), cls=InstructionClass.PREDICATE))
        return
    width = TYPE_BYTES[type]
    if isinstance(dst, Vector) or isinstance(src, Vector):
        _move_vector(e, dst, src, type)
        return
    if isinstance(src, Special) and _move_clock(e, dst, src, width):
        return
    if isinstance(src, Symbol) and e.find_variable(src) is None and src.name in e.module.functions:
        raise e.error("addresses of functions are not supported")
    ops = (e.destination(dst, width), e.source(src, type))
    e.emit(Operation(f"mov.b{8 * width}", ops, cls=InstructionClass.MOVE))


def _move_clock(e: Emitter, dst: Operand, src: Special, width: int) -> bool:
    if src.name not in ("%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"):
        return False
    if src.name.endswith("_hi"):
        e.emit(Operation("mov.b32", (e.destination(dst, 4), e.zero()), cls=InstructionClass.MOVE))
    else:
        e.emit(Operation(f"clock.b{8 * width}", (e.destination(dst, width),), cls=InstructionClass.MOVE))
    return True


def _move_vector(e: Emitter, dst: Operand, src: Operand, type: str) -> None:
    width = TYPE_BYTES[type]
    items = dst.items if isinstance(dst, Vector) else src.items if isinstance(src, Vector) else ()
    if len(items) not in (2, 4, 8) or width % len(items):
        raise e.error(f"{len(items)} elements do not make up .{type}")
    part = width // len(items)
    if isinstance(dst, Vector):
        ops = (*(e.destination(o, part) for o in items), e.source(src, type))
        e.emit(Operation("unpack", ops, (part, width), cls=InstructionClass.MOVE))
    else:
        ops = (e.destination(dst, width), *(e.source(o, f"b{8 * part}") for o in items))
        e.emit(Operation("pack", ops, (part, width), cls=InstructionClass.MOVE))


class _Access(NamedTuple):
    """What the modifiers of a memory instruction say."""

    space: str  # state space, or ""
    vector: int
    order: int  # flags
    rest: tuple[str, ...]  # what is left
    hint: bool  # whether the last operand is a cache policy
    remote: bool  # shared memory of other CTAs


@lru_cache(maxsize=4096)
def _modifiers(opcode: str) -> _Access:
    space, vector, order, rest = "", 1, 0, []
    words = opcode.split(".")[1:]
    for word in words:
        base = word.partition("::")[0]
        if base in SPACES:
            space = base
        elif word in ("v2", "v4", "v8"):
            vector = int(word[1])
        elif word in _ORDER:
            order |= _ORDER[word]
        elif word not in _IGNORED and base not in ("L1", "L2", "level"):
            rest.append(word)
    hint = any("cache_hint" in word for word in words)
    return _Access(space, vector, order, tuple(rest), hint, "shared::cluster" in words)


def _access(e: Emitter, opcode: str) -> _Access:
    access = _modifiers(opcode)
    if access.remote:
        raise e.error("shared memory of other CTAs of a cluster is not supported")
    return access


def _registers(e: Emitter, operand: Operand, vector: int) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != vector:
        raise e.error(f"{len(items)} registers, expected {vector}")
    return items


def _register_width(e: Emitter, items: Sequence[Operand], type: str) -> int:
    """Bytes of the registers, which may be wider than the type, and must agree."""
    widths = {max(TYPE_BYTES[o.type], 2) for o in items if isinstance(o, Reg) and o.type != "pred"}
    if len(widths) > 1:
        raise e.error("registers of different widths")
    width = widths.pop() if widths else max(TYPE_BYTES[type], 2)
    if width < TYPE_BYTES[type]:
        raise e.error(f"registers are too narrow for .{type}")
    return width


def load_store(e: Emitter, instruction: Instruction) -> None:
    """ld, ldu, st."""
    space, vector, order, rest, hint, _ = _access(e, instruction.opcode)
    if len(rest) != 1 or rest[0] not in TYPE_BYTES:
        raise e.error(f"unknown modifiers {list(rest[:-1] or rest)}")
    type = rest[0]
    store = instruction.opcode.startswith("st")
    operands = instruction.operands[:-1] if hint else instruction.operands
    if len(operands) != 2:
        raise e.error(f"{len(operands)} operands, expected 2")
    address, data = (operands[0], operands[1]) if store else (operands[1], operands[0])
    items = _registers(e, data, vector)
    width = _register_width(e, items, type)
    bits = f"b{8 * width}"
    rows = tuple([e.source(o, bits) if store else e.destination(o, width) for o in items])
    signed = int(type[0] == "s")
    if space == "param" and not store and _is_entry_param(e, address):
        offset = _param_offset(e, address)
        p = (0, 0, TYPE_BYTES[type], vector, width, signed, 0)
        e.emit(Operation("ld.param", rows, p, offset, InstructionClass.PARAM))
        return
    code = SPACES.get(space, 0)
    if space == "param" and isinstance(address, Address) and isinstance(address.base, Symbol):
        code = 3  # parameters of calls lie in local memory
    base, base_width, offset = e.address(address)
    p = (code, base_width, TYPE_BYTES[type], vector, width, signed, order)
    ops = (base, *rows) if store else (*rows, base)
    e.emit(Operation("st" if store else "ld", ops, p, offset, _CLASSES[code]))


def _param_offset(e: Emitter, address: Operand) -> int:
    if not isinstance(address, Address) or not isinstance(address.base, Symbol):
        raise e.error("a parameter was expected")
    return e.params[address.base.name].offset + address.offset


def _is_entry_param(e: Emitter, address: Operand) -> bool:
    if not isinstance(address, Address) or not isinstance(address.base, Symbol):
        return False
    symbol = address.base
    return not e.frame.prefix and symbol.name in e.params and e.find_variable(symbol) is None


def atomic(e: Emitter, instruction: Instruction) -> None:
    """atom, red."""
    space, vector, order, rest, hint, _ = _access(e, instruction.opcode)
    if len(rest) == 3 and rest[1] == rest[0]:
        rest = rest[1:]
    if len(rest) == 2 and rest[0] in ATOM_TYPES:
        rest = rest[::-1]  # with vectors, compilers write the type first
    if len(rest) != 2 or rest[0] not in ATOM_OPS or rest[1] not in ATOM_TYPES:
        raise e.error("atomic operation is not supported")
    operation, type = rest
    returns, cas = instruction.opcode.startswith("atom"), operation == "cas"
    operands = list(instruction.operands)
    if hint:
        operands.pop()
    if len(operands) != 2 + returns + cas:
        raise e.error(f"{len(operands)} operands, expected {2 + returns + cas}")
    width = TYPE_BYTES[type]
    results: tuple[int, ...] = ()
    if returns:
        results = tuple(e.destination(o, width) for o in _registers(e, operands.pop(0), vector))
    base, base_width, offset = e.address(operands[0])
    values = tuple(e.source(o, type) for o in _registers(e, operands[1], vector))
    third = (e.source(operands[2], type),) if cas else ()
    ops = (*results, base, *values, *third)
    p = (SPACES.get(space, 0), base_width, ATOM_OPS[operation], ATOM_TYPES[type], int(returns), int(cas))
    e.emit(Operation("atom", ops, (*p, order | STRONG, vector), offset, InstructionClass.ATOMIC))


def async_copy(e: Emitter, instruction: Instruction) -> None:
    """cp.async with groups."""
    opcode = instruction.opcode
    operands = instruction.operands
    cls = InstructionClass.ASYNC
    if opcode in ("cp.async.commit_group", "cp.async.wait_all"):
        e.emit(Operation(opcode, cls=cls))
        return
    if opcode == "cp.async.wait_group":
        (count,) = operands_of(e, instruction, 1)
        if not isinstance(count, Imm):
            raise e.error("the number of groups must be a number")
        e.emit(Operation(opcode, imm=int(count.value), cls=cls))
        return
    if "cache_hint" in opcode:
        operands = operands[:-1]
    if len(operands) not in (3, 4) or not isinstance(operands[2], Imm) or operands[2].value not in (4, 8, 16):
        raise e.error("expected [dst], [src], 4|8|16 and at most one more operand")
    dst, dst_width, dst_offset = e.address(operands[0])
    src, src_width, src_offset = e.address(operands[1])
    ops = [dst, src]
    size_op, size_const, ignore, negated = -1, -1, -1, 0
    if len(operands) == 4:
        last = operands[3]
        if isinstance(last, Not) or (isinstance(last, Reg) and last.type == "pred"):
            row, negated = e.predicate(last)
            ignore, ops = 2, [*ops, row]
        elif isinstance(last, Imm):
            size_const = int(last.value)
        else:
            size_op, ops = 2, [*ops, e.source(last, "b32")]
    p = (dst_width, src_width, int(operands[2].value), size_op, size_const, ignore, negated)
    imm = (dst_offset & 0xFFFFFFFF) | (src_offset << 32)
    e.emit(Operation("cp.async", tuple(ops), p, imm, cls))


def fence(e: Emitter, instruction: Instruction) -> None:
    """fence, membar: CTA and cluster scope order the threads of a block, device scope and above the blocks too."""
    words = instruction.opcode.split(".")[1:]
    wide = any(w in ("gpu", "sys", "gl") for w in words)
    e.emit(Operation("fence", p=(int(wide),), cls=InstructionClass.CONTROL))


def convert_address(e: Emitter, instruction: Instruction) -> None:
    """cvta."""
    words = instruction.opcode.split(".")[1:]
    to = "to" in words
    space = next((w.partition("::")[0] for w in words if w.partition("::")[0] in SPACES), None)
    if space is None or words[-1] != "u64":
        raise e.error("expected .space and .u64")
    dst, src = operands_of(e, instruction, 2)
    code = 1 if space == "param" and not to else SPACES[space]
    ops = (e.destination(dst, 8), e.source(src, "u64"))
    e.emit(Operation("cvta", ops, (code, int(to)), cls=InstructionClass.MOVE))


def test_space(e: Emitter, instruction: Instruction) -> None:
    """isspacep."""
    space = instruction.opcode.split(".")[1].partition("::")[0]
    dst, src = operands_of(e, instruction, 2)
    ops = (e.destination(dst, 0), e.source(src, "u64"))
    e.emit(Operation("isspacep", ops, (SPACES[space],), cls=InstructionClass.PREDICATE))


def cache_hint(e: Emitter, instruction: Instruction) -> None:
    """prefetch, discard, applypriority: no effect here; createpolicy: any value serves."""
    if instruction.opcode.startswith("createpolicy"):
        row = e.destination(instruction.operands[0], 8)
        e.emit(Operation("mov.b64", (row, e.constant(0, 8)), cls=InstructionClass.MOVE))
    else:
        e.emit(Operation("nop", cls=InstructionClass.CONTROL))
