"""Counters against hand counts."""

from __future__ import annotations

import torch
from vgpu_evaluate import ONE_THREAD
from vgpu_pairs import module

from pagedtune.harness.vgpu.report import Counters
from pagedtune.harness.vgpu.run_ptx import run_ptx
from pagedtune.kernels.slot import Access

IN, OUT = Access.IN, Access.OUT


def count(body: str, elements: int, threads: int = 64, blocks: int = 2, prelude: str = "") -> Counters:
    """Counters of `body`, where %rd11 and %rd12 are to be made from %rd0 (input) and %rd1 (output)."""
    arguments = {
        "x": (torch.zeros(elements, dtype=torch.int32), IN),
        "o": (torch.zeros(threads * blocks, dtype=torch.int32), OUT),
    }
    frame = f"mad.lo.s32 %r10, %r61, {threads}, %r60; mul.wide.u32 %rd13, %r10, 4; add.s64 %rd12, %rd1, %rd13;"
    text = module(f"{frame}\n{body}\nst.global.u32 [%rd12], %r1;", arguments, prelude)
    report = run_ptx(text, "k", arguments, (blocks, 1, 1), (threads, 1, 1), options=ONE_THREAD)
    assert report.clean, [str(f) for f in report.faults]
    return report.steps[0].counters


def test_consecutive_words() -> None:
    """4 warps read and write 128 bytes each: 4 sectors and 1 line a warp."""
    c = count("add.s64 %rd11, %rd0, %rd13; ld.global.u32 %r1, [%rd11];", 128)
    assert (c.read_sectors, c.read_lines, c.write_sectors, c.write_lines) == (16, 4, 16, 4)
    assert c.unique_read_bytes["x"] == 512
    assert c.unique_written_bytes["o"] == 512
    assert c.instructions["global"] == 8
    # 2 moves and 2 parameters of the frame, mad, wide product, 2 sums, load, store, return: 11 of 128 lanes
    assert c.lane_instructions == 11 * 128


def test_strided_words_take_a_sector_each() -> None:
    """Words 128 bytes apart: 32 sectors and 32 lines for each of 4 warps; 4 of each line's bytes are wanted."""
    c = count("mul.wide.u32 %rd14, %r10, 128; add.s64 %rd11, %rd0, %rd14; ld.global.u32 %r1, [%rd11];", 32 * 128)
    assert (c.read_sectors, c.read_lines) == (128, 128)
    assert c.unique_read_bytes["x"] == 512


def test_a_broadcast_is_one_sector_and_rereads_are_not_unique() -> None:
    c = count("ld.global.u32 %r1, [%rd0]; ld.global.u32 %r2, [%rd0]; add.s32 %r1, %r1, %r2;", 8)
    assert (c.read_sectors, c.read_lines) == (8, 8)
    assert c.unique_read_bytes["x"] == 4


def test_sixteen_byte_loads() -> None:
    """A warp reads 512 adjacent bytes with one instruction: 16 sectors, 4 lines."""
    body = "mul.wide.u32 %rd14, %r10, 16; add.s64 %rd11, %rd0, %rd14; ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd11];"
    c = count(body, 4 * 128)
    assert (c.read_sectors, c.read_lines) == (64, 16)


def conflicts(stride: int, width: int = 4) -> int:
    """Bank conflicts of one warp that writes `width` bytes per lane, `stride` bytes apart."""
    store = {4: "st.shared.u32 [%r4], %r60;", 8: "st.shared.v2.u32 [%r4], {%r60, %r60};",
             16: "st.shared.v4.u32 [%r4], {%r60, %r60, %r60, %r60};"}[width]  # fmt: skip
    body = f"mov.u32 %r1, 0; mov.u32 %r3, s; mad.lo.s32 %r4, %r60, {stride}, %r3; {store}"
    return count(body, 1, 32, 1, ".shared .align 16 .b8 s[8192];").bank_conflicts


def test_bank_conflicts() -> None:
    assert conflicts(4) == 0
    assert conflicts(8) == 1
    assert conflicts(128) == 31
    assert conflicts(132) == 0
    assert conflicts(16, 16) == 0
    assert conflicts(32, 16) == 4  # 4 groups of 8 lanes, each in 2 passes
    assert conflicts(128, 16) == 28
    assert conflicts(8, 8) == 0


def test_matrix_barrier_and_asynchronous_counts() -> None:
    zeros = "mov.f32 %f1, 0f00000000; mov.u32 %r1, 0; mov.u32 %r3, s;"
    opcode, zeros4, ones = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "%f1,%f1,%f1,%f1", "%r1,%r1"
    mma = f"{opcode} {{{zeros4}}}, {{{ones},{ones}}}, {{{ones}}}, {{{zeros4}}};"
    copy = "mad.lo.s32 %r5, %r60, 16, %r3; mul.wide.u32 %rd14, %r60, 16; add.s64 %rd15, %rd0, %rd14;"
    copy += "cp.async.cg.shared.global [%r5], [%rd15], 16; cp.async.wait_all;"
    c = count(f"{zeros} {mma} bar.sync 0; {copy}", 256, prelude=".shared .align 16 .b8 s[1024];")
    assert c.matrix_operations == 4
    assert c.barriers == 4
    assert c.read_sectors == 4 * 16
    assert c.instructions["async"] == 8
