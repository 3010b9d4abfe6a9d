"""Integer, bit, selection and predicate instructions, stated over columns of exact integers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import vgpu_semantics as ref
from vgpu_forms import Bits, Form, Function, integers, text_of

TYPES = [f"{letter}{bits}" for bits in (16, 32, 64) for letter in "us"]


def form(opcode: str, operands: tuple[str, ...], result: str, f: Callable[..., object], **more: object) -> Form:
    """A form of exact integers."""
    return Form(text_of(opcode, len(operands)), operands, result, integers(operands, result, f), **more)  # type: ignore[arg-type]


def each(f: Callable[..., int]) -> Callable[..., object]:
    """A function of single integers, over columns."""
    return lambda *columns: np.frompyfunc(f, len(columns), 1)(*columns)


def nonzero_divisor(a: Bits, b: Bits) -> np.ndarray:
    """The manual defines no result of a division by zero, nor of the one quotient that overflows."""
    del a
    return b != 0


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def arithmetic() -> Iterator[Form]:
    for t in TYPES:
        bits, u = int(t[1:]), f"u{t[1:]}"
        two, three = (t, t), (t, t, t)
        yield form(f"add.{t}", two, u, lambda a, b: a + b)
        yield form(f"sub.{t}", two, u, lambda a, b: a - b)
        yield form(f"mul.lo.{t}", two, u, lambda a, b: a * b)
        yield form(f"mul.hi.{t}", two, u, lambda a, b, n=bits: a * b >> n)
        yield form(f"mad.lo.{t}", three, u, lambda a, b, c: a * b + c)
        yield form(f"mad.hi.{t}", three, u, lambda a, b, c, n=bits: (a * b >> n) + c)
        yield form(f"min.{t}", two, u, np.minimum)
        yield form(f"max.{t}", two, u, np.maximum)
        yield form(f"div.{t}", two, u, each(truncated), keep=nonzero_divisor)
        yield form(f"rem.{t}", two, u, each(lambda a, b: a - b * truncated(a, b)), keep=nonzero_divisor)
        yield form(f"sad.{t}", (t, t, u), u, lambda a, b, c: c + abs(a - b))
        if t[0] == "s":
            yield form(f"neg.{t}", (t,), u, lambda a: -a)
            yield form(f"abs.{t}", (t,), u, abs)
        if bits < 64:
            wide = f"u{2 * bits}"
            yield form(f"mul.wide.{t}", two, wide, lambda a, b: a * b)
            yield form(f"mad.wide.{t}", (t, t, wide), wide, lambda a, b, c: a * b + c)

    def clamp(a: object) -> object:
        return np.clip(a, -(1 << 31), (1 << 31) - 1)  # type: ignore[call-overload]

    yield form("add.sat.s32", ("s32", "s32"), "u32", lambda a, b: clamp(a + b))
    yield form("sub.sat.s32", ("s32", "s32"), "u32", lambda a, b: clamp(a - b))
    yield form("mad.hi.sat.s32", ("s32",) * 3, "u32", lambda a, b, c: clamp((a * b >> 32) + c))
    for t, low in (("u32", lambda a: a % (1 << 24)), ("s32", lambda a: (a + (1 << 23)) % (1 << 24) - (1 << 23))):
        yield form(f"mul24.lo.{t}", (t, t), "u32", lambda a, b, low=low: low(a) * low(b))


def carries() -> Iterator[Form]:
    """Carry chains: the second instruction takes what the first leaves, and the third shows what the second left."""
    for bits in (32, 64):
        u, top = f"u{bits}", 1 << bits
        for op, sign in (("add", 1), ("sub", -1)):
            text = f".reg .b{bits} %lo, %hi, %more; {op}.cc.{u} %lo, {{0}}, {{1}}; {op}c.cc.{u} %hi, {{1}}, {{0}};"
            text += f"{op}c.{u} %more, 0, 0;"
            parts = {"lo": 0, "hi": bits, "more": 2 * bits}
            for part, shift in parts.items():
                whole = lambda a, b, s=sign, n=bits, k=shift: ((b << n | a) + s * (a << n | b)) >> k
                yield Form(f"{text} mov.b{bits} {{d}}, %{part};", (u, u), u, integers((u, u), u, whole))
        for high, mad in itertools.product((False, True), ("mad", "madc")):
            kind = "hi" if high else "lo"
            first = f"add.cc.{u} %x, {{0}}, {{0}};" if mad == "madc" else ""
            text = f".reg .b{bits} %x, %y1, %z; {first}{mad}.{kind}.cc.{u} %y1, {{0}}, {{1}}, {{2}}; addc.{u} %z, 0, 0;"

            def total(a: object, b: object, c: object, high: bool = high, mad: str = mad, n: int = bits) -> object:
                part = a * b >> n if high else a * b % (1 << n)  # type: ignore[operator]
                return part + c + (2 * a >> n if mad == "madc" else 0)  # type: ignore[operator]

            yield Form(f"{text} mov.b{bits} {{d}}, %y1;", (u,) * 3, u, integers((u,) * 3, u, total))
            over = integers((u,) * 3, u, lambda *x, f=total, top=top: f(*x) // top)
            yield Form(f"{text} mov.b{bits} {{d}}, %z;", (u,) * 3, u, over)
            if mad == "madc":
                text = f".reg .b{bits} %x; {first}madc.{kind}.{u} {{d}}, {{0}}, {{1}}, {{2}};"
                yield Form(text, (u,) * 3, u, integers((u,) * 3, u, total))


def bits_forms() -> Iterator[Form]:
    for bits in (16, 32, 64):
        u, s, b = f"u{bits}", f"s{bits}", f"b{bits}"
        mask = (1 << bits) - 1
        yield form(f"and.{b}", (u, u), u, lambda a, b: a & b)
        yield form(f"or.{b}", (u, u), u, lambda a, b: a | b)
        yield form(f"xor.{b}", (u, u), u, lambda a, b: a ^ b)
        yield form(f"not.{b}", (u,), u, lambda a, m=mask: a ^ m)
        yield form(f"cnot.{b}", (u,), u, each(lambda a: int(a == 0)))
        yield form(f"shl.{b}", (u, "u32"), u, each(lambda a, n, k=bits: a << min(n, k)))
        yield form(f"shr.{u}", (u, "u32"), u, each(lambda a, n, k=bits: a >> min(n, k)))
        yield form(f"shr.{s}", (s, "u32"), u, each(lambda a, n, k=bits: a >> min(n, k)))
        yield form(f"mov.{b}", (u,), u, lambda a: a)
        choose = f"setp.gt.s32 %p1, {{2}}, 0; selp.{b} {{d}}, {{0}}, {{1}}, %p1;"
        yield Form(choose, (u, u, "s32"), u, integers((u, u, "s32"), u, lambda a, b, c: np.where(c > 0, a, b)))
        yield form(f"slct.{b}.s32", (u, u, "s32"), u, lambda a, b, c: np.where(c >= 0, a, b))
    for bits in (32, 64):
        u, s, b = f"u{bits}", f"s{bits}", f"b{bits}"
        yield form(f"popc.{b}", (u,), "u32", each(int.bit_count))
        yield form(f"clz.{b}", (u,), "u32", each(lambda a, n=bits: n - a.bit_length()))
        yield form(f"brev.{b}", (u,), u, each(lambda a, n=bits: int(f"{a:0{n}b}"[::-1], 2)))
        for t in (u, s):
            yield form(f"bfind.{t}", (t,), "u32", each(lambda a: (a ^ -(a < 0)).bit_length() - 1))
            shift = lambda a, n=bits: n - (a ^ -(a < 0)).bit_length() if a not in (0, -1) else -1
            yield form(f"bfind.shiftamt.{t}", (t,), "u32", each(shift))
            take = lambda a, p, n, k=bits, t=t: ref.bit_field_extract(a % (1 << k), p, n, k, t[0] == "s")
            yield form(f"bfe.{t}", (t, "u32", "u32"), u, each(take))
        put = each(lambda a, b, p, n, k=bits: ref.bit_field_insert(a, b, p, n, k))
        yield form(f"bfi.{b}", (u, u, "u32", "u32"), u, put)
    yield from masks()


def masks() -> Iterator[Form]:
    def field(a: int, b: int, wrap: bool) -> int:
        a, b = (a % 32, b % 32) if wrap else (min(a, 32), min(b, 32))
        return ((1 << b) - 1) << a

    def nth(mask: int, base: int, offset: int) -> int:
        """The manual's loop: the offset-th set bit from `base` on, upwards or downwards."""
        if offset == 0:
            return base if base < 32 and mask >> base & 1 else -1
        step, left = (1 if offset > 0 else -1), abs(offset)
        for at in range(base, 32 if step > 0 else -1, step):
            left -= mask >> at & 1
            if left == 0:
                return at
        return -1

    u32, s32 = "u32", "s32"
    yield form("bmsk.clamp.b32", (u32, u32), u32, each(lambda a, b: field(a, b, False)))
    yield form("bmsk.wrap.b32", (u32, u32), u32, each(lambda a, b: field(a, b, True)))
    yield form("szext.clamp.u32", (u32, u32), u32, each(lambda a, n: a % (1 << min(n, 32))))
    extend = each(lambda a, n: ref.signed(a, min(n, 32)) if n else 0)
    yield form("szext.clamp.s32", (u32, u32), u32, extend)
    small = lambda a, b, c: b < 32  # the base is a bit position
    yield form("fns.b32", (u32, u32, s32), u32, each(nth), keep=small)
    for table in (0x00, 0x1B, 0x96, 0xCA, 0xE8, 0xFE):
        text = f"lop3.b32 {{d}}, {{0}}, {{1}}, {{2}}, {table};"
        yield Form(
            text, (u32,) * 3, u32, integers((u32,) * 3, u32, each(lambda a, b, c, t=table: ref.lookup3(a, b, c, t)))
        )
    for side, mode in itertools.product("lr", ("wrap", "clamp")):
        move = each(lambda a, b, n, d=side, m=mode: ref.funnel(a, b, n, d == "l", m == "clamp"))
        yield form(f"shf.{side}.{mode}.b32", (u32,) * 3, u32, move)
    yield form("prmt.b32", (u32,) * 3, u32, each(ref.permute))
    for mode, selectors in PERMUTE_MODES.items():
        pick = each(lambda a, b, c, s=selectors: ref.permute(a, b, s[c % 4]))
        text = f"prmt.b32.{mode} {{d}}, {{0}}, {{1}}, {{2}};"
        yield Form(text, (u32,) * 3, u32, integers((u32,) * 3, u32, pick))
    for (a, b), dot in itertools.product(itertools.product("us", repeat=2), ("dp4a", "dp2a.lo", "dp2a.hi")):
        yield form(
            f"{dot}.{a}32.{b}32", (u32,) * 3, u32, each(lambda x, y, z, p=(dot, a, b): z + dot_product(x, y, *p))
        )


