"""The least time that a launch can take, from the bytes that it cannot avoid to read, and what it must move."""

from __future__ import annotations

from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Op
from pagedtune.kernels.workload import Workload

# Attention cannot be fed faster than a plain read of the same bytes; the allowance covers the steps of the measured
# curve, what stays in the last-level cache from one rotation to the next, and a neighbour while the curve was measured.
FLOOR_SLACK = 1.15


def kv_bytes(problem: Problem, pool_format: PoolFormat, workload: Workload) -> int:
    """KV bytes that one attention launch must read at least: of every visible token, once."""
    return visible_tokens(problem, workload) * pool_format.bytes_per_token(problem)


def moved_bytes(op: Op, problem: Problem, pool_format: PoolFormat, workload: Workload) -> int:
    """Bytes of K and V, and of scales that tokens have, that one launch of any op must read and write at least.

    Lists of slots, blocks and lengths are not counted. Of a block pair, and of a block that is packed or unpacked,
    which `workload` has as a sequence, all slots are moved, with a token or without.
    """
    of_token = pool_format.bytes_per_token(problem)
    if op is Op.ATTENTION:
        return kv_bytes(problem, pool_format, workload)
    if op is Op.KV_WRITE:
        new = problem.num_kv_heads * (problem.head_dim + problem.head_dim_v) * problem.q_dtype.itemsize
        return workload.num_tokens * (new + of_token)
    tokens = workload.total_context if op is Op.GATHER_KV else workload.num_seqs * pool_format.block_size
    return 2 * tokens * of_token


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
