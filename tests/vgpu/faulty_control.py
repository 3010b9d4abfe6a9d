"""Faulty kernels that never end, or whose threads do not come together, with corrected twins."""

from __future__ import annotations

import torch
from vgpu_pairs import Pair, ints

from pagedtune.harness.vgpu.report import FaultKind as F
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpuOptions
from pagedtune.kernels.slot import Access

OUT, INOUT = Access.OUT, Access.INOUT
SHARED = ".shared .align 16 .b8 s[1024];"
LIMIT = VirtualGpuOptions(num_threads=1, max_warp_instructions=20_000)


def out(n: int = 64):
    return lambda: {"o": (torch.empty(n, dtype=torch.int32), OUT)}


def flags(*values: int):
    return lambda: {"c": (ints(*values), INOUT), "o": (torch.empty(1, dtype=torch.int32), OUT)}


STORE_OUT = "mul.wide.u32 %rd10, %r60, 4;\nadd.s64 %rd12, %rd{n}, %rd10;\nst.global.u32 [%rd12], %r1;\n"
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
    "breakpoint that was left in": Pair(
        F.TRAP,
        "mov.u32 %r1, 0;\nbrkpt; // FAULT\n" + STORE_OUT.format(n=0),
        "mov.u32 %r1, 0;\n" + STORE_OUT.format(n=0),
        out(32),
    ),
    "barrier vote on a predicate that nobody has set": Pair(
        F.UNINITIALISED_OPERAND,
        "bar.red.popc.u32 %r1, 0, %p9; // FAULT\n" + STORE_OUT.format(n=0),
        "setp.lt.u32 %p9, %r60, 7;\nbar.red.popc.u32 %r1, 0, %p9;\n" + STORE_OUT.format(n=0),
        out(),
        block=64,
    ),
}
