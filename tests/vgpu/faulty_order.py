"""Faulty kernels that order memory wrongly: flags without release or acquire, wrong scopes, readers not awaited."""

from __future__ import annotations

import torch
from vgpu_pairs import Pair, ints

from pagedtune.harness.vgpu.report import FaultKind as F
from pagedtune.kernels.slot import Access

OUT, INOUT = Access.OUT, Access.INOUT
SHARED = ".shared .align 16 .b8 s[1024];"


def out():
    return {"o": (torch.empty(64, dtype=torch.int32), OUT)}


def shared_readers():
    return {"o": (torch.empty(96, dtype=torch.int32), OUT)}


def global_cells():
    return {
        "c": (ints(0, 0, 0), INOUT),
        "x": (ints(3), INOUT),
        "o": (torch.empty(3, dtype=torch.int32), OUT),
    }


def counted():
    return {"c": (ints(0), INOUT)}


def handed():
    return {
        "c": (ints(0), INOUT),
        "w": torch.empty(1, dtype=torch.int32),
        "o": (torch.empty(2, dtype=torch.int32), OUT),
    }


# Lane 0 of warp 1 puts a value into s[0] and raises the flag s[4]; all of warp 0 polls the flag, then reads the value.
FLAG = """mov.u32 %r3, s;
mov.u32 %r1, 0;
setp.eq.u32 %p1, %r60, 0;
@%p1 st.shared.u32 [%r3+4], 0;
bar.sync 0;
setp.lt.u32 %p2, %r60, 32;
@%p2 bra POLL;
setp.ne.u32 %p3, %r60, 32;
@%p3 bra DONE;
st.shared.u32 [%r3], 7;
{release}
bra DONE;
POLL:
{poll}
setp.eq.u32 %p4, %r5, 0;
@%p4 bra POLL;
{acquire}
ld.shared.u32 %r1, [%r3]; {mark}
DONE:
bar.warp.sync -1;
mul.wide.u32 %rd10, %r60, 4;
add.s64 %rd12, %rd0, %rd10;
st.global.u32 [%rd12], %r1;
"""
RELEASE, ACQUIRE = "st.release.cta.shared.u32 [%r3+4], 1;", "ld.acquire.cta.shared.u32 %r5, [%r3+4];"
RAISE, LOOK = "st.volatile.shared.u32 [%r3+4], 1;", "ld.volatile.shared.u32 %r5, [%r3+4];"
FENCE = "membar.cta;"
# Both warps leave a value in s and count up; the one that counts last reads the other's value.
LAST = """mov.u32 %r3, s;
mov.u32 %r1, 0;
setp.eq.u32 %p1, %r60, 0;
@%p1 st.shared.u32 [%r3+64], 0;
bar.sync 0;
and.b32 %r4, %r60, 31;
setp.ne.u32 %p2, %r4, 0;
@%p2 bra DONE;
shr.u32 %r5, %r60, 3;
add.s32 %r6, %r3, %r5;
st.shared.u32 [%r6], %r60;
{count}
setp.ne.u32 %p3, %r7, 1;
@%p3 bra DONE;
xor.b32 %r8, %r5, 4;
add.s32 %r6, %r3, %r8;
ld.shared.u32 %r1, [%r6]; {mark}
DONE:
bar.warp.sync -1;
mov.u32 %r1, 0;
mul.wide.u32 %rd10, %r60, 4;
add.s64 %rd12, %rd0, %rd10;
st.global.u32 [%rd12], %r1;
"""
# Warps 0 and 1 read s[0]; warp 2 overwrites it after it has met those that it waits for.
READERS = """mov.u32 %r3, s;
setp.eq.u32 %p1, %r60, 0;
@%p1 st.shared.u32 [%r3], 5;
bar.sync 0;
mov.u32 %r1, 0;
shr.u32 %r4, %r60, 5;
setp.eq.u32 %p2, %r4, 2;
@%p2 bra WRITER;
ld.shared.u32 %r1, [%r3];
add.s32 %r5, %r4, 1;
{arrive}
bra DONE;
WRITER:
bar.sync 1, 64;
{second}
setp.eq.u32 %p3, %r60, 64;
@%p3 st.shared.u32 [%r3], 9; {mark}
DONE:
bar.warp.sync -1;
mul.wide.u32 %rd10, %r60, 4;
add.s64 %rd12, %rd0, %rd10;
st.global.u32 [%rd12], %r1;
"""
# Blocks 0 and 1 read x and then count up; block 2 overwrites x when the counters that it looks at are up.
GLOBAL_READERS = """mul.wide.u32 %rd10, %r61, 4;
add.s64 %rd11, %rd0, %rd10;
add.s64 %rd12, %rd2, %rd10;
setp.ne.u32 %p1, %r60, 0;
@%p1 bra DONE;
setp.eq.u32 %p2, %r61, 2;
@%p2 bra WRITER;
ld.global.u32 %r1, [%rd1];
red.release.gpu.global.add.u32 [%rd11], 1;
bra STORE;
WRITER:
{wait}
st.global.u32 [%rd1], 4; {mark}
mov.u32 %r1, 0;
STORE:
st.global.u32 [%rd12], %r1;
DONE:
"""


def wait_for(block: int) -> str:
    """Polls the counter of a block."""
    address = f"[%rd0+{4 * block}]"
    return f"W{block}:\nld.acquire.gpu.global.u32 %r5, {address};\nsetp.eq.u32 %p3, %r5, 0;\n@%p3 bra W{block};"


