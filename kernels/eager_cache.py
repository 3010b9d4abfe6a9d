"""Baseline and fallback for the cache operations: plain torch indexing."""

from __future__ import annotations

from functools import partial

import torch

from .artifact import Artifact
from .bounds import Bounds
from .device import Device, DeviceKind
from .dtypes import DType
from .eager import EagerConfig
from .launch import CallStep, LaunchPlan, Tensors
from .pool_format import KVAxes, PoolFormat
from .problem import Problem
from .slots import copy_blocks_slots, gather_kv_slots, kv_write_slots
from .variant import Config, Op, Properties, Variant


class _EagerCacheOp(Variant):
    """What the three operations share: one host call, nothing to build."""

    device_kind = DeviceKind.CPU
    config_type = EagerConfig
    properties = Properties(deterministic=True, batch_invariant=True)

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Quantised pools are refused."""
        if pool_format.kv_dtype not in (DType.FP32, DType.BF16, DType.FP16):
            return f"{self.name} handles fp32, bf16 and fp16 pools, not {pool_format.kv_dtype}"
        return pool_format.reject(problem)

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """Nothing to build."""
        return ()


class EagerKVWrite(_EagerCacheOp):
    """Indexed assignment of new K and V."""

    name = "eager_kv_write"
    summary = "torch K/V write by slot mapping: baseline and fallback"
    op = Op.KV_WRITE

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """One host call."""
        step = CallStep(partial(write_kv, pool_format))
        return LaunchPlan((step,), kv_write_slots(problem, pool_format))


class EagerCopyBlocks(_EagerCacheOp):
    """Indexed copy of whole blocks."""

    name = "eager_copy_blocks"
    summary = "torch copy of (source, destination) block pairs: baseline and fallback"
    op = Op.COPY_BLOCKS

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """One host call."""
        return LaunchPlan((CallStep(copy_blocks),), copy_blocks_slots(problem, pool_format))


class EagerGatherKV(_EagerCacheOp):
    """Indexed gather of each sequence."""

    name = "eager_gather_kv"
    summary = "torch gather of paged K/V into packed tensors: baseline and fallback"
    op = Op.GATHER_KV

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """One host call."""
        step = CallStep(partial(gather_kv, pool_format))
        return LaunchPlan((step,), gather_kv_slots(problem, pool_format))


def write_kv(pool_format: PoolFormat, tensors: Tensors) -> None:
    """Stores `k` and `v` at `slot_mapping`; negative slots are skipped."""
    live = tensors["slot_mapping"] >= 0
    slots = tensors["slot_mapping"][live]
    block, slot = slots // pool_format.block_size, slots % pool_format.block_size
    for name, axes in (("k", pool_format.k_axes), ("v", pool_format.v_axes)):
        values = tensors[name][live]
        if f"{name}_scale" in tensors:
            values = values.float() / tensors[f"{name}_scale"].view(1, -1, 1)
        rows = _token_rows(tensors[f"{name}_cache"], axes)  # [num_blocks, block_size, heads, ...]
        rows[block, slot] = values.to(rows.dtype).reshape(-1, *rows.shape[2:])


def copy_blocks(tensors: Tensors) -> None:
    """Copies block `pairs[i, 0]` to block `pairs[i, 1]` in both pools, unless one of them is negative."""
    pairs = tensors["block_pairs"]
    source, destination = pairs[(pairs >= 0).all(1)].unbind(1)
    for name in ("k_cache", "v_cache"):
        tensors[name][destination] = tensors[name][source]


def gather_kv(pool_format: PoolFormat, tensors: Tensors) -> None:
    """Collects each sequence's tokens into `k_out` and `v_out` from row `out_start` on."""
    starts = tensors["out_start"].tolist()
    for seq, context_len in enumerate(tensors["context_lens"].tolist()):
        position = torch.arange(context_len)
        block = tensors["block_table"][seq].long()[position // pool_format.block_size]
        for name, axes in (("k", pool_format.k_axes), ("v", pool_format.v_axes)):
            rows = _token_rows(tensors[f"{name}_cache"], axes)[block, position % pool_format.block_size]
            tensors[f"{name}_out"][starts[seq] : starts[seq] + context_len] = rows.flatten(2)


def _token_rows(pool: torch.Tensor, axes: KVAxes) -> torch.Tensor:
    """View of a pool as [num_blocks, block_size, num_kv_heads, head_dim] (or [..., head_dim / x, x])."""
    dims = (axes.block, axes.slot, axes.head, axes.dim)
    return pool.permute(*dims if axes.pack is None else (*dims, axes.pack))
