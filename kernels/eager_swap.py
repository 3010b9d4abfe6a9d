"""Baseline and fallback for the swap operations: plain torch indexing."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .artifact import Artifact
from .bounds import Bounds
from .device import Device, DeviceKind
from .eager import EagerConfig
from .gpu_cache import reject_scales_of_blocks
from .launch import CallStep, LaunchPlan, Tensors
from .pool_format import PoolFormat
from .problem import Problem
from .slots import pack_blocks_slots, unpack_blocks_slots
from .variant import Config, Op, Properties, Variant

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes of an element: bits are copied, not numbers


class _EagerSwap(Variant):
    """What packing and unpacking share: one host call, nothing to build."""

    device_kind = DeviceKind.CPU
    config_type = EagerConfig
    properties = Properties(deterministic=True, batch_invariant=True)

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Whatever the pool's dtype is, bits are copied."""
        return reject_scales_of_blocks(pool_format) or pool_format.reject(problem)

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """Nothing to build."""
        return ()


class EagerPackBlocks(_EagerSwap):
    """Indexed copy of listed blocks to a staging buffer."""

    name = "eager_pack_blocks"
    summary = "torch copy of listed blocks to a staging buffer: baseline and fallback"
    op = Op.PACK_BLOCKS

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """One host call."""
        return LaunchPlan((CallStep(pack_blocks),), pack_blocks_slots(problem, pool_format))


class EagerUnpackBlocks(_EagerSwap):
    """Indexed copy of a staging buffer to listed blocks."""

    name = "eager_unpack_blocks"
    summary = "torch copy of a staging buffer to listed blocks: baseline and fallback"
    op = Op.UNPACK_BLOCKS

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """One host call."""
        return LaunchPlan((CallStep(unpack_blocks),), unpack_blocks_slots(problem, pool_format))


def pack_blocks(tensors: Tensors) -> None:
    """Copies block `block_ids[i]` of both pools to row i of `staging`; rows of negative ids stay as they are."""
    ids = tensors["block_ids"]
    live = ids >= 0
    for pool, rows in _parts(tensors):
        rows[live] = pool[ids[live]].flatten(1)


def unpack_blocks(tensors: Tensors) -> None:
    """Copies row i of `staging` to block `block_ids[i]` of both pools, unless that is negative."""
    ids = tensors["block_ids"]
    live = ids >= 0
    for pool, rows in _parts(tensors):
        pool[ids[live]] = rows[live].view(-1, *pool.shape[1:])


def _parts(tensors: Tensors) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each pool with the columns of `staging` that hold its blocks, as integers."""
    start = 0
    for name in ("k_cache", "v_cache"):
        pool, staging = (t.view(_INTEGERS[t.element_size()]) for t in (tensors[name], tensors["staging"]))
        count = pool[0].numel()
        yield pool, staging[:, start : start + count]
        start += count
