"""Floating-point arithmetic and conversions against exact fractions, rounded once."""

from __future__ import annotations

import itertools
import math
import random
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import vgpu_semantics as ref
from vgpu_evaluate import evaluate

FORMATS = ref.FORMATS


def edges(name: str) -> list[int]:
    """Zeros, subnormals, ones, ties, extremes, infinities and NaN of a format, both signs, and some random patterns."""
    f = FORMATS[name]
    stored = f.precision - 1
    one = (f.emax if f.infinite else 7) << stored
    if f.infinite:
        one = ((1 << (f.bits - 1 - stored - 1)) - 1) << stored
    top = ((1 << (f.bits - 1 - stored)) - 1) << stored
    some = [
        0,
        1,
        2,
        (1 << stored) - 1,
        1 << stored,
        one,
        one + 1,
        one - 1,
        one | 1 << (stored - 1),
        one + (3 << stored),
    ]
    some += [top - 1, top, top | 1 << (stored - 1)] if f.infinite else [top | 6, top | 7]
    rng = random.Random(name)
    some += [rng.getrandbits(f.bits - 1) for _ in range(4)]
    some += [one + rng.randrange(-(8 << stored), 8 << stored) for _ in range(4)]
    return [s | sign for s in some for sign in (0, 1 << (f.bits - 1))]


def same(bits: int, expected: ref.Number, f: ref.Format, text: object) -> None:
    """NaN equals NaN and zeros are equal; all else is exact."""
    got = ref.value_of(bits, f)
    assert got == expected or (ref.is_nan(got) and ref.is_nan(expected)), (text, hex(bits), got, expected)


def run(
    text: str, name: str, columns: Sequence[Sequence[int]], function: Callable[..., ref.Number], mode: str = "rn"
) -> None:
    f = FORMATS[name]
    bits = max(16, f.bits)
    got = evaluate(text, [bits] * len(columns), columns, bits)
    for row, out in zip(zip(*columns, strict=True), got, strict=True):
        expected = ref.round_to(function(*(ref.value_of(x, f) for x in row)), f, mode)
        same(out, expected, f, (text, [hex(x) for x in row]))


def table(name: str, count: int) -> list[list[int]]:
    values = edges(name)
    rows = list(itertools.product(values, repeat=count))
    random.Random(count).shuffle(rows)
    return [list(c) for c in zip(*rows[:900], strict=True)]


BINARY = {"add": ref.add, "sub": ref.sub, "mul": ref.mul}


@pytest.mark.parametrize("name", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("op", BINARY)
def test_sums_and_products_are_rounded_once(op: str, name: str) -> None:
    run(f"{op}.{name} {{d}}, {{0}}, {{1}};", name, table(name, 2), BINARY[op])


@pytest.mark.parametrize("name", ["f16", "bf16", "f32", "f64"])
def test_fma_is_rounded_once(name: str) -> None:
    run(f"fma.rn.{name} {{d}}, {{0}}, {{1}}, {{2}};", name, table(name, 3), ref.fma)


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["f32", "f64"])
def test_directed_rounding(name: str, mode: str) -> None:
    run(f"fma.{mode}.{name} {{d}}, {{0}}, {{1}}, {{2}};", name, table(name, 3), ref.fma, mode)
    run(f"add.{mode}.{name} {{d}}, {{0}}, {{1}};", name, table(name, 2), ref.add, mode)
    run(f"mul.{mode}.{name} {{d}}, {{0}}, {{1}};", name, table(name, 2), ref.mul, mode)


