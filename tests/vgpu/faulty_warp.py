"""Faulty kernels whose lanes meet wrongly: masks that leave lanes out, lanes that have exited; with corrected twins."""

from __future__ import annotations

import torch
from vgpu_pairs import Pair

from pagedtune.harness.vgpu.report import FaultKind as F
from pagedtune.kernels.slot import Access

OUT = Access.OUT
SHARED = ".shared .align 16 .b8 s[1024];"


def out():
    return {"o": (torch.empty(32, dtype=torch.int32), OUT)}


STORE_OUT = "mul.wide.u32 %rd10, %r60, 4;\nadd.s64 %rd12, %rd0, %rd10;\nst.global.u32 [%rd12], %r1;\n"
HALVES = "setp.lt.u32 %p1, %r60, 16;\nselp.b32 %r2, 0xffff, 0xffff0000, %p1;\n"
# Each lane reads what another one has written: lane ^ DISTANCE.
EXCHANGE = (
    HALVES
    + """mov.u32 %r3, s;
shl.b32 %r4, %r60, 2;
add.s32 %r5, %r3, %r4;
xor.b32 %r6, %r4, {distance};
add.s32 %r6, %r3, %r6;
st.shared.u32 [%r5], %r60;
{sync}
ld.shared.u32 %r1, [%r6]; {mark}
{after}
"""
    + STORE_OUT
)
# Lanes from 16 on leave; the rest meet in an instruction for the whole warp.
LEAVE = """mov.u32 %r3, s;
mov.u32 %r1, 0;
mov.f32 %f1, 0f00000000;
shl.b32 %r4, %r60, 2;
add.s32 %r4, %r3, %r4;
st.shared.u32 [%r4], 0;
shl.b32 %r5, %r60, 4;
and.b32 %r5, %r5, 112;
add.s32 %r5, %r3, %r5;
bar.warp.sync -1;
setp.ge.u32 %p1, %r60, 16;
{before}
{instruction}
{behind}
"""
WHOLE_WARP = {
    "mma": "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
    "{%f2, %f3, %f4, %f5}, {%r1, %r1}, {%r1}, {%f1, %f1, %f1, %f1};",
    "ldmatrix": "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%r5];",
    "stmatrix": "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r5], {%r1};",
    "movmatrix": "movmatrix.sync.aligned.m8n8.trans.b16 %r6, %r1;",
}

PAIRS = {
    **{
        f"{name} after lanes have exited": Pair(
            F.DIVERGENT_SYNC,
            LEAVE.format(before=STORE_OUT + "@%p1 exit;", instruction=f"{text} // FAULT", behind=""),
            LEAVE.format(before="", instruction=text, behind=STORE_OUT + "@%p1 exit;"),
            out,
            SHARED,
        )
        for name, text in WHOLE_WARP.items()
    },
    "__syncwarp of half a warp in front of a read from the other half": Pair(
        F.RACE_SHARED,
        EXCHANGE.format(distance=64, sync="bar.warp.sync %r2;", mark="// FAULT", after=""),
        EXCHANGE.format(distance=64, sync="bar.warp.sync -1;", mark="", after=""),
        out,
        SHARED,
    ),
    "overwritten after a __syncwarp with other lanes than the reader": Pair(
        F.RACE_SHARED,
        EXCHANGE.format(
            distance=64, sync="bar.warp.sync -1;", mark="", after="bar.warp.sync %r2;\nst.shared.u32 [%r5], 5; // FAULT"
        ),
        EXCHANGE.format(
            distance=32, sync="bar.warp.sync %r2;", mark="", after="bar.warp.sync %r2;\nst.shared.u32 [%r5], 5;"
        ),
        out,
        SHARED,
    ),
    "__syncwarp by a lane that its mask leaves out": Pair(
        F.DIVERGENT_SYNC,
        EXCHANGE.format(distance=4, sync="bar.warp.sync 0xffff; // FAULT", mark="", after=""),
        EXCHANGE.format(distance=4, sync="bar.warp.sync %r2;", mark="", after=""),
        out,
        SHARED,
    ),
    "__syncwarp with a mask that nobody has set": Pair(
        F.UNINITIALISED_OPERAND,
        EXCHANGE.format(distance=4, sync="bar.warp.sync %r40; // FAULT", mark="", after=""),
        EXCHANGE.format(distance=4, sync="bar.warp.sync %r2;", mark="", after=""),
        out,
        SHARED,
    ),
    "lanes that name each other in one direction only": Pair(
        F.DIVERGENT_SYNC,
        HALVES.replace("0xffff0000", "0xffffffff") + "redux.sync.add.u32 %r1, %r60, %r2; // FAULT\n" + STORE_OUT,
        HALVES + "redux.sync.add.u32 %r1, %r60, %r2;\n" + STORE_OUT,
        out,
    ),
    "shuffle from the other half of a warp": Pair(
        F.UNINITIALISED_OUTPUT,
        HALVES + "shfl.sync.idx.b32 %r1, %r60, 3, 31, %r2;\n" + STORE_OUT.replace("%r1;", "%r1; // FAULT"),
        HALVES + "shfl.sync.idx.b32 %r1, %r60, 3, 4127, %r2;\n" + STORE_OUT,  # segments of 16 lanes
        out,
    ),
    "lanes of one warp at different barriers": Pair(
        F.BARRIER_MISUSE,
        "mov.u32 %r1, 0;\nshr.u32 %r2, %r60, 4;\nbar.sync %r2; // FAULT\n" + STORE_OUT,
        "mov.u32 %r1, 0;\nshr.u32 %r2, %r60, 5;\nbar.sync %r2;\n" + STORE_OUT,
        out,
    ),
    "barrier whose number nobody has set": Pair(
        F.UNINITIALISED_OPERAND,
        "mov.u32 %r1, 0;\nbar.sync %r40; // FAULT\n" + STORE_OUT,
        "mov.u32 %r1, 0;\nmov.u32 %r40, 3;\nbar.sync %r40;\n" + STORE_OUT,
        out,
    ),
}