# The manual's table of prmt modes: for the selector's lower two bits, the bytes 3 to 0 of the result.
PERMUTE_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543), "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333), "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210), "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}  # fmt: skip


def dot_product(x: int, y: int, dot: str, a: str, b: str) -> int:
    """dp4a: four bytes; dp2a: two halves with two bytes of the lower or upper half."""
    size, count, first = (8, 4, 0) if dot == "dp4a" else (16, 2, 2 if dot.endswith("hi") else 0)
    total = 0
    for k in range(count):
        p, q = x >> size * k & ((1 << size) - 1), y >> 8 * (first + k) & 255
        total += (ref.signed(p, size) if a == "s" else p) * (ref.signed(q, 8) if b == "s" else q)
    return total


COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
ORDER: dict[str, Callable[..., object]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


def as_number(f: Callable[..., object], yes: int = 1) -> Callable[..., object]:
    return lambda *x: np.where(np.asarray(f(*x), np.bool_), yes, 0)


def comparisons() -> Iterator[Form]:
    for t, (name, f) in itertools.product(TYPES, ORDER.items()):
        text = f"setp.{name}.{t} %p0, {{0}}, {{1}}; selp.u32 {{d}}, 1, 0, %p0;"
        yield Form(text, (t, t), "u32", integers((t, t), "u32", as_number(f)))
        yield form(f"set.{name}.u32.{t}", (t, t), "u32", as_number(f, -1))
    for alias, name in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
        text = f"setp.{alias}.u32 %p0, {{0}}, {{1}}; selp.u32 {{d}}, 1, 0, %p0;"
        yield Form(text, ("u32", "u32"), "u32", integers(("u32", "u32"), "u32", as_number(ORDER[name])))
    yield form("set.lt.f32.s32", ("s32", "s32"), "f32", as_number(ORDER["lt"], 0x3F800000))


def predicates() -> Iterator[Form]:
    """Two predicates per setp, boolean combinations with a third, and logic between predicates."""
    joins: dict[str, Callable[[object, object], object]] = {
        "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
    }  # fmt: skip
    u, three = "u32", ("u32", "u32", "u32")

    def both(p: object, q: object) -> object:
        return np.where(p, 1, 0) + np.where(q, 2, 0)  # type: ignore[call-overload]

    show = "selp.u32 %r3, 1, 0, %p1; selp.u32 %r4, 2, 0, %p2; add.u32 {d}, %r3, %r4;"
    text = f"setp.lt.u32 %p1|%p2, {{0}}, {{1}}; {show}"
    yield Form(text, (u, u), u, integers((u, u), u, lambda a, b: both(a < b, a >= b)))
    odd = ".reg .pred %c; and.b32 %r3, {2}, 1; setp.eq.u32 %c, %r3, 1;"
    for (name, join), negated in itertools.product(joins.items(), (False, True)):
        text = f"{odd} setp.lt.{name}.u32 %p1|%p2, {{0}}, {{1}}, {'!' if negated else ''}%c; {show}"
        f = lambda a, b, c, j=join, n=negated: both(j(a < b, (c % 2 == 1) != n), j(a >= b, (c % 2 == 1) != n))
        yield Form(text, three, u, integers(three, u, f))
        text = f"{odd} setp.lt.u32 %p0, {{0}}, {{1}}; {name}.pred %p1, %p0, {'!' if negated else ''}%c;"
        text += f"not.pred %p2, %p1; mov.pred %p3, %p2; and.pred %p2, %p3, %p3; {show}"
        f = lambda a, b, c, j=join, n=negated: both(r := j(a < b, (c % 2 == 1) != n), np.logical_not(r))
        yield Form(text, three, u, integers(three, u, f))


def parts() -> Iterator[Form]:
    """Registers put together and taken apart."""
    for total, part in ((32, 16), (64, 32), (64, 16), (32, 8)):
        n = total // part
        names = ", ".join(f"%e{k}" for k in range(n))
        text = f".reg .b{max(part, 16)} {names}; mov.b{total} {{{{{names}}}}}, {{0}};"
        turned = ", ".join(f"%e{n - 1 - k}" for k in range(n))
        text = text.replace("{{", "{").replace("}}", "}") + f" mov.b{total} {{d}}, {{{turned}}};"
        mask = (1 << part) - 1
        f = lambda a, n=n, s=part, m=mask: sum((a >> s * k & m) << s * (n - 1 - k) for k in range(n))
        yield Form(text, (f"u{total}",), f"u{total}", integers((f"u{total}",), f"u{total}", f))


FORMS: dict[str, list[Form]] = {
    "integer arithmetic": list(arithmetic()),
    "carry chains": list(carries()),
    "bits": list(bits_forms()),
    "integer comparisons": list(comparisons()),
    "predicates": list(predicates()),
    "registers in parts": list(parts()),
}
__all__ = ["FORMS", "Function"]
