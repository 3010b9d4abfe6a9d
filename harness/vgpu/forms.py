"""The instruction forms that the virtual GPU runs: handlers of the core, wide ones split by what they depend on.

A form is what a test can miss: `cvt` is one handler but 144 pairs of types, `mma` one handler but a shape per tensor
core generation. `forms_of` names the forms that a program uses; `all_forms` lists every one that exists.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from .core_library import core
from .decode_arith import CVT_TYPES
from .decode_memory import ATOM_OPS, ATOM_TYPES
from .decode_warp import MMA_TYPES, REDUCTIONS, mma_shapes
from .program import Program

_SPACES = ("generic", "global", "shared", "local")
_PRMT = ("b32", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
_SHUFFLES, _VOTES = ("up", "down", "bfly", "idx"), ("all", "any", "uni", "ballot")
_BARRIERS = ("sync", "arrive", "red.and", "red.or", "red.popc")
_CVT_NAMES = {code: name for name, code in CVT_TYPES.items()}
_ATOM_OP_NAMES = {code: name for name, code in ATOM_OPS.items()}
_ATOM_TYPE_NAMES = {code: name for name, code in reversed(ATOM_TYPES.items())}  # u32 rather than b32
_MMA_NAMES = {code: name for name, code in MMA_TYPES.items()}
_FLOAT_ATOMS = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")


def _cvt(p: Sequence[int]) -> str:
    return f"cvt.{_CVT_NAMES[p[6]]}.{_CVT_NAMES[p[7]]}"


def _memory(name: str) -> Callable[[Sequence[int]], str]:
    return lambda p: f"{name}.{_SPACES[p[0]]}.{p[2]}x{p[3]}"


def _atom(p: Sequence[int]) -> str:
    vector = f".v{p[7]}" if p[7] > 1 else ""
    return f"{'atom' if p[4] else 'red'}{vector}.{_ATOM_OP_NAMES[p[2]]}.{_ATOM_TYPE_NAMES[p[3]]}"


def _mma(p: Sequence[int]) -> str:
    finite = ".satfinite" if p[6] else ""
    return f"mma.m{p[0]}n8k{p[2]}{finite}.{_MMA_NAMES[p[5]]}.{_MMA_NAMES[p[3]]}.{_MMA_NAMES[p[4]]}"


def _matrix(name: str) -> Callable[[Sequence[int]], str]:
    return lambda p: f"{name}.x{p[2]}{'.trans' if p[3] else ''}"


def _redux(p: Sequence[int]) -> str:
    return f"redux.{REDUCTIONS[p[0]]}.{('u32', 's32', 'f32')[p[1]]}"


def _async(p: Sequence[int]) -> str:
    more = ".size" if p[3] >= 0 or p[4] >= 0 else ".ignore" if p[5] >= 0 else ""
    return f"cp.async.{p[2]}{more}"


# Handlers that stand for several forms, by what their parameters say.
_SPLIT: dict[str, Callable[[Sequence[int]], str]] = {
    "cvt": _cvt,
    "ld": _memory("ld"),
    "st": _memory("st"),
    "atom": _atom,
    "mma": _mma,
    "ldmatrix": _matrix("ldmatrix"),
    "stmatrix": _matrix("stmatrix"),
    "redux": _redux,
    "cp.async": _async,
    "shfl": lambda p: f"shfl.{_SHUFFLES[p[0]]}",
    "vote": lambda p: f"vote.{_VOTES[p[0]]}",
    "match": lambda p: f"match.{'all' if p[0] else 'any'}.b{8 * p[1]}",
    "bar": lambda p: f"bar.{_BARRIERS[p[0]]}",
    "prmt": lambda p: f"prmt.{_PRMT[p[0]]}",
    "shf": lambda p: f"shf.{'l' if p[0] else 'r'}.{'clamp' if p[1] else 'wrap'}",
    "fence": lambda p: f"fence.{'gpu' if p[0] else 'cta'}",
}


def form_of(key: str, p: Sequence[int]) -> str:
    """The form of one decoded instruction."""
    if key in _SPLIT:
        return _SPLIT[key](p)
    return key.replace("cvt.fast.", "cvt.")


def forms_of(program: Program) -> set[str]:
    """The forms that a program uses."""
    keys = program.names
    return {form_of(keys[k], [int(v) for v in row]) for k, row in enumerate(program.code["p"])}


def all_forms() -> set[str]:
    """Every form that the core runs and PTX has.

    Raises:
        BuildError: the core cannot be built.
    """
    single = {form_of(h, ()) for h in core().handlers() if h not in _SPLIT}
    return single | set(_families())


def _families() -> Iterator[str]:
    yield from (f"cvt.{d}.{s}" for d, s in itertools.product(CVT_TYPES, CVT_TYPES))
    for name, space, size, count in itertools.product(("ld", "st"), _SPACES, (1, 2, 4, 8), (1, 2, 4)):
        if size * count <= 16:
            yield f"{name}.{space}.{size}x{count}"
    for name in ("atom", "red"):
        yield from (f"{name}.add.{t}" for t in ("u32", "s32", "u64", *_FLOAT_ATOMS))
        yield from (f"{name}.{op}.{t}" for op in ("min", "max") for t in ("u32", "s32", "u64", "s64"))
        yield from (f"{name}.{op}.{t}" for op in ("and", "or", "xor") for t in ("u32", "u64"))
        yield from (f"{name}.{op}.u32" for op in ("inc", "dec"))
    yield from (f"atom.{op}.{t}" for op in ("exch", "cas") for t in ("u32", "u64"))
    yield "atom.cas.b16"
    yield from (f"red.v{n}.add.{t}" for n, t in ((2, "f32"), (4, "f32"), (2, "f16x2"), (4, "f16x2"), (2, "bf16x2")))
    yield from (f"mma.m{r}n8k{k}.{c}.{a}.{b}" for r, k, c, a, b in mma_shapes())
    yield from (f"{n}.x{c}{t}" for n in ("ldmatrix", "stmatrix") for c in (1, 2, 4) for t in ("", ".trans"))
    yield from (f"redux.{op}.{t}" for op in ("add", "min", "max") for t in ("u32", "s32"))
    yield from (*(f"redux.{op}.u32" for op in ("and", "or", "xor")), "redux.min.f32", "redux.max.f32")
    yield from (f"cp.async.{n}{more}" for n in (4, 8, 16) for more in ("", ".size", ".ignore"))
    yield from (*(f"shfl.{m}" for m in _SHUFFLES), *(f"vote.{m}" for m in _VOTES), "fence.gpu", "fence.cta")
    yield from (*(f"bar.{m}" for m in _BARRIERS), *(f"prmt.{m}" for m in _PRMT))
    yield from (f"match.{m}.b{n}" for m in ("any", "all") for n in (32, 64))
    yield from (f"shf.{d}.{m}" for d in "lr" for m in ("wrap", "clamp"))
