"""Shared memory of `triton_split`: `reject` counts what Triton's builds take, so nothing that it passes cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest
from vgpu_attention import H100

from pagedtune.kernels.cubin import ptx_is_enough
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.triton_split import TritonSplit, TritonSplitConfig
from pagedtune.kernels.triton_split_shape import REDUCTION_BYTES, shared_bytes
from pagedtune.tuner.configs import Configs

pytest.importorskip("triton")
BF16, FP16, FP32, E4M3 = DType.BF16, DType.FP16, DType.FP32, DType.FP8_E4M3


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "heads", "head_dim", "tile_tokens", "num_warps", "num_stages"),
    [
        (FP32, FP16, 71, 256, 32, 8, 2),
        (FP32, FP32, 8, 128, 32, 8, 3),
        (FP32, DType.INT8, 4, 256, 32, 8, 3),
        (FP32, E4M3, 16, 64, 64, 4, 2),
        (BF16, BF16, 8, 128, 64, 4, 2),
    ],
)
def test_what_is_counted_is_what_a_build_takes(
    q_dtype: DType,
    kv_dtype: DType,
    heads: int,
    head_dim: int,
    tile_tokens: int,
    num_warps: int,
    num_stages: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGEDTUNE_CACHE", str(tmp_path))
    problem = Problem(heads, 1, head_dim, q_dtype=q_dtype)
    scale_kind = ScaleKind.NONE if kv_dtype.itemsize > 1 else ScaleKind.PER_TENSOR
    pool_format = PoolFormat(16, kv_dtype, scale_kind=scale_kind)
    config = TritonSplitConfig(1, tile_tokens, 256, num_warps, num_stages)
    with ptx_is_enough():
        (artifact,) = TritonSplit().build(problem, pool_format, config, H100)
    taken = artifact.resources["attention_split"].dynamic_shared_bytes
    counted = shared_bytes(problem, pool_format, tile_tokens)
    assert taken <= counted <= taken + REDUCTION_BYTES


def test_a_block_that_does_not_fit_is_refused() -> None:
    """102,528 bytes: an H100 has them, an L40S has not."""
    problem, pool_format = Problem(71, 1, 256, q_dtype=FP32, window=16), PoolFormat(16, FP16)
    config = TritonSplitConfig(1, 32, 256, 8, 2)
    assert TritonSplit().reject(problem, pool_format, config, H100) is None
    reason = TritonSplit().reject(problem, pool_format, config, Configs().gpu("l40s").device("l40s"))
    assert reason is not None
    assert "bytes of shared memory, l40s has 101376" in reason


@pytest.mark.parametrize(("q_dtype", "kv_dtype"), [(BF16, FP16), (FP16, BF16)])
def test_16_bit_types_that_do_not_hold_each_other_are_refused(q_dtype: DType, kv_dtype: DType) -> None:
    reason = TritonSplit().reject(
        Problem(8, 2, 64, q_dtype=q_dtype), PoolFormat(16, kv_dtype), TritonSplitConfig(), H100
    )
    assert reason is not None
    assert "the range of bf16" in reason
