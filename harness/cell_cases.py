"""The few cases that a candidate must pass before it is timed: the cell's own problem and format, small lengths."""

from __future__ import annotations

import zlib
from dataclasses import replace

from pagedtune.kernels.bounds import Bucket
from pagedtune.kernels.device import Device
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Config, Op, Variant
from pagedtune.kernels.workload import Workload

from .case import Case, Family, Hazard
from .fewer_heads import with_fewer_heads

MAX_KV_ELEMENTS = 1 << 20  # of K and V of one sequence; with half of it where the length itself does not matter, all
# cases of a candidate together take under a second
MAX_VIRTUAL_KV_ELEMENTS = 1 << 19  # the same where kernels are interpreted
VIRTUAL_KV_HEADS = 2
MAX_EDGES = 3


def cases_for_cell(
    problem: Problem,
    pool_format: PoolFormat,
    bucket: Bucket,
    variant: Variant,
    config: Config | None = None,
    max_kv_elements: int = MAX_KV_ELEMENTS,
) -> tuple[Case, ...]:
    """Seven cases: all three families, every kind of table tail, block edges and the edges of `config`'s splits, a
    strided launch, a pool above 2^32 elements, and one plan made for the bucket's own bounds."""
    problem = replace(problem, max_query_len=max(problem.max_query_len, bucket.max_query_len))
    longest = max(2, min(bucket.max_context_len, max_kv_elements // _elements_per_token(problem)))
    size = pool_format.block_size
    medium = max(2, longest // 2)
    edges = _limited((size + 1, size, 0, size - 1, 1), longest)
    splits = _limited(tuple(e + step for e in split_edges(config, longest)[:MAX_EDGES] for step in (1, 0, -1)), longest)
    seed = zlib.crc32(f"{problem.key}|{pool_format.key}".encode())
    replay = (Hazard.REPLAY,) if problem.max_query_len == 1 else ()
    attention = variant.op is Op.ATTENTION
    plans: list[tuple[Family, tuple[int, ...], tuple[Hazard, ...]]] = [
        (Family.NEEDLE, edges, (Hazard.TAIL_FOREIGN,)),
        (Family.RANDOM, splits, (Hazard.TAIL_INT_MAX, *(replay if attention else ()))),
        (Family.NEEDLE, splits, (Hazard.TAIL_MINUS_ONE, Hazard.STRIDED, Hazard.OFFSET_BASE)),
        (Family.CODED, edges, (Hazard.TAIL_INT_MAX, Hazard.HIGH_POOL)),
        (Family.NEEDLE, (medium,), (Hazard.TAIL_FOREIGN, Hazard.STRIDED_POOL)),
        (Family.CODED, (medium, 0, min(size, medium)), (Hazard.LOOSE_BOUNDS, Hazard.IDENTITY_TABLE)),
    ]
    cases = [
        Case(variant.op, problem, pool_format, _workload(problem, lens), family, hazards, seed + index)
        for index, (family, lens, hazards) in enumerate(plans)
    ]
    if attention:
        cases.append(_at_bucket(problem, pool_format, bucket, medium, seed))
    return tuple(cases)


def cases_for_virtual_cell(
    problem: Problem, pool_format: PoolFormat, bucket: Bucket, variant: Variant, config: Config, device: Device
) -> tuple[Case, ...]:
    """The same cases for a device whose kernels are interpreted: the binaries are those of the cell, and all but one
    case have two KV heads where fewer heads run on the same binaries; the last one has all."""
    fewer = with_fewer_heads(variant, config, problem, pool_format, device, VIRTUAL_KV_HEADS)
    cases = cases_for_cell(fewer, pool_format, bucket, variant, config, MAX_VIRTUAL_KV_ELEMENTS)
    if fewer == problem:
        return cases
    whole = replace(problem, max_query_len=max(problem.max_query_len, bucket.max_query_len))
    size = pool_format.block_size
    lens = _limited((2 * size + 1, 0, size), bucket.max_context_len)
    hazards = (Hazard.TAIL_MINUS_ONE, Hazard.STRIDED_POOL)
    return (*cases, Case(variant.op, whole, pool_format, _workload(whole, lens), Family.NEEDLE, hazards, cases[0].seed))


def split_edges(config: Config | None, context_len: int) -> list[int]:
    """Lengths at which `config`'s splits or tiles of a context begin, read off its tunables' names, largest first.

    A tunable called `...tokens` counts tokens, one called `...splits` divides the context. 64 is always among them.
    """
    found = {64}
    for name, value in (config.as_dict() if config is not None else {}).items():
        if isinstance(value, int) and value > 0:
            if name.endswith("tokens"):
                found.add(value)
            elif name.endswith("splits") and value > 1:
                found.add(-(-context_len // value))
    return sorted((edge for edge in found if edge < context_len), reverse=True) or [1]


def _at_bucket(problem: Problem, pool_format: PoolFormat, bucket: Bucket, longest: int, seed: int) -> Case:
    """The plan that is timed, on a small batch."""
    lens = (longest, 1, longest // 2 + 1)[: bucket.max_num_seqs]
    workload = _workload(problem, lens)
    return Case(Op.ATTENTION, problem, pool_format, workload, Family.RANDOM, (), seed + 99, bucket.bounds)


def _workload(problem: Problem, lens: tuple[int, ...]) -> Workload:
    query_lens = tuple(min(problem.max_query_len, max(n, 1), 4) for n in lens)
    return Workload(lens, query_lens, "cell")


def _limited(lens: tuple[int, ...], longest: int) -> tuple[int, ...]:
    return tuple(min(max(n, 0), longest) for n in lens)


def _elements_per_token(problem: Problem) -> int:
    return problem.num_kv_heads * (problem.head_dim + problem.head_dim_v)
