"""The cases that a variant must pass: pairwise covering arrays over the dimensions, small shapes, stable seeds.

Every pair of values of two dimensions that can occur together occurs in some case. What cannot occur together is said
once, in `possible`; what a variant refuses is a result with its reason. A variant that refuses some of these cases also
gets a covering array over the values that it takes, or values it does support would go unseen beside those it does not.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import cycle, product
from typing import Any

from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Op, Variant
from pagedtune.kernels.workload import Workload

from . import dimensions as d
from .case import SWAPS, Case, Family, Hazard, Level
from .pairwise import Facets, covering_rows

Row = Mapping[str, Any]
HAZARD_DIMENSIONS = ("table", "tail", "memory", "launch", "outputs", "values", "skips")


def cases_for(variant: Variant, device: Device, level: Level) -> tuple[Case, ...]:
    """The cases of a variant's op at a level: one list for every variant of the op. A variant with limits gets, in
    place of the cases that it takes, as many pairs as there are of what it takes.

    Numbers of cases for attention on a CPU: tiny 46, corner 244, production 38; of a cache operation 42, 65 and 36, of
    packing or unpacking, 8-bit pools included, 56, 97 and 36. A GPU kernel is compiled for each shape and feature:
    there, ratio, head dims and dtypes of a shape are paired with the rest one by one, and shapes with a quantised pool
    are added: 48, 215 and 39 cases.
    """
    common = _cases(variant.op, level, variant.device_kind)
    refused = tuple(case for case in common if not _takes(variant, device, case.problem, case.pool_format))
    if not refused:
        return common
    spans = _taken_spans(variant, device, dimensions_of(variant.op, level, variant.device_kind))
    if any(not values for values in spans.values()):
        return common
    rows = covering_rows(spans, possible, _facets(variant.device_kind))
    own = [_case(variant.op, row, _lengths(level), len(common) + index) for index, row in enumerate(rows)]
    sizes = tuple(case for case in common if case.workload.name in d.SIZES and case not in refused)
    return (*refused, *own, *sizes)


def _facets(kind: DeviceKind) -> Facets:
    return {"shape": lambda shape: shape.facets} if kind is DeviceKind.CUDA else {}


def _takes(variant: Variant, device: Device, problem: Problem, pool_format: PoolFormat) -> bool:
    """Whether the variant accepts some config, of those that a check would try first."""
    bounds = Bounds(4, 1024, problem.max_query_len)
    default = variant.default_config(problem, pool_format, bounds, device)
    return variant.reject(problem, pool_format, default, device) is None


def _taken_spans(variant: Variant, device: Device, spans: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """The spans without the values that the variant refuses whatever they are combined with."""
    deciding = ("shape", "block_size", "layout", "scale_kind", "feature", "queries")
    taken: dict[str, set[int]] = {name: set() for name in deciding}
    for indices in product(*(range(len(spans[name])) for name in deciding)):
        if all(i in taken[name] for name, i in zip(deciding, indices, strict=True)):
            continue
        row = {name: spans[name][i] for name, i in zip(deciding, indices, strict=True)}
        if possible(row) and _takes(variant, device, _problem(row, max(1, *d.QUERIES[row["queries"]])), _format(row)):
            for name, i in zip(deciding, indices, strict=True):
                taken[name].add(i)
    kept = {name: tuple(spans[name][i] for i in sorted(taken[name])) for name in deciding}
    return {name: kept.get(name, tuple(values)) for name, values in spans.items()}


@cache
def _cases(op: Op, level: Level, kind: DeviceKind) -> tuple[Case, ...]:
    rows = covering_rows(dimensions_of(op, level, kind), possible, _facets(kind))
    covering = [_case(op, row, _lengths(level), index) for index, row in enumerate(rows)]
    return (*covering, *(_sizes() if (op, level) == (Op.ATTENTION, Level.CORNER) else ()))


def _sizes() -> Iterator[Case]:
    """Large batches and long contexts, where a kernel may take another path: few cases, each of them slow."""
    choices = product(d.SIZES, d.SIZE_SHAPES, (Family.RANDOM, Family.NEEDLE))
    for index, (name, shape, family) in enumerate(choices):
        pool_format = PoolFormat(16, shape.kv_dtype)
        hazards = (Hazard.TAIL_FOREIGN,)
        workload = Workload(d.SIZES[name](16), name=name)
        yield Case(Op.ATTENTION, shape.problem(), pool_format, workload, family, hazards, seed=index)


def _lengths(level: Level) -> Mapping[str, d.Lengths]:
    return d.MODEL_LENGTHS if level is Level.PRODUCTION else d.LENGTHS


def dimensions_of(op: Op, level: Level, kind: DeviceKind = DeviceKind.CPU) -> dict[str, tuple[Any, ...]]:
    """Values of each dimension of an op at a level, for variants of one kind of device."""
    spans: dict[str, tuple[Any, ...]] = {
        "shape": {Level.TINY: d.TINY_SHAPES, Level.CORNER: d.SHAPES, Level.PRODUCTION: d.MODEL_SHAPES}[level],
        "lengths": tuple(d.MODEL_LENGTHS if level is Level.PRODUCTION else d.LENGTHS),
        "block_size": {Level.TINY: (16, 1, 32), Level.CORNER: d.BLOCK_SIZES, Level.PRODUCTION: (16, 64, 128)}[level],
        "family": tuple(Family),
        "layout": tuple(Layout),
        "scale_kind": tuple(ScaleKind),
        "table": d.TABLES,
        "tail": d.TAILS,
        "memory": d.MEMORIES,
        "launch": d.LAUNCHES,
        "queries": tuple(d.QUERIES),
    }
    if op is Op.ATTENTION and kind is DeviceKind.CUDA:
        spans["shape"] += d.QUANTISED_SHAPES if level is Level.CORNER else d.QUANTISED_SHAPES[:1]
    if op is Op.ATTENTION:
        spans |= {"feature": d.FEATURES, "outputs": d.OUTPUTS, "values": d.VALUES}
    else:
        spans |= _cache_dimensions(op, level)
        if kind is DeviceKind.CUDA or (op in SWAPS and level is not Level.PRODUCTION):
            spans["shape"] += d.QUANTISED_CACHE_SHAPES if level is Level.CORNER else d.QUANTISED_CACHE_SHAPES[:2]
    if level is Level.TINY:
        spans |= {k: v[:n] for k, v in spans.items() if (n := {"feature": 6, "values": 2}.get(k))}  # no sinks
    elif level is Level.PRODUCTION:
        spans |= {k: (d.PLAIN,) for k in spans if k == "feature"} | {"queries": ("decode",)}
        spans |= {k: v[:2] for k, v in spans.items() if k == "values"}
    return spans


def _cache_dimensions(op: Op, level: Level) -> dict[str, tuple[Any, ...]]:
    spans: dict[str, tuple[Any, ...]] = {"feature": (d.PLAIN,), "launch": d.LAUNCHES[:2]}
    if level is Level.CORNER:
        spans["shape"] = d.CACHE_SHAPES
    if op is not Op.GATHER_KV:
        spans["tail"] = ((),)  # no table
    if op is Op.KV_WRITE:
        # Two tokens would be written to one shared slot.
        spans |= {"table": d.TABLES[:2], "skips": d.SKIPS}
    else:
        spans |= {"queries": ("decode",), "scale_kind": (ScaleKind.NONE,)}
    if op is Op.COPY_BLOCKS or op in SWAPS:
        spans["skips"] = d.SKIPS
    if op in SWAPS:
        spans |= {"table": ((),), "memory": d.MEMORIES if level is Level.PRODUCTION else d.SWAP_MEMORIES}
    return spans


def possible(row: Row) -> bool:
    """Whether the values of a row, which may be incomplete, can occur together: see `reject_case`."""
    shape, layout = row.get("shape"), row.get("layout")
    if shape is not None and layout is Layout.XPACKED and shape.head_dim % (16 // shape.kv_dtype.itemsize):
        return False
    hazards = {h for name in HAZARD_DIMENSIONS for h in row.get(name, ())}
    if shape is not None and shape.kv_dtype is DType.INT8 and Hazard.LIVE_NAN in hazards:
        return False
    if "feature" in row:
        hazards |= set(row["feature"].hazards)
        if hazards & {Hazard.HUGE_SINKS, Hazard.INF_SINKS} and not row["feature"].fields.get("sinks"):
            return False
    if {Hazard.HIGH_STAGING, Hazard.SKIPPED_TOKENS} <= hazards:
        return False
    if row.get("family", Family.RANDOM) is not Family.RANDOM and hazards & {Hazard.SATURATED_CAP, Hazard.LIVE_NAN}:
        return False
    return row.get("queries", "decode") == "decode" or not hazards & {Hazard.REPLAY, Hazard.LIVE_NAN}


def _case(op: Op, row: Row, lengths: Mapping[str, d.Lengths], index: int) -> Case:
    workload = _workload(row["lengths"], lengths, row["block_size"], d.QUERIES[row["queries"]])
    hazards = [h for name in HAZARD_DIMENSIONS for h in row.get(name, ())] + list(row["feature"].hazards)
    return Case(
        op,
        _problem(row, max(1, *workload.query_lens)),
        _format(row),
        workload,
        row["family"],
        tuple(hazards),
        seed=zlib.crc32(f"{op}-{index}".encode()),
    )


def _problem(row: Row, max_query_len: int) -> Problem:
    problem: Problem = row["shape"].problem(**row["feature"].fields, max_query_len=max_query_len)
    return problem


def _format(row: Row) -> PoolFormat:
    return PoolFormat(row["block_size"], row["shape"].kv_dtype, row["layout"], row["scale_kind"])


def _workload(name: str, lengths: Mapping[str, d.Lengths], block_size: int, pattern: Sequence[int]) -> Workload:
    context_lens = lengths[name](block_size)
    query_lens = tuple(min(q, max(c, 1)) for c, q in zip(context_lens, cycle(pattern), strict=False))
    return Workload(context_lens, query_lens, name)
