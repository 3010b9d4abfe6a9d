"""Faulty kernels with asynchronous copies, and their corrected twins."""

from __future__ import annotations

import torch
from vgpu_pairs import Pair

from pagedtune.harness.vgpu.report import FaultKind as F
from pagedtune.kernels.slot import Access

IN, OUT = Access.IN, Access.OUT
SHARED = ".shared .align 16 .b8 s[1024];"


def copy(n: int = 64):
    return lambda: {"x": (torch.arange(4 * n, dtype=torch.int32), IN), "o": (torch.empty(n, dtype=torch.int32), OUT)}


def scratch():
    return {"w": torch.empty(64, dtype=torch.int32), "o": (torch.empty(64, dtype=torch.int32), OUT)}


STORE_OUT = "mul.wide.u32 %rd10, %r60, 4;\nadd.s64 %rd12, %rd{n}, %rd10;\nst.global.u32 [%rd12], %r1;\n"
ASYNC = """mov.u32 %r3, s;
shl.b32 %r2, %r60, 4;
add.s32 %r4, %r3, %r2;
xor.b32 %r5, %r4, {other};
mul.wide.u32 %rd10, %r60, 16;
add.s64 %rd11, %rd0, %rd10;
cp.async.cg.shared.global [%r4], [%rd11], 16;
cp.async.commit_group;
{second}
{wait}
ld.shared.u32 %r1, [%r5]; {mark}
{after}
""" + STORE_OUT.format(n=1)
WAIT, BOTH = "cp.async.wait_group 0;", "cp.async.wait_group 0;\nbar.sync 0;"
SECOND = "cp.async.cg.shared.global [%r4+1024], [%rd11], 16;\ncp.async.commit_group;"

# Each thread copies what it has written; the other warp overwrites it once the copy is under way.
SOURCE = """mov.u32 %r3, s;
shl.b32 %r2, %r60, 2;
add.s32 %r4, %r3, %r2;
mul.wide.u32 %rd10, %r60, 4;
xor.b64 %rd13, %rd10, 128;
add.s64 %rd11, %rd0, %rd10;
add.s64 %rd14, %rd0, %rd13;
st.global.u32 [%rd11], 1;
cp.async.ca.shared.global [%r4], [%rd11], 4; {mark}
{first}
bar.sync 0;
st.global.u32 [%rd14], 2; {mark}
{second}
ld.shared.u32 %r1, [%r4];
""" + STORE_OUT.format(n=1)

PAIRS = {
    "source overwritten before the wait": Pair(
        F.RACE_GLOBAL,
        SOURCE.format(first="", second="cp.async.wait_all;", mark="// FAULT"),
        SOURCE.format(first="cp.async.wait_all;", second="", mark=""),
        scratch,
        SHARED,
        block=64,
    ),
    "copy of more bytes than its destination takes": Pair(
        F.OUT_OF_BOUNDS,
        ASYNC.format(other=0, second="", wait=WAIT, mark="", after="")
        .replace("], 16;", "], 16, %r9; // FAULT")
        .replace("mov.u32 %r3, s;", "mov.u32 %r3, s;\nmov.u32 %r9, 20;"),
        ASYNC.format(other=0, second="", wait=WAIT, mark="", after="")
        .replace("], 16;", "], 16, %r9;")
        .replace("mov.u32 %r3, s;", "mov.u32 %r3, s;\nmov.u32 %r9, 12;"),
        copy(32),
        SHARED,
    ),
    "asynchronous copy read before its wait": Pair(
        F.ASYNC_UNWAITED,
        ASYNC.format(other=0, second="", wait="", mark="// FAULT", after=""),
        ASYNC.format(other=0, second="", wait=WAIT, mark="", after=""),
        copy(32),
        SHARED,
    ),
    "wait that leaves the last group in flight": Pair(
        F.ASYNC_UNWAITED,
        ASYNC.format(other=0, second=SECOND, wait="cp.async.wait_group 2;", mark="// FAULT", after=WAIT),
        ASYNC.format(other=0, second=SECOND, wait="cp.async.wait_group 1;", mark="", after=WAIT),
        copy(32),
        ".shared .align 16 .b8 s[2048];",
    ),
    "copy of another thread without a barrier": Pair(
        F.RACE_SHARED,
        ASYNC.format(other=512, second="", wait=WAIT, mark="// FAULT", after=""),
        ASYNC.format(other=512, second="", wait=BOTH, mark="", after=""),
        copy(64),
        SHARED,
        block=64,
        also=(F.ASYNC_UNWAITED,),
    ),
    "copy left out by a predicate that nobody has set": Pair(
        F.UNINITIALISED_ADDRESS,
        ASYNC.format(other=0, second="", wait=WAIT, mark="", after="").replace("], 16;", "], 16, %p9; // FAULT"),
        ASYNC.format(other=0, second="", wait=WAIT, mark="", after="").replace(
            "cp.async.cg.shared.global [%r4], [%rd11], 16;",
            "setp.eq.u32 %p9, %r60, 3;\ncp.async.cg.shared.global [%r4], [%rd11], 16, %p9;",
        ),
        copy(32),
        SHARED,
    ),
    "destination overwritten in flight": Pair(
        F.ASYNC_UNWAITED,
        ASYNC.format(other=0, second="st.shared.u32 [%r4], 5; // FAULT", wait=WAIT, mark="", after=""),
        ASYNC.format(other=0, second="", wait=WAIT, mark="", after="st.shared.u32 [%r4], 5;"),
        copy(32),
        SHARED,
    ),
}
