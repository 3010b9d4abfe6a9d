"""Fragment layouts of mma, ldmatrix, stmatrix and movmatrix against the formulas of the PTX manual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import vgpu_semantics as ref
from vgpu_evaluate import ONE_THREAD, as_ints, as_tensor

from pagedtune.harness.vgpu.run_ptx import FILE_HEADER, run_ptx
from pagedtune.kernels.slot import Access

Place = Callable[[int, int, int], tuple[int, int]]  # group, member, element index -> row, column


@dataclass(frozen=True)
class Shape:
    """One shape of mma: elements per lane, and where each lies, as the manual states it."""

    rows: int
    depth: int
    counts: tuple[int, int, int]
    a: Place
    b: Place


def c_place(g: int, t: int, i: int) -> tuple[int, int]:
    return g + (8 if i >= 2 else 0), t * 2 + (i & 1)


SHAPES = {
    "16-bit k16": Shape(
        16,
        16,
        (8, 4, 4),
        lambda g, t, i: (g if i < 2 or 4 <= i < 6 else g + 8, t * 2 + (i & 1) + (0 if i < 4 else 8)),
        lambda g, t, i: (t * 2 + (i & 1) + (0 if i < 2 else 8), g),
    ),
    "16-bit k8": Shape(
        16, 8, (4, 2, 4), lambda g, t, i: (g if i < 2 else g + 8, t * 2 + (i & 1)), lambda g, t, i: (t * 2 + i, g)
    ),
    "tf32 k8": Shape(
        16,
        8,
        (4, 2, 4),
        lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),
        lambda g, t, i: (t if i == 0 else t + 4, g),
    ),
    "tf32 k4": Shape(16, 4, (2, 1, 4), lambda g, t, i: (g if i == 0 else g + 8, t), lambda g, t, i: (t, g)),
    "8-bit k32": Shape(
        16,
        32,
        (16, 8, 4),
        lambda g, t, i: (g if i < 4 or 8 <= i < 12 else g + 8, t * 4 + (i & 3) + (0 if i < 8 else 16)),
        lambda g, t, i: (t * 4 + (i & 3) + (0 if i < 4 else 16), g),
    ),
    "8-bit k16": Shape(
        16, 16, (8, 4, 4), lambda g, t, i: (g if i < 4 else g + 8, t * 4 + (i & 3)), lambda g, t, i: (t * 4 + i, g)
    ),
    "8-bit m8": Shape(8, 16, (4, 4, 2), lambda g, t, i: (g, t * 4 + i), lambda g, t, i: (t * 4 + i, g)),
}
CASES = [
    ("16-bit k16", "m16n8k16", "f32", "f16"),
    ("16-bit k16", "m16n8k16", "f32", "bf16"),
    ("16-bit k16", "m16n8k16", "f16", "f16"),
    ("16-bit k8", "m16n8k8", "f32", "f16"),
    ("16-bit k8", "m16n8k8", "f32", "bf16"),
    ("tf32 k8", "m16n8k8", "f32", "tf32"),
    ("tf32 k4", "m16n8k4", "f32", "tf32"),
    ("8-bit k32", "m16n8k32", "f32", "e4m3"),
    ("8-bit k32", "m16n8k32", "f32", "e5m2"),
    ("8-bit k32", "m16n8k32", "s32", "s8"),
    ("8-bit k32", "m16n8k32", "s32", "u8"),
    ("8-bit k16", "m16n8k16", "s32", "s8"),
    ("8-bit m8", "m8n8k16", "s32", "s8"),
]
WIDTH = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}


def encode(x: int, type: str) -> int:
    """Bits of a small integer in a type."""
    if type in ("s8", "u8", "s32"):
        return x & ((1 << WIDTH[type]) - 1)
    f = ref.FORMATS["f32" if type in ("tf32", "f32") else type]
    return next(b for b in _candidates(type) if ref.value_of(b, f) == x)


_CACHE: dict[str, list[int]] = {}


def _candidates(type: str) -> list[int]:
    if type not in _CACHE:
        if WIDTH[type] == 32:
            _CACHE[type] = [int(v) for v in np.arange(-400, 400, dtype=np.float32).view(np.uint32)]
        else:
            _CACHE[type] = list(range(1 << WIDTH[type]))
    return _CACHE[type]


def fragments(matrix: np.ndarray, place: Place, count: int, type: str) -> list[int]:
    """32-bit registers, lane by lane."""
    per = 32 // WIDTH[type]
    codes = {int(v): encode(int(v), type) for v in np.unique(matrix)}
    out = []
    for lane in range(32):
        for r in range(count // per):
            word = 0
            for j in range(per):
                row, col = place(lane // 4, lane % 4, r * per + j)
                word |= codes[int(matrix[row, col])] << j * WIDTH[type]
            out.append(word)
    return out


@pytest.mark.parametrize(("layout", "shape", "acc", "type"), CASES, ids=lambda v: str(v).replace(" ", "_"))
def test_mma_multiplies_the_matrices_that_the_fragments_hold(layout: str, shape: str, acc: str, type: str) -> None:
    s = SHAPES[layout]
    rng = np.random.default_rng(len(shape) + WIDTH[type])
    low = 0 if type == "u8" else -3
    a, b = rng.integers(low, 4, (s.rows, s.depth)), rng.integers(low, 4, (s.depth, 8))
    c = rng.integers(-9, 10, (s.rows, 8))
    per_c = 32 // WIDTH[acc]
    na, nb, nc = s.counts[0] * WIDTH[type] // 32, s.counts[1] * WIDTH[type] // 32, s.counts[2] // per_c
    inputs = [
        fragments(a, s.a, s.counts[0], type),
        fragments(b, s.b, s.counts[1], type),
        fragments(c, c_place, s.counts[2], acc),
    ]
    registers, loads = [], []
    for k, n in enumerate((na, nb, nc)):
        names = [f"%x{k}_{r}" for r in range(n)]
        registers.append("{" + ", ".join(names) + "}")
        loads.append(f".reg .b32 {', '.join(names)}; ld.param.u64 %rd1, [a{k}]; mul.wide.u32 %rd2, %r1, {4 * n};")
        loads.append(
            "add.s64 %rd3, %rd1, %rd2;" + "".join(f"ld.global.b32 {x}, [%rd3+{4 * r}];" for r, x in enumerate(names))
        )
    results = [f"%y{r}" for r in range(nc)]
    opcode = f"mma.sync.aligned.{shape}.row.col.{acc}.{type}.{type}.{acc}"
    stores = "".join(f"st.global.b32 [%rd3+{4 * r}], {y};" for r, y in enumerate(results))
    ptx = f"""{FILE_HEADER}.visible .entry k(.param .u64 a0, .param .u64 a1, .param .u64 a2, .param .u64 a3) {{
.reg .b32 %r<4>; .reg .b64 %rd<8>; .reg .b32 {", ".join(results)}; mov.u32 %r1, %tid.x;
{" ".join(loads)}
{opcode} {{{", ".join(results)}}}, {registers[0]}, {registers[1]}, {registers[2]};
ld.param.u64 %rd1, [a3]; mul.wide.u32 %rd2, %r1, {4 * nc}; add.s64 %rd3, %rd1, %rd2; {stores}
ret; }}"""
    out = torch.zeros(32 * nc, dtype=torch.int32)
    arguments = {f"a{k}": (as_tensor(v, 32), Access.IN) for k, v in enumerate(inputs)}
    report = run_ptx(ptx, "k", {**arguments, "o": (out, Access.OUT)}, options=ONE_THREAD)
    assert report.clean, [str(f) for f in report.faults]
    assert report.steps[0].counters.matrix_operations == 1
    assert as_ints(out) == fragments(a @ b + c, c_place, s.counts[2], acc)


def run_words(body: str, num: int, shared: str = "") -> list[int]:
    """Words that a warp of `body` stores: `%y0`.. go to out[lane * num + r]."""
    stores = "".join(f"st.global.b32 [%rd3+{4 * r}], %y{r};" for r in range(num))
    ptx = f"""{FILE_HEADER}{shared}
