"""Loads, stores, atomics, asynchronous copies and addresses, stated over columns of patterns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import vgpu_numpy as num
from vgpu_forms import Bits, Form, Function, floats, halves, integers, width

# By space: the qualifier, and the thread's own 16 bytes there.
PLACES = {
    "generic": ("", "[%rg]"),
    "global": (".global", "[%rw]"),
    "shared": (".shared", "[%rs]"),
    "local": (".local", "[%rl]"),
}


def vector(names: list[str]) -> str:
    return names[0] if len(names) == 1 else "{" + ", ".join(names) + "}"


def loads_and_stores() -> Iterator[Form]:
    """What is stored comes back: the result is the sum of k + 1 times element k."""
    for (space, at), size, count in itertools.product(PLACES.values(), (1, 2, 4, 8), (1, 2, 4)):
        if size * count > 16:
            continue
        bits, wide = 8 * size, max(16, 8 * size)
        suffix = (f".v{count}" if count > 1 else "") + f".b{bits}"
        loaded = [f"%e{k}" for k in range(count)]
        text = (
            f".reg .b{wide} {', '.join(loaded)}; st{space}{suffix} {at}, {vector([f'{{{k}}}' for k in range(count)])};"
        )
        text += f" ld{space}{suffix} {vector(loaded)}, {at}; mov.b{wide} {{d}}, 0;"
        text += "".join(f" mad.lo.u{wide} {{d}}, {e}, {k + 1}, {{d}};" for k, e in enumerate(loaded))
        type, result = f"u{bits}", f"u{wide}"
        total = lambda *x: sum((k + 1) * e for k, e in enumerate(x))
        yield Form(text, (type,) * count, result, integers((type,) * count, result, total))
    for bits, letter, target in ((8, "s", 32), (16, "s", 32), (32, "s", 64), (8, "u", 32), (8, "s", 16)):
        text = f"st.shared.b{bits} [%rs], {{0}}; ld.shared.{letter}{bits} {{d}}, [%rs];"
        type, result = f"{letter}{bits}", f"u{target}"
        yield Form(text, (type,), result, integers((type,), result, lambda a: a))


INTEGER_ATOMICS: dict[str, Callable[[object, object], object]] = {
    "add": lambda a, b: a + b, "min": np.minimum, "max": np.maximum, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "exch": lambda a, b: b + 0 * a,
    "inc": lambda a, b: np.where(a >= b, 0, a + 1), "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1),
}  # fmt: skip
TYPES = {
    "add": ("u32", "s32", "u64"), "min": ("u32", "s32", "u64", "s64"), "max": ("u32", "s32", "u64", "s64"),
    "and": ("b32", "b64"), "or": ("b32", "b64"), "xor": ("b32", "b64"), "exch": ("b32", "b64"), "inc": ("u32",),
    "dec": ("u32",),
}  # fmt: skip


def atomics() -> Iterator[Form]:
    """Each thread has a cell of its own: what `atom` gives back, and what it and `red` leave."""
    for (name, (space, at)), (op, types) in itertools.product(list(PLACES.items())[:3], TYPES.items()):
        for t in types:
            exact = t.replace("b", "u")
            f = integers((exact, exact), exact, INTEGER_ATOMICS[op])
            yield from _atomic(op, t, exact, f, space, at, red=op != "exch" and name != "generic")
    for t, (space, at) in itertools.product(("b16", "b32", "b64"), (PLACES["global"], PLACES["shared"])):
        u = t.replace("b", "u")
        store, cas = f"st{space}.{t} {at}, {{0}};", f"atom{space}.cas.{t} {{d}}, {at}, {{1}}, {{2}};"
        yield Form(f"{store} {cas}", (u,) * 3, u, lambda a, b, c: a)
        # the first operand is compared with itself in every other row
        text = f"{store} .reg .b{t[1:]} %old, %want; and.b32 %r5, %r1, 1; setp.eq.u32 %p1, %r5, 0;"
        text += f" selp.b{t[1:]} %want, {{0}}, {{1}}, %p1; {cas.replace('{d}', '%old').replace('{1}', '%want')}"
        text += f" ld{space}.{t} {{d}}, {at};"
        swap = lambda a, b, c: np.where((np.arange(len(a)) % 2 == 0) | (a == b), c, a)
        yield Form(text, (u,) * 3, u, swap)
    yield from float_atomics()


def _atomic(op: str, t: str, type: str, f: Function, space: str, at: str, red: bool) -> Iterator[Form]:
    bits = width(type)
    noftz = ".noftz" if type in ("f16", "bf16", "f16x2", "bf16x2") else ""
    store, load = f"st{space}.b{bits} {at}, {{0}};", f"ld{space}.b{bits} {{d}}, {at};"
    operation = f"{space}.{op}{noftz}.{t}"
    yield Form(f"{store} atom{operation} {{d}}, {at}, {{1}};", (type, type), type, lambda a, b: a)
    yield Form(f"{store} .reg .b{bits} %old; atom{operation} %old, {at}, {{1}}; {load}", (type, type), type, f)
    if red:
        yield Form(f"{store} red{operation} {at}, {{1}}; {load}", (type, type), type, f)


def float_atomics() -> Iterator[Form]:
    """In global memory `add.f32` flushes subnormals, in shared memory it does not; the 16-bit ones never do."""
    add: Callable[[num.Reals, num.Reals], num.Reals] = lambda a, b: num.add_odd(a, b)
    for name, (space, at) in itertools.product(("f16", "bf16", "f32", "f64"), (PLACES["global"], PLACES["shared"])):
        ftz = ".ftz" if name == "f32" and space == ".global" else ""
        f = floats(name, (lambda a, b: a + b) if name == "f64" else add, "rn", ftz)
        yield from _atomic("add", name, name, f, space, at, red=True)
        if name in ("f16", "bf16"):
            packed = halves(Form("", (name, name), name, f), text="-")
            yield from _atomic("add", f"{name}x2", f"{name}x2", packed.function, space, at, red=True)
    for count, name in ((2, "f32"), (4, "f32"), (2, "f16x2"), (4, "f16x2"), (2, "bf16x2")):
        scalar = name.partition("x2")[0]
        one = floats(scalar, add, "rn", ".ftz" if name == "f32" else "")
        f = one if name == "f32" else halves(Form("", (scalar, scalar), scalar, one), text="-").function
        noftz = "" if name == "f32" else ".noftz"
        fill, more = vector(["{0}"] * count), vector(["{1}"] * count)
        order = f"v{count}.{name}.add{noftz}" if count == 2 else f"add{noftz}.v{count}.{name}"
        text = f"st.global.v{count}.b32 [%rw], {fill}; red.global.{order} [%rw], {more};"
        text += f" ld.global.b32 {{d}}, [%rw+{4 * count - 4}];"
        yield Form(text, (name, name), name, f)


def copies() -> Iterator[Form]:
    """cp.async: bytes past the given source size are zero, and all of them where the source is ignored."""
    fill = ".reg .b64 %u, %v; mov.b64 %u, {0}; not.b64 %v, %u; st.global.v2.b64 [%rw], {%u, %v};"
    for size, how in itertools.product((4, 8, 16), ("", "size", "constant", "ignore")):
        last = {"": "", "size": ", %r5", "constant": f", {size // 2}", "ignore": ", %p1"}[how]
        before = {
            "size": f"rem.u32 %r5, {{1}}, {size + 1};",
            "ignore": "and.b32 %r5, {1}, 1; setp.eq.u32 %p1, %r5, 1;",
        }.get(how, "")
        kind = "cg" if size == 16 else "ca"
        copy = f"cp.async.{kind}.shared.global [%rs], [%rw], {size}{last};"
        wait = "cp.async.wait_all;" if how else "cp.async.commit_group; cp.async.wait_group 0;"
        at = 8 if size == 16 else 0
        bits = 32 if size == 4 else 64
        text = f"{fill} {before} {copy} {wait} ld.shared.b{bits} {{d}}, [%rs+{at}];"

        def f(a: Bits, b: Bits, size: int = size, how: str = how, at: int = at) -> Bits:
            taken = {
                "size": b % np.uint64(size + 1),
                "constant": b * 0 + size // 2,
                "ignore": np.where(b % 2 == 1, 0, size),
            }.get(how, b * 0 + size)
            left = np.clip(taken.astype(np.int64) - at, 0, 8)
            mask = np.array([(1 << 8 * int(n)) - 1 for n in left], np.uint64)
            return (~a if at else a) & mask & np.uint64(2 ** (32 if size == 4 else 64) - 1)

        yield Form(text, ("u64", "u32"), f"u{bits}", f)


def addresses() -> Iterator[Form]:
    same = lambda a: a
    text = "st.shared.b32 [%rs], {0}; cvta.to.shared.u64 %rd4, %rg; ld.shared.b32 {d}, [%rd4];"
    yield Form(text, ("u32",), "u32", same)
    text = "st.local.b32 [%rl+4], {0}; cvta.local.u64 %rd4, %rl; ld.b32 {d}, [%rd4+4];"
    yield Form(text, ("u32",), "u32", same)
    text = "cvta.to.global.u64 %rd4, %rw; st.global.b32 [%rd4], {0}; cvta.global.u64 %rd5, %rd4; ld.b32 {d}, [%rd5];"
    yield Form(text, ("u32",), "u32", same)
    for register, space in (("%rg", "shared"), ("%rw", "global"), ("%rl", "local")):
        for asked in ("shared", "global", "local"):
            to_generic = "cvta.local.u64 %rd4, %rl;" if register == "%rl" else f"mov.u64 %rd4, {register};"
            text = f"{to_generic} isspacep.{asked} %p1, %rd4; selp.u32 {{d}}, 1, 0, %p1;"
            yield Form(text, ("u32",), "u32", lambda a, yes=space == asked: np.full_like(a, int(yes)))


FORMS: dict[str, list[Form]] = {
    "loads and stores": list(loads_and_stores()),
    "atomics": list(atomics()),
    "asynchronous copies": list(copies()),
    "addresses": list(addresses()),
}
