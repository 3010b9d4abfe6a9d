"""Host side of the native swap operations (`kernels/cpu/swap_ops.cpp`): blocks to a staging buffer and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from .artifact import Artifact, KernelAbi
from .bounds import Bounds
from .cpu_cache import CpuCacheConfig
from .device import Device, DeviceKind
from .gpu_cache import block_strides, cache_limits, reject_scales_of_blocks, runs_of
from .launch import Arg, CType, KernelStep, LaunchAttributes, LaunchPlan, SizeArg, SlotSpec, StrideArg
from .native_args import SOURCE_DIR, i64, pointers
from .pool_format import PoolFormat
from .problem import Problem
from .slots import pack_blocks_slots, unpack_blocks_slots
from .variant import Config, Op, Properties, Variant

# The binary's own signatures, stated apart from the plans so that the two are checked against each other at launch.
_ABI = dict.fromkeys(
    ("pagedtune_pack_blocks", "pagedtune_unpack_blocks"), KernelAbi((CType.POINTER,) * 4 + (CType.I64,) * 20)
)


class _CpuSwap(Variant):
    """What packing and unpacking share: one library for every shape and dtype, one step without workspace."""

    device_kind = DeviceKind.CPU
    config_type = CpuCacheConfig
    properties = Properties(deterministic=True, batch_invariant=True, graph_safe=True)
    entry: ClassVar[str]
    slots: ClassVar[Callable[[Problem, PoolFormat], dict[str, SlotSpec]]]

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Whatever the pool's dtype is, bits are copied."""
        return reject_scales_of_blocks(pool_format) or pool_format.reject(problem)

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """One library for every problem and format."""
        from .build_native import build_library

        return (build_library(SOURCE_DIR / "swap_ops.cpp", sorted(SOURCE_DIR.glob("*.h")), {}, _ABI),)

    def binary_id(self, problem: Problem, pool_format: PoolFormat, config: Config) -> str:
        """One library for all; see `Variant.binary_id`."""
        return "swap_ops"

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """One kernel over the listed blocks."""
        if not isinstance(config, CpuCacheConfig):
            raise TypeError(f"{self.name} takes a CpuCacheConfig, not {type(config).__name__}")
        runs = runs_of(problem, pool_format)
        args: tuple[Arg, ...] = (
            *pointers("k_cache", "v_cache", "block_ids", "staging"),
            *(arg for name in ("k", "v") for arg in (*block_strides(pool_format, name), *i64(*runs[name]))),
            StrideArg("staging", 0),
            SizeArg("block_ids", 0),
            SizeArg("k_cache", 0),
            *i64(pool_format.kv_dtype.itemsize),
        )
        step = KernelStep(self.entry, (1, 1, 1), args, attributes=LaunchAttributes(num_threads=config.num_threads))
        slots = type(self).slots(problem, pool_format)
        return LaunchPlan((step,), slots, {}, cache_limits(self.op, bounds))


class CpuPackBlocks(_CpuSwap):
    """Copies listed blocks of both pools to the rows of a staging buffer."""

    name = "cpu_pack_blocks"
    summary = "C++ copy of listed blocks to a staging buffer; negative ids are skipped"
    op = Op.PACK_BLOCKS
    entry = "pagedtune_pack_blocks"
    slots = pack_blocks_slots


class CpuUnpackBlocks(_CpuSwap):
    """Copies the rows of a staging buffer to listed blocks of both pools."""

    name = "cpu_unpack_blocks"
    summary = "C++ copy of a staging buffer to listed blocks; negative ids are skipped"
    op = Op.UNPACK_BLOCKS
    entry = "pagedtune_unpack_blocks"
    slots = unpack_blocks_slots
