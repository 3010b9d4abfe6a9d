"""The pools: shapes, memory, guards."""

from __future__ import annotations

import pytest
import torch

from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.runtime.errors import Invariant, InvariantViolation
from pagedtune.runtime.kv_cache import KVCache

PROBLEM = Problem(num_q_heads=8, num_kv_heads=2, head_dim=32, head_dim_v=16)
FORMATS = [
    PoolFormat(16, DType.BF16, Layout.NHD),
    PoolFormat(8, DType.FP32, Layout.HND),
    PoolFormat(4, DType.FP16, Layout.XPACKED),
    PoolFormat(16, DType.FP8_E4M3, Layout.NHD, ScaleKind.PER_HEAD),
    PoolFormat(16, DType.INT8, Layout.HND, ScaleKind.PER_TENSOR),
    PoolFormat(16, DType.INT8, Layout.NHD, ScaleKind.PER_TOKEN_HEAD),
]
by_key = pytest.mark.parametrize("pool_format", FORMATS, ids=lambda f: f.key)
debugged = pytest.mark.parametrize("debug", [False, True])


@by_key
@debugged
def test_every_layer_has_the_shape_of_the_format(pool_format: PoolFormat, debug: bool) -> None:
    cache = KVCache(PROBLEM, pool_format, num_layers=3, num_blocks=5, debug=debug)
    for layer in range(3):
        k, v = cache.k_cache(layer), cache.v_cache(layer)
        assert (tuple(k.shape), k.dtype) == (pool_format.k_shape(5, PROBLEM), pool_format.kv_dtype.torch)
        assert (tuple(v.shape), v.dtype) == (pool_format.v_shape(5, PROBLEM), pool_format.kv_dtype.torch)
    scales = pool_format.scale_shape(5, PROBLEM)
    assert (cache.k_scale is None) == (scales is None)
    if cache.k_scale is not None and scales is not None:
        assert tuple(cache.k_scale.shape) == (3, *scales)
        if pool_format.has_token_scales:
            assert tuple(cache.k_scale[2].stride()) == (32, 16, 1)  # [num_blocks, 2 heads, 16 slots]
        else:
            assert (cache.k_scale == 1).all()


@by_key
def test_layers_do_not_overlap(pool_format: PoolFormat) -> None:
    cache = KVCache(PROBLEM, pool_format, num_layers=2, num_blocks=3)
    tensors = [pool(layer) for layer in range(2) for pool in (cache.k_cache, cache.v_cache)]
    if pool_format.has_token_scales:
        tensors += [cache.k_scale[0], cache.v_scale[0], cache.k_scale[1], cache.v_scale[1]]
    pools = [tensor.view(torch.uint8) for tensor in tensors]
    for value, pool in enumerate(pools):
        pool.fill_(value)
    assert [int(pool.min()) for pool in pools] == [int(pool.max()) for pool in pools] == [*range(len(pools))]


@by_key
@debugged
def test_accounting_is_that_of_the_tensors(pool_format: PoolFormat, debug: bool) -> None:
    cache = KVCache(PROBLEM, pool_format, num_layers=2, num_blocks=7, debug=debug)
    pools = [pool(layer) for layer in range(2) for pool in (cache.k_cache, cache.v_cache)]
    pools += [cache.k_scale, cache.v_scale] if pool_format.has_token_scales else []
    usable_bytes = sum(pool.numel() * pool.element_size() for pool in pools)
    assert usable_bytes == 2 * 7 * pool_format.block_size * pool_format.bytes_per_token(PROBLEM)
    assert cache.block_bytes * 7 == usable_bytes
    assert cache.num_bytes == usable_bytes + (2 * cache.block_bytes if debug else 0)
    assert cache.num_tokens == 7 * pool_format.block_size


@by_key
@debugged
def test_a_budget_is_used_and_kept(pool_format: PoolFormat, debug: bool) -> None:
    budget_bytes = 200_000
    cache = KVCache.from_budget(PROBLEM, pool_format, 2, budget_bytes, debug=debug)
    assert cache.num_bytes <= budget_bytes < cache.num_bytes + cache.block_bytes


def test_bad_sizes_are_refused() -> None:
    pool_format = FORMATS[0]
    with pytest.raises(ValueError, match="budget_bytes=100 holds no block: one takes 12288 bytes over 4 layers"):
        KVCache.from_budget(PROBLEM, pool_format, 4, 100)
    with pytest.raises(ValueError, match="num_layers=0"):
        KVCache(PROBLEM, pool_format, 0, 4)
    with pytest.raises(ValueError, match="num_blocks=0"):
        KVCache(PROBLEM, pool_format, 1, 0)
    with pytest.raises(ValueError, match="multiple of 8"):
        KVCache(Problem(4, 4, 12), PoolFormat(16, DType.BF16, Layout.XPACKED), 1, 1)
    with pytest.raises(IndexError, match="layers are 0 to 0"):
        KVCache(PROBLEM, pool_format, 1, 1).k_cache(-1)


@by_key
@pytest.mark.parametrize(("name", "side"), [("K", "before"), ("K", "behind"), ("V", "before"), ("V", "behind")])
def test_a_write_beside_the_pool_is_found(pool_format: PoolFormat, name: str, side: str) -> None:
    cache = KVCache(PROBLEM, pool_format, num_layers=2, num_blocks=3, debug=True)
    for layer in range(2):
        cache.k_cache(layer).view(torch.uint8).fill_(1)
        cache.v_cache(layer).view(torch.uint8).fill_(1)
    cache.check()
    pool = cache.k_cache(1) if name == "K" else cache.v_cache(1)
    offset = -1 if side == "before" else pool.numel()  # one element outside
    start = pool.storage_offset() + offset
    outside = torch.as_strided(pool, (1,), (1,), start)
    outside.view(torch.uint8).fill_(0)
    with pytest.raises(InvariantViolation, match=f"guard block {side} the {name} pool of layer 1") as found:
        cache.check()
    assert found.value.invariant is Invariant.GUARD


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.FP16, DType.FP8_E4M3])
def test_poison_is_nan(dtype: DType) -> None:
    cache = KVCache(PROBLEM, PoolFormat(4, dtype), 1, 2, debug=True)
    assert cache.k_cache(0).float().isnan().all()
