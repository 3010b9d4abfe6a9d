"""Conversions: every pair of scalar types, and the packed ones, stated over columns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import vgpu_numpy as num
import vgpu_semantics as ref
from vgpu_forms import Bits, Form, Function, integers, text_of, width
from vgpu_numpy import Reals

INTEGERS = [f"{letter}{bits}" for bits in (8, 16, 32, 64) for letter in "us"]
SCALARS = ("f16", "bf16", "f32", "f64")
MODES = ("rn", "rz", "rm", "rp")
WHOLE: dict[str, Callable[[Reals], Reals]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def register(type: str) -> str:
    """The integer type of the register that holds a value of `type`."""
    return f"{type[0]}{width(type)}"


def between_integers() -> Iterator[Form]:
    for target, source in itertools.product(INTEGERS, INTEGERS):
        bits, sign = int(target[1:]), target[0] == "s"
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if sign else (0, (1 << bits) - 1)
        wrap = np.frompyfunc(lambda a, n=bits, s=sign: ref.signed(a, n) if s else a % (1 << n), 1, 1)
        clamp = lambda a, low=low, high=high: np.clip(a, low, high)
        for more, f in (("", wrap), (".sat", clamp)):
            text = text_of(f"cvt{more}.{target}.{source}", 1)
            yield Form(text, (source,), register(target), integers((source,), register(target), f))


def to_integers() -> Iterator[Form]:
    for target, source, mode in itertools.product(INTEGERS, SCALARS, WHOLE):
        bits, sign, format = int(target[1:]), target[0] == "s", ref.FORMATS[source]

        def one(
            a: int, n: int = bits, s: bool = sign, f: ref.Format = format, m: str = mode, source: str = source
        ) -> int:
            x = ref.to_integer(ref.value_of(int(a), f), n, s, m[:2], source)
            return ref.signed(x, n) % (1 << max(n, 16)) if s else x

        text = text_of(f"cvt.{mode}.{target}.{source}", 1)
        yield Form(text, (source,), register(target), _single(one))
    ftz = np.frompyfunc(lambda a: ref.to_integer(ref.value_of(int(a), ref.F32), 32, True, "rp"), 1, 1)
    text = text_of("cvt.rpi.ftz.s32.f32", 1)
    yield Form(text, ("f32",), "s32", lambda a: ftz(num.flush_patterns(a, "f32")).astype(np.uint64))


def _single(f: Callable[[int], int]) -> Function:
    return lambda a: np.frompyfunc(f, 1, 1)(a).astype(np.uint64)


def from_integers() -> Iterator[Form]:
    for target, source, mode in itertools.product(SCALARS, INTEGERS, MODES):
        bits, format = int(source[1:]), ref.FORMATS[target]

        def one(a: int, n: int = bits, s: bool = source[0] == "s", f: ref.Format = format, m: str = mode) -> float:
            return float(ref.round_to(Fraction(ref.signed(int(a), n) if s else int(a)), f, m))

        yield Form(text_of(f"cvt.{mode}.{target}.{source}", 1), (source,), target, _rounded(one, target))
    text = text_of("cvt.rn.sat.f32.s32", 1)
    f = lambda a: num.patterns(np.clip(a.astype(np.int64), 0, 1) * 1.0, "f32")
    yield Form(text, ("s32",), "f32", lambda a: f(np.where(a >> np.uint64(31) == 1, np.uint64(0), a)))


def _rounded(f: Callable[[int], float], target: str) -> Function:
    return lambda a: num.patterns(np.frompyfunc(f, 1, 1)(a).astype(np.float64), target)


def between_floats() -> Iterator[Form]:
    for target, source in itertools.product(SCALARS, SCALARS):
        narrow = num.FORMATS[target].mantissa < num.FORMATS[source].mantissa or (target, source) == ("f16", "bf16")
        if target == source:
            for mode, f in WHOLE.items():
                whole = lambda a, f=f, t=target: num.patterns(np.copysign(f(num.value(a, t)), num.value(a, t)), t)
                yield Form(text_of(f"cvt.{mode}.{target}.{source}", 1), (source,), target, whole)
            continue
        modes = ("" if not narrow else "rn",) if not narrow else ("rn", "rz") if target == "bf16" else MODES
        for mode, more in itertools.product(modes, ("", ".sat", ".relu")):
            if more == ".relu" and (target not in ("f16", "bf16") or source != "f32"):
                continue
            if more == ".sat" and target == "bf16":
                continue
            opcode = ".".join(part for part in ("cvt", mode, more[1:], target, source) if part)
            yield Form(text_of(opcode, 1), (source,), target, _narrow(target, source, mode or "rn", more))
    tiny = lambda a: num.patterns(num.flush(num.value(a, "f32")), "f64")
    yield Form(text_of("cvt.ftz.f64.f32", 1), ("f32",), "f64", tiny)
    down = lambda a: num.flush_patterns(num.patterns(num.value(a, "f64"), "f32"), "f32")
    yield Form(text_of("cvt.rn.ftz.f32.f64", 1), ("f64",), "f32", down)


def _narrow(target: str, source: str, mode: str, more: str, saturate: bool = False) -> Function:
    def apply(a: Bits) -> Bits:
        x = num.value(a, source)
        if more == ".sat":
            x = np.where(np.isnan(x), 0.0, np.clip(x, 0.0, 1.0) + 0.0)
        if more == ".relu":
            x = np.where(np.isnan(x) | (x > 0), x, 0.0)
        return num.patterns(x, target, mode, saturate)

    return apply


def packed() -> Iterator[Form]:
    for target, mode, more, finite in itertools.product(
        ("f16", "bf16"), ("rn", "rz"), ("", ".relu"), ("", ".satfinite")
    ):
        yield two_of_f32(target, mode, more, finite)
    for target, more in itertools.product(("e4m3", "e5m2"), ("", ".relu")):
        yield two_of_f32(target, "rn", more, ".satfinite")
        for source in ("f16", "bf16"):
            f = _narrow(target, source, "rn", more, True)
            text = text_of(f"cvt.rn.satfinite{more}.{target}x2.{source}x2", 1)
            yield Form(text, (f"{source}x2",), f"{target}x2", by_half(f, 16, 8))
        for wide in ("f16", "bf16"):
            text = text_of(f"cvt.rn{more}.{wide}x2.{target}x2", 1)
            yield Form(text, (f"{target}x2",), f"{wide}x2", by_half(_narrow(wide, target, "rn", more), 8, 16))
    for mode, more, finite in (
        ("rna", "", ""),
        ("rna", "", ".satfinite"),
        ("rn", "", ""),
        ("rz", "", ""),
        ("rn", ".relu", ""),
    ):
        f = _narrow("tf32", "f32", mode, more, bool(finite))
        yield Form(text_of(f"cvt.{mode}{more}{finite}.tf32.f32", 1), ("f32",), "tf32", f)


def two_of_f32(target: str, mode: str, more: str, finite: str) -> Form:
    """The first source goes to the upper half."""
    f = _narrow(target, "f32", mode, more, bool(finite))
    shift = np.uint64(num.FORMATS[target].bits)
    text = text_of(f"cvt.{mode}{more}{finite}.{target}x2.f32", 2)
    return Form(text, ("f32", "f32"), f"{target}x2", lambda a, b: f(a) << shift | f(b))


def by_half(f: Function, source: int, target: int) -> Function:
    mask, up, out = np.uint64((1 << source) - 1), np.uint64(source), np.uint64(target)
    return lambda a: f(a & mask) | f(a >> up) << out


FORMS: dict[str, list[Form]] = {
    "between integers": list(between_integers()),
    "floats to integers": list(to_integers()),
    "integers to floats": list(from_integers()),
    "between floats": list(between_floats()),
    "packed conversions": list(packed()),
}
