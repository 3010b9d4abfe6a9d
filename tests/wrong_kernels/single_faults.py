"""Faults that every pairwise case passes: each is refused by a case of `harness/singles.py`, which is here for it."""

from __future__ import annotations

from collections.abc import Callable

from pagedtune.harness.case import Case, Hazard
from pagedtune.harness.singles import SPLIT_SHAPE, single_cases
from pagedtune.harness.verdicts import Check
from pagedtune.kernels.device import DeviceKind
from pagedtune.kernels.dtypes import DType

from .gpu_planted import VALUE, GpuFault


def single(matches: Callable[[Case], bool]) -> Case:
    """The first single case that `matches`."""
    return next(case for case in single_cases(DeviceKind.CUDA) if matches(case))


def with_hazard(hazard: Hazard, kv_dtype: DType) -> Case:
    """The single case of a hazard over a pool of a dtype."""
    return single(lambda case: hazard in case.hazards and case.pool_format.kv_dtype is kv_dtype)


SPLITS = single(lambda case: case.problem.head_dim == SPLIT_SHAPE.head_dim)
WINDOWED_QUERIES = single(lambda case: case.problem.window is not None)
NAN_SCORES = with_hazard(Hazard.NAN_SCORES, DType.BF16)
FAR_E4M3, FAR_INT8 = (with_hazard(Hazard.FAR_QUERIES, dtype) for dtype in (DType.FP8_E4M3, DType.INT8))
STEEP_SCALES = with_hazard(Hazard.STEEP_SCALES, DType.INT8)
ZERO_SCALES = with_hazard(Hazard.ZERO_SCALES, DType.INT8)
ALL_SPLITS = {"num_splits": 128, "tile_tokens": 64, "split_tokens": 128, "num_warps": 4, "num_stages": 3}
WEIGHTS = "for (int k = 1; k < MAX_SPLITS / 32; ++k) value"
LSE = (Check.LSE, Check.NONFINITE)

SPLIT_MMA_SINGLES = (
    *(
        GpuFault(
            f"only {32 * words} splits weighed with weights of their own", "merge", WEIGHTS,
            f"for (int k = 1; k < {words}; ++k) value", VALUE, SPLITS, ALL_SPLITS, "merge.cuh",
        )
        for words in (1, 2, 3)
    ),
    GpuFault(
        "scales of the first tile taken for all", "scale", "most >= 2.0f * unit", "unit == 0.0f",
        VALUE, STEEP_SCALES, file="split_mma_scales.cuh",
    ),
    GpuFault(
        "queries not brought into the range of a half", "scale",
        "scales[row] = most > 0.0f ? __int_as_float(exponent << 23) : 1.0f;", "scales[row] = 1.0f;",
        VALUE, FAR_INT8, file="split_mma_products.cuh",
    ),
    GpuFault(
        "the first query's window taken for that of all", "window", "rows.position + last_query - PT_WINDOW + 1",
        "rows.position + rows.query(0) - PT_WINDOW + 1",
        VALUE, WINDOWED_QUERIES, file="split_mma_result.cuh",
    ),
)  # fmt: skip
TRITON_SPLIT_SINGLES = (
    GpuFault(
        "a NaN taken for a split without keys", "NaN",
        'tl.where(total == 0.0, -float("inf"), (top + tl.log2(safe_total)) * LN2)',
        'tl.where(total > 0.0, (top + tl.log2(safe_total)) * LN2, -float("inf"))',
        (Check.NONFINITE,), NAN_SCORES, {"num_splits": 4},
    ),
    GpuFault(
        "a NaN taken for a row without keys", "NaN",
        "row_lse = tl.where(total == 0.0, top, (top + tl.log2(safe_total)) * LN2)",
        "row_lse = tl.where(total > 0.0, (top + tl.log2(safe_total)) * LN2, top)",
        (Check.NONFINITE,), NAN_SCORES, {"num_splits": 1},
    ),
    GpuFault(
        "queries not brought into the range of a half", "scale",
        "tl.where(most > 0.0, (exponent << 23).to(tl.float32, bitcast=True), 1.0)", "tl.where(most > 0.0, 1.0, 1.0)",
        VALUE, FAR_E4M3,
    ),
    GpuFault(
        "divided by a scale of 0", "scale", "tl.maximum(x.to(tl.int32, bitcast=True) >> 23, 1)",
        "(x.to(tl.int32, bitcast=True) >> 23)", VALUE, ZERO_SCALES,
    ),
)  # fmt: skip
CUDA_PAGED_SINGLES = (
    GpuFault(
        "a NaN left out of the LSE", "NaN", "total == 0.0f ? top : (top + log2f(total)) * LN2;",
        "total > 0.0f ? (top + log2f(total)) * LN2 : top;", LSE, NAN_SCORES,
    ),
)  # fmt: skip