@pytest.mark.parametrize("name", ["f32", "f64"])
def test_division_and_reciprocal(name: str) -> None:
    values = [v for v in edges(name) if ref.value_of(v, FORMATS[name]) != 0]
    rows = list(itertools.product(values, repeat=2))
    columns = [list(c) for c in zip(*rows, strict=True)]
    run(f"div.rn.{name} {{d}}, {{0}}, {{1}};", name, columns, ref.div)
    run(f"rcp.rn.{name} {{d}}, {{0}};", name, [values], lambda a: ref.div(Fraction(1), a))


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_directed_reciprocals_and_roots_of_f64(mode: str) -> None:
    f = FORMATS["f64"]
    values = [v for v in edges("f64") if v < 1 << 63 and isinstance(ref.value_of(v, f), Fraction) and v]
    run(f"rcp.{mode}.f64 {{d}}, {{0}};", "f64", [values], lambda a: ref.div(Fraction(1), a), mode)
    for v, root in zip(values, evaluate(f"sqrt.{mode}.f64 {{d}}, {{0}};", [64], [values], 64), strict=True):
        x = ref.value_of(v, f)
        # Patterns of positive numbers are in their order: the root lies between this one and a neighbour.
        low, high = (ref.value_of(p, f) for p in ((root - 1, root) if mode == "rp" else (root, root + 1)))
        assert all(isinstance(n, Fraction) for n in (x, low, high))
        assert low**2 < x <= high**2 if mode == "rp" else low**2 <= x < high**2, (hex(v), hex(root))


def test_fast_division_by_more_than_two_to_the_126_gives_nothing() -> None:
    """PTX ISA, div: for 2^126 < |b| < 2^128, div.approx.f32 delivers NaN where a is infinite, and 0 otherwise."""
    a = [0x3F800000, 0x7F000000, 0x7F7FFFFF, 0xFF000000, 0x7F800000, 0xFF800000]
    for b in (0x7E800001, 0x7F000000, 0xFF7FFFFF):
        got = evaluate("div.approx.f32 {d}, {0}, {1};", [32, 32], [a, [b] * len(a)], 32)
        values = [ref.value_of(v, ref.F32) for v in got]
        assert values[:4] == [0] * 4, (hex(b), got)
        assert all(ref.is_nan(v) for v in values[4:]), (hex(b), got)
    assert evaluate("div.approx.f32 {d}, {0}, {1};", [32, 32], [[0x7F000000], [0x7E800000]], 32) == [0x40000000]


def test_set_flushes_subnormals_on_request() -> None:
    columns = [[1, 0x80000001, 0x00800000], [0, 0, 0]]
    assert evaluate("set.ne.u32.f32 {d}, {0}, {1};", [32, 32], columns, 32) == [2**32 - 1] * 3
    assert evaluate("set.ne.ftz.u32.f32 {d}, {0}, {1};", [32, 32], columns, 32) == [0, 0, 2**32 - 1]


@pytest.mark.parametrize("name", ["f16", "bf16", "f32", "f64"])
def test_minimum_and_maximum(name: str) -> None:
    columns = table(name, 2)
    run(f"min.{name} {{d}}, {{0}}, {{1}};", name, columns, ref.minimum)
    run(f"max.{name} {{d}}, {{0}}, {{1}};", name, columns, ref.maximum)
    if name != "f64":
        both_numbers = lambda f: lambda a, b: math.nan if ref.is_nan(a) or ref.is_nan(b) else f(a, b)  # noqa: E731
        run(f"max.NaN.{name} {{d}}, {{0}}, {{1}};", name, columns, both_numbers(ref.maximum))


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_packed_halves_are_independent(name: str) -> None:
    f = FORMATS[name]
    a, b = table(name, 2)
    x = [lo | hi << 16 for lo, hi in zip(a, reversed(a), strict=True)]
    y = [lo | hi << 16 for lo, hi in zip(b, reversed(b), strict=True)]
    for op, function in BINARY.items():
        got = evaluate(f"{op}.{name}x2 {{d}}, {{0}}, {{1}};", [32, 32], [x, y], 32)
        for u, v, out in zip(x, y, got, strict=True):
            for shift in (0, 16):
                parts = (ref.value_of(w >> shift & 0xFFFF, f) for w in (u, v))
                same(out >> shift & 0xFFFF, ref.round_to(function(*parts), f), f, (op, hex(u), hex(v)))


