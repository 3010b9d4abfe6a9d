"""Faulty kernels that race on shared memory, with corrected twins: lockstep order hides every one of them."""

from __future__ import annotations

import torch
from vgpu_pairs import Pair

from pagedtune.harness.vgpu.report import FaultKind as F
from pagedtune.kernels.slot import Access

OUT = Access.OUT
SHARED = ".shared .align 16 .b8 s[1024];"


def out(n: int = 64):
    return lambda: {"o": (torch.empty(n, dtype=torch.int32), OUT)}


# r4 = &s[tid], r6 = &s[tid ^ 32]: the same place of the other warp; r7 = &s[tid ^ 1]
PLACES = """mov.u32 %r3, s;
shl.b32 %r2, %r60, 2;
add.s32 %r4, %r3, %r2;
xor.b32 %r5, %r2, 128;
add.s32 %r6, %r3, %r5;
xor.b32 %r5, %r2, 4;
add.s32 %r7, %r3, %r5;
"""
STORE_OUT = "mul.wide.u32 %rd10, %r60, 4;\nadd.s64 %rd12, %rd{n}, %rd10;\nst.global.u32 [%rd12], %r1;\n"
EXCHANGE = PLACES + "st.shared.u32 [%r4], %r60;\n{sync}\nld.shared.u32 %r1, [{from_}]; {mark}\n" + STORE_OUT.format(n=0)
REUSE = (
    PLACES
    + "st.shared.u32 [%r4], %r60;\nbar.sync 0;\nld.shared.u32 %r1, [%r6];\n{sync}\nst.shared.u32 [%r4], %r1; {mark}\n"
    + STORE_OUT.format(n=0)
)

PAIRS = {
    "no barrier between write and read": Pair(
        F.RACE_SHARED,
        EXCHANGE.format(sync="", from_="%r6", mark="// FAULT"),
        EXCHANGE.format(sync="bar.sync 0;", from_="%r6", mark=""),
        out(),
        SHARED,
        block=64,
        says="clashes with",
    ),
    "no barrier between read and overwrite": Pair(
        F.RACE_SHARED,
        REUSE.format(sync="", mark="// FAULT"),
        REUSE.format(sync="bar.sync 0;", mark=""),
        out(),
        SHARED,
        block=64,
    ),
    "two threads write different values": Pair(
        F.RACE_SHARED,
        PLACES
        + "and.b32 %r8, %r4, -256;\nst.shared.u32 [%r3], %r60; // FAULT\nmov.u32 %r1, 0;\n"
        + STORE_OUT.format(n=0),
        PLACES + "st.shared.u32 [%r3], 7;\nmov.u32 %r1, 0;\n" + STORE_OUT.format(n=0),
        out(),
        SHARED,
        block=64,
    ),
    "lanes of one warp without __syncwarp": Pair(
        F.RACE_SHARED,
        EXCHANGE.format(sync="", from_="%r7", mark="// FAULT"),
        EXCHANGE.format(sync="bar.warp.sync -1;", from_="%r7", mark=""),
        out(32),
        SHARED,
    ),
    "__syncwarp where a block barrier is needed": Pair(
        F.RACE_SHARED,
        EXCHANGE.format(sync="bar.warp.sync -1;", from_="%r6", mark="// FAULT"),
        EXCHANGE.format(sync="bar.sync 0;", from_="%r6", mark=""),
        out(),
        SHARED,
        block=64,
    ),
    "named barriers of different ids": Pair(
        F.RACE_SHARED,
        EXCHANGE.format(
            sync="shr.u32 %r8, %r60, 6;\nadd.s32 %r8, %r8, 1;\nbar.sync %r8, 64;", from_="%r9", mark="// FAULT"
        ).replace("xor.b32 %r5, %r2, 4;", "xor.b32 %r5, %r2, 256;\nadd.s32 %r9, %r3, %r5;\nxor.b32 %r5, %r2, 4;"),
        EXCHANGE.format(sync="bar.sync 1, 128;", from_="%r9", mark="").replace(
            "xor.b32 %r5, %r2, 4;", "xor.b32 %r5, %r2, 256;\nadd.s32 %r9, %r3, %r5;\nxor.b32 %r5, %r2, 4;"
        ),
        out(128),
        SHARED,
        block=128,
    ),
}
