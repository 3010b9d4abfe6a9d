"""Counters against hand counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vgpu_attention import BF16, Case, run
from vgpu_evaluate import ONE_THREAD
from vgpu_pairs import module

from pagedtune.harness.vgpu.report import Counters
from pagedtune.harness.vgpu.run_ptx import run_ptx
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpuOptions
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.slot import Access
from pagedtune.kernels.triton_split import TritonSplit, TritonSplitConfig

IN, OUT = Access.IN, Access.OUT


def count(
    body: str, elements: int, threads: int = 64, blocks: int = 2, prelude: str = "", quantum: int = 512
) -> Counters:
    """Counters of `body`, where %rd11 and %rd12 are to be made from %rd0 (input) and %rd1 (output)."""
    arguments = {
        "x": (torch.zeros(elements, dtype=torch.int32), IN),
        "o": (torch.zeros(threads * blocks, dtype=torch.int32), OUT),
    }
    frame = f"mad.lo.s32 %r10, %r61, {threads}, %r60; mul.wide.u32 %rd13, %r10, 4; add.s64 %rd12, %rd1, %rd13;"
    text = module(f"{frame}\n{body}\nst.global.u32 [%rd12], %r1;", arguments, prelude)
    options = replace(ONE_THREAD, quantum=quantum)
    report = run_ptx(text, "k", arguments, (blocks, 1, 1), (threads, 1, 1), options=options)
    assert report.clean, [str(f) for f in report.faults]
    return report.steps[0].counters


def test_sites_name_what_they_access() -> None:
    arguments = {"x": (torch.zeros(32, dtype=torch.int32), IN), "o": (torch.zeros(32, dtype=torch.int32), OUT)}
    body = "mul.wide.u32 %rd13, %r60, 4; add.s64 %rd11, %rd0, %rd13; add.s64 %rd12, %rd1, %rd13;"
    text = module(f"{body} ld.global.u32 %r1, [%rd11]; st.global.u32 [%rd12], %r1;", arguments, "")
    report = run_ptx(text, "k", arguments, (1, 1, 1), (32, 1, 1), options=ONE_THREAD)
    named = {site.instruction: (site.slot, site.sectors) for site in report.steps[0].sites if site.slot}
    assert named == {"ld.global.u32": ("x", 4), "st.global.u32": ("o", 4)}


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


def test_bytes_in_flight_until_the_first_use() -> None:
    """One warp has 128 bytes (4 sectors) in flight from its load to its store, 4 instructions later (a move of the
    result is no use), of the 15 that each warp issues. Warps run one after the other, so they never add up."""
    body = "add.s64 %rd11, %rd0, %rd13; ld.global.u32 %r1, [%rd11]; mov.u32 %r2, %r1;"
    c = count(f"{body} add.u32 %r3, %r10, 1; add.u32 %r3, %r3, 1; add.u32 %r3, %r3, 1;", 128)
    assert c.bytes_in_flight_max == 128
    assert c.bytes_in_flight_mean == 128 * 5 / 15


def test_warps_that_take_turns_add_up_without_a_barrier() -> None:
    """As above, but the other warp's turn comes after every instruction, as on a device: both are in flight."""
    body = "add.s64 %rd11, %rd0, %rd13; ld.global.u32 %r1, [%rd11]; mov.u32 %r2, %r1;"
    c = count(f"{body} add.u32 %r3, %r10, 1; add.u32 %r3, %r3, 1; add.u32 %r3, %r3, 1;", 128, quantum=1)
    assert c.bytes_in_flight_max == 256


def test_warps_add_up_to_their_block() -> None:
    """Both warps have loaded before the barrier lets either store: 256 bytes."""
    c = count("add.s64 %rd11, %rd0, %rd13; ld.global.u32 %r1, [%rd11]; bar.sync 0;", 128)
    assert c.bytes_in_flight_max == 256


def test_loads_batched_before_their_use() -> None:
    """Four loads of 4 sectors each, all issued before the first sum; then the same four, each summed at once."""
    loads = [f"ld.global.u32 %r{k}, [%rd11+{128 * k}];" for k in (2, 3, 4, 5)]
    sums = [f"add.u32 %r1, %r1, %r{k};" for k in (2, 3, 4, 5)]
    start = "mov.u32 %r1, 0; add.s64 %rd11, %rd0, %rd13;"
    batched = count(start + "".join(loads + sums), 32 * 6, 32, 1)
    assert batched.bytes_in_flight_max == 4 * 128
    one_by_one = count(start + "".join(a + b for a, b in zip(loads, sums, strict=True)), 32 * 6, 32, 1)
    assert one_by_one.bytes_in_flight_max == 128