@pytest.mark.parametrize("source", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_floats_to_integers_clamp(source: str, mode: str) -> None:
    f = FORMATS[source]
    values = edges(source)
    for target in ("s32", "u32", "s16", "u16", "s64", "u64"):
        bits = int(target[1:])
        got = evaluate(f"cvt.{mode}.{target}.{source} {{d}}, {{0}};", [f.bits], [values], bits)
        expected = [ref.to_integer(ref.value_of(v, f), bits, target[0] == "s", mode[:2], source) for v in values]
        wrong = [(hex(v), g, e) for v, g, e in zip(values, got, expected, strict=True) if g != e]
        assert not wrong, (target, wrong[:4])


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("target", ["f16", "bf16", "f32", "f64"])
def test_integers_to_floats(target: str, mode: str) -> None:
    f = FORMATS[target]
    for source in ("u16", "s16", "u32", "s32", "u64", "s64"):
        bits = int(source[1:])
        rng = random.Random(source)
        top = 1 << (bits - 1)
        values = [
            0,
            1,
            top - 1,
            top,
            2 * top - 1,
            top + 1,
            top | top >> 25 | 1,
            *(rng.getrandbits(bits) for _ in range(40)),
        ]
        values += [v >> s for v in (top - 1, top + top // 2 + 1) for s in range(0, bits, 3)]
        got = evaluate(f"cvt.{mode}.{target}.{source} {{d}}, {{0}};", [bits], [values], f.bits)
        for v, out in zip(values, got, strict=True):
            exact = Fraction(ref.signed(v, bits) if source[0] == "s" else v)
            same(out, ref.round_to(exact, f, mode), f, (source, target, v))


NARROWING = [(t, s, m) for t, s in (("f16", "f32"), ("f32", "f64"), ("f16", "f64")) for m in ("rn", "rz", "rm", "rp")]


@pytest.mark.parametrize(("target", "source", "mode"), [*NARROWING, ("bf16", "f32", "rn"), ("bf16", "f32", "rz")])
def test_narrowing_floats(target: str, source: str, mode: str) -> None:
    fs, ft = FORMATS[source], FORMATS[target]
    # Values of the source that lie on and beside the ties of the target.
    values = list(edges(source))
    shift = fs.precision - ft.precision
    for v in edges(target):
        x = ref.value_of(v, ft)
        if isinstance(x, Fraction) and x:
            wide = _bits(x, source)
            values += [wide + d for d in (1, (1 << (shift - 1)) - 1, 1 << (shift - 1), (1 << (shift - 1)) + 1)]
    got = evaluate(f"cvt.{mode}.{target}.{source} {{d}}, {{0}};", [fs.bits], [values], ft.bits)
    for v, out in zip(values, got, strict=True):
        same(out, ref.round_to(ref.value_of(v, fs), ft, mode), ft, (source, target, hex(v)))


def _bits(x: Fraction, name: str) -> int:
    code, word = ("<f", "<I") if name == "f32" else ("<d", "<Q")
    return int(struct.unpack(word, struct.pack(code, float(x)))[0])


@pytest.mark.parametrize("target", ["f16", "bf16", "e4m3", "e5m2"])
def test_packed_narrowing_puts_the_first_source_on_top(target: str) -> None:
    f = FORMATS[target]
    lanes = 16 if f.bits == 16 else 8
    saturate = ".satfinite" if lanes == 8 else ""
    halfway = [
        _bits(x + Fraction(2) ** f.emin * Fraction(1, 2**f.precision), "f32")
        for v in edges(target)
        if isinstance(x := ref.value_of(v, f), Fraction) and abs(x) < 1
    ]
    a = [*edges("f32"), *halfway, *(_bits(Fraction(n), "f32") for n in (448, 449, 463, 464, 465, 57344, 61440, 65519))]
    b = a[7:] + a[:7]
    got = evaluate(f"cvt.rn{saturate}.{target}x2.f32 {{d}}, {{0}}, {{1}};", [32, 32], [a, b], 2 * lanes)
    for x, y, out in zip(a, b, got, strict=True):
        for v, part in ((y, out & ((1 << lanes) - 1)), (x, out >> lanes)):
            same(part, ref.round_to(ref.value_of(v, ref.F32), f, saturate=lanes == 8), f, (target, hex(v)))


@pytest.mark.parametrize("source", ["e4m3", "e5m2"])
def test_all_bytes_widen_exactly(source: str) -> None:
    values = [lo | (255 - lo) << 8 for lo in range(256)]
    got = evaluate(f"cvt.rn.f16x2.{source}x2 {{d}}, {{0}};", [16], [values], 32)
    for v, out in zip(values, got, strict=True):
        for shift in (0, 8):
            expected = ref.value_of(v >> shift & 255, FORMATS[source])
            same(out >> 2 * shift & 0xFFFF, expected, ref.F16, (source, v))
