"""Faulty kernels that synchronise wrongly, with corrected twins: races that lockstep hides, barriers, copies."""

from __future__ import annotations

import pytest
import torch
from vgpu_pairs import Pair, check_pair, ints

from pagedtune.harness.vgpu.report import FaultKind as F
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpuOptions
from pagedtune.kernels.slot import Access

IN, OUT, INOUT = Access.IN, Access.OUT, Access.INOUT
SHARED = ".shared .align 16 .b8 s[1024];"
LIMIT = VirtualGpuOptions(num_threads=1, max_warp_instructions=20_000)


def out(n: int = 64):
    return lambda: {"o": (torch.empty(n, dtype=torch.int32), OUT)}


def copy(n: int = 64):
    return lambda: {"x": (torch.arange(4 * n, dtype=torch.int32), IN), "o": (torch.empty(n, dtype=torch.int32), OUT)}


def counter():
    return {
        "c": (ints(0), INOUT),
        "w": torch.empty(64, dtype=torch.int32),
        "o": (torch.empty(64, dtype=torch.int32), OUT),
    }


def flags(*values: int):
    return lambda: {"c": (ints(*values), INOUT), "o": (torch.empty(1, dtype=torch.int32), OUT)}


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
POLL = "ld.relaxed.gpu.global.u32 %r8, [%rd0];"
SPIN_SHARED = """mov.u32 %r3, s;
setp.eq.u32 %p1, %r60, 0;
@%p1 st.shared.u32 [%r3], 0;
bar.sync 0;
setp.lt.u32 %p2, %r60, 32;
@%p2 bra WAITERS;
{signal}
bra DONE;
WAITERS:
ld.volatile.shared.u32 %r1, [%r3]; // FAULT
setp.eq.u32 %p3, %r1, 0;
@%p3 bra WAITERS; // FAULT
DONE:
mov.u32 %r1, 1;
"""
SIGNAL = "setp.eq.u32 %p4, %r60, 32;\n@%p4 st.volatile.shared.u32 [%r3], 1;"

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
    "barrier in a divergent branch": Pair(
        F.DIVERGENT_BARRIER,
        "mov.u32 %r1, 1;\nsetp.lt.u32 %p1, %r60, 16;\n@!%p1 bra L;\nbar.sync 0; // FAULT\nL:\n" + STORE_OUT.format(n=0),
        "mov.u32 %r1, 1;\nsetp.lt.u32 %p1, %r60, 16;\n@!%p1 bra L;\nL:\nbar.sync 0;\n" + STORE_OUT.format(n=0),
        out(),
        block=64,
    ),
    "barrier under a guard": Pair(
        F.DIVERGENT_BARRIER,
        "mov.u32 %r1, 1;\nsetp.lt.u32 %p1, %r60, 16;\n@%p1 bar.sync 0; // FAULT\n" + STORE_OUT.format(n=0),
        "mov.u32 %r1, 1;\nsetp.lt.u32 %p1, %r60, 64;\n@%p1 bar.sync 0;\n" + STORE_OUT.format(n=0),
        out(),
        block=64,
    ),
    "barrier count that is no multiple of a warp": Pair(
        F.BARRIER_MISUSE,
        "mov.u32 %r1, 1;\nbar.sync 1, 40; // FAULT\n" + STORE_OUT.format(n=0),
        "mov.u32 %r1, 1;\nbar.sync 1, 64;\n" + STORE_OUT.format(n=0),
        out(),
        block=64,
    ),
    "barrier with more threads than announced": Pair(
        F.DEADLOCK,
        "mov.u32 %r1, 1;\nbar.sync 1, 64; // FAULT\n" + STORE_OUT.format(n=0),
        "mov.u32 %r1, 1;\nbar.sync 1, 96;\n" + STORE_OUT.format(n=0),
        out(96),
        block=96,
    ),
    "one warp skips a counted barrier": Pair(
        F.DEADLOCK,
        "mov.u32 %r1, 1;\nsetp.lt.u32 %p1, %r60, 32;\n@%p1 bra L;\nbar.sync 1, 64; // FAULT\nL:\n"
        + STORE_OUT.format(n=0),
        "mov.u32 %r1, 1;\nsetp.lt.u32 %p1, %r60, 32;\n@%p1 bra M;\nbar.sync 1, 64;\nbra L;\nM:\nbar.arrive 1, 64;\nL:\n"
        + STORE_OUT.format(n=0),
        out(),
        block=64,
    ),
    "endless loop": Pair(
        F.ENDLESS_LOOP,
        "mov.u32 %r1, 0;\nL:\nadd.s32 %r1, %r1, 2;\nsetp.ne.s32 %p1, %r1, 5; // FAULT\n@%p1 bra L; // FAULT\n".replace(
            "add.s32 %r1, %r1, 2;", "add.s32 %r1, %r1, 2; // FAULT"
        )
        + STORE_OUT.format(n=0),
        "mov.u32 %r1, 0;\nL:\nadd.s32 %r1, %r1, 2;\nsetp.ne.s32 %p1, %r1, 6;\n@%p1 bra L;\n" + STORE_OUT.format(n=0),
        out(32),
        options=LIMIT,
    ),
    "flag that nobody sets": Pair(
        F.ENDLESS_LOOP,
        SPIN_SHARED.format(signal="").replace("setp.eq.u32 %p3, %r1, 0;", "setp.eq.u32 %p3, %r1, 0; // FAULT")
        + STORE_OUT.format(n=0),
        SPIN_SHARED.format(signal=SIGNAL) + STORE_OUT.format(n=0),
        out(),
        SHARED,
        block=64,
        options=LIMIT,
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
    "destination overwritten in flight": Pair(
        F.ASYNC_UNWAITED,
        ASYNC.format(other=0, second="st.shared.u32 [%r4], 5; // FAULT", wait=WAIT, mark="", after=""),
        ASYNC.format(other=0, second="", wait=WAIT, mark="", after="st.shared.u32 [%r4], 5;"),
        copy(32),
        SHARED,
    ),
    "shuffle that half of its members never reach": Pair(
        F.DIVERGENT_SYNC,
        "setp.lt.u32 %p1, %r60, 16;\nmov.u32 %r1, 0;\n@!%p1 bra L;\n"
        "shfl.sync.bfly.b32 %r1, %r60, 1, 31, -1; // FAULT\nL:\n"
        "bar.warp.sync -1;\n" + STORE_OUT.format(n=0),
        "setp.lt.u32 %p1, %r60, 16;\nmov.u32 %r1, 0;\n@!%p1 bra L;\nshfl.sync.bfly.b32 %r1, %r60, 1, 31, 0xffff;\nL:\n"
        "bar.warp.sync -1;\n" + STORE_OUT.format(n=0),
        out(32),
    ),
    "shuffle from a lane that is not a member": Pair(
        F.UNINITIALISED_OUTPUT,
        "setp.lt.u32 %p1, %r60, 16;\nmov.u32 %r1, 0;\n@!%p1 bra L;\nshfl.sync.idx.b32 %r1, %r60, 20, 31, 0xffff;\nL:\n"
        + STORE_OUT.format(n=0).replace("%r1;", "%r1; // FAULT"),
        "setp.lt.u32 %p1, %r60, 16;\nmov.u32 %r1, 0;\n@!%p1 bra L;\nshfl.sync.idx.b32 %r1, %r60, 2, 31, 0xffff;\nL:\n"
        + STORE_OUT.format(n=0),
        out(32),
    ),
    "trap": Pair(
        F.TRAP,
        "mov.u32 %r1, 0;\nsetp.eq.u32 %p1, %r60, 9;\n@%p1 trap; // FAULT\n" + STORE_OUT.format(n=0),
        "mov.u32 %r1, 0;\nsetp.eq.u32 %p1, %r60, 99;\n@%p1 trap;\n" + STORE_OUT.format(n=0),
        out(32),
    ),
    "blocks that wait for a block which never signals": Pair(
        F.ENDLESS_LOOP,
        "L:\nld.volatile.global.u32 %r1, [%rd0]; // FAULT\nsetp.lt.u32 %p1, %r1, 3; // FAULT\n@%p1 bra L; // FAULT\n"
        "setp.eq.u32 %p2, %r61, 0;\n@%p2 st.global.u32 [%rd1], %r1;\n",
        "red.global.add.u32 [%rd0], 1;\nL:\nld.volatile.global.u32 %r1, [%rd0];\n"
        "setp.lt.u32 %p1, %r1, 3;\n@%p1 bra L;\n"
        "setp.eq.u32 %p2, %r61, 0;\n@%p2 st.global.u32 [%rd1], %r1;\n",
        flags(0),
        block=1,
        grid=3,
        cooperative=True,
        options=LIMIT,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_synchronisation_fault_is_found_at_its_line_and_the_twin_is_clean(name: str) -> None:
    check_pair(PAIRS[name])
