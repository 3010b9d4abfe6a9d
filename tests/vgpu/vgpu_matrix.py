"""Shapes of mma.sync with the fragment layouts of the PTX manual, and one product through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import vgpu_numpy as num
from vgpu_evaluate import ONE_THREAD, as_ints, as_tensor

from pagedtune.harness.vgpu.decode_warp import mma_shapes
from pagedtune.harness.vgpu.run_ptx import FILE_HEADER, run_ptx
from pagedtune.kernels.slot import Access

Place = Callable[[int, int, int], tuple[int, int]]  # group, member, element index -> row, column
Matrix = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Layout:
    """Elements of A, B and C per lane, and where each lies, as the manual states it."""

    counts: tuple[int, int, int]
    a: Place
    b: Place


def c_place(g: int, t: int, i: int) -> tuple[int, int]:
    return g + (8 if i >= 2 else 0), t * 2 + (i & 1)


# By rows, depth and bits of an element of A.
LAYOUTS = {
    (16, 16, 16): Layout(
        (8, 4, 4),
        lambda g, t, i: (g if i < 2 or 4 <= i < 6 else g + 8, t * 2 + (i & 1) + (0 if i < 4 else 8)),
        lambda g, t, i: (t * 2 + (i & 1) + (0 if i < 2 else 8), g),
    ),
    (16, 8, 16): Layout(
        (4, 2, 4), lambda g, t, i: (g if i < 2 else g + 8, t * 2 + (i & 1)), lambda g, t, i: (t * 2 + i, g)
    ),
    (16, 8, 32): Layout(
        (4, 2, 4),
        lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),
        lambda g, t, i: (t if i == 0 else t + 4, g),
    ),
    (16, 4, 32): Layout((2, 1, 4), lambda g, t, i: (g if i == 0 else g + 8, t), lambda g, t, i: (t, g)),
    (16, 32, 8): Layout(
        (16, 8, 4),
        lambda g, t, i: (g if i < 4 or 8 <= i < 12 else g + 8, t * 4 + (i & 3) + (0 if i < 8 else 16)),
        lambda g, t, i: (t * 4 + (i & 3) + (0 if i < 4 else 16), g),
    ),
    (16, 16, 8): Layout(
        (8, 4, 4), lambda g, t, i: (g if i < 4 else g + 8, t * 4 + (i & 3)), lambda g, t, i: (t * 4 + i, g)
    ),
    (8, 16, 8): Layout((4, 4, 2), lambda g, t, i: (g, t * 4 + i), lambda g, t, i: (t * 4 + i, g)),
}
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}


@dataclass(frozen=True)
class Case:
    """One form of mma.sync."""

    rows: int
    depth: int
    acc: str
    a_type: str
    b_type: str

    @property
    def form(self) -> str:
        """Its name in the list of forms."""
        return f"mma.m{self.rows}n8k{self.depth}.{self.acc}.{self.a_type}.{self.b_type}"

    @property
    def layout(self) -> Layout:
        """Where its elements lie."""
        return LAYOUTS[self.rows, self.depth, BITS[self.a_type]]


CASES = [Case(*shape) for shape in mma_shapes()]
MEMORY_FORMS = [
    "movmatrix",
    *(f"{n}.x{c}{t}" for n in ("ldmatrix", "stmatrix") for c in (1, 2, 4) for t in ("", ".trans")),
]


def encode(matrix: Matrix, type: str) -> npt.NDArray[np.uint64]:
    """Bit patterns of numbers that the type holds."""
    if type in ("s8", "u8", "s32"):
        return matrix.astype(np.int64).astype(np.uint64) & np.uint64((1 << BITS[type]) - 1)
    return num.patterns(matrix.astype(np.float64), type)


def fragments(matrix: Matrix, place: Place, count: int, type: str) -> list[int]:
    """32-bit registers, lane by lane."""
    per, codes = 32 // BITS[type], encode(matrix, type)
    out = []
    for lane in range(32):
        for r in range(count // per):
            places = [place(lane // 4, lane % 4, r * per + j) for j in range(per)]
            out.append(sum(int(codes[p]) << j * BITS[type] for j, p in enumerate(places)))
    return out


def gather(words: list[int], case: Case) -> npt.NDArray[np.float64]:
    """The matrix that accumulator registers hold."""
    per, bits = 32 // BITS[case.acc], BITS[case.acc]
    out = np.full((case.rows, 8), np.nan)
    registers = case.layout.counts[2] // per
    for lane in range(32):
        for i in range(case.layout.counts[2]):
            word = words[lane * registers + i // per] >> (i % per) * bits & ((1 << bits) - 1)
            signed = word - (word >> 31 << 32) if case.acc == "s32" else 0
            value = signed if case.acc == "s32" else num.value(np.array([word], np.uint64), case.acc)[0]
            out[c_place(lane // 4, lane % 4, i)] = value
    return out


def multiply(case: Case, a: Matrix, b: Matrix, c: Matrix, finite: str = "") -> npt.NDArray[np.float64]:
    """a @ b + c through one instruction."""
    s, types = case.layout, (case.a_type, case.b_type, case.acc)
    parts = ((a, s.a), (b, s.b), (c, c_place))
    counts = [n * BITS[t] // 32 for n, t in zip(s.counts, types, strict=True)]
    registers, loads = [], []
    for k, n in enumerate(counts):
        names = [f"%x{k}_{r}" for r in range(n)]
        registers.append("{" + ", ".join(names) + "}")
        loads.append(f".reg .b32 {', '.join(names)}; ld.param.u64 %rd1, [a{k}]; mul.wide.u32 %rd2, %r1, {4 * n};")
        loads.append(
            "add.s64 %rd3, %rd1, %rd2;" + "".join(f"ld.global.b32 {x}, [%rd3+{4 * r}];" for r, x in enumerate(names))
        )
    results = [f"%y{r}" for r in range(counts[2])]
    shape = f"m{case.rows}n8k{case.depth}"
    opcode = f"mma.sync.aligned.{shape}.row.col{finite}.{case.acc}.{case.a_type}.{case.b_type}.{case.acc}"
    stores = "".join(f"st.global.b32 [%rd3+{4 * r}], {y};" for r, y in enumerate(results))
    ptx = f"""{FILE_HEADER}.visible .entry k(.param .u64 a0, .param .u64 a1, .param .u64 a2, .param .u64 a3) {{
.reg .b32 %r<4>; .reg .b64 %rd<8>; .reg .b32 {", ".join(results)}; mov.u32 %r1, %tid.x;
{" ".join(loads)}
{opcode} {{{", ".join(results)}}}, {registers[0]}, {registers[1]}, {registers[2]};
ld.param.u64 %rd1, [a3]; mul.wide.u32 %rd2, %r1, {4 * counts[2]}; add.s64 %rd3, %rd1, %rd2; {stores}
ret; }}"""
    inputs = [fragments(m, place, n, t) for (m, place), n, t in zip(parts, s.counts, types, strict=True)]
    out = torch.zeros(32 * counts[2], dtype=torch.int32)
    arguments = {f"a{k}": (as_tensor(v, 32), Access.IN) for k, v in enumerate(inputs)}
    report = run_ptx(ptx, "k", {**arguments, "o": (out, Access.OUT)}, options=ONE_THREAD)
    assert report.clean, [str(f) for f in report.faults]
    assert report.steps[0].counters.matrix_operations == 1
    return gather(as_ints(out), case)
