"""The cases that a variant must pass: pairwise covering arrays over the dimensions, small shapes, stable seeds.

Every pair of values of two dimensions that can occur together occurs in some case. What cannot occur together is said
once, in `possible`; what a variant refuses is a result with its reason. A variant that refuses some of these cases also
gets a covering array over the pairs that it takes, or what it does support would go unseen beside what it does not.
At corner level on a GPU some values share a place (`dimensions.TURNS`): it is that place which is paired.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle
from typing import Any

from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import LARGEST_STORED, SCALE_BYTES, Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Op, Variant
from pagedtune.kernels.workload import Workload

from . import dimensions as d
from .case import SWAPS, Case, Family, Hazard, Level
from .config_corners import NUM_CORNERS
from .pairwise import Turns, covering_in_turn
from .singles import single_cases, size_cases

Row = Mapping[str, Any]
_CONSTANT_SCALES = (ScaleKind.NONE, ScaleKind.PER_TENSOR, ScaleKind.PER_HEAD)  # a CPU has no 8-bit pool
HAZARD_DIMENSIONS = ("table", "tail", "memory", "launch", "outputs", "values", "skips")
# What a variant can refuse a case for.
DECIDING = ("shape", "heads", "head_dims", "dtypes", "block_size", "layout", "scale_kind", "feature", "queries")


@dataclass(frozen=True)
class Trial:
    """A case, and which corner of the variant's space its config is from (see `config_corners`; None: any)."""

    case: Case
    corner: int | None = None


def cases_for(variant: Variant, device: Device, level: Level) -> tuple[Case, ...]:
    """The cases of a variant's op at a level, as `trials_for`."""
    return tuple(trial.case for trial in trials_for(variant, device, level))


def trials_for(variant: Variant, device: Device, level: Level) -> tuple[Trial, ...]:
    """The trials of a variant's op at a level: one list for every variant of the op. A variant with limits gets, in
    place of the cases that it takes, a covering of all pairs that it takes.

    Numbers of cases for attention on a CPU: tiny 51, corner 252, production 38; on a GPU 51, 105 and 142. Of a cache
    operation at most 64, 97 and 107.
    """
    kind = variant.device_kind
    rows = _rows(variant.op, level, kind)
    common = [_trial(variant.op, row, index) for index, row in enumerate(rows)]
    singles: list[Trial] = []
    if (variant.op, level) == (Op.ATTENTION, Level.CORNER):
        singles = [*map(Trial, size_cases()), *(Trial(case, corner=0) for case in single_cases(kind))]
    takes = partial(_takes, variant, device)
    taken = [row for row in rows if takes(*_stored(row))]
    if len(taken) in (0, len(rows)):
        return (*common, *singles)
    refused = [trial for trial in common if not takes(trial.case.problem, trial.case.pool_format)]
    own = _own_rows(variant.op, level, kind, taken, takes)
    return (*refused, *(_trial(variant.op, row, len(common) + k) for k, row in enumerate(own)), *singles)


def _takes(variant: Variant, device: Device, problem: Problem, pool_format: PoolFormat) -> bool:
    """Whether the variant accepts some config, of those that a check would try first."""
    bounds = Bounds(4, 1024, problem.max_query_len)
    default = variant.default_config(problem, pool_format, bounds, device)
    return variant.reject(problem, pool_format, default, device) is None


def _own_rows(
    op: Op, level: Level, kind: DeviceKind, taken: Sequence[Row], takes: Callable[[Problem, PoolFormat], bool]
) -> tuple[Row, ...]:
    """A covering of what can occur and `takes` says yes to. A pair is in it if it can be put into a row of `taken`."""
    spans, occurs = dimensions_of(op, level, kind), partial(possible, kind=kind)
    deciding = [name for name in DECIDING if name in spans]
    witnesses = [{name: row[name] for name in deciding} for row in taken]
    decided = cache(takes)

    def allowed(row: Row) -> bool:
        if not occurs(row):
            return False
        known = {name: row[name] for name in deciding if name in row}
        filled = ({**witness, **known} for witness in witnesses)
        return any(occurs(whole) and decided(*_stored(whole)) for whole in filled)

    kept = {name: tuple(value for value in values if allowed({name: value})) for name, values in spans.items()}
    return covering_in_turn(kept, allowed, turns_of(level, kind))


