"""Faulty kernels that touch memory wrongly, each with its corrected twin."""

from __future__ import annotations

import torch
from vgpu_pairs import Pair, ints

from pagedtune.harness.vgpu.report import FaultKind as F
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpuOptions
from pagedtune.kernels.slot import Access

IN, OUT, INOUT = Access.IN, Access.OUT, Access.INOUT


def copy32():
    return {"x": (torch.arange(32, dtype=torch.int32), IN), "o": (torch.empty(32, dtype=torch.int32), OUT)}


def scratch():
    return {"w": torch.empty(32, dtype=torch.int32), "o": (torch.empty(32, dtype=torch.int32), OUT)}


def rows():
    """A [8, 4] view of rows that are 6 apart."""
    x = torch.arange(48, dtype=torch.int32).view(8, 6)[:, :4]
    return {"x": (x, IN), "o": (torch.empty(32, dtype=torch.int32), OUT)}


# out[tid] = x[tid + shift] with the shift in bytes
COPY = """mul.wide.u32 %rd10, %r60, 4;
add.s64 %rd11, %rd0, %rd10;
add.s64 %rd12, %rd1, %rd10;
{load}
{store}
"""
LOAD, STORE = "ld.global.u32 %r1, [%rd11];", "st.global.u32 [%rd12], %r1;"
GOOD = COPY.format(load=LOAD, store=STORE)


def copy(load: str = LOAD, store: str = STORE) -> str:
    return COPY.format(load=load, store=store)


