"""The copies of a step, in every layer, by a kernel that takes no more pairs than it was planned for."""

from __future__ import annotations

import pytest
import torch

from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.catalogue import VARIANTS
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.eager_cache import EagerCopyBlocks
from pagedtune.kernels.gpu_cache import cache_limits
from pagedtune.kernels.launch import LaunchPlan
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Config, Op
from pagedtune.runtime.attention import PagedAttention
from pagedtune.runtime.dispatch import Dispatch
from pagedtune.runtime.kv_cache import KVCache
from pagedtune.runtime.launch_group import LayerAttention
from pagedtune.runtime.limits import BatchLimits
from pagedtune.runtime.model_attention import ModelAttention

DEVICE = Device("cpu", DeviceKind.CPU, product="any", num_units=2, isa="portable")
PROBLEM, FORMAT = Problem(2, 1, 8, q_dtype=DType.FP32), PoolFormat(4, DType.FP32)


class BoundedCopy(EagerCopyBlocks):
    """A copy of blocks with the limits of the GPU's."""

    name = "bounded_copy"

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        plan = super().plan(problem, pool_format, config, bounds)
        return LaunchPlan(plan.steps, plan.slots, limits=cache_limits(self.op, bounds))


@pytest.mark.parametrize("num_pairs", [1, 2, 3, 5, 9])
def test_all_pairs_of_a_step_are_copied(num_pairs: int) -> None:
    """Up to 9 for 4 rows: samples and beams may want several copies each."""
    fallbacks = {Op.ATTENTION: ("eager",), Op.KV_WRITE: ("eager_kv_write",), Op.COPY_BLOCKS: ("bounded_copy",)}
    dispatch = Dispatch(DEVICE, variants=(*VARIANTS, BoundedCopy()), fallbacks=fallbacks)
    cache = KVCache(PROBLEM, FORMAT, num_layers=2, num_blocks=20)
    for tensor in cache.block_tensors():
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in cache.block_tensors()]
    attention = PagedAttention(PROBLEM, FORMAT, dispatch)
    layers = [LayerAttention(attention, {}) for _ in range(2)]
    model = ModelAttention(cache, layers, dispatch, BatchLimits(4, 64, 16))
    pairs = torch.stack([torch.arange(num_pairs), 10 + torch.arange(num_pairs)], 1)
    model._copy_blocks(pairs)
    for tensor, old in zip(cache.block_tensors(), before, strict=True):
        old[:, pairs[:, 1]] = old[:, pairs[:, 0]]
        assert torch.equal(tensor, old)
