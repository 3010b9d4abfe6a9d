"""Floating-point arithmetic, comparisons and approximations, stated over columns of values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import vgpu_numpy as num
import vgpu_semantics as ref
from vgpu_forms import Bits, Form, Function, floats, halves, reals, text_of
from vgpu_numpy import Reals

MODES = ("rn", "rz", "rm", "rp")
Exact = Callable[..., ref.Number]


def sum_in(mode: str) -> Callable[[Reals, Reals], Reals]:
    """a + b ready for one more rounding; an exact zero of opposite terms is -0 where rounding goes down."""

    def add(a: Reals, b: Reals) -> Reals:
        s = num.add_odd(a, b)
        return np.where((s == 0) & (np.signbit(a) != np.signbit(b)), -0.0, s) if mode == "rm" else s

    return add


def fma_in(mode: str) -> Callable[[Reals, Reals, Reals], Reals]:
    """Products of two f32 have 48 bits: exact in float64."""
    add = sum_in(mode)
    return lambda a, b, c: add(a * b, c)


def exact(name: str, f: Exact, mode: str) -> Function:
    """Through exact fractions: for f64 and quotients, where float64 is not wide enough."""
    format = ref.FORMATS[name]

    def one(*bits: int) -> float:
        out = ref.round_to(f(*(ref.value_of(int(b), format) for b in bits)), format, mode)
        return float(out)

    def apply(*columns: Bits) -> Bits:
        return num.patterns(np.frompyfunc(one, len(columns), 1)(*columns).astype(np.float64), name)

    return apply


def arithmetic() -> Iterator[Form]:
    for op, mode, ftz, sat in itertools.product(("add", "sub", "mul", "fma"), MODES, ("", ".ftz"), ("", ".sat")):
        yield of_f32(op, mode, ftz + sat)
    for name, op in itertools.product(("f16", "bf16"), ("add", "sub", "mul", "fma")):
        modifiers = ("", ".ftz", ".sat", ".ftz.sat") if name == "f16" else ("",)
        modifiers += ((".relu", ".ftz.relu") if name == "f16" else (".relu",)) if op == "fma" else ()
        for more in modifiers:
            count = 3 if op == "fma" else 2
            form = Form(
                text_of(f"{op}.rn{more}.{name}", count), (name,) * count, name, arithmetic_of(name, op, "rn", more)
            )
            yield from (form, halves(form))
    for op, mode in itertools.product(("add", "sub", "mul", "fma", "div"), MODES):
        count, f = (3, ref.fma) if op == "fma" else (2, getattr(ref, op))
        keep = (lambda *x: num.value(x[1], "f64") != 0) if op == "div" else None
        function = unsigned_zero(exact("f64", f, mode), "f64")
        text = text_of(f"{op}.{mode}.f64", count).replace("{d}", "%dd") + "add.f64 {d}, %dd, 0d0000000000000000;"
        yield Form(".reg .f64 %dd; " + text, ("f64",) * count, "f64", function, keep=keep)


def arithmetic_of(name: str, op: str, mode: str, modifiers: str) -> Function:
    add = sum_in(mode)
    table: dict[str, Callable[..., Reals]] = {
        "add": add, "sub": lambda a, b: add(a, -b), "mul": lambda a, b: a * b, "fma": fma_in(mode),
    }  # fmt: skip
    return floats(name, table[op], mode, modifiers)


def of_f32(op: str, mode: str, modifiers: str) -> Form:
    count = 3 if op == "fma" else 2
    return Form(
        text_of(f"{op}.{mode}{modifiers}.f32", count),
        ("f32",) * count,
        "f32",
        arithmetic_of("f32", op, mode, modifiers),
    )


def unsigned_zero(f: Function, name: str) -> Function:
    """Fractions know no -0: those forms add +0 to their result."""
    del name
    return lambda *columns: np.where((r := f(*columns)) == np.uint64(1 << 63), np.uint64(0), r)


def signed_zero(f: Function) -> Function:
    """Fractions know no -0: a quotient that vanishes has the sign of its operands."""
    top = np.uint64(1 << 31)
    return lambda a, b: np.where((r := f(a, b)) == 0, (a ^ b) & top, r)


def quotients() -> Iterator[Form]:
    """Division and square roots of f32: the float64 result, rounded again, is right (53 >= 2 * 24 + 2 bits)."""
    divide: Callable[[Reals, Reals], Reals] = lambda a, b: a / b
    for ftz in ("", ".ftz"):
        yield Form(text_of(f"div.rn{ftz}.f32", 2), ("f32", "f32"), "f32", floats("f32", divide, "rn", ftz))
        yield Form(text_of(f"rcp.rn{ftz}.f32", 1), ("f32",), "f32", floats("f32", lambda a: 1 / a, "rn", ftz))
        yield Form(text_of(f"sqrt.rn{ftz}.f32", 1), ("f32",), "f32", floats("f32", np.sqrt, "rn", ftz))
        for kind in ("approx", "full"):
            size = lambda b: np.abs(num.value(b, "f32"))
            in_range = lambda a, b, size=size: (size(b) >= 2.0**-126) & (size(b) <= 2.0**126)
            f, real = floats("f32", divide, "rn", ftz), reals("f32", divide, ftz)
            text = text_of(f"div.{kind}{ftz}.f32", 2)
            keep = in_range if kind == "approx" else lambda a, b, size=size: size(b) >= 2.0**-126
            yield Form(text, ("f32", "f32"), "f32", f, relative=2.0**-22, real=real, keep=keep)
    for mode in MODES[1:]:
        f = signed_zero(exact("f32", ref.div, mode))
        value = lambda x: num.value(x, "f32")
        keep = lambda a, b, v=value: (v(b) != 0) & np.isfinite(v(b)) & (v(a) != 0)
        yield Form(text_of(f"div.{mode}.f32", 2), ("f32", "f32"), "f32", f, keep=keep)
        yield Form(
            text_of(f"rcp.{mode}.f32", 1),
            ("f32",),
            "f32",
            lambda a, f=f: f(np.full_like(a, 0x3F800000), a),
            keep=lambda a, keep=keep: keep(a, a),
        )
        root = lambda a, m=mode: num.patterns(root_odd(num.value(a, "f32")), "f32", m)
        yield Form(text_of(f"sqrt.{mode}.f32", 1), ("f32",), "f32", root)
    f64 = lambda f: lambda a: f(num.value(a, "f64")).view(np.uint64)
    yield Form(text_of("rcp.rn.f64", 1), ("f64",), "f64", f64(lambda x: 1 / x))
    yield Form(text_of("sqrt.rn.f64", 1), ("f64",), "f64", f64(np.sqrt))
    # The upper word alone is computed: 20 mantissa bits, the lower word is zero.
    yield Form(
        text_of("rcp.approx.ftz.f64", 1), ("f64",), "f64", f64(lambda x: flush64(1 / flush64(x))), relative=2.0**-20
    )
    yield Form(
        text_of("rsqrt.approx.ftz.f64", 1), ("f64",), "f64", f64(lambda x: 1 / np.sqrt(flush64(x))), relative=2.0**-20
    )
    yield Form(text_of("rsqrt.approx.f64", 1), ("f64",), "f64", f64(lambda x: 1 / np.sqrt(x)), relative=2.0**-20)


def flush64(x: Reals) -> Reals:
    return np.where(np.abs(x) < 2.0**-1022, np.copysign(0.0, x), x)


def root_odd(x: Reals) -> Reals:
    """The square root rounded to odd: r² - x, exact for a root cut to 26 bits, tells on which side it lies."""
    r = np.sqrt(x)
    cut = (r.view(np.uint64) & ~np.uint64((1 << 27) - 1)).view(np.float64)
    inexact = np.isfinite(cut) & (cut * cut != x)
    return np.where(inexact, (cut.view(np.uint64) | np.uint64(1)).view(np.float64), r)


def signs_and_extremes() -> Iterator[Form]:
    for name in ("f16", "bf16", "f32", "f64"):
        top = np.uint64(1 << (num.FORMATS[name].bits - 1))
        flips = [("neg", lambda a, t=top: a ^ t), ("abs", lambda a, t=top: a & ~t)]
        packable = name in ("f16", "bf16")
        for op, f in flips:
            form = Form(text_of(f"{op}.{name}", 1), (name,), name, f)
            yield from (form, halves(form)) if packable else (form,)
        if name in ("f32", "f64"):
            take = lambda a, b, t=top: (a & t) | (b & ~t)
            yield Form(text_of(f"copysign.{name}", 2), (name, name), name, take)
        modifiers = {"f64": ("",), "f32": ("", ".ftz", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs", ".ftz.NaN")}
        for op, more in itertools.product(
            ("min", "max"), modifiers.get(name, ("", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs"))
        ):
            form = Form(text_of(f"{op}{more}.{name}", 2), (name, name), name, extreme(name, op, more))
            yield from (form, halves(form)) if packable else (form,)
    for op, more in itertools.product(("min", "max"), ("", ".NaN", ".ftz")):
        two = extreme("f32", op, more)
        three = lambda a, b, c, f=two: f(f(a, b), c)
        yield Form(text_of(f"{op}{more}.f32", 3), ("f32",) * 3, "f32", three)
    yield Form(text_of("neg.ftz.f32", 1), ("f32",), "f32", lambda a: num.flush_patterns(a, "f32") ^ np.uint64(1 << 31))
    yield Form(
        text_of("abs.ftz.f32", 1), ("f32",), "f32", lambda a: num.flush_patterns(a, "f32") & np.uint64((1 << 31) - 1)
    )


def extreme(name: str, op: str, modifiers: str) -> Function:
    """min, max: a number wins over NaN but with .NaN; -0 is less than +0; .xorsign.abs: of magnitudes, sign a xor b."""
    top = np.uint64(1 << (num.FORMATS[name].bits - 1))

    def apply(a: Bits, b: Bits) -> Bits:
        if ".ftz" in modifiers:
            a, b = num.flush_patterns(a, name), num.flush_patterns(b, name)
        sign = (a ^ b) & top
        if ".xorsign" in modifiers:
            a, b = a & ~top, b & ~top
        x, y = num.value(a, name), num.value(b, name)
        first = (x < y) | ((x == y) & (a & top != 0))
        out = np.where(first == (op == "min"), a, b)
        out = np.where(np.isnan(x), b, np.where(np.isnan(y), a, out))
        if ".NaN" in modifiers:
            out = np.where(np.isnan(x) | np.isnan(y), top - np.uint64(1), out)
        return (out & ~top) | sign if ".xorsign" in modifiers else out

    return apply


# Documented errors: relative or absolute, and the range they hold in.
APPROXIMATIONS: dict[str, tuple[str, Callable[[Reals], Reals], float, float]] = {
    "rcp.approx": ("f32", lambda x: 1 / x, 2.0**-23, 0),
    "sqrt.approx": ("f32", np.sqrt, 2.0**-23, 0),
    "rsqrt.approx": ("f32", lambda x: 1 / np.sqrt(x), 2.0**-22.9, 0),
    "ex2.approx": ("f32", np.exp2, 2.0**-22, 0),
    "lg2.approx": ("f32", np.log2, 2.0**-22, 2.0**-22),
    "sin.approx": ("f32", np.sin, 0, 2.0**-20.5),
    "cos.approx": ("f32", np.cos, 0, 2.0**-20.5),
    "tanh.approx": ("f32", np.tanh, 2.0**-11, 0),
}
HALF_APPROXIMATIONS: dict[str, tuple[str, Callable[[Reals], Reals], float, float]] = {
    "ex2.approx.f16": ("f16", np.exp2, 2.0**-9.9, 2.0**-24),
    "ex2.approx.ftz.bf16": ("bf16", np.exp2, 2.0**-7, 0),
    "tanh.approx.f16": ("f16", np.tanh, 0, 2.0**-10.987),
    "tanh.approx.bf16": ("bf16", np.tanh, 0, 2.0**-8),
}


def approximations() -> Iterator[Form]:
    for opcode, (name, f, relative, absolute) in APPROXIMATIONS.items():
        periodic = opcode[:3] in ("sin", "cos")
        keep = (lambda a: ~(np.abs(num.value(a, "f32")) > np.pi)) if periodic else None
        for ftz in ("", ".ftz") if opcode[:4] != "tanh" else ("",):
            text = text_of(f"{opcode}{ftz}.f32", 1)
            real = reals(name, f, ftz)
            yield Form(text, (name,), name, floats(name, f, "rn", ftz), relative, absolute, real, keep)
    for opcode, (name, f, relative, absolute) in HALF_APPROXIMATIONS.items():
        ftz = ".ftz" if "ftz" in opcode else ""
        function, real = floats(name, f, "rn", ftz), reals(name, f, ftz)
        form = Form(text_of(opcode, 1), (name,), name, function, relative, absolute, real)
        yield from (form, halves(form))


FORMS: dict[str, list[Form]] = {
    "float arithmetic": list(arithmetic()),
    "quotients and roots": list(quotients()),
    "signs and extremes": list(signs_and_extremes()),
    "approximations": list(approximations()),
}
