"""Exchange between lanes and threads, barriers and control, stated over whole warps and blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import vgpu_forms_float as flt
from vgpu_evaluate import BLOCK
from vgpu_forms import Bits, Form, Function

Whole = npt.NDArray[np.int64]


def groups(size: int, f: Callable[..., object]) -> Function:
    """`f` over [groups, size] arrays; the last group is filled up with the first row, as `evaluate` does."""

    def apply(*columns: Bits) -> Bits:
        n = len(columns[0])
        filled = [np.concatenate((c, np.full(-n % BLOCK, c[0], np.uint64))).reshape(-1, size) for c in columns]
        out = np.broadcast_to(np.asarray(f(*filled)), filled[0].shape)
        return out.astype(np.uint64).reshape(-1)[:n]

    return apply


def warp(f: Callable[..., object]) -> Function:
    return groups(32, f)


LANE = np.arange(32)


def source_lane(mode: str, b: Whole, c: int) -> tuple[Whole, npt.NDArray[np.bool_]]:
    """The manual's pseudocode of shfl: the lane to read, and whether it is in range."""
    bound, segment = c & 31, c >> 8 & 31
    top, bottom = (LANE & segment) | (bound & ~segment & 31), LANE & segment
    b = b & 31
    if mode == "up":
        j = LANE - b
        inside = j >= top
    else:
        j = {"down": LANE + b, "bfly": LANE ^ b, "idx": bottom | (b & ~segment & 31)}[mode]
        inside = j <= top
    return np.where(inside, j, LANE), inside


def shuffles() -> Iterator[Form]:
    for mode, size in itertools.product(("up", "down", "bfly", "idx"), (32, 16, 8)):
        c = (32 - size) << 8 | (0 if mode == "up" else 31)

        def f(a: Bits, b: Bits, mode: str = mode, c: int = c) -> object:
            j, inside = source_lane(mode, b.astype(np.int64), c)
            return np.take_along_axis(a, j, 1) ^ np.where(inside, 0, 0x80000000).astype(np.uint64)

        text = f"shfl.sync.{mode}.b32 %r3|%p1, {{0}}, {{1}}, {c}, -1;"
        text += " selp.u32 %r4, 0, 0x80000000, %p1; xor.b32 {d}, %r3, %r4;"
        yield Form(text, ("u32", "u32"), "u32", warp(f))


def votes() -> Iterator[Form]:
    odd = "and.b32 %r3, {0}, %s; setp.eq.u32 %p1, %r3, 0;"
    for mask in (1, 3, 0x80000000):
        p = lambda a, m=mask: a & np.uint64(m) == 0
        test = odd.replace("%s", str(mask))
        ballot = lambda a, p=p: (p(a) * (1 << LANE)).sum(1, keepdims=True)
        yield Form(f"{test} vote.sync.ballot.b32 {{d}}, %p1, -1;", ("u32",), "u32", warp(ballot))
        for mode, f in {"any": np.any, "all": np.all}.items():
            g = lambda a, p=p, f=f: f(p(a), 1, keepdims=True)
            text = f"{test} vote.sync.{mode}.pred %p2, %p1, -1; selp.u32 {{d}}, 1, 0, %p2;"
            yield Form(text, ("u32",), "u32", warp(g))
            text = text.replace("%p1, -1", "!%p1, -1")
            yield Form(text, ("u32",), "u32", warp(lambda a, p=p, f=f: f(~p(a), 1, keepdims=True)))
        uni = lambda a, p=p: p(a).all(1, keepdims=True) | ~p(a).any(1, keepdims=True)
        text = f"{test} vote.sync.uni.pred %p2, %p1, -1; selp.u32 {{d}}, 1, 0, %p2;"
        yield Form(text, ("u32",), "u32", warp(uni))
    same = lambda v: (v[:, :, None] == v[:, None, :]) @ (1 << LANE)
    for bits in (32, 64):
        text = f"and.b{bits} {{0}}, {{0}}, 3; match.any.sync.b{bits} {{d}}, {{0}}, -1;"
        yield Form(text, (f"u{bits}",), "u32", warp(lambda a: same(a & np.uint64(3))))
        text = f"shr.b{bits} {{0}}, {{0}}, {bits - 1}; match.all.sync.b{bits} %r3|%p1, {{0}}, -1;"
        text += " selp.u32 %r4, 5, 7, %p1; xor.b32 {d}, %r3, %r4;"
        top = lambda a, n=bits: a >> np.uint64(n - 1)
        every = lambda a, t=top: np.where((t(a) == t(a)[:, :1]).all(1, keepdims=True), 0xFFFFFFFF ^ 5, 7)
        yield Form(text, (f"u{bits}",), "u32", warp(every))


