"""Makes a variant say what it refuses: its constraints live in `reject` alone, so that is what is asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from pagedtune.kernels.device import Device
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Variant

_PLAIN = Problem(8, 2, 128)
_UNUSUAL_PROBLEMS = (
    {"head_dim": 4},
    {"head_dim": 100},
    {"head_dim": 96},
    {"head_dim": 320},
    {"head_dim": 512},
    {"head_dim_v": 64},
    {"num_q_heads": 14},
    {"num_q_heads": 128},
    {"window": 1000},
    {"soft_cap": 30.0},
    {"sinks": True},
    {"alibi": True},
    {"max_query_len": 16},
)
_PROBED = re.compile(r"(?<=\w)=\S+(?= must )|, not \d+$")  # the value that was tried: nobody asked for it
_KV_DTYPES = (DType.FP32, DType.BF16, DType.FP16, DType.FP8_E4M3, DType.INT8)


def provoked_rejections(variant: Variant, device: Device) -> list[str]:
    """The distinct reasons with which `variant` refuses everything unusual, each once, in the order met."""
    reasons: dict[str, str] = {}  # by their text without numbers
    for problem, pool_format in _unusual():
        for config in variant.space(problem, pool_format, device):
            reason = variant.reject(problem, pool_format, config, device)
            if reason is None:
                break
            reasons.setdefault(re.sub(r"\d+", "#", reason), _PROBED.sub("", reason))
    return list(reasons.values())


def accepted_pools(variant: Variant, device: Device) -> list[str]:
    """The pools that `variant` reads or writes, a line for each dtype of queries: `bf16: bf16, int8; nhd; ...`."""
    lines = []
    for q_dtype in (DType.BF16, DType.FP16, DType.FP32):
        problem = replace(_PLAIN, q_dtype=q_dtype)
        taken = [
            (kv_dtype, layout, scale_kind)
            for kv_dtype in _KV_DTYPES
            for layout in Layout
            for scale_kind in ScaleKind
            if _takes(variant, problem, PoolFormat(16, kv_dtype, layout, scale_kind), device)
        ]
        dtypes, layouts, scales = (dict.fromkeys(str(t[k]) for t in taken) for k in range(3))
        if taken:
            lines.append(f"{q_dtype}: {', '.join(dtypes)}; {', '.join(layouts)}; scales {', '.join(scales)}")
    return lines


def _takes(variant: Variant, problem: Problem, pool_format: PoolFormat, device: Device) -> bool:
    configs = variant.space(problem, pool_format, device)
    return any(variant.reject(problem, pool_format, config, device) is None for config in configs)


def _unusual() -> Iterator[tuple[Problem, PoolFormat]]:
    plain_format = PoolFormat(16, DType.BF16)
    for change in _UNUSUAL_PROBLEMS:
        yield replace(_PLAIN, **{"head_dim_v": 0, **change}), plain_format  # type: ignore[arg-type]
    for kv_dtype in _KV_DTYPES:
        for layout in Layout:
            for block_size in (1, 16, 24, 256):
                for scale_kind in ScaleKind:
                    yield _PLAIN, PoolFormat(block_size, kv_dtype, layout, scale_kind)
