"""What instructions compute on numbers, stated in numpy over whole columns: formats, rounding, exact sums.

A second statement beside `vgpu_semantics` (exact fractions, one value at a time). A format is its list of numbers in
order: the bit patterns of the non-negative ones count them. Rounding is a choice between the two neighbours of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint64]
Reals = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Format:
    """A binary format: bits in memory, stored mantissa bits, exponent bias, and whether it has infinities."""

    bits: int
    mantissa: int
    bias: int
    infinite: bool = True

    @property
    def largest(self) -> int:
        """Pattern of the largest finite number; the next pattern stands for overflow: infinity, or e4m3's NaN."""
        if not self.infinite:
            return (1 << (self.bits - 1)) - 2
        return (((1 << (self.bits - 1 - self.mantissa)) - 1) << self.mantissa) - 1

    @property
    def tiny(self) -> float:
        """The least normal number."""
        return float(2.0 ** (1 - self.bias))


FORMATS = {
    "f16": Format(16, 10, 15), "bf16": Format(16, 7, 127), "f32": Format(32, 23, 127), "f64": Format(64, 52, 1023),
    "tf32": Format(19, 10, 127), "e4m3": Format(8, 3, 7, infinite=False), "e5m2": Format(8, 2, 15),
}  # fmt: skip


@cache
def ladder(name: str) -> Reals:
    """All non-negative numbers of a small format by pattern; the last one is where overflow begins to be nearer."""
    f = FORMATS[name]
    patterns = np.arange(f.largest + 2)
    exponent, mantissa = patterns >> f.mantissa, patterns & ((1 << f.mantissa) - 1)
    whole = np.where(exponent > 0, mantissa + (1 << f.mantissa), mantissa)
    return np.ldexp(whole.astype(np.float64), np.maximum(exponent, 1) - f.bias - f.mantissa)


def value(bits: Bits, name: str) -> Reals:
    """Values of bit patterns."""
    f = FORMATS[name]
    if name == "f64":
        return bits.view(np.float64)
    if name == "f32":
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    pattern = (bits >> np.uint64(13) if name == "tf32" else bits).astype(np.int64)
    magnitude = pattern & ((1 << (f.bits - 1)) - 1)
    steps = ladder(name)
    out = steps[np.minimum(magnitude, f.largest)]
    special = magnitude > f.largest
    out = np.where(special, np.where(f.infinite & (magnitude == f.largest + 1), np.inf, np.nan), out)
    return np.where(pattern >> (f.bits - 1) & 1 == 1, -out, out)


def _below(a: Reals, name: str) -> tuple[npt.NDArray[np.int64], Reals, Reals]:
    """For finite a >= 0: pattern and value of the number at or just below it, and the value of the next one."""
    f = FORMATS[name]
    if name == "f32":
        with np.errstate(over="ignore"):
            near = a.astype(np.float32)
        pattern = near.view(np.uint32).astype(np.int64) - (near.astype(np.float64) > a)
        pattern = np.minimum(pattern, f.largest)
        step = np.ldexp(1.0, np.maximum(pattern >> 23, 1) - 127 - 23)
        low = pattern.astype(np.uint32).view(np.float32).astype(np.float64)
        return pattern, low, low + step
    steps = ladder(name)
    pattern = np.minimum(np.searchsorted(steps, a, side="right") - 1, f.largest)
    return pattern, steps[pattern], steps[pattern + 1]


def patterns(x: Reals, name: str, mode: str = "rn", saturate: bool = False) -> Bits:
    """Bit patterns of the numbers that `x` rounds to; NaN is 0x7f..f. `saturate`: the largest number for overflow."""
    f = FORMATS[name]
    if name == "f64":
        return x.view(np.uint64)
    finite = np.isfinite(x)
    a = np.where(finite, np.abs(x), 0.0)
    pattern, low, high = _below(a, name)
    down, up = a - low, high - a
    negative = np.signbit(x)
    take = {
        "rn": (up < down) | ((up == down) & (pattern % 2 == 1)),
        "rna": up <= down,
        "rz": np.zeros(x.shape, np.bool_),
        "rm": negative & (down > 0),
        "rp": ~negative & (down > 0),
    }[mode]
    out = np.where(down == 0, pattern, pattern + take)
    out = np.where(np.isinf(x), f.largest + 1, out)
    if saturate:
        out = np.minimum(out, f.largest)
    out = np.where(np.isnan(x), (1 << (f.bits - 1)) - 1, out)
    bits = out.astype(np.uint64) | (negative & ~np.isnan(x)).astype(np.uint64) << np.uint64(f.bits - 1)
    return bits << np.uint64(13) if name == "tf32" else bits


def add_odd(a: Reals, b: Reals) -> Reals:
    """a + b rounded to odd: where the sum is inexact, its last bit is 1, so that a second rounding is never double."""
    with np.errstate(all="ignore"):
        s = a + b
        part = s - a
        error = (a - (s - part)) + (b - part)  # Knuth's two-sum: exact
        even = s.view(np.uint64) % np.uint64(2) == 0
        return np.where(np.isfinite(s) & (error != 0) & even, np.nextafter(s, np.copysign(np.inf, error)), s)


def flush(x: Reals, name: str = "f32") -> Reals:
    """Subnormals to zero of the same sign."""
    return np.where(np.abs(x) < FORMATS[name].tiny, np.copysign(0.0, x), x)


def flush_patterns(bits: Bits, name: str) -> Bits:
    """Patterns of subnormals to those of zero."""
    f = FORMATS[name]
    sign = np.uint64(1 << (f.bits - 1))
    return np.where(bits & ~sign < np.uint64(1 << f.mantissa), bits & sign, bits)


def is_nan(bits: Bits, name: str) -> npt.NDArray[np.bool_]:
    """Which patterns are NaN."""
    return np.isnan(value(bits, name))
