"""Faults planted in the cache operations, as torch code: each is a few lines that a reviewer could overlook."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from pagedtune.harness.verdicts import Check
from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.eager import EagerConfig
from pagedtune.kernels.eager_cache import copy_blocks, gather_kv, write_kv
from pagedtune.kernels.launch import CallStep, LaunchPlan, Tensors
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.slots import (
    copy_blocks_slots,
    gather_kv_slots,
    kv_write_slots,
    pack_blocks_slots,
    unpack_blocks_slots,
)
from pagedtune.kernels.variant import Config, Op, Properties, Variant

Function = Callable[[PoolFormat, Tensors], None]
_SLOTS = {
    Op.KV_WRITE: kv_write_slots,
    Op.COPY_BLOCKS: copy_blocks_slots,
    Op.GATHER_KV: gather_kv_slots,
    Op.PACK_BLOCKS: pack_blocks_slots,
    Op.UNPACK_BLOCKS: unpack_blocks_slots,
}


class PlantedOp(Variant):
    """A cache operation that is wrong in one way."""

    name = "planted"
    summary = "a wrong cache operation"
    device_kind = DeviceKind.CPU
    config_type = EagerConfig
    properties = Properties(deterministic=True)

    def __init__(self, op: Op, fault: str, source: str, function: Function, expected: tuple[Check, ...]) -> None:
        self.op = op  # type: ignore[misc]  # one class for all ops
        self.fault, self.source, self.function, self.expected = fault, source, function, expected

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """What the format itself refuses."""
        return pool_format.reject(problem)

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """Nothing."""
        return ()

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """The wrong call."""
        step = CallStep(partial(self.function, pool_format))
        return LaunchPlan((step,), _SLOTS[self.op](problem, pool_format))


def _write_negative_as_last(pool_format: PoolFormat, tensors: Tensors) -> None:
    num_slots = tensors["k_cache"].shape[0] * pool_format.block_size
    write_kv(pool_format, {**tensors, "slot_mapping": tensors["slot_mapping"] % num_slots})


def _write_truncated(pool_format: PoolFormat, tensors: Tensors) -> None:
    dtype = tensors["k_cache"].dtype
    bits = {torch.bfloat16: 16, torch.float16: 13}.get(dtype, 0)
    keep = torch.tensor(-1 << bits, dtype=torch.int32)
    cut = {n: (tensors[n].float().view(torch.int32) & keep).view(torch.float32) for n in ("k", "v")}
    write_kv(pool_format, {**tensors, **cut})


def _write_scale_twice(pool_format: PoolFormat, tensors: Tensors) -> None:
    scales = {n: tensors[n] ** 2 for n in ("k_scale", "v_scale") if n in tensors}
    write_kv(pool_format, {**tensors, **scales})


def _write_v_with_k_scale(pool_format: PoolFormat, tensors: Tensors) -> None:
    scales = {"v_scale": tensors["k_scale"]} if "k_scale" in tensors else {}
    write_kv(pool_format, {**tensors, **scales})


def _write_next_slot_too(pool_format: PoolFormat, tensors: Tensors) -> None:
    slots = tensors["slot_mapping"]
    num_slots = tensors["k_cache"].shape[0] * pool_format.block_size
    spilled = torch.where(slots >= 0, (slots + 1) % num_slots, slots)
    write_kv(pool_format, {**tensors, "slot_mapping": spilled})
    write_kv(pool_format, tensors)


def _copy_backwards(pool_format: PoolFormat, tensors: Tensors) -> None:
    copy_blocks({**tensors, "block_pairs": tensors["block_pairs"].flip(1)})


def _copy_k_only(pool_format: PoolFormat, tensors: Tensors) -> None:
    copy_blocks({**tensors, "v_cache": tensors["v_cache"].clone()})


def _copy_without_last_pair(pool_format: PoolFormat, tensors: Tensors) -> None:
    copy_blocks({**tensors, "block_pairs": tensors["block_pairs"][:-1]})


def _gather_whole_blocks(pool_format: PoolFormat, tensors: Tensors) -> None:
    size, rows = pool_format.block_size, tensors["k_out"].shape[0]
    lens, starts = tensors["context_lens"], tensors["out_start"]
    rounded = torch.minimum((lens + size - 1) // size * size, rows - starts[:-1])
    gather_kv(pool_format, {**tensors, "context_lens": rounded.int()})


def _gather_clears_input(pool_format: PoolFormat, tensors: Tensors) -> None:
    gather_kv(pool_format, tensors)
    tensors["context_lens"].zero_()


CACHE_FAULTS = (
    PlantedOp(Op.KV_WRITE, "slot -1 used as an index", "padding writes", _write_negative_as_last, (Check.EXACT,)),
    PlantedOp(Op.KV_WRITE, "conversion truncates", "rounding", _write_truncated, (Check.EXACT,)),
    PlantedOp(Op.KV_WRITE, "scale applied twice", "#17", _write_scale_twice, (Check.EXACT,)),
    PlantedOp(Op.KV_WRITE, "V stored with k_scale", "#16", _write_v_with_k_scale, (Check.EXACT,)),
    PlantedOp(Op.KV_WRITE, "a neighbour slot is written", "#40", _write_next_slot_too, (Check.EXACT,)),
    PlantedOp(Op.COPY_BLOCKS, "source and destination swapped", "copy-on-write", _copy_backwards, (Check.EXACT,)),
    PlantedOp(Op.COPY_BLOCKS, "only K is copied", "copy-on-write", _copy_k_only, (Check.EXACT,)),
    PlantedOp(Op.COPY_BLOCKS, "the last pair is dropped", "off by one", _copy_without_last_pair, (Check.EXACT,)),
    PlantedOp(Op.GATHER_KV, "whole blocks are gathered", "#41", _gather_whole_blocks, (Check.EXACT, Check.POISON)),
    PlantedOp(Op.GATHER_KV, "the lengths are changed", "input edited", _gather_clears_input, (Check.INPUTS,)),
)
