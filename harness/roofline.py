"""The least time that a launch can take, from the bytes that it cannot avoid to read."""

from __future__ import annotations

from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.workload import Workload

# Attention cannot be fed faster than a plain read of the same bytes; the allowance covers the steps of the measured
# curve, what stays in the last-level cache from one rotation to the next, and a neighbour while the curve was measured.
FLOOR_SLACK = 1.15


def kv_bytes(problem: Problem, pool_format: PoolFormat, workload: Workload) -> int:
    """KV bytes that one attention launch must read at least: of every visible token, once."""
    return visible_tokens(problem, workload) * pool_format.bytes_per_token(problem)


def visible_tokens(problem: Problem, workload: Workload) -> int:
    """Tokens that any query of the batch sees: with a window, the last `window + query_len - 1` of each sequence."""
    total = 0
    for context_len, query_len in zip(workload.context_lens, workload.query_lens, strict=True):
        reach = context_len if problem.window is None else problem.window + query_len - 1
        total += min(context_len, reach) if query_len else 0
    return total


def floor_us(num_bytes: int, ceiling_gb_s: float) -> float:
    """The time, in microseconds, below which a measurement is not believed."""
    return num_bytes / (ceiling_gb_s * FLOOR_SLACK) / 1e3
