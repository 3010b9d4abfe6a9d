"""Smaller problems that run the very same binaries: fewer KV heads."""

from __future__ import annotations

from dataclasses import replace

from pagedtune.kernels.device import Device
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Config, Variant


def with_heads(problem: Problem, num_kv_heads: int) -> Problem:
    """The problem with `num_kv_heads` KV heads at its GQA ratio."""
    return replace(problem, num_kv_heads=num_kv_heads, num_q_heads=num_kv_heads * problem.gqa_ratio)


def with_fewer_heads(
    variant: Variant, config: Config, problem: Problem, pool_format: PoolFormat, device: Device, num_kv_heads: int
) -> Problem:
    """The problem with `num_kv_heads` KV heads if it runs on the same binaries, else the problem itself."""
    if num_kv_heads >= problem.num_kv_heads:
        return problem
    fewer = with_heads(problem, num_kv_heads)
    if variant.reject(fewer, pool_format, config, device) is not None:
        return problem
    keys = [[a.key for a in variant.build(p, pool_format, config, device)] for p in (problem, fewer)]
    return fewer if keys[0] == keys[1] else problem
