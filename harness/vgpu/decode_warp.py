"""Decoding of warp exchange, matrix instructions and barriers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from .decode_arith import FLAGS, operands_of
from .emitter import TRASH, Emitter
from .program import InstructionClass, Operation
from .ptx_module import Instruction, Operand, Pair, Sink, Vector

_MMA = re.compile(r"mma\.sync\.aligned\.m(8|16)n8k(\d+)\.row\.col(\.satfinite)?\.(\w+)\.(\w+)\.(\w+)\.(\w+)(\.\w+)?")
MMA_TYPES = {t: k for k, t in enumerate(("f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8", "f32", "s32"))}
_MMA_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
REDUCTIONS = ("add", "min", "max", "and", "or", "xor")


def mma_shapes() -> Iterator[tuple[int, int, str, str, str]]:
    """Rows, depth, accumulator, A and B of every form of mma.sync that is supported (columns are always 8)."""
    for depth, (acc, type) in itertools.product((8, 16), (("f32", "f16"), ("f16", "f16"), ("f32", "bf16"))):
        yield 16, depth, acc, type, type
    yield from ((16, depth, "f32", "tf32", "tf32") for depth in (4, 8))
    for a, b in itertools.product(("e4m3", "e5m2"), repeat=2):
        yield from ((16, depth, acc, a, b) for depth in (16, 32) for acc in ("f32", "f16"))
    for a, b in itertools.product(("s8", "u8"), repeat=2):
        yield from ((rows, depth, "s32", a, b) for rows, depth in ((16, 16), (16, 32), (8, 16)))


_MMA_SHAPES = frozenset(mma_shapes())


def shuffle(e: Emitter, instruction: Instruction) -> None:
    """shfl.sync."""
    words = instruction.opcode.split(".")
    if words[1] != "sync":
        raise e.error("shfl without .sync is not supported")
    dst, a, b, c, mask = operands_of(e, instruction, 5)
    first, second = _pair(dst)
    sources = tuple(e.source(o, "b32") for o in (a, b, c, mask))
    ops = (e.destination(first, 4), e.destination(second, 0), *sources)
    mode = ("up", "down", "bfly", "idx").index(words[2])
    e.emit(Operation("shfl", ops, (mode,), cls=InstructionClass.WARP))


def _pair(operand: Operand) -> tuple[Operand, Operand]:
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())


def vote(e: Emitter, instruction: Instruction) -> None:
    """vote.sync."""
    words = instruction.opcode.split(".")
    if words[1] != "sync":
        raise e.error("vote without .sync is not supported")
    dst, a, mask = operands_of(e, instruction, 3)
    row, negated = e.predicate(a)
    ballot = words[2] == "ballot"
    ops = (e.destination(dst, 4 if ballot else 0), row, e.source(mask, "b32"))
    mode = ("all", "any", "uni", "ballot").index(words[2])
    e.emit(Operation("vote", ops, (mode, negated), cls=InstructionClass.WARP))


def match(e: Emitter, instruction: Instruction) -> None:
    """match.sync."""
    words = instruction.opcode.split(".")
    dst, a, mask = operands_of(e, instruction, 3)
    first, second = _pair(dst)
    ops = (e.destination(first, 4), e.destination(second, 0), e.source(a, words[-1]), e.source(mask, "b32"))
    p = (int("all" in words), 8 if words[-1] == "b64" else 4)
    e.emit(Operation("match", ops, p, cls=InstructionClass.WARP))


def reduce(e: Emitter, instruction: Instruction) -> None:
    """redux.sync."""
    words = instruction.opcode.split(".")
    type = words[-1]
    dst, a, mask = operands_of(e, instruction, 3)
    mode = REDUCTIONS.index(words[2])
    kind = {"u32": 0, "b32": 0, "s32": 1, "f32": 2}[type]
    flags = sum(FLAGS[w] for w in words[3:-1] if w in FLAGS)
    ops = (e.destination(dst, 4), e.source(a, type), e.source(mask, "b32"))
    e.emit(Operation("redux", ops, (mode, kind, flags), cls=InstructionClass.WARP))


def elect(e: Emitter, instruction: Instruction) -> None:
    """elect.sync."""
    dst, mask = operands_of(e, instruction, 2)
    first, second = _pair(dst)
    ops = (e.destination(first, 4), e.destination(second, 0), e.source(mask, "b32"))
    e.emit(Operation("elect", ops, cls=InstructionClass.WARP))


def active_mask(e: Emitter, instruction: Instruction) -> None:
    """activemask."""
    (dst,) = operands_of(e, instruction, 1)
    e.emit(Operation("activemask", (e.destination(dst, 4),), cls=InstructionClass.WARP))


def matrix_memory(e: Emitter, instruction: Instruction) -> None:
    """ldmatrix, stmatrix."""
    words = [w.partition("::")[0] for w in instruction.opcode.split(".")]
    if "m8n8" not in words or words[-1] != "b16":
        raise e.error("only .m8n8 matrices of .b16 are supported")
    count = next((int(w[1]) for w in words if w in ("x1", "x2", "x4")), 0)
    store = words[0] == "stmatrix"
    operands = operands_of(e, instruction, 2)
    address, data = (operands[0], operands[1]) if store else (operands[1], operands[0])
    items = data.items if isinstance(data, Vector) else (data,)
    if len(items) != count:
        raise e.error(f"{len(items)} registers, expected {count}")
    rows = tuple(e.source(o, "b32") if store else e.destination(o, 4) for o in items)
    base, width, offset = e.address(address)
    p = (2 if "shared" in words else 0, width, count, int("trans" in words))
    ops = (base, *rows) if store else (*rows, base)
    e.emit(Operation(words[0], ops, p, offset, InstructionClass.SHARED))


def move_matrix(e: Emitter, instruction: Instruction) -> None:
    """movmatrix."""
    dst, src = operands_of(e, instruction, 2)
    ops = (e.destination(dst, 4), e.source(src, "b32"))
    e.emit(Operation("movmatrix", ops, cls=InstructionClass.WARP))


def matrix_multiply(e: Emitter, instruction: Instruction) -> None:
    """mma.sync.

    What it computes: products are exact, the sum of one instruction is taken in fp64 (fp32 for 16-bit m16n8k16)
    in ascending depth and rounded once. Tensor cores are less exact, by published measurements: they align the products
    and the accumulator to the largest exponent among them, cut what lies more than a few bits below an fp32 mantissa,
    and round the fp32 sum towards zero. So silicon may differ by depth * 2^-23 of the largest term; with fp8 on sm_89
    and sm_90, which keep about 13 fraction bits, by 2^-13 of it. Integers are exact on both, modulo 2^32 or saturated.
    A kernel that is right here within its error bound may use up more of the bound on silicon, never less.
    """
    found = _MMA.fullmatch(instruction.opcode)
    if found is None:
        raise e.error("this form of mma is not supported")
    rows, depth = int(found[1]), int(found[2])
    words = [w for w in found.groups()[3:] if w]
    dtype, atype, btype, ctype = (w.lstrip(".") for w in words[:4])
    if dtype != ctype or (rows, depth, dtype, atype, btype) not in _MMA_SHAPES:
        raise e.error(
            f"m{rows}n8k{depth} with types {dtype}, {atype}, {btype}, {ctype} is not a supported shape of mma"
        )
    bits = _MMA_BITS[atype]
    half = dtype == "f16"
    counts = (rows * (4 if half else 8) // 32, rows * depth * bits // 1024, 8 * depth * bits // 1024)
    d, a, b, c = operands_of(e, instruction, 4)
    fragments = [
        _fragment(e, operand, count) for operand, count in zip((d, a, b, c), (*counts, counts[0]), strict=True)
    ]
    rows_d = tuple(e.destination(o, 4) for o in fragments[0])
    sources = tuple(e.source(o, "b32") for f in fragments[1:] for o in f)
    types = (MMA_TYPES[atype], MMA_TYPES[btype], MMA_TYPES[dtype])
    p = (rows, 8, depth, *types, int(found[3] is not None))
    e.emit(Operation("mma", (*rows_d, *sources), p, cls=InstructionClass.MATRIX))


def _fragment(e: Emitter, operand: Operand, count: int) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise e.error(f"a fragment of {len(items)} registers, expected {count}")
    return items


def barrier(e: Emitter, instruction: Instruction) -> None:
    """bar, barrier."""
    words = instruction.opcode.split(".")
    operands = list(instruction.operands)
    if "warp" in words:
        (mask,) = operands_of(e, instruction, 1)
        e.emit(Operation("bar.warp.sync", (e.source(mask, "b32"),), cls=InstructionClass.BARRIER))
        return
    if "cluster" in words:
        raise e.error("barriers of clusters are not supported")
    aligned = words[0] == "bar" or "aligned" in words
    dst, last, negated, kind = TRASH, TRASH, 0, 1 if "arrive" in words else 0
    if "red" in words:
        kind = next((k for w, k in (("and", 2), ("or", 3), ("popc", 4)) if w in words), 0)
        target = operands.pop(0)
        dst = e.destination(target, 4 if kind == 4 else 0)
        last, negated = e.predicate(operands.pop())
    if not 1 <= len(operands) <= 2:
        raise e.error(f"{len(operands)} operands, expected a barrier and at most a count")
    count = e.source(operands[1], "u32") if len(operands) == 2 else TRASH
    ops = (dst, e.source(operands[0], "u32"), count, last)
    e.emit(Operation("bar", ops, (kind, int(aligned), len(operands) - 1, negated), cls=InstructionClass.BARRIER))
