"""A cache with scales of tokens from the write to the answer: kernels of all ops on one pool, and blocks that move."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from vgpu_attention import H100

from pagedtune.harness.vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.catalogue import find_variant
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.runtime.host_pool import HostPool
from pagedtune.runtime.kv_cache import KVCache
from pagedtune.runtime.launch_group import pool_tensors
from pagedtune.runtime.swap import copy_blocks

PROBLEM, TOKENS = Problem(4, 2, 64), 40
FORMATS = [
    PoolFormat(16, DType.INT8, Layout.NHD, ScaleKind.PER_TOKEN_HEAD),
    PoolFormat(16, DType.FP8_E4M3, Layout.HND, ScaleKind.PER_TOKEN_HEAD),
]
STEP = {DType.INT8: 1 / 127, DType.FP8_E4M3: 32 / 448}  # largest distance of two stored values, of a row's largest


def launch(name: str, pool_format: PoolFormat, tensors: dict[str, torch.Tensor], bounds: Bounds) -> None:
    if importlib.util.find_spec("triton" if name.startswith("triton") else "cuda") is None:
        pytest.skip(f"the compiler of {name} is not installed")
    variant = find_variant(name)
    config = variant.default_config(PROBLEM, pool_format, bounds, H100)
    plan = variant.plan(PROBLEM, pool_format, config, bounds)
    gpu = VirtualGpu(variant.build(PROBLEM, pool_format, config, H100), VirtualGpuOptions(num_threads=1))
    gpu.prepare(plan.bind({**tensors, **plan.allocate_workspaces()}))()


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one query token over unquantised keys, in float64."""
    keys, values = (x.double().repeat_interleave(2, dim=1) for x in (k, v))
    weights = (torch.einsum("hd,thd->ht", q[0].double(), keys) / 8).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, values)


@pytest.mark.parametrize("kind", ["cuda", "triton"])
@pytest.mark.parametrize("pool_format", FORMATS, ids=lambda f: f.key)
def test_what_was_written_is_attended_to_wherever_its_blocks_go(kind: str, pool_format: PoolFormat) -> None:
    generator = torch.Generator().manual_seed(3)
    cache = KVCache(PROBLEM, pool_format, num_layers=2, num_blocks=8, debug=True)
    pools = pool_tensors(cache, 1)
    # Rows whose sizes lie far apart: one scale for all of them would leave the small ones nothing.
    sizes = 2.0 ** torch.randint(-8, 3, (TOKENS, 2, 1), generator=generator)
    k = torch.randn(TOKENS, 2, 64, generator=generator).bfloat16()
    v = (torch.randn(TOKENS, 2, 64, generator=generator) * sizes).bfloat16()
    q = torch.randn(1, 4, 64, generator=generator).bfloat16()
    blocks = torch.tensor([6, 1, 3])
    slots = blocks[torch.arange(TOKENS) // 16] * 16 + torch.arange(TOKENS) % 16
    launch(f"{kind}_kv_write", pool_format, {"k": k, "v": v, "slot_mapping": slots, **pools}, Bounds(TOKENS, 64))

    # A fork's copy by the kernel, one by torch, and a way through host memory.
    launch(f"{kind}_copy_blocks", pool_format, {"block_pairs": torch.tensor([[3, 0]]), **pools}, Bounds(1, 64))
    copy_blocks(cache, torch.tensor([[1, 2]]))
    host = HostPool(cache, 1)
    host.save(np.array([6]), np.array([0]))
    host.load(np.array([0]), np.array([7]))

    for table in ([6, 1, 3], [7, 2, 0]):
        out = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
        attention = "cuda_split_mma" if kind == "cuda" else "triton_split"
        batch = {
            "q": q,
            "out": out,
            "block_table": torch.tensor([[*table, -1]], dtype=torch.int32),
            "context_lens": torch.tensor([TOKENS], dtype=torch.int32),
            "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
        }
        launch(attention, pool_format, {**pools, **batch}, Bounds(1, 64))
        wanted = expected(q, k, v)
        error = (out[0].double() - wanted).abs().max() / wanted.abs().max()
        assert error < 2 * STEP[pool_format.kv_dtype]
    cache.check()

    gathered = {name: torch.zeros(TOKENS, 2, 64).to(pool_format.kv_dtype.torch) for name in ("k_out", "v_out")}
    scales = {name: torch.zeros(TOKENS, 2) for name in ("k_scale_out", "v_scale_out")}
    batch = {"block_table": torch.tensor([[7, 2, 0]], dtype=torch.int32), "out_start": torch.tensor([0, TOKENS]).int()}
    lens = {"context_lens": torch.tensor([TOKENS], dtype=torch.int32)}
    launch(f"{kind}_gather_kv", pool_format, {**pools, **gathered, **scales, **batch, **lens}, Bounds(1, 64, TOKENS))
    for name, original in (("k", k), ("v", v)):
        real = gathered[f"{name}_out"].float() * scales[f"{name}_scale_out"][..., None]
        row = original.float().abs().amax(dim=-1, keepdim=True)
        assert ((real - original.float()).abs() <= 0.501 * STEP[pool_format.kv_dtype] * row).all()