@cache
def _rows(op: Op, level: Level, kind: DeviceKind) -> tuple[Row, ...]:
    return covering_in_turn(dimensions_of(op, level, kind), partial(possible, kind=kind), turns_of(level, kind))


def turns_of(level: Level, kind: DeviceKind) -> Turns:
    """Which values of which dimensions share a place in the coverings of a level."""
    return d.TURNS if (level, kind) == (Level.CORNER, DeviceKind.CUDA) else {}


def dimensions_of(op: Op, level: Level, kind: DeviceKind = DeviceKind.CPU) -> dict[str, tuple[Any, ...]]:
    """Values of each dimension of an op at a level, for variants of one kind of device."""
    gpu, production = kind is DeviceKind.CUDA, level is Level.PRODUCTION
    spans: dict[str, tuple[Any, ...]] = {
        **_shapes(op, level, kind),
        "lengths": tuple(d.LENGTHS if not production else d.VIRTUAL_LENGTHS if gpu else d.MODEL_LENGTHS),
        "block_size": (16, 1, 32)
        if level is Level.TINY
        else (16, 64, 128)
        if production and not gpu
        else d.BLOCK_SIZES,
        "family": tuple(Family),
        "layout": tuple(Layout),
        "scale_kind": tuple(ScaleKind) if gpu else _CONSTANT_SCALES,
        "table": d.TABLES,
        "tail": d.TAILS,
        "memory": d.MEMORIES,
        "launch": d.LAUNCHES,
        "queries": tuple(d.QUERIES),
    }
    if op is Op.ATTENTION:
        spans |= {"feature": d.FEATURES, "outputs": d.OUTPUTS, "values": d.VALUES, "memory": d.ATTENTION_MEMORIES}
    else:
        spans |= _cache_dimensions(op, gpu)
    if level is Level.TINY:
        spans |= {k: v[:n] for k, v in spans.items() if (n := {"feature": 6, "values": 2}.get(k))}  # no sinks
    elif production and gpu:
        spans["config"] = tuple(range(NUM_CORNERS))
    elif production:
        spans |= {k: (d.PLAIN,) for k in spans if k == "feature"} | {"queries": ("decode",)}
        spans |= {k: v[:2] for k, v in spans.items() if k == "values"} | {"memory": d.MEMORIES}
    return spans


def _shapes(op: Op, level: Level, kind: DeviceKind) -> dict[str, tuple[Any, ...]]:
    """Heads, head dims and dtypes: as whole shapes, or as dimensions of their own where a case is compiled anyway."""
    gpu = kind is DeviceKind.CUDA
    quantised = gpu or op in SWAPS  # whole blocks are moved on a CPU too, whatever is in them
    if level is Level.TINY:
        return {"shape": d.TINY_SHAPES + (d.QUANTISED_SHAPE,) * quantised}
    if gpu and op not in (Op.ATTENTION, Op.KV_WRITE):
        return {"heads": d.MOVED_HEADS, "head_dims": d.MOVED_HEAD_DIMS, "dtypes": d.MOVED_DTYPES}
    if op is not Op.ATTENTION and (level is Level.CORNER or gpu):
        return {"shape": d.CACHE_SHAPES + d.QUANTISED_CACHE_SHAPES * quantised}
    if gpu:
        heads = d.HEADS if level is Level.CORNER else d.MODEL_HEADS
        return {"heads": heads, "head_dims": d.HEAD_DIMS, "dtypes": d.DTYPES}
    return {"shape": d.SHAPES if level is Level.CORNER else d.MODEL_SHAPES}


def _cache_dimensions(op: Op, gpu: bool) -> dict[str, tuple[Any, ...]]:
    spans: dict[str, tuple[Any, ...]] = {"feature": (d.PLAIN,), "launch": d.LAUNCHES[:2]}
    if op is not Op.GATHER_KV:
        spans["tail"] = ((),)  # no table
    if op is Op.KV_WRITE:
        # Two tokens would be written to one shared slot.
        spans |= {"table": d.TABLES[:2], "skips": d.SKIPS}
    else:
        moved = (ScaleKind.PER_TOKEN_HEAD,) * gpu  # others are no business of these ops
        spans |= {"queries": ("decode",), "scale_kind": (ScaleKind.NONE, *moved)}
    if op is Op.COPY_BLOCKS or op in SWAPS:
        spans["skips"] = d.SKIPS
    if op in SWAPS:
        spans |= {"table": ((),), "memory": d.SWAP_MEMORIES}
    return spans


