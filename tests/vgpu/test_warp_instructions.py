"""Exchange between lanes, atomics, control flow, calls and module variables."""

from __future__ import annotations

import pytest
import torch
from vgpu_evaluate import ONE_THREAD, as_ints
from vgpu_pairs import ints, module

from pagedtune.harness.vgpu.run_ptx import run_ptx
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpuOptions
from pagedtune.kernels.slot import Access

IN, OUT, INOUT = Access.IN, Access.OUT, Access.INOUT
STORE = "mul.wide.u32 %rd10, %r60, 4;\nadd.s64 %rd12, %rd0, %rd10;\nst.global.u32 [%rd12], %r1;\n"


def run(body: str, threads: int = 32, prelude: str = "", options: VirtualGpuOptions = ONE_THREAD) -> list[int]:
    """What each thread leaves in %r1."""
    out = torch.zeros(threads, dtype=torch.int32)
    arguments = {"o": (out, OUT)}
    report = run_ptx(
        module(body + "\n" + STORE, arguments, prelude), "k", arguments, block=(threads, 1, 1), options=options
    )
    assert report.clean, [str(f) for f in report.faults]
    return as_ints(out)


def shuffled(mode: str, lane: int, b: int, width: int) -> tuple[int, bool]:
    """__shfl_*_sync of the CUDA manual: source lane within a segment of `width`, and whether it is in range."""
    segment = lane // width * width
    if mode == "idx":
        return segment + b % width, True
    source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b}[mode]
    inside = source >= segment if mode == "up" else source < segment + width
    return (source, True) if inside else (lane, False)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 16, 8])
@pytest.mark.parametrize("b", [0, 1, 5, 8])
def test_shuffles(mode: str, width: int, b: int) -> None:
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    body = f"""mul.lo.u32 %r2, %r60, 3;
shfl.sync.{mode}.b32 %r1|%p1, %r2, {b}, {c}, -1;
selp.u32 %r3, 1000, 0, %p1;
add.u32 %r1, %r1, %r3;"""
    expected = [3 * s + 1000 * ok for s, ok in (shuffled(mode, lane, b, width) for lane in range(32))]
    assert run(body) == expected


def test_votes_and_reductions() -> None:
    body = "setp.lt.u32 %p1, %r60, 5;\nvote.sync.ballot.b32 %r1, %p1, -1;"
    assert run(body) == [31] * 32
    assert run("setp.lt.u32 %p1, %r60, 5;\nvote.sync.any.pred %p2, %p1, -1;\nselp.u32 %r1, 1, 0, %p2;") == [1] * 32
    assert run("setp.lt.u32 %p1, %r60, 5;\nvote.sync.all.pred %p2, !%p1, -1;\nselp.u32 %r1, 1, 0, %p2;") == [0] * 32
    assert run("redux.sync.add.u32 %r1, %r60, -1;") == [496] * 32
    assert run("sub.s32 %r2, %r60, 9;\nredux.sync.min.s32 %r1, %r2, -1;") == [2**32 - 9] * 32
    assert run("and.b32 %r2, %r60, 1;\nmatch.any.sync.b32 %r1, %r2, -1;") == [0x55555555, 0xAAAAAAAA] * 16
    assert run("mov.u32 %r2, 7;\nmatch.all.sync.b32 %r1|%p1, %r2, -1;") == [2**32 - 1] * 32
    assert run("elect.sync %r2|%p1, -1;\nselp.u32 %r1, 1, 0, %p1;") == [1] + [0] * 31
    assert (
        run("mov.u32 %r1, 0;\nsetp.gt.u32 %p1, %r60, 27;\n@!%p1 bra L;\nbra M;\nL:\nactivemask.b32 %r1;\nM:")[:28]
        == [2**28 - 1] * 28
    )


HALVES = "setp.lt.u32 %p1, %r60, 16;\nselp.b32 %r2, 0xffff, 0xffff0000, %p1;\n"  # masks of the lower and upper lanes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("setp.ne.u32 %p2, %r60, 20;\nvote.sync.ballot.b32 %r1, %p2, %r2;", (0xFFFF, 0xFFEF0000)),
        ("setp.eq.u32 %p2, %r60, 20;\nvote.sync.any.pred %p3, %p2, %r2;\nselp.u32 %r1, 1, 0, %p3;", (0, 1)),
        ("redux.sync.max.u32 %r1, %r60, %r2;", (15, 31)),
        ("mov.u32 %r3, 1;\nmatch.any.sync.b32 %r1, %r3, %r2;", (0xFFFF, 0xFFFF0000)),
        ("mov.u32 %r3, %r2;\nmatch.all.sync.b32 %r1|%p2, %r3, %r2;", (0xFFFF, 0xFFFF0000)),
    ],
)
def test_lanes_of_different_masks_do_not_meet(text: str, expected: tuple[int, int]) -> None:
    low, high = expected
    assert run(HALVES + text) == [low] * 16 + [high] * 16


def test_each_set_of_lanes_elects_a_leader() -> None:
    got = run(HALVES + "elect.sync %r3|%p2, %r2;\nselp.u32 %r1, 100, 0, %p2;\nadd.u32 %r1, %r1, %r3;")
    assert got == [100] + [0] * 15 + [116] + [16] * 15


def test_divergent_loops_end_at_each_lanes_own_count() -> None:
    body = "mov.u32 %r1, 0;\nL:\nadd.u32 %r1, %r1, 1;\nsetp.lt.u32 %p1, %r1, %r60;\n@%p1 bra L;"
    assert run(body) == [max(1, lane) for lane in range(32)]