CARRY = "mov.u32 %r3, 0;\nadd.cc.u32 %r2, {low}, 1;\naddc.u32 %r1, %r3, 0;"
SHARED = ".shared .align 16 .b8 s[128];"
# s[tid] = tid; barrier; r1 = s[...]
SHARED_READ = """shl.b32 %r2, %r60, 2;
mov.u32 %r3, s;
add.s32 %r4, %r3, %r2;
st.shared.u32 [%r4], %r60;
bar.sync 0;
{read}
mul.wide.u32 %rd10, %r60, 4;
add.s64 %rd12, %rd1, %rd10;
st.global.u32 [%rd12], %r1;
"""
LOCAL = """.local .align 8 .b8 depot[16];
mov.u64 %rd20, depot;
st.local.u32 [%rd20], %r60;
{read}
mul.wide.u32 %rd10, %r60, 4;
add.s64 %rd12, %rd1, %rd10;
st.global.u32 [%rd12], %r1;
"""
GENERIC = """mov.u64 %rd20, s;
cvta.shared.u64 %rd21, %rd20;
mul.wide.u32 %rd10, %r60, 4;
add.s64 %rd22, %rd21, %rd10;
st.u32 [%rd22], %r60;
bar.sync 0;
{read}
add.s64 %rd12, %rd1, %rd10;
st.u32 [%rd12], %r1;
"""
ASYNC = """mov.u32 %r3, s;
mul.wide.u32 %rd10, %r60, 4;
add.s64 %rd11, %rd0, %rd10;
cvt.u32.u64 %r2, %rd10;
add.s32 %r4, %r3, %r2;
cp.async.ca.shared.global [%r4], [%rd11{offset}], 4; // FAULT
cp.async.wait_all;
"""
PAIRS = {
    "load past the end": Pair(
        F.OUT_OF_BOUNDS, copy(load="ld.global.u32 %r1, [%rd11+4]; // FAULT"), GOOD, copy32, says="past the end of x"
    ),
    "load before the start": Pair(
        F.OUT_OF_BOUNDS, copy(load="ld.global.u32 %r1, [%rd11+-4]; // FAULT"), GOOD, copy32, says="before x"
    ),
    "store past the end": Pair(
        F.OUT_OF_BOUNDS, copy(store="st.global.u32 [%rd12+4], %r1; // FAULT"), GOOD, copy32, says="past the end of o"
    ),
    "address cut to 32 bits": Pair(
        F.OUT_OF_BOUNDS,
        copy(load="cvt.u32.u64 %r5, %rd11; cvt.u64.u32 %rd11, %r5;\nld.global.u32 %r1, [%rd11]; // FAULT"),
        GOOD,
        copy32,
    ),
    "null pointer": Pair(
        F.OUT_OF_BOUNDS, copy(load="mov.u64 %rd11, 0;\nld.global.u32 %r1, [%rd11]; // FAULT"), GOOD, copy32
    ),
    "gap between rows": Pair(
        F.OUT_OF_BOUNDS,
        copy(load="ld.global.u32 %r1, [%rd11]; // FAULT"),
        "shr.u32 %r2, %r60, 2; and.b32 %r3, %r60, 3; mad.lo.s32 %r4, %r2, 6, %r3; mul.wide.u32 %rd13, %r4, 4;\n"
        + copy(load="add.s64 %rd11, %rd0, %rd13; ld.global.u32 %r1, [%rd11];"),
        rows,
        says="x+",
    ),
    "freed memory": Pair(
        F.USE_AFTER_FREE,
        copy(load="ld.global.u32 %r1, [%rd11]; // FAULT"),
        GOOD,
        copy32,
        options=VirtualGpuOptions(num_threads=1, freed=frozenset({"x"})),
    ),
    "shared past the end": Pair(
        F.OUT_OF_BOUNDS,
        SHARED_READ.format(read="ld.shared.u32 %r1, [%r4+4]; // FAULT"),
        SHARED_READ.format(read="ld.shared.u32 %r1, [%r4];"),
        copy32,
        SHARED,
        says="shared",
    ),
    "shared pointer without its base": Pair(
        F.OUT_OF_BOUNDS,
        SHARED_READ.format(read="ld.shared.u32 %r1, [%r2]; // FAULT"),
        SHARED_READ.format(read="ld.shared.u32 %r1, [%r4];"),
        copy32,
        SHARED,
    ),
    "local past the end": Pair(
        F.OUT_OF_BOUNDS,
        LOCAL.format(read="ld.local.u32 %r1, [%rd20+16]; // FAULT"),
        LOCAL.format(read="ld.local.u32 %r1, [%rd20];"),
        copy32,
        says="local",
    ),
    "generic address of shared memory": Pair(
        F.OUT_OF_BOUNDS,
        GENERIC.format(read="ld.u32 %r1, [%rd22+4]; // FAULT"),
        GENERIC.format(read="ld.u32 %r1, [%rd22];"),
        copy32,
        SHARED,
        says="shared",
    ),
    "misaligned vector": Pair(
        F.MISALIGNED,
        copy(load="ld.global.v2.u32 {%r1, %r2}, [%rd11]; // FAULT"),
        copy(
            load="and.b64 %rd11, %rd11, -8; ld.global.v2.u32 {%r2, %r3}, [%rd11]; and.b32 %r4, %r60, 1;"
            "setp.eq.u32 %p1, %r4, 0; selp.b32 %r1, %r2, %r3, %p1;"
        ),
        copy32,
        says="x+",
    ),
    "misaligned shared": Pair(
        F.MISALIGNED,
        SHARED_READ.format(read="ld.shared.u32 %r1, [%r4+2]; // FAULT"),
        SHARED_READ.format(read="ld.shared.u16 %h1, [%r4+2]; cvt.u32.u16 %r1, %h1;"),
        copy32,
        SHARED,
    ),
    "uninitialised workspace decides a branch": Pair(
        F.UNINITIALISED_BRANCH,
        "ld.global.u32 %r1, [%rd0];\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 bra L; // FAULT\nL:\n"
        + copy(load="mov.u32 %r1, 1;"),
        "mov.u32 %r1, 0;\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 bra L;\nL:\n" + copy(load="mov.u32 %r1, 1;"),
        scratch,
    ),
    "uninitialised shared memory makes an address": Pair(
        F.UNINITIALISED_ADDRESS,
        "ld.shared.u32 %r5, [s]; cvt.u64.u32 %rd20, %r5; add.s64 %rd0, %rd0, %rd20;\n"
        + copy(load="ld.global.u32 %r1, [%rd11]; // FAULT").replace("mul.wide", "mul.wide", 1),
        "st.shared.u32 [s], 0; bar.warp.sync -1; "
        "ld.shared.u32 %r5, [s]; cvt.u64.u32 %rd20, %r5; add.s64 %rd0, %rd0, %rd20;\n" + GOOD,
        copy32,
        SHARED,
    ),
    "uninitialised workspace reaches an output": Pair(
        F.UNINITIALISED_OUTPUT,
        copy(store="st.global.u32 [%rd12], %r1; // FAULT"),
        copy(load="mov.u32 %r1, 3;"),
        scratch,
    ),
    "register without a value": Pair(
        F.UNINITIALISED_OUTPUT,
        copy(load="", store="st.global.u32 [%rd12], %r1; // FAULT"),
        copy(load="mov.u32 %r1, 3;"),
        copy32,
    ),
    "carry out of an uninitialised sum": Pair(
        F.UNINITIALISED_OUTPUT,
        copy(load=CARRY.format(low="%r40"), store="st.global.u32 [%rd12], %r1; // FAULT"),
        copy(load=CARRY.format(low="%r60")),
        copy32,
    ),
    "one uninitialised byte of four": Pair(
        F.UNINITIALISED_OUTPUT,
        copy(
            load="ld.global.u32 %r1, [%rd11];",
            store="and.b32 %r1, %r1, 0xff0000ff;\nst.global.u32 [%rd12], %r1; // FAULT",
        ),
        copy(
            load="ld.global.u32 %r1, [%rd11];", store="and.b32 %r1, %r1, 0x00ffffff; st.global.u32 [%rd12], %r1;"
        ).replace("ld.global.u32 %r1, [%rd11];", "ld.global.u16 %r1, [%rd11];"),
        lambda: {"x": (torch.zeros(64, dtype=torch.int16), IN), "o": (torch.empty(32, dtype=torch.int32), OUT)},
        options=VirtualGpuOptions(num_threads=1, uninitialised={"x": torch.tensor([False, True] * 32)}),
    ),
    "store to an input": Pair(
        F.MUTATED_INPUT,
        copy(store="st.global.u32 [%rd12], %r1;\nst.global.u32 [%rd11], %r1; // FAULT"),
        GOOD,
        copy32,
        says="x+",
    ),
    "output not written by one thread": Pair(
        F.UNWRITTEN_OUTPUT,
        "setp.ne.u32 %p1, %r60, 5;\n" + copy(store="@%p1 st.global.u32 [%rd12], %r1;"),
        GOOD,
        copy32,
        says="1 of 32 elements of o",
    ),
    "counter that nobody has set to zero": Pair(
        F.UNINITIALISED_BRANCH,
        "atom.global.add.u32 %r1, [%rd0], 1;\nsetp.eq.u32 %p1, %r1, 31;\n@%p1 st.global.u32 [%rd1], %r1; // FAULT\n",
        "atom.global.add.u32 %r1, [%rd0], 1;\nsetp.eq.u32 %p1, %r1, 31;\n@%p1 st.global.u32 [%rd1], %r1;\n",
        lambda: {"w": torch.empty(1, dtype=torch.int32), "o": (torch.empty(1, dtype=torch.int32), OUT)},
        twin_arguments=lambda: {"w": (ints(0), INOUT), "o": (torch.empty(1, dtype=torch.int32), OUT)},
    ),
    "local variable that nobody has written": Pair(
        F.UNINITIALISED_OUTPUT,
        LOCAL.format(read="ld.local.u32 %r1, [%rd20+4];").replace("[%rd12], %r1;", "[%rd12], %r1; // FAULT"),
        LOCAL.format(read="ld.local.u32 %r1, [%rd20];"),
        copy32,
    ),
    "misaligned local": Pair(
        F.MISALIGNED,
        LOCAL.format(read="ld.local.u32 %r1, [%rd20+2]; // FAULT"),
        LOCAL.format(read="ld.local.u32 %r1, [%rd20];"),
        copy32,
        says="local",
    ),
    "atomic past the end": Pair(
        F.OUT_OF_BOUNDS,
        "mov.u32 %r1, 0;\nred.global.add.u32 [%rd0+128], 1; // FAULT\n" + copy(load=""),
        "mov.u32 %r1, 0;\nred.global.add.u32 [%rd0+124], 1;\n" + copy(load=""),
        lambda: {"x": (torch.zeros(32, dtype=torch.int32), INOUT), "o": (torch.empty(32, dtype=torch.int32), OUT)},
        says="past the end of x",
    ),
    "store to freed memory": Pair(
        F.USE_AFTER_FREE,
        copy(store="st.global.u32 [%rd12], %r1; // FAULT"),
        GOOD,
        copy32,
        options=VirtualGpuOptions(num_threads=1, freed=frozenset({"o"})),
    ),
    "asynchronous copy from past the end": Pair(
        F.OUT_OF_BOUNDS,
        ASYNC.format(offset="+4") + "\n" + copy(load="ld.shared.u32 %r1, [%r4];"),
        ASYNC.format(offset="").replace(" // FAULT", "") + "\n" + copy(load="ld.shared.u32 %r1, [%r4];"),
        copy32,
        SHARED,
        says="past the end of x",
    ),
    "store to constant memory": Pair(
        F.MUTATED_INPUT,
        "mov.u64 %rd20, table;\nmov.u32 %r1, 5;\nst.u32 [%rd20], %r1; // FAULT\n" + copy(load=""),
        "ld.const.u32 %r1, [table];\n" + copy(load=""),
        copy32,
        ".const .align 4 .u32 table[1] = {5};",
        says="table",
    ),
    "shuffle distance that nobody has set": Pair(
        F.UNINITIALISED_OPERAND,
        "shfl.sync.bfly.b32 %r1, %r60, %r20, 31, -1; // FAULT\n" + copy(load=""),
        "mov.u32 %r20, 1;\nshfl.sync.bfly.b32 %r1, %r60, %r20, 31, -1;\n" + copy(load=""),
        copy32,
    ),
    "member mask that nobody has set": Pair(
        F.UNINITIALISED_OPERAND,
        "redux.sync.add.u32 %r1, %r60, %r20; // FAULT\n" + copy(load=""),
        "mov.u32 %r20, -1;\nredux.sync.add.u32 %r1, %r60, %r20;\n" + copy(load=""),
        copy32,
    ),
}
