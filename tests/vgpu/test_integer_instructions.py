"""Integer, bit and comparison instructions against their statement in Python integers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import vgpu_semantics as ref
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vgpu_evaluate import evaluate

SIGNED = ref.signed
MASK = {16: 0xFFFF, 32: 0xFFFFFFFF, 64: (1 << 64) - 1}


def edges(bits: int) -> list[int]:
    top = 1 << (bits - 1)
    return [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 0x55, 255, 256, top - 1, top, top + 1, MASK[bits] - 1, MASK[bits]]


def both(f: Callable[..., int], bits: int, sign: bool) -> Callable[..., int]:
    """`f` over signed or unsigned values."""
    return lambda *a: f(*(SIGNED(x, bits) if sign else x for x in a)) & MASK[bits]


def truncated_div(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def arithmetic() -> dict[str, tuple[int, int, Callable[..., int]]]:
    """Opcode -> (bits, operands, function)."""
    table: dict[str, tuple[int, int, Callable[..., int]]] = {}
    for bits in (16, 32, 64):
        for letter in "su":
            sign, t = letter == "s", f"{letter}{bits}"
            table |= {
                f"add.{t}": (bits, 2, both(lambda a, b: a + b, bits, sign)),
                f"sub.{t}": (bits, 2, both(lambda a, b: a - b, bits, sign)),
                f"mul.lo.{t}": (bits, 2, both(lambda a, b: a * b, bits, sign)),
                f"mul.hi.{t}": (bits, 2, both(lambda a, b, n=bits: a * b >> n, bits, sign)),
                f"mad.lo.{t}": (bits, 3, both(lambda a, b, c: a * b + c, bits, sign)),
                f"min.{t}": (bits, 2, both(min, bits, sign)),
                f"max.{t}": (bits, 2, both(max, bits, sign)),
                f"div.{t}": (bits, 2, both(lambda a, b: truncated_div(a, b) if b else -1, bits, sign)),
                f"rem.{t}": (bits, 2, both(lambda a, b: a - b * truncated_div(a, b) if b else -1, bits, sign)),
                f"sad.{t}": (
                    bits,
                    3,
                    lambda a, b, c, n=bits, s=sign: (c + abs(SIGNED(a, n) - SIGNED(b, n) if s else a - b)) & MASK[n],
                ),
            }
        table |= {
            f"neg.s{bits}": (bits, 1, both(lambda a: -a, bits, True)),
            f"abs.s{bits}": (bits, 1, both(abs, bits, True)),
            f"and.b{bits}": (bits, 2, lambda a, b: a & b),
            f"or.b{bits}": (bits, 2, lambda a, b: a | b),
            f"xor.b{bits}": (bits, 2, lambda a, b: a ^ b),
            f"not.b{bits}": (bits, 1, lambda a, n=bits: a ^ MASK[n]),
            f"cnot.b{bits}": (bits, 1, lambda a: int(a == 0)),
        }
        if bits >= 32:
            table[f"brev.b{bits}"] = (bits, 1, lambda a, n=bits: int(f"{a:0{n}b}"[::-1], 2))
    table["add.sat.s32"] = (
        32,
        2,
        lambda a, b: max(-(1 << 31), min((1 << 31) - 1, SIGNED(a, 32) + SIGNED(b, 32))) & MASK[32],
    )
    table["sub.sat.s32"] = (
        32,
        2,
        lambda a, b: max(-(1 << 31), min((1 << 31) - 1, SIGNED(a, 32) - SIGNED(b, 32))) & MASK[32],
    )
    return table


ARITHMETIC = arithmetic()


@pytest.mark.parametrize("opcode", ARITHMETIC)
def test_arithmetic(opcode: str) -> None:
    bits, count, function = ARITHMETIC[opcode]
    values = edges(bits) if count < 3 else edges(bits)[::3]
    columns = [list(c) for c in zip(*itertools.product(values, repeat=count), strict=True)]
    if opcode.startswith(("div", "rem")):  # the result of a division by zero is not specified
        keep = [k for k, b in enumerate(columns[1]) if b]
        columns = [[c[k] for k in keep] for c in columns]
    sources = ", ".join(f"{{{k}}}" for k in range(count))
    text = f"{opcode} {{d}}, {sources};"
    got = evaluate(text, [bits] * count, columns, bits)
    assert got == [function(*row) for row in zip(*columns, strict=True)]


SHIFTS = {
    f"{op}{bits}": (bits, f)
    for bits in (16, 32, 64)
    for op, f in {
        "shl.b": lambda a, n, bits: a << n & MASK[bits] if n < bits else 0,
        "shr.u": lambda a, n, bits: a >> n if n < bits else 0,
        "shr.s": lambda a, n, bits: SIGNED(a, bits) >> min(n, bits - 1) & MASK[bits],
    }.items()
}


@pytest.mark.parametrize("opcode", SHIFTS)
def test_shifts_clamp_their_amount(opcode: str) -> None:
    bits, function = SHIFTS[opcode]
    pairs = list(itertools.product(edges(bits), [0, 1, 7, 8, 15, 16, 31, 32, 63, 64, 255, MASK[32]]))
    a, n = [p[0] for p in pairs], [p[1] for p in pairs]
    assert evaluate(f"{opcode} {{d}}, {{0}}, {{1}};", [bits, 32], [a, n], bits) == [
        function(x, k, bits) for x, k in pairs
    ]


@pytest.mark.parametrize("bits", [32, 64])
def test_counting(bits: int) -> None:
    a = edges(bits)
    high = [x.bit_length() - 1 if x else MASK[32] for x in a]
    assert evaluate(f"popc.b{bits} {{d}}, {{0}};", [bits], [a], 32) == [x.bit_count() for x in a]
    assert evaluate(f"clz.b{bits} {{d}}, {{0}};", [bits], [a], 32) == [bits - x.bit_length() for x in a]
    assert evaluate(f"bfind.u{bits} {{d}}, {{0}};", [bits], [a], 32) == high
    shifted = [bits - 1 - h if h != MASK[32] else h for h in high]
    assert evaluate(f"bfind.shiftamt.u{bits} {{d}}, {{0}};", [bits], [a], 32) == shifted


@pytest.mark.parametrize("opcode", [f"mul.wide.{t}" for t in ("u16", "s16", "u32", "s32")])
def test_wide_products(opcode: str) -> None:
    bits, sign = int(opcode[-2:]), opcode[-3] == "s"
    pairs = list(itertools.product(edges(bits), repeat=2))
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    c = [(x * 77 + 5) & MASK[2 * bits] for x in a]
    product = [(SIGNED(x, bits) * SIGNED(y, bits) if sign else x * y) for x, y in pairs]
    wide = 2 * bits
    assert evaluate(f"{opcode} {{d}}, {{0}}, {{1}};", [bits, bits], [a, b], wide) == [p & MASK[wide] for p in product]
    got = evaluate(f"{opcode.replace('mul', 'mad')} {{d}}, {{0}}, {{1}}, {{2}};", [bits, bits, wide], [a, b, c], wide)
    assert got == [(p + x) & MASK[wide] for p, x in zip(product, c, strict=True)]


words = st.integers(0, MASK[32])
COMMON = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))


@COMMON
@given(st.lists(st.tuples(words, words, words), min_size=40, max_size=40), st.integers(0, 255))
def test_bit_instructions_on_random_words(rows: list[tuple[int, int, int]], table: int) -> None:
    a, b, c = (list(column) for column in zip(*rows, strict=True))
    widths = [32, 32, 32]
    assert evaluate(f"lop3.b32 {{d}}, {{0}}, {{1}}, {{2}}, {table};", widths, [a, b, c], 32) == [
        ref.lookup3(*row, table) for row in rows
    ]
    assert evaluate("prmt.b32 {d}, {0}, {1}, {2};", widths, [a, b, c], 32) == [ref.permute(*row) for row in rows]
    for direction, mode in itertools.product("lr", ("wrap", "clamp")):
        got = evaluate(
            f"shf.{direction}.{mode}.b32 {{d}}, {{0}}, {{1}}, {{2}};", widths, [a, b, [x % 70 for x in c]], 32
        )
        assert got == [ref.funnel(x, y, z % 70, direction == "l", mode == "clamp") for x, y, z in rows]


@COMMON
@given(st.lists(st.tuples(words, words, st.integers(0, 300), st.integers(0, 300)), min_size=60, max_size=60))
def test_bit_fields(rows: list[tuple[int, int, int, int]]) -> None:
    a, b, pos, length = (list(column) for column in zip(*rows, strict=True))
    for letter in "us":
        got = evaluate(f"bfe.{letter}32 {{d}}, {{0}}, {{1}}, {{2}};", [32, 32, 32], [a, pos, length], 32)
        assert got == [ref.bit_field_extract(x, p, n, 32, letter == "s") for x, _, p, n in rows]
    got = evaluate("bfi.b32 {d}, {0}, {1}, {2}, {3};", [32] * 4, [a, b, pos, length], 32)
    assert got == [ref.bit_field_insert(x, y, p, n, 32) for x, y, p, n in rows]


@COMMON
@given(st.lists(st.tuples(words, words, words), min_size=40, max_size=40))
def test_dot_products_of_bytes(rows: list[tuple[int, int, int]]) -> None:
    a, b, c = (list(column) for column in zip(*rows, strict=True))
    for ta, tb in itertools.product("us", repeat=2):
        expected = []
        for x, y, z in rows:
            parts = [
                (SIGNED(x >> 8 * k, 8) if ta == "s" else x >> 8 * k & 255)
                * (SIGNED(y >> 8 * k, 8) if tb == "s" else y >> 8 * k & 255)
                for k in range(4)
            ]
            expected.append((z + sum(parts)) & MASK[32])
        assert evaluate(f"dp4a.{ta}32.{tb}32 {{d}}, {{0}}, {{1}}, {{2}};", [32] * 3, [a, b, c], 32) == expected


COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@pytest.mark.parametrize("type", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("comparison", COMPARISONS)
def test_comparisons(type: str, comparison: str) -> None:
    bits = int(type[1:])
    pairs = list(itertools.product(edges(bits), repeat=2))
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    text = f"setp.{comparison}.{type} %p0, {{0}}, {{1}}; selp.u32 {{d}}, 1, 0, %p0;"
    got = evaluate(text, [bits, bits], [a, b], 32)
    function = eval(f"lambda a, b: a {COMPARISONS[comparison]} b")
    expected = [int(function(*(SIGNED(x, bits) if type[0] == "s" else x for x in p))) for p in pairs]
    assert got == expected


def test_carry_chain_adds_and_subtracts_128_bits() -> None:
    values = edges(64)
    pairs = list(itertools.product(values, repeat=2))
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    for op, sign in (("add", 1), ("sub", -1)):
        for high in (False, True):
            text = (
                ".reg .b64 %lo, %hi;"
                f"{op}.cc.u64 %lo, {{0}}, {{1}}; {op}c.u64 %hi, {{1}}, {{0}};"
                f"mov.b64 {{d}}, {'%hi' if high else '%lo'};"
            )
            got = evaluate(text, [64, 64], [a, b], 64)
            wide = [((y << 64 | x) + sign * (x << 64 | y)) % (1 << 128) for x, y in pairs]
            assert got == [w >> 64 if high else w & MASK[64] for w in wide]