def reductions() -> Iterator[Form]:
    u = lambda a: a.astype(np.int64)
    s = lambda a: a.astype(np.uint32).view(np.int32).astype(np.int64)
    table = {"add": np.sum, "min": np.min, "max": np.max}
    for (op, f), (t, read) in itertools.product(table.items(), {"u32": u, "s32": s}.items()):
        g = lambda a, f=f, r=read: f(r(a), axis=1, keepdims=True) % (1 << 32)
        yield Form(f"redux.sync.{op}.{t} {{d}}, {{0}}, -1;", ("u32",), "u32", warp(g))
    for op, h in {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.items():
        yield Form(
            f"redux.sync.{op}.b32 {{d}}, {{0}}, -1;",
            ("u32",),
            "u32",
            warp(lambda a, h=h: h.reduce(a, 1, keepdims=True)),
        )
    for op, more in itertools.product(("min", "max"), ("", ".NaN", ".abs", ".abs.NaN")):
        two = flt.extreme("f32", op, more.replace(".abs", ""))
        absolute = np.uint64(0x7FFFFFFF if ".abs" in more else 0xFFFFFFFF)

        def reduce(a: Bits, two: Function = two, mask: np.uint64 = absolute) -> object:
            out = a[:, 0] & mask
            for k in range(1, 32):
                out = two(out, a[:, k] & mask)
            return out[:, None]

        yield Form(f"redux.sync.{op}{more}.f32 {{d}}, {{0}}, -1;", ("f32",), "f32", warp(reduce))
    yield Form(
        "elect.sync %r3|%p1, -1; selp.u32 %r4, 100, 0, %p1; add.u32 {d}, %r3, %r4;",
        ("u32",),
        "u32",
        warp(lambda a: np.where(LANE == 0, 100, 0)),
    )
    lanes = "setp.lt.u32 %p1, {0}, 0x80000000; mov.u32 {d}, 0; @%p1 bra ON; bra OFF;"
    lanes += " ON: activemask.b32 {d}; OFF: bar.warp.sync -1;"
    low = lambda a: np.where(a < 1 << 31, ((a < 1 << 31) * (1 << LANE)).sum(1, keepdims=True), 0)
    yield Form(lanes, ("u32",), "u32", warp(low))


def barriers() -> Iterator[Form]:
    thread = np.arange(BLOCK)
    other = "xor.b32 %r3, %r1, {n}; shl.b32 %r3, %r3, 4; mov.u32 %r4, sh; add.s32 %r3, %r3, %r4;"
    for n, sync in (
        (32, "bar.sync 0;"),
        (64, "barrier.sync 1;"),
        (32, "barrier.sync.aligned 2, 128;"),
        (1, "bar.warp.sync -1;"),
        (64, "bar.sync 15, 128;"),
    ):
        text = f"st.shared.b32 [%rs], {{0}}; {sync} {other.replace('{n}', str(n))} ld.shared.b32 {{d}}, [%r3];"
        yield Form(text, ("u32",), "u32", groups(BLOCK, lambda a, n=n: a[:, thread ^ n]))
    arrive = f"st.shared.b32 [%rs], {{0}}; mov.b32 {{d}}, {{0}}; {other.replace('{n}', '64')} setp.lt.u32 %p1, %r1, 64;"
    arrive += " @%p1 bar.arrive 3, 128; @%p1 bra END; bar.sync 3, 128; ld.shared.b32 {d}, [%r3]; END:"
    yield Form(arrive, ("u32",), "u32", groups(BLOCK, lambda a: np.where(thread < 64, a, a[:, thread ^ 64])))
    odd = "and.b32 %r3, {0}, 1; setp.eq.u32 %p1, %r3, 1;"
    for sign in ("", "!"):
        p = lambda a, s=sign: (a % 2 == 1) != (s == "!")
        for kind, f in {"and": np.all, "or": np.any}.items():
            text = f"{odd} bar.red.{kind}.pred %p2, 0, {sign}%p1; selp.u32 {{d}}, 1, 0, %p2;"
            yield Form(text, ("u32",), "u32", groups(BLOCK, lambda a, f=f, p=p: f(p(a), 1, keepdims=True)))
        text = f"{odd} bar.red.popc.u32 {{d}}, 0, {sign}%p1;"
        yield Form(text, ("u32",), "u32", groups(BLOCK, lambda a, p=p: p(a).sum(1, keepdims=True)))


def control() -> Iterator[Form]:
    same = lambda a: a
    yield Form(
        "nanosleep.u32 20; griddepcontrol.launch_dependents; griddepcontrol.wait; membar.cta; fence.acq_rel.gpu;"
        " mov.b32 {d}, {0};",
        ("u32",),
        "u32",
        same,
    )
    yield Form(
        "nanosleep.u32 20; prefetch.global.L2 [%rw]; discard.global.L2 [%rw], 128; mov.b32 {d}, {0};",
        ("u32",),
        "u32",
        same,
    )
    loop = "and.b32 %r3, {0}, 15; mov.u32 {d}, 0; LOOP: add.u32 {d}, {d}, 3; sub.s32 %r3, %r3, 1;"
    loop += " setp.gt.s32 %p1, %r3, 0; @%p1 bra LOOP;"
    yield Form(loop, ("u32",), "u32", lambda a: 3 * np.maximum(a & np.uint64(15), 1))
    guard = "setp.gt.u32 %p1, {0}, 7; mov.u32 {d}, 1; @%p1 mov.u32 {d}, 2; @!%p1 add.u32 {d}, {d}, 4;"
    yield Form(guard, ("u32",), "u32", lambda a: np.where(a > 7, 2, 5))
    clock = ".reg .b64 %u, %v; mov.u64 %u, %clock64; mov.u32 %r3, %clock; nanosleep.u32 1; mov.u64 %v, %clock64;"
    clock += " setp.ge.u64 %p1, %v, %u; selp.u32 {d}, 1, 0, %p1;"
    yield Form(clock, ("u32",), "u32", lambda a: np.ones_like(a))


FORMS: dict[str, list[Form]] = {
    "shuffles": list(shuffles()),
    "votes and matches": list(votes()),
    "reductions": list(reductions()),
    "barriers": list(barriers()),
    "control": list(control()),
}