.visible .entry k(.param .u64 a0) {{
.reg .pred %p<4>; .reg .b16 %h<8>; .reg .b32 %r<16>; .reg .b32 %y<8>; .reg .b64 %rd<8>; mov.u32 %r1, %laneid;
{body}
ld.param.u64 %rd1, [a0]; mul.wide.u32 %rd2, %r1, {4 * num}; add.s64 %rd3, %rd1, %rd2; {stores} ret; }}"""
    out = torch.zeros(32 * num, dtype=torch.int32)
    report = run_ptx(ptx, "k", {"o": (out, Access.OUT)}, options=ONE_THREAD)
    assert report.clean, [str(f) for f in report.faults]
    return as_ints(out)


# Element n of shared memory holds n: lane l writes 16 bytes, elements 8l .. 8l+7.
FILL = """mov.u32 %r2, s; shl.b32 %r3, %r1, 4; add.s32 %r4, %r2, %r3;
shl.b32 %r5, %r1, 3; mad.lo.s32 %r6, %r5, 65537, 65536;
st.shared.b32 [%r4], %r6; add.s32 %r6, %r6, 0x20002; st.shared.b32 [%r4+4], %r6; add.s32 %r6, %r6, 0x20002;
st.shared.b32 [%r4+8], %r6; add.s32 %r6, %r6, 0x20002; st.shared.b32 [%r4+12], %r6; bar.warp.sync -1;"""
SHARED = ".shared .align 16 .b8 s[512];"


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(count: int, transposed: bool) -> None:
    registers = ", ".join(f"%y{k}" for k in range(count))
    suffix = ".trans" if transposed else ""
    got = run_words(
        f"{FILL} ldmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 {{{registers}}}, [%r4];", count, SHARED
    )
    for lane in range(32):
        for k in range(count):
            row, col = lane // 4, 2 * (lane % 4)
            places = [(col, row), (col + 1, row)] if transposed else [(row, col), (row, col + 1)]
            low, high = (64 * k + 8 * r + c for r, c in places)
            assert got[lane * count + k] == low | high << 16


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_undoes_ldmatrix(transposed: bool) -> None:
    suffix = ".trans" if transposed else ""
    body = f"""{FILL} ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{%r7, %r8, %r9, %r10}}, [%r4];
bar.warp.sync -1; xor.b32 %r11, %r3, 128; add.s32 %r11, %r11, %r2;
stmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 [%r11], {{%r7, %r8, %r9, %r10}}; bar.warp.sync -1;
ld.shared.v4.b32 {{%y0, %y1, %y2, %y3}}, [%r4];"""
    got = run_words(body, 4, SHARED)
    for lane in range(32):
        first = 8 * (lane ^ 8)  # matrices 0 and 1, 2 and 3 have changed places
        assert got[4 * lane : 4 * lane + 4] == [first + 2 * j | (first + 2 * j + 1) << 16 for j in range(4)]


def test_movmatrix_transposes() -> None:
    body = "shl.b32 %r2, %r1, 1; mad.lo.s32 %r3, %r2, 65537, 65536; movmatrix.sync.aligned.m8n8.trans.b16 %y0, %r3;"
    got = run_words(body, 1)
    for lane in range(32):
        row, col = lane // 4, 2 * (lane % 4)
        assert got[lane] == (8 * col + row) | (8 * (col + 1) + row) << 16