def possible(row: Row, kind: DeviceKind = DeviceKind.CPU) -> bool:
    """Whether the values of a row, which may be incomplete, can occur together: see `reject_case`. A GPU's kernels are
    interpreted, so that for them a row must also be small."""
    dtypes, head_dims, hazards = _part(row, "dtypes"), _part(row, "head_dims"), _hazards(row)
    if row.get("layout") is Layout.XPACKED and dtypes and head_dims and head_dims[0] % (16 // dtypes[1].itemsize):
        return False
    if row.get("scale_kind") is ScaleKind.PER_TOKEN_HEAD and dtypes and dtypes[1] not in LARGEST_STORED:
        return False
    if dtypes and dtypes[1] is DType.INT8 and Hazard.LIVE_NAN in hazards:
        return False
    if "feature" in row and hazards & {Hazard.HUGE_SINKS, Hazard.INF_SINKS} and not row["feature"].fields.get("sinks"):
        return False
    if Hazard.HIGH_ROWS in hazards and "lengths" in row and len(d.ALL_LENGTHS[row["lengths"]](1)) < 2:
        return False
    if {Hazard.HIGH_STAGING, Hazard.SKIPPED_TOKENS} <= hazards:
        return False
    if row.get("family", Family.RANDOM) is not Family.RANDOM and hazards & {Hazard.SATURATED_CAP, Hazard.LIVE_NAN}:
        return False
    if row.get("queries", "decode") != "decode" and hazards & {Hazard.REPLAY, Hazard.LIVE_NAN}:
        return False
    return kind is DeviceKind.CPU or _is_small(row)


def _is_small(row: Row) -> bool:
    """Whether the virtual GPU runs the row in a moment; what the row lacks is taken to be small."""
    if "lengths" not in row or "block_size" not in row:
        return True
    workload, heads, dims = _workload(row), _part(row, "heads") or (1, 1), sum(_part(row, "head_dims") or (1, 1))
    itemsize = dtypes[1].itemsize if (dtypes := _part(row, "dtypes")) else 1
    scales = 2 * SCALE_BYTES if row.get("scale_kind") is ScaleKind.PER_TOKEN_HEAD else 0
    kv_bytes: int = sum(workload.context_lens) * heads[1] * (dims * itemsize + scales)
    pairs: int = sum(q * c for q, c in zip(workload.query_lens, workload.context_lens, strict=True))
    return kv_bytes <= d.MAX_VIRTUAL_KV_BYTES and pairs * heads[0] * dims <= d.MAX_VIRTUAL_PRODUCTS[row["lengths"]]


def _part(row: Row, name: str) -> tuple[Any, ...] | None:
    """`heads`, `head_dims` or `dtypes` of a row, if it has them."""
    found: tuple[Any, ...] | None = getattr(row["shape"], name) if "shape" in row else row.get(name)
    return found


def _hazards(row: Row) -> set[Hazard]:
    feature = row["feature"].hazards if "feature" in row else ()
    return {hazard for name in HAZARD_DIMENSIONS for hazard in row.get(name, ())} | set(feature)


def _trial(op: Op, row: Row, index: int) -> Trial:
    workload = _workload(row)
    problem, pool_format = _stored(row)
    problem = replace(problem, max_query_len=max(1, *workload.query_lens))
    seed = zlib.crc32(f"{op}-{index}".encode())
    return Trial(Case(op, problem, pool_format, workload, row["family"], tuple(_hazards(row)), seed), row.get("config"))


def _stored(row: Row) -> tuple[Problem, PoolFormat]:
    """Problem and format of a row that has at least the deciding dimensions."""
    shape = row["shape"] if "shape" in row else d.Shape(*row["heads"], *row["head_dims"], *row["dtypes"])
    problem = shape.problem(**row["feature"].fields, max_query_len=max(1, *d.QUERIES[row["queries"]]))
    return problem, PoolFormat(row["block_size"], shape.kv_dtype, row["layout"], row["scale_kind"])


def _workload(row: Row) -> Workload:
    """Lengths of a row; without queries, as in decode."""
    name = row["lengths"]
    context_lens = d.ALL_LENGTHS[name](row["block_size"])
    pattern = d.QUERIES[row.get("queries", "decode")]
    query_lens = tuple(min(q, max(c, 1)) for c, q in zip(context_lens, cycle(pattern), strict=False))
    return Workload(context_lens, query_lens, name)
