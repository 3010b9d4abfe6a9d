"""Forms of instructions with what they compute in numpy, and the comparison of one form with the virtual GPU."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt
import vgpu_numpy as num
from vgpu_evaluate import evaluate

Bits = npt.NDArray[np.uint64]
Function = Callable[..., Bits]
FLOATS = ("f16", "bf16", "f32", "f64", "tf32", "e4m3", "e5m2")
ROWS = 500


@dataclass(frozen=True)
class Form:
    """One instruction form.

    Args:
        text: PTX, with `{d}` for the result and `{0}`, `{1}`, .. for the operands.
        operands: their types: u8 .. s64, a float format, `f16x2` and the like; `u5` and `u8` also name small numbers.
        result: type of the result.
        function: columns of operand patterns -> column of result patterns (64-bit unsigned).
        relative, absolute: the documented error of an approximation; 0 for exact forms.
        real: columns of operand patterns, of one half where packed -> exact values, from which that error is counted.
        keep: which rows the manual defines a result for.
    """

    text: str
    operands: tuple[str, ...]
    result: str
    function: Function
    relative: float = 0.0
    absolute: float = 0.0
    real: Callable[..., num.Reals] | None = None
    keep: Callable[..., npt.NDArray[np.bool_]] | None = None

    @property
    def name(self) -> str:
        """The opcode."""
        return self.text.split(";")[-2 if self.text.rstrip().endswith(";") else -1].split()[0]


def width(type: str) -> int:
    """Bits of the register that holds a type."""
    if type == "tf32":
        return 32
    scalar, packed, _ = type.partition("x2")
    bits = num.FORMATS[scalar].bits if scalar in num.FORMATS else int(scalar.lstrip("usbf"))
    return max(16, 2 * bits if packed else bits)


@cache
def edges(type: str) -> tuple[int, ...]:
    """Zeros, subnormals, ones, ties, extremes, infinities and NaN of a type; some arbitrary patterns."""
    rng = np.random.default_rng(zlib.crc32(type.encode()))
    scalar, packed, _ = type.partition("x2")
    if packed:
        parts = edges(scalar)
        bits = num.FORMATS[scalar].bits
        order = rng.permutation(len(parts))
        return tuple(low | parts[k] << bits for low, k in zip(parts, order, strict=True))
    if scalar not in FLOATS:
        bits = int(scalar.lstrip("usb"))
        top = 1 << (bits - 1)
        some = [0, 1, 2, 3, 7, 15, 16, 31, 32, 33, 0x55, 127, 128, 255, top - 1, top, top + 1, 2 * top - 2, 2 * top - 1]
        some += [int.from_bytes(rng.bytes(8), "little") >> int(rng.integers(0, bits)) for _ in range(5)]
        return tuple(dict.fromkeys(s % (2 * top) for s in some))
    f = num.FORMATS[scalar]
    one = f.bias << f.mantissa
    half_step = 1 << (f.mantissa - 1)
    some = [
        0,
        1,
        2,
        (1 << f.mantissa) - 1,
        1 << f.mantissa,
        one - 1,
        one,
        one + 1,
        one | half_step,
        one + (3 << f.mantissa),
    ]
    some += [f.largest - 1, f.largest, f.largest + 1, (1 << (f.bits - 1)) - 1]
    some += [one + int(rng.integers(-(6 << f.mantissa), 6 << f.mantissa)) for _ in range(6)]
    some += [int.from_bytes(rng.bytes(8), "little") >> (65 - f.bits) for _ in range(3)]
    both = [s | sign << (f.bits - 1) for s in dict.fromkeys(some) for sign in (0, 1)]
    return tuple(b << 13 for b in both) if scalar == "tf32" else tuple(both)


def rows_of(form: Form) -> list[tuple[int, ...]]:
    """Combinations of edge values, at most `ROWS`."""
    rows = list(itertools.product(*(edges(t) for t in form.operands)))
    if len(rows) > ROWS:
        rng = np.random.default_rng(len(form.text))
        rows = [rows[k] for k in rng.choice(len(rows), ROWS, replace=False)]
    return rows


def check(form: Form, rows: Sequence[tuple[int, ...]]) -> None:
    """Runs a form on the virtual GPU and compares every row."""
    columns = [np.array(c, np.uint64) for c in zip(*rows, strict=True)]
    if form.keep is not None:
        keep = form.keep(*columns)
        columns = [c[keep] for c in columns]
    if not len(columns[0]):
        return
    with np.errstate(all="ignore"):
        want = np.asarray(form.function(*columns)).astype(np.uint64)
    bits = width(form.result)
    got = evaluate(form.text, [width(t) for t in form.operands], [[int(v) for v in c] for c in columns], bits)
    with np.errstate(all="ignore"):
        wrong = _differ(np.array(got, np.uint64), want, form, columns)
    if wrong.any():
        k = int(np.flatnonzero(wrong)[0])
        source = ", ".join(hex(int(c[k])) for c in columns)
        raise AssertionError(f"{form.text}: of {source} gave {got[k]:#x}, expected {int(want[k]):#x}")


def _differ(got: Bits, want: Bits, form: Form, columns: Sequence[Bits]) -> npt.NDArray[np.bool_]:
    scalar, packed, _ = form.result.partition("x2")
    if scalar not in FLOATS:
        return got != want
    bits = num.FORMATS[scalar].bits
    wrong = np.zeros(got.shape, np.bool_)
    for shift in (0, bits) if packed else (0,):
        mask = np.uint64(2**32 - 1 if scalar == "tf32" else 2**bits - 1)
        x, y = (v >> np.uint64(shift) & mask for v in (got, want))
        a, b = num.value(x, scalar), num.value(y, scalar)
        same = (x == y) | (np.isnan(a) & np.isnan(b))
        if form.relative or form.absolute:
            exact = b if form.real is None else form.real(*(c >> np.uint64(shift) & mask for c in columns))
            same |= np.isfinite(b) & (np.abs(a - exact) <= np.maximum(form.absolute, form.relative * np.abs(exact)))
        wrong |= ~same
    return wrong


# ---- statements over columns
def integers(types: Sequence[str], result: str, f: Callable[..., object]) -> Function:
    """A function over exact integers (columns of Python's), whose result is cut to the width of `result`."""

    def apply(*columns: Bits) -> Bits:
        exact = [_exact(c, t) for c, t in zip(columns, types, strict=True)]
        out = np.asarray(f(*exact), dtype=object) % (1 << width(result))
        return np.broadcast_to(out, columns[0].shape).astype(np.uint64)

    return apply


def _exact(column: Bits, type: str) -> npt.NDArray[np.object_]:
    bits = int(type.lstrip("usb"))
    out: npt.NDArray[np.object_] = column.astype(object) % (1 << bits)
    return np.where(out >= 1 << (bits - 1), out - (1 << bits), out) if type[0] == "s" else out


def floats(name: str, f: Callable[..., num.Reals], mode: str = "rn", modifiers: str = "") -> Function:
    """A function over values: flushed before and after with `.ftz`, clamped with `.sat`, cut at zero with `.relu`."""

    def apply(*columns: Bits) -> Bits:
        if ".ftz" in modifiers:
            columns = tuple(num.flush_patterns(c, name) for c in columns)
        bits = num.patterns(f(*(num.value(c, name) for c in columns)), name, mode)
        if ".ftz" in modifiers:
            bits = num.flush_patterns(bits, name)
        x = num.value(bits, name)
        if ".sat" in modifiers:
            return num.patterns(np.where(np.isnan(x), 0.0, np.clip(x, 0.0, 1.0) + 0.0), name)
        return num.patterns(np.where(x > 0, x, np.where(np.isnan(x), x, 0.0)), name) if ".relu" in modifiers else bits

    return apply


def reals(name: str, f: Callable[..., num.Reals], modifiers: str = "") -> Callable[..., num.Reals]:
    """The values of `floats` before they are rounded to the format."""
    values = lambda c: num.value(num.flush_patterns(c, name) if ".ftz" in modifiers else c, name)
    return lambda *columns: f(*map(values, columns))


def halves(form: Form, *, text: str = "") -> Form:
    """The packed form: the same function on the lower and the upper half."""
    bits = width(form.operands[0])
    mask, shift = np.uint64((1 << bits) - 1), np.uint64(bits)

    def apply(*columns: Bits) -> Bits:
        low, high = (form.function(*(c >> s & mask for c in columns)) for s in (np.uint64(0), shift))
        return low | high << shift

    type = form.result
    text = text or form.text.replace(f".{type} ", f".{type}x2 ")
    return replace(form, text=text, operands=(f"{type}x2",) * len(form.operands), result=f"{type}x2", function=apply)


def text_of(opcode: str, count: int) -> str:
    """`opcode d, 0, 1, ..;`"""
    return f"{opcode} {{d}}, " + ", ".join(f"{{{k}}}" for k in range(count)) + ";"
