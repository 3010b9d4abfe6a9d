"""Every shape of mma.sync, ldmatrix, stmatrix and movmatrix against the layouts of the PTX manual."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import vgpu_numpy as num
from vgpu_evaluate import ONE_THREAD, as_ints
from vgpu_matrix import CASES, Case, multiply

from pagedtune.harness.vgpu.run_ptx import FILE_HEADER, run_ptx
from pagedtune.kernels.slot import Access


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.form)
def test_mma_multiplies_the_matrices_that_the_fragments_hold(case: Case) -> None:
    """Small integers: every product and sum is exact in every type, so that any misplaced element shows."""
    rng = np.random.default_rng(case.depth + case.rows)
    a = rng.integers(0 if case.a_type == "u8" else -3, 4, (case.rows, case.depth))
    b = rng.integers(0 if case.b_type == "u8" else -3, 4, (case.depth, 8))
    c = rng.integers(-9, 10, (case.rows, 8))
    assert (multiply(case, a, b, c) == a @ b + c).all()


@pytest.mark.parametrize("case", [c for c in CASES if c.acc == "f32"], ids=lambda c: c.form)
def test_mma_is_at_least_as_precise_as_the_tensor_cores(case: Case) -> None:
    """Real numbers over many binades: within depth + 1 roundings of fp32 relative to the largest term of each sum."""
    rng = np.random.default_rng(case.depth)
    a, b = (
        num.value(num.patterns(rng.normal(size=s) * 2.0 ** rng.integers(-6, 6, s), t), t)
        for s, t in (((case.rows, case.depth), case.a_type), ((case.depth, 8), case.b_type))
    )
    c = rng.normal(size=(case.rows, 8)).astype(np.float32).astype(np.float64)
    terms = np.abs(a[:, :, None] * b[None]).max(1)
    bound = (case.depth + 1) * 2.0**-24 * np.maximum(np.abs(c), np.maximum(terms, np.abs(a) @ np.abs(b)))
    assert (np.abs(multiply(case, a, b, c) - (a @ b + c)) <= bound).all()


@pytest.mark.parametrize("case", [c for c in CASES if c.acc == "s32"], ids=lambda c: c.form)
def test_integer_mma_wraps_or_saturates(case: Case) -> None:
    a = np.full((case.rows, case.depth), 100)
    b = np.full((case.depth, 8), 100)
    b[:, 4:] = 0 if case.b_type == "u8" else -100
    c = np.where(np.arange(8) < 4, 2**31 - 5, -(2**31) + 5) * np.ones((case.rows, 1), np.int64)
    exact = a @ b + c
    assert (multiply(case, a, b, c) == (exact + 2**31) % 2**32 - 2**31).all()
    assert (multiply(case, a, b, c, ".satfinite") == np.clip(exact, -(2**31), 2**31 - 1)).all()


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


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_of_fewer_matrices(count: int, transposed: bool) -> None:
    """Register k of lane l goes to row l / 4 of matrix k, at lane 8 k + that row's address; transposed, to a column."""
    suffix = ".trans" if transposed else ""
    registers = ", ".join(f"%r{7 + k}" for k in range(count))
    values = "".join(f"mad.lo.s32 %r{7 + k}, %r5, 65537, {65536 * (1 + 256 * k) + 256 * k};" for k in range(count))
    body = f"""mov.u32 %r2, s; shl.b32 %r3, %r1, 4; add.s32 %r4, %r2, %r3; shl.b32 %r5, %r1, 1; {values}
stmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 [%r4], {{{registers}}}; bar.warp.sync -1;
mov.u32 %y0, 0; shl.b32 %r6, %r1, 2; add.s32 %r6, %r6, %r2; ld.shared.b32 %y0, [%r6];"""
    body += "add.s32 %r6, %r6, 128; ld.shared.b32 %y1, [%r6];" if count == 2 else ""
    got = run_words(body, count, SHARED)
    for lane in range(32):
        row, col = lane // 4, 2 * (lane % 4)
        for k in range(count):  # element (r, c) of matrix k was made by lane 4 r + c / 2 as 8 r + c + 256 k
            places = [(col, row), (col + 1, row)] if transposed else [(row, col), (row, col + 1)]
            low, high = (8 * r + c + 256 * k for r, c in places)
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