def test_lanes_of_one_warp_may_wait_for_each_other() -> None:
    """A lock that lane 31 opens: a schedule that always runs the lanes furthest behind would spin for ever."""
    body = """mov.u32 %r3, s;
setp.eq.u32 %p1, %r60, 0;
@%p1 st.shared.u32 [%r3], 0;
bar.warp.sync -1;
setp.eq.u32 %p2, %r60, 31;
@%p2 bra OPEN;
SPIN:
ld.volatile.shared.u32 %r1, [%r3];
setp.eq.u32 %p3, %r1, 0;
@%p3 bra SPIN;
bra DONE;
OPEN:
st.volatile.shared.u32 [%r3], 5;
mov.u32 %r1, 5;
DONE:"""
    assert run(body, prelude=".shared .align 4 .b8 s[4];") == [5] * 32


def test_a_switch_and_a_call_with_local_memory() -> None:
    function = """.func (.param .b32 result) square_plus(.param .b32 x, .param .b32 y) {
.reg .b32 %a<4>; .reg .pred %q<2>;
ld.param.b32 %a1, [x]; ld.param.b32 %a2, [y]; setp.gt.u32 %q1, %a1, 20;
@%q1 bra BIG;
mad.lo.s32 %a3, %a1, %a1, %a2; st.param.b32 [result], %a3; ret;
BIG: st.param.b32 [result], %a2; ret; }"""
    body = """{ .param .b32 p0; st.param.b32 [p0], %r60; .param .b32 p1; st.param.b32 [p1+0], 7; .param .b32 r0;
call.uni (r0), square_plus, (p0, p1);
ld.param.b32 %r1, [r0+0]; }
and.b32 %r2, %r60, 3;
TABLE: .branchtargets A, B, C, D;
brx.idx %r2, TABLE;
A: bra.uni E;
B: add.u32 %r1, %r1, 100; bra.uni E;
C: add.u32 %r1, %r1, 200; bra.uni E;
D: add.u32 %r1, %r1, 300;
E:"""
    assert run(body, prelude=function) == [(n * n if n <= 20 else 0) + 7 + 100 * (n % 4) for n in range(32)]


def test_module_variables_have_their_initial_values() -> None:
    prelude = ".global .align 4 .u32 table[4] = {3, 5, 7, 11};\n.const .align 4 .b32 one[1] = {1};"
    body = """and.b32 %r2, %r60, 3; mul.wide.u32 %rd5, %r2, 4; mov.u64 %rd6, table; add.s64 %rd7, %rd6, %rd5;
ld.global.u32 %r1, [%rd7]; ld.const.u32 %r4, [one]; add.u32 %r1, %r1, %r4;"""
    assert run(body, prelude=prelude) == [4, 6, 8, 12] * 8


ATOMICS = {
    "add.u32": (0, sum(range(256))),
    "min.s32": (9, 0),
    "max.u32": (9, 255),
    "or.b32": (0, 255),
    "and.b32": (0xFF00, 0),
    "xor.b32": (0, 0),
    "inc.u32": (0, 6),
}


@pytest.mark.parametrize("operation", ATOMICS)
@pytest.mark.parametrize("threads", [1, 2])
def test_atomics_of_many_blocks(operation: str, threads: int) -> None:
    start, expected = ATOMICS[operation]
    memory = ints(start)
    arguments = {"c": (memory, INOUT)}
    operand = "249" if operation == "inc.u32" else "%r3"  # 256 increments wrap at 249 and leave 6
    body = f"mad.lo.s32 %r3, %r61, 64, %r60;\natom.global.{operation} %r4, [%rd0], {operand};"
    options = VirtualGpuOptions(num_threads=threads)
    report = run_ptx(module(body, arguments), "k", arguments, (4, 1, 1), (64, 1, 1), options=options)
    assert report.clean, [str(f) for f in report.faults]
    assert as_ints(memory) == [expected]


def test_compare_and_swap_lock_counts_every_thread() -> None:
    memory = ints(0, 0)
    arguments = {"c": (memory, INOUT)}
    body = """TRY:
atom.global.acquire.gpu.cas.b32 %r3, [%rd0], 0, 1;
setp.ne.u32 %p1, %r3, 0;
@%p1 bra TRY;
ld.global.u32 %r4, [%rd0+4];
add.u32 %r4, %r4, 1;
st.global.u32 [%rd0+4], %r4;
atom.global.release.gpu.exch.b32 %r5, [%rd0], 0;"""
    options = VirtualGpuOptions(num_threads=2)
    report = run_ptx(module(body, arguments), "k", arguments, (2, 1, 1), (64, 1, 1), options=options)
    assert report.clean, [str(f) for f in report.faults]
    assert as_ints(memory) == [0, 128]


@pytest.mark.parametrize(("kind", "expected"), [("and", 0), ("or", 1)])
def test_barrier_reductions(kind: str, expected: int) -> None:
    body = f"setp.eq.u32 %p1, %r60, 40;\nbar.red.{kind}.pred %p2, 0, %p1;\nselp.u32 %r1, 1, 0, %p2;"
    assert run(body, 64) == [expected] * 64
    assert run("setp.lt.u32 %p1, %r60, 40;\nbar.red.popc.u32 %r1, 0, %p1;", 64) == [40] * 64