# Thread 0 of block 1 writes w and raises a flag; thread 0 of block 0 waits for the flag and reads w.
SCOPE = """setp.ne.u32 %p1, %r60, 0;
@%p1 bra DONE;
mul.wide.u32 %rd10, %r61, 4;
add.s64 %rd12, %rd2, %rd10;
mov.u32 %r1, 1;
setp.eq.u32 %p2, %r61, 0;
@%p2 bra POLL;
st.global.u32 [%rd1], 7;
{release}
bra STORE;
POLL:
{poll}
setp.eq.u32 %p3, %r5, 0;
@%p3 bra POLL;
{acquire}
ld.global.u32 %r1, [%rd1]; {mark}
STORE:
st.global.u32 [%rd12], %r1;
DONE:
"""


def scope(scope: str, mark: str = "") -> str:
    return SCOPE.format(
        release=f"st.release.{scope}.global.u32 [%rd0], 1;",
        poll=f"ld.acquire.{scope}.global.u32 %r5, [%rd0];",
        acquire="",
        mark=mark,
    )


def fences(scope: str, mark: str = "") -> str:
    return SCOPE.format(
        release=f"fence.acq_rel.{scope};\nst.relaxed.gpu.global.u32 [%rd0], 1;",
        poll="ld.relaxed.gpu.global.u32 %r5, [%rd0];",
        acquire=f"fence.acq_rel.{scope};",
        mark=mark,
    )


# Blocks count up, each with an instruction of its own.
TWO_SCOPES = """setp.eq.u32 %p1, %r61, 0;
@%p1 red.relaxed.gpu.global.add.u32 [%rd0], 1; {mark}
@!%p1 red.relaxed.{narrow}.global.add.u32 [%rd0], 1; {mark}
"""
MARKED = "// FAULT"
PAIRS = {
    "shared flag raised without release": Pair(
        F.RACE_SHARED,
        FLAG.format(release=RAISE, poll=ACQUIRE, acquire="", mark=MARKED),
        FLAG.format(release=RELEASE, poll=ACQUIRE, acquire="", mark=""),
        out,
        SHARED,
        block=64,
        says="clashes with",
    ),
    "shared flag seen without acquire": Pair(
        F.RACE_SHARED,
        FLAG.format(release=RELEASE, poll=LOOK, acquire="", mark=MARKED),
        FLAG.format(release=RELEASE, poll=LOOK, acquire="fence.acq_rel.cta;", mark=""),
        out,
        SHARED,
        block=64,
    ),
    "fence on one side of a shared flag only": Pair(
        F.RACE_SHARED,
        FLAG.format(release=RAISE, poll=LOOK, acquire=FENCE, mark=MARKED),
        FLAG.format(release=f"{FENCE}\n{RAISE}", poll=LOOK, acquire=FENCE, mark=""),
        out,
        SHARED,
        block=64,
    ),
    "shared counter that orders nothing": Pair(
        F.RACE_SHARED,
        LAST.format(count="atom.relaxed.cta.shared.add.u32 %r7, [%r3+64], 1;", mark=MARKED),
        LAST.format(count="atom.acq_rel.cta.shared.add.u32 %r7, [%r3+64], 1;", mark=""),
        out,
        SHARED,
        block=64,
    ),
    "writer that awaits one of two warps that read": Pair(
        F.RACE_SHARED,
        READERS.format(arrive="setp.eq.u32 %p4, %r4, 0;\n@%p4 bar.arrive 1, 64;", second="", mark=MARKED).replace(
            "ld.shared.u32 %r1, [%r3];", "ld.shared.u32 %r1, [%r3]; // FAULT"
        ),
        READERS.format(arrive="bar.arrive %r5, 64;", second="bar.sync 2, 64;", mark=""),
        shared_readers,
        SHARED,
        block=96,
    ),
    "writer that awaits the first of two blocks that read": Pair(
        F.RACE_GLOBAL,
        GLOBAL_READERS.format(wait=wait_for(0), mark=MARKED).replace(
            "ld.global.u32 %r1, [%rd1];", "ld.global.u32 %r1, [%rd1]; // FAULT"
        ),
        GLOBAL_READERS.format(wait=f"{wait_for(0)}\n{wait_for(1)}", mark=""),
        global_cells,
        grid=3,
    ),
    "writer that awaits the second of two blocks that read": Pair(
        F.RACE_GLOBAL,
        GLOBAL_READERS.format(wait=wait_for(1), mark=MARKED).replace(
            "ld.global.u32 %r1, [%rd1];", "ld.global.u32 %r1, [%rd1]; // FAULT"
        ),
        GLOBAL_READERS.format(wait=f"{wait_for(1)}\n{wait_for(0)}", mark=""),
        global_cells,
        grid=3,
    ),
    "release and acquire of block scope between blocks": Pair(
        F.RACE_GLOBAL, scope("cta", MARKED), scope("gpu"), handed, grid=2
    ),
    "fences of block scope between blocks": Pair(F.RACE_GLOBAL, fences("cta", MARKED), fences("gpu"), handed, grid=2),
    # A launch without clusters: each block is a cluster of its own.
    "release and acquire of cluster scope between blocks": Pair(
        F.RACE_GLOBAL, scope("cluster", MARKED), scope("gpu"), handed, grid=2
    ),
    "fences of cluster scope between blocks": Pair(
        F.RACE_GLOBAL, fences("cluster", MARKED), fences("gpu"), handed, grid=2
    ),
    "atomics of block scope between blocks": Pair(
        F.RACE_GLOBAL,
        "red.relaxed.cta.global.add.u32 [%rd0], 1; // FAULT\n",
        "red.relaxed.gpu.global.add.u32 [%rd0], 1;\n",
        counted,
        grid=2,
    ),
    "atomics of two scopes between blocks": Pair(
        F.RACE_GLOBAL,
        TWO_SCOPES.format(narrow="cta", mark=MARKED),
        TWO_SCOPES.format(narrow="gpu", mark=""),
        counted,
        grid=2,
    ),
}
