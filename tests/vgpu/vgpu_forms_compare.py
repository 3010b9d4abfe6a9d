"""Comparisons and properties of floats, scalar and packed, stated over columns of values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import vgpu_numpy as num
from vgpu_forms import Bits, Form, text_of
from vgpu_numpy import Reals


def _ordered(f: Callable[[Reals, Reals], object]) -> Callable[[Reals, Reals], object]:
    return lambda a, b: np.asarray(f(a, b)) & ~(np.isnan(a) | np.isnan(b))


def _unordered(f: Callable[[Reals, Reals], object]) -> Callable[[Reals, Reals], object]:
    return lambda a, b: np.asarray(f(a, b)) | np.isnan(a) | np.isnan(b)


_ORDER: dict[str, Callable[[Reals, Reals], object]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
COMPARE = {name: _ordered(f) for name, f in _ORDER.items()} | {f"{name}u": _unordered(f) for name, f in _ORDER.items()}
COMPARE |= {"num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b)}


def comparisons() -> Iterator[Form]:
    for name, (comparison, f) in itertools.product(("f16", "bf16", "f32", "f64"), COMPARE.items()):
        yes = lambda a, b, f=f, t=name: np.asarray(f(num.value(a, t), num.value(b, t)))
        number = lambda a, b, f=yes: np.where(f(a, b), 1, 0).astype(np.uint64)
        ones = lambda a, b, f=yes: np.where(f(a, b), 0xFFFFFFFF, 0).astype(np.uint64)
        show = "selp.u32 {d}, 1, 0, %p0;"
        yield Form(f"setp.{comparison}.{name} %p0, {{0}}, {{1}}; {show}", (name, name), "u32", number)
        yield Form(text_of(f"set.{comparison}.u32.{name}", 2), (name, name), "u32", ones)
        if name in ("f16", "bf16"):
            yield from packed_comparisons(name, comparison, yes)
    flushed = lambda a, b: np.where(num.flush(num.value(a, "f32")) < num.flush(num.value(b, "f32")), 1, 0)
    yield Form("setp.lt.ftz.f32 %p0, {0}, {1}; selp.u32 {d}, 1, 0, %p0;", ("f32", "f32"), "u32", flushed)
    one = lambda a, b: np.where(num.value(a, "f32") < num.value(b, "f32"), 0x3F800000, 0)
    yield Form(text_of("set.lt.f32.f32", 2), ("f32", "f32"), "f32", one)
    for name, other in itertools.product(("u16", "u32", "u64"), ("f32",)):
        f = lambda a, b, c: np.where(num.value(c, "f32") >= 0, a, b)
        yield Form(text_of(f"slct.b{name[1:]}.{other}", 3), (name, name, other), name, f)


def packed_comparisons(name: str, comparison: str, yes: Callable[[Bits, Bits], object]) -> Iterator[Form]:
    low, high = np.uint64(0xFFFF), np.uint64(16)
    wide = f"{name}x2"
    both = lambda a, b: (yes(a & low, b & low), yes(a >> high, b >> high))
    text = f"setp.{comparison}.{wide} %p1|%p2, {{0}}, {{1}}; selp.u32 %r3, 1, 0, %p1; selp.u32 %r4, 2, 0, %p2;"
    count = lambda a, b: sum(np.where(h, k + 1, 0) for k, h in enumerate(both(a, b)))
    yield Form(
        text + " add.u32 {d}, %r3, %r4;", (wide, wide), "u32", lambda *x: np.asarray(count(*x)).astype(np.uint64)
    )
    one = 0x3C00 if name == "f16" else 0x3F80
    filled = lambda a, b: sum(np.where(h, one << 16 * k, 0) for k, h in enumerate(both(a, b)))
    yield Form(
        text_of(f"set.{comparison}.{wide}.{wide}", 2),
        (wide, wide),
        wide,
        lambda *x: np.asarray(filled(*x)).astype(np.uint64),
    )


def properties() -> Iterator[Form]:
    for name in ("f32", "f64"):
        tiny = num.FORMATS[name].tiny
        normal = lambda x, t=tiny: np.isfinite(x) & (np.abs(x) >= t)
        table: dict[str, Callable[[Reals], object]] = {
            "finite": np.isfinite, "infinite": np.isinf, "number": lambda x: ~np.isnan(x), "notanumber": np.isnan,
            "normal": normal, "subnormal": lambda x, t=tiny: (x != 0) & (np.abs(x) < t),
        }  # fmt: skip
        for what, f in table.items():
            text = f"testp.{what}.{name} %p0, {{0}}; selp.u32 {{d}}, 1, 0, %p0;"
            yield Form(text, (name,), "u32", lambda a, f=f, t=name: np.where(np.asarray(f(num.value(a, t))), 1, 0))


FORMS: dict[str, list[Form]] = {
    "float comparisons": list(comparisons()),
    "float properties": list(properties()),
}