def test_a_loop_keeps_one_load_in_flight() -> None:
    """The result of round k is read in round k + 1, after the next load was issued into another register."""
    body = """add.s64 %rd11, %rd0, %rd13; mov.u32 %r1, 0; mov.u32 %r7, 0; ld.global.u32 %r2, [%rd11];
    again: ld.global.u32 %r3, [%rd11]; add.u32 %r1, %r1, %r2; mov.u32 %r2, %r3; add.u32 %r7, %r7, 1;
    setp.lt.u32 %p1, %r7, 5; @%p1 bra again; add.u32 %r1, %r1, %r2;"""
    assert count(body, 32, 32, 1).bytes_in_flight_max == 2 * 128


def test_bytes_in_flight_by_site() -> None:
    """Each load is used by the third instruction after it."""
    body = "mov.u32 %r1, 0; add.s64 %rd11, %rd0, %rd13; ld.global.u32 %r2, [%rd11]; ld.global.u32 %r3, [%rd11+128];"
    body += "add.u32 %r5, %r10, 1; add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3;"
    arguments = {"x": (torch.zeros(64, dtype=torch.int32), IN), "o": (torch.zeros(32, dtype=torch.int32), OUT)}
    frame = "mov.u32 %r10, %r60; mul.wide.u32 %rd13, %r10, 4; add.s64 %rd12, %rd1, %rd13;"
    text = module(f"{frame}\n{body}\nst.global.u32 [%rd12], %r1;", arguments)
    step = run_ptx(text, "k", arguments, (1, 1, 1), (32, 1, 1), options=ONE_THREAD).steps[0]
    assert [site.flight for site in step.sites if site.instruction == "ld.global.u32"] == [128 * 3, 128 * 3]
    issued = sum(site.executed for site in step.sites)
    assert step.counters.bytes_in_flight_mean == 2 * 128 * 3 / issued


