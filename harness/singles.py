"""Cases that no pairwise covering has, on few shapes each: sizes and numbers past which a kernel takes another path."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from pagedtune.kernels.device import DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat, ScaleKind
from pagedtune.kernels.variant import Op
from pagedtune.kernels.workload import Workload

from . import dimensions as d
from .case import Case, Family, Hazard

# One sequence and one KV head: any rule that fills a device takes all the splits that it may, and all of them are live.
SPLIT_SHAPE = d.Shape(4, 1, 32, 32, DType.BF16, DType.BF16)
EXTREME_SHAPE = d.Shape(8, 2, 64, 64, DType.BF16, DType.BF16)
EIGHT_BIT_SHAPES = (
    d.Shape(8, 2, 64, 64, DType.BF16, DType.FP8_E4M3),
    d.Shape(8, 2, 64, 64, DType.BF16, DType.INT8),
)
# No covering has every pair of dtypes: here are those that it lacks and that a tensor core has no product for.
MIXED_SHAPES = (d.Shape(4, 2, 64, 64, DType.BF16, DType.FP16),)
LENGTHS = (300, 0, 17, 33)


def single_cases(kind: DeviceKind) -> Iterator[Case]:
    """Attention at corner level, for a variant's default config: the rule behind it decides which path is taken."""
    for index, family in enumerate((Family.RANDOM, Family.NEEDLE)):
        yield _case(SPLIT_SHAPE, (d.SPLIT_CONTEXT,), family, seed=index)
    for lens in (LENGTHS, (1025, 40)):  # in one split and in several
        yield _case(EXTREME_SHAPE, lens, Family.RANDOM, Hazard.NAN_SCORES)
    yield _windowed_queries()
    for shape in (EXTREME_SHAPE, *(EIGHT_BIT_SHAPES if kind is DeviceKind.CUDA else ())):
        yield _case(shape, LENGTHS, Family.RANDOM, Hazard.FAR_QUERIES, scale_kind=ScaleKind.PER_HEAD)
    if kind is DeviceKind.CUDA:
        for shape in EIGHT_BIT_SHAPES:
            for hazard in (Hazard.ZERO_SCALES, Hazard.STEEP_SCALES):
                yield _case(shape, LENGTHS, Family.RANDOM, hazard, scale_kind=ScaleKind.PER_TOKEN_HEAD)
        for shape in MIXED_SHAPES:
            yield _case(shape, LENGTHS, Family.RANDOM)


def size_cases() -> Iterator[Case]:
    """Large batches and long contexts, where a kernel may take another path: few cases, each of them slow."""
    choices = product(d.SIZES, d.SIZE_SHAPES, (Family.RANDOM, Family.NEEDLE))
    for index, (name, shape, family) in enumerate(choices):
        pool_format = PoolFormat(16, shape.kv_dtype)
        hazards = (Hazard.TAIL_FOREIGN,)
        workload = Workload(d.SIZES[name](16), name=name)
        yield Case(Op.ATTENTION, shape.problem(), pool_format, workload, family, hazards, seed=index)


def _windowed_queries() -> Case:
    """Several queries whose windows begin at different tokens of a long context: three dimensions at once."""
    problem = EXTREME_SHAPE.problem(window=37, max_query_len=8)
    workload = Workload((300, 0, 65), (8, 1, 5), name="single")
    return Case(Op.ATTENTION, problem, PoolFormat(16, DType.BF16), workload, Family.RANDOM, (Hazard.TAIL_FOREIGN,))


def _case(
    shape: d.Shape,
    lens: tuple[int, ...],
    family: Family,
    *hazards: Hazard,
    scale_kind: ScaleKind = ScaleKind.NONE,
    seed: int = 0,
) -> Case:
    pool_format = PoolFormat(16, shape.kv_dtype, scale_kind=scale_kind)
    workload = Workload(lens, name="single")
    return Case(Op.ATTENTION, shape.problem(), pool_format, workload, family, (Hazard.TAIL_FOREIGN, *hazards), seed)
