"""What PTX instructions compute, stated from the manual in exact arithmetic: Python integers and fractions.

Shares nothing with the execution core. Values are bit patterns (unsigned integers); a float is decoded to an exact
fraction, computed on exactly, and rounded once by `round_to`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

Number = Fraction | float  # floats stand for NaN and the infinities only


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Args:
        bits: width in memory.
        precision: significant bits, the hidden one included.
        emin, emax: least and largest exponent of normal numbers.
        infinite: whether it has infinities (e4m3 has none: all ones is NaN, 448 the largest value).
    """

    bits: int
    precision: int
    emin: int
    emax: int
    infinite: bool = True

    @property
    def largest(self) -> Fraction:
        top = 2 - Fraction(2, 2**self.precision) if self.infinite else Fraction(2) - Fraction(4, 2**self.precision)
        return top * Fraction(2) ** self.emax


F16 = Format(16, 11, -14, 15)
BF16 = Format(16, 8, -126, 127)
F32 = Format(32, 24, -126, 127)
F64 = Format(64, 53, -1022, 1023)
E4M3 = Format(8, 4, -6, 8, infinite=False)
E5M2 = Format(8, 3, -14, 15)
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64, "e4m3": E4M3, "e5m2": E5M2}


def signed(x: int, bits: int) -> int:
    """Two's complement value of a bit pattern."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def value_of(bits: int, f: Format) -> Number:
    """The exact value of a bit pattern."""
    stored = f.precision - 1
    mantissa, exponent = bits & ((1 << stored) - 1), bits >> stored & ((1 << (f.bits - 1 - stored)) - 1)
    sign = -1 if bits >> (f.bits - 1) else 1
    top = (1 << (f.bits - 1 - stored)) - 1
    if exponent == top:
        if f.infinite:
            return math.nan if mantissa else sign * math.inf
        if mantissa == (1 << stored) - 1:
            return math.nan
    if exponent == 0:
        return sign * Fraction(mantissa) * Fraction(2) ** (f.emin - stored)
    return sign * Fraction(mantissa + (1 << stored)) * Fraction(2) ** (exponent - 1 + f.emin - stored)


def whole(x: Fraction, mode: str) -> int:
    """`x` rounded to an integer."""
    floor = math.floor(x)
    if mode == "rm":
        return floor
    if mode == "rp":
        return math.ceil(x)
    if mode == "rz":
        return math.trunc(x)
    if mode == "rna":
        return (1 if x >= 0 else -1) * math.floor(abs(x) + Fraction(1, 2))
    return round(x)  # ties to even


def round_to(x: Number, f: Format, mode: str = "rn", saturate: bool = False) -> Number:
    """The value of format `f` that `x` rounds to."""
    if isinstance(x, float):
        if math.isinf(x) and (saturate or not f.infinite):
            return math.copysign(1, x) * f.largest if saturate else math.nan
        return x
    if x == 0:
        return x
    exponent = max(_log2(abs(x)), f.emin)
    step = Fraction(2) ** (exponent - f.precision + 1)
    out = whole(x / step, mode) * step
    if abs(out) <= f.largest:
        return out
    inward = mode == "rz" or (mode == "rm" and x > 0) or (mode == "rp" and x < 0)
    if saturate or inward:
        return f.largest if x > 0 else -f.largest
    return (math.inf if x > 0 else -math.inf) if f.infinite else math.nan


def _log2(x: Fraction) -> int:
    n = x.numerator.bit_length() - x.denominator.bit_length()
    return n if x >= Fraction(2) ** n else n - 1


def lift(exact: Callable[..., Fraction], special: Callable[..., float]) -> Callable[..., Number]:
    """A function that is exact on finite values and follows IEEE floats where one is not finite."""

    def apply(*args: Number) -> Number:
        if any(isinstance(a, float) for a in args):
            try:
                return special(*(float(a) if isinstance(a, float) else _as_float(a) for a in args))
            except (ZeroDivisionError, OverflowError, ValueError):
                return math.nan
        return exact(*args)

    return apply


def _as_float(x: Fraction) -> float:
    """A float with the sign and the zeroness of `x`: enough where another operand is not finite."""
    return float(max(min(x, 1), -1)) or (0.0 if x == 0 else math.copysign(1e-300, x))


add = lift(lambda a, b: a + b, lambda a, b: a + b)
sub = lift(lambda a, b: a - b, lambda a, b: a - b)
mul = lift(lambda a, b: a * b, lambda a, b: a * b)
fma = lift(lambda a, b, c: a * b + c, lambda a, b, c: a * b + c)


def div(a: Number, b: Number) -> Number:
    """a / b; a zero divisor gives an infinity whose sign the caller does not compare."""
    if isinstance(a, float) or isinstance(b, float):
        if any(isinstance(x, float) and math.isnan(x) for x in (a, b)):
            return math.nan
        if isinstance(b, float):
            return math.nan if isinstance(a, float) else Fraction(0)
        return math.copysign(1, a) * (math.inf if b >= 0 else -math.inf)
    if b == 0:
        return math.nan if a == 0 else math.inf
    return a / b


def is_nan(x: Number) -> bool:
    """Whether a value is NaN."""
    return isinstance(x, float) and math.isnan(x)


def minimum(a: Number, b: Number) -> Number:
    """min without .NaN: a number wins over NaN."""
    if is_nan(a):
        return b
    return a if is_nan(b) else min(a, b)


def maximum(a: Number, b: Number) -> Number:
    """max without .NaN."""
    if is_nan(a):
        return b
    return a if is_nan(b) else max(a, b)


def to_integer(x: Number, bits: int, is_signed: bool, mode: str, source: str = "") -> int:
    """cvt from a float: rounded, then clamped; NaN gives 0, to 64 bits or from f64 the top bit alone."""
    if is_nan(x):
        return 1 << (bits - 1) if bits == 64 or source == "f64" else 0
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
    if isinstance(x, float):
        return (high if x > 0 else low) & ((1 << bits) - 1)
    return max(low, min(high, whole(x, mode))) & ((1 << bits) - 1)


def bit_field_extract(a: int, pos: int, length: int, bits: int, is_signed: bool) -> int:
    """bfe, bit by bit as in the manual."""
    pos, length, msb = pos & 0xFF, length & 0xFF, bits - 1
    sign = a >> min(pos + length - 1, msb) & 1 if is_signed and length else 0
    out = 0
    for k in range(bits):
        bit = a >> (pos + k) & 1 if k < length and pos + k <= msb else sign
        out |= bit << k
    return out


def bit_field_insert(a: int, b: int, pos: int, length: int, bits: int) -> int:
    """bfi, bit by bit as in the manual."""
    pos, length = pos & 0xFF, length & 0xFF
    out = b
    for k in range(length):
        if pos + k < bits:
            out = out & ~(1 << (pos + k)) | (a >> k & 1) << (pos + k)
    return out


def permute(a: int, b: int, selector: int) -> int:
    """prmt in its default mode."""
    data = (b << 32 | a).to_bytes(8, "little")
    out = bytearray()
    for k in range(4):
        nibble = selector >> 4 * k & 15
        byte = data[nibble & 7]
        out.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
    return int.from_bytes(out, "little")


def lookup3(a: int, b: int, c: int, table: int) -> int:
    """lop3, bit by bit: the table's bit at index a·4 + b·2 + c."""
    out = 0
    for k in range(32):
        out |= (table >> ((a >> k & 1) * 4 + (b >> k & 1) * 2 + (c >> k & 1)) & 1) << k
    return out


def funnel(a: int, b: int, n: int, left: bool, clamp: bool) -> int:
    """shf: the 64 bits b:a, shifted."""
    n = min(n, 32) if clamp else n & 31
    both = b << 32 | a
    return (both << n >> 32) & 0xFFFFFFFF if left else both >> n & 0xFFFFFFFF