def stages(depth: int, rounds: int, threads: int = 32) -> Counters:
    """A software pipeline: `depth` groups are issued ahead; each round waits for the oldest and issues another."""
    issue = (
        "cp.async.cg.shared.global [%r5], [%rd15], 16; cp.async.commit_group; "
        f"add.u32 %r5, %r5, {16 * threads}; add.s64 %rd15, %rd15, {16 * threads};"
    )
    frame = "mov.u32 %r1, 0; mov.u32 %r3, s; mad.lo.s32 %r5, %r60, 16, %r3; mul.wide.u32 %rd14, %r60, 16;"
    body = f"{frame} add.s64 %rd15, %rd0, %rd14; {issue * depth} bar.sync 0;"
    body += f"cp.async.wait_group {depth - 1}; bar.sync 0; {issue}" * rounds + "cp.async.wait_all;"
    size = 16 * threads * (depth + rounds)
    return count(body, size // 4, threads, 1, f".shared .align 16 .b8 s[{size}];")


def test_bytes_in_flight_of_a_pipeline() -> None:
    """Each group of a warp is 512 bytes; `depth` of them are in flight."""
    assert stages(1, 3).bytes_in_flight_max == 512
    assert stages(3, 4).bytes_in_flight_max == 3 * 512
    assert stages(4, 2, threads=64).bytes_in_flight_max == 4 * 2 * 512
    assert stages(3, 4).bytes_in_flight_mean > stages(2, 4).bytes_in_flight_mean


def load_conflicts(stride: int, width: int) -> int:
    """Bank conflicts of one warp that reads `width` bytes per lane, `stride` bytes apart."""
    load = {4: "ld.shared.u32 %r1, [%r4];", 8: "ld.shared.v2.u32 {%r1, %r5}, [%r4];",
            16: "ld.shared.v4.u32 {%r1, %r5, %r6, %r7}, [%r4];"}[width]  # fmt: skip
    body = f"{FILL} mad.lo.s32 %r4, %r60, {stride}, %r3; {load}"
    return count(body, 1, 32, 1, ".shared .align 16 .b8 s[8192];").bank_conflicts


# Fills 8192 bytes, 16 consecutive ones a lane, which is free of conflicts.
FILL = """mov.u32 %r3, s; mad.lo.s32 %r9, %r60, 16, %r3; mov.u32 %r8, 0;
fill: st.shared.v4.u32 [%r9], {%r8, %r8, %r8, %r8}; add.u32 %r9, %r9, 512; add.u32 %r8, %r8, 1;
setp.lt.u32 %p2, %r8, 16; @%p2 bra fill; bar.sync 0;"""


def test_bank_conflicts_of_loads() -> None:
    """32 banks of 4 bytes: a pass serves 32 lanes of 4 bytes, 16 of 8 or 8 of 16."""
    assert [load_conflicts(s, 4) for s in (0, 4, 8, 16, 128, 132)] == [0, 0, 1, 3, 31, 0]
    assert [load_conflicts(s, 8) for s in (0, 8, 16, 128, 136)] == [0, 0, 2, 30, 0]
    assert [load_conflicts(s, 16) for s in (0, 16, 32, 128, 144)] == [0, 0, 4, 28, 0]


def matrix_conflicts(stride: int, count_of: int, transposed: bool = False) -> int:
    """Bank conflicts of an ldmatrix whose rows of 16 bytes lie `stride` bytes apart."""
    registers = ", ".join(f"%r{11 + k}" for k in range(count_of))
    trans = ".trans" if transposed else ""
    load = f"ldmatrix.sync.aligned.m8n8.x{count_of}{trans}.shared.b16 {{{registers}}}, [%r4];"
    body = f"{FILL} mov.u32 %r1, 0; mad.lo.s32 %r4, %r60, {stride}, %r3; {load}"
    return count(body, 1, 32, 1, ".shared .align 16 .b8 s[8192];").bank_conflicts


def test_bank_conflicts_of_ldmatrix() -> None:
    """The 8 rows of a matrix are one pass where their 16-byte pieces of 128 bytes differ."""
    assert [matrix_conflicts(s, 4) for s in (16, 32, 64, 128, 144)] == [0, 4, 12, 28, 0]
    assert [matrix_conflicts(128, n) for n in (1, 2, 4)] == [7, 14, 28]
    assert matrix_conflicts(128, 4, transposed=True) == 28


LENS, SPLITS, TILE, WARPS = (512, 256), 2, 64, 4


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sectors_of_triton_split_on_whole_blocks(head_dim: int) -> None:
    """Sectors of 32 bytes, for 8 query and 2 KV heads in bf16, blocks of 16, two splits of each sequence.

    KV: every live byte of K and V once for each KV head. Tables: a warp's access of 512 bytes of K or V covers
    512 / (2 x head_dim) tokens, which lie in one block or in neighbours: one sector of the table per access.
    q: 4 rows of a group for each of the 2 splits. Partials: fp32 rows of each query head and split, and one sector of
    LSE for each block, whose 4 heads x 2 splits x 4 bytes lie in one. The merge reads rows and LSE once for each query
    head, and writes its row and its LSE.
    """
    problem = Problem(8, 2, head_dim)
    case = Case(problem, BF16, LENS, triton=TritonSplitConfig(SPLITS, TILE, 128, WARPS, 2))
    _, gpu = run(TritonSplit(), case.triton, case, VirtualGpuOptions(num_threads=1))
    split, merge = (step.counters for step in gpu.report.steps)

    kv_bytes = sum(LENS) * 2 * 2 * 2 * head_dim
    table = kv_bytes // 512
    q = len(LENS) * SPLITS * 2 * (4 * 2 * head_dim // 32)
    partial_rows = len(LENS) * 8 * SPLITS
    partials = partial_rows * 4 * head_dim // 32
    blocks = len(LENS) * 2 * SPLITS
    assert split.read_sectors == pytest.approx(kv_bytes // 32 + table + q, rel=0.03)
    assert split.write_sectors == pytest.approx(partials + blocks, rel=0.03)
    assert merge.read_sectors == pytest.approx(partials + len(LENS) * 8, rel=0.15)
    assert merge.write_sectors == pytest.approx(len(LENS) * 8 * (2 * head_dim // 32 + 1), rel=0.03)
    total = sum(c.read_sectors + c.write_sectors for c in (split, merge))
    expected = kv_bytes // 32 + table + q + 2 * partials + blocks + len(LENS) * 8 * (2 + 2 * head_dim // 32)
    assert total == pytest.approx(expected, rel=0.03)
    assert split.unique_read_bytes["k_cache"] + split.unique_read_bytes["v_cache"] == kv_bytes
