"""Faulty kernels that race on global memory, within a block and between blocks, with corrected twins."""

from __future__ import annotations

import torch
from vgpu_pairs import Pair, ints

from pagedtune.harness.vgpu.report import FaultKind as F
from pagedtune.kernels.slot import Access

OUT, INOUT = Access.OUT, Access.INOUT


def out(n: int = 64):
    return lambda: {"o": (torch.empty(n, dtype=torch.int32), OUT)}


def counter():
    return {
        "c": (ints(0), INOUT),
        "w": torch.empty(64, dtype=torch.int32),
        "o": (torch.empty(64, dtype=torch.int32), OUT),
    }


STORE_OUT = "mul.wide.u32 %rd10, %r60, 4;\nadd.s64 %rd12, %rd{n}, %rd10;\nst.global.u32 [%rd12], %r1;\n"
# Block 1 hands w[tid] to block 0 through a counter.
PASS = """mul.wide.u32 %rd10, %r60, 4;
add.s64 %rd11, %rd1, %rd10;
add.s64 %rd12, %rd2, %rd10;
setp.eq.u32 %p1, %r61, 0;
@%p1 bra CONSUMER;
st.global.u32 [%rd11], %r60;
{release}
bar.sync 0;
setp.eq.u32 %p2, %r60, 0;
@%p2 red.global.add.u32 [%rd0], 1;
bra DONE;
CONSUMER:
setp.ne.u32 %p2, %r60, 0;
@%p2 bra READY;
SPIN:
{poll}
setp.eq.u32 %p3, %r8, 0;
@%p3 bra SPIN;
READY:
{acquire}
bar.sync 0;
ld.global.u32 %r1, [%rd11]; {mark}
st.global.u32 [%rd12], %r1;
DONE:
"""
# Each thread reads back what it has just written, or what its neighbour has.
BACK = """mul.wide.u32 %rd10, %r60, 4;
xor.b64 %rd13, %rd10, {other};
add.s64 %rd11, %rd1, %rd10;
add.s64 %rd14, %rd1, %rd13;
st.global.u32 [%rd11], %r60;
bar.sync 0;
ld.global{nc}.u32 %r1, [%rd14]; {mark}
""" + STORE_OUT.format(n=2)
POLL = "ld.relaxed.gpu.global.u32 %r8, [%rd0];"

PAIRS = {
    "two blocks write one element": Pair(
        F.RACE_GLOBAL,
        "add.s32 %r1, %r60, %r61;\nmul.wide.u32 %rd10, %r60, 4;\n"
        "add.s64 %rd12, %rd0, %rd10;\nst.global.u32 [%rd12], %r1; // FAULT\n",
        "shl.b32 %r2, %r61, 5;\nadd.s32 %r1, %r60, %r2;\nmul.wide.u32 %rd10, %r1, 4;\nadd.s64 %rd12, %rd0, %rd10;\n"
        "st.global.u32 [%rd12], %r1;\n",
        out(64),
        grid=2,
        says="clashes with",
    ),
    "global memory between warps without a barrier": Pair(
        F.RACE_GLOBAL,
        "mul.wide.u32 %rd10, %r60, 4;\nxor.b64 %rd13, %rd10, 128;\n"
        "add.s64 %rd11, %rd1, %rd10;\nadd.s64 %rd14, %rd1, %rd13;\n"
        "st.global.u32 [%rd11], %r60;\nld.global.u32 %r1, [%rd14]; // FAULT\n" + STORE_OUT.format(n=2),
        "mul.wide.u32 %rd10, %r60, 4;\nxor.b64 %rd13, %rd10, 128;\n"
        "add.s64 %rd11, %rd1, %rd10;\nadd.s64 %rd14, %rd1, %rd13;\n"
        "st.global.u32 [%rd11], %r60;\nbar.sync 0;\nld.global.u32 %r1, [%rd14];\n" + STORE_OUT.format(n=2),
        counter,
        block=64,
    ),
    "own value read back through the read-only cache": Pair(
        F.RACE_GLOBAL,
        BACK.format(other=0, nc=".nc", mark="// FAULT"),
        BACK.format(other=0, nc="", mark=""),
        counter,
        block=64,
        says="clashes with",
    ),
    "value of this kernel read through the read-only cache, after a barrier": Pair(
        F.RACE_GLOBAL,
        BACK.format(other=128, nc=".nc", mark="// FAULT"),
        BACK.format(other=128, nc="", mark=""),
        counter,
        block=64,
    ),
    "hand-over between blocks without a fence": Pair(
        F.RACE_GLOBAL,
        PASS.format(release="", poll=POLL, acquire="", mark="// FAULT"),
        PASS.format(release="membar.gl;", poll=POLL, acquire="membar.gl;", mark=""),
        counter,
        block=64,
        grid=2,
    ),
    "hand-over that acquires but never releases": Pair(
        F.RACE_GLOBAL,
        PASS.format(release="", poll="ld.acquire.gpu.global.u32 %r8, [%rd0];", acquire="", mark="// FAULT"),
        PASS.format(release="fence.acq_rel.gpu;", poll="ld.acquire.gpu.global.u32 %r8, [%rd0];", acquire="", mark=""),
        counter,
        block=64,
        grid=2,
    ),
    "counter raised before the other warp has written": Pair(
        F.RACE_GLOBAL,
        PASS.format(release="membar.gl;", poll=POLL, acquire="membar.gl;", mark="// FAULT").replace(
            "bar.sync 0;", "", 1
        ),
        PASS.format(release="membar.gl;", poll=POLL, acquire="membar.gl;", mark=""),
        counter,
        block=64,
        grid=2,
    ),
}
