"""Host side of the native cache operations (`kernels/cpu/cache_ops.cpp`): write, copy and gather of KV blocks."""

from __future__ import annotations

from dataclasses import dataclass

from .artifact import Artifact, KernelAbi
from .bounds import Bounds
from .device import Device, DeviceKind
from .launch import Arg, CType, KernelStep, LaunchAttributes, LaunchPlan, SizeArg, SlotSpec
from .native_args import FLOAT_CODES, SOURCE_DIR, i64, pointers, pool_strides, scale_stride, strides
from .pool_format import PoolFormat
from .problem import Problem
from .slots import copy_blocks_slots, gather_kv_slots, kv_write_slots
from .variant import Config, Op, Properties, Variant

# The binary's own signatures, stated apart from the plans so that the two are checked against each other at launch.
_ABI = {
    "pagedtune_kv_write": KernelAbi((CType.POINTER,) * 7 + (CType.I64,) * 23),
    "pagedtune_copy_blocks": KernelAbi((CType.POINTER,) * 3 + (CType.I64,) * 17),
    "pagedtune_gather_kv": KernelAbi((CType.POINTER,) * 9 + (CType.I64,) * 22),
}


@dataclass(frozen=True)
class CpuCacheConfig(Config):
    """Tunables of the cache operations.

    Args:
        num_threads: threads; 0 is every core this process may use.
    """

    num_threads: int = 0


class _CpuCacheOp(Variant):
    """What the three operations share: one library without compile-time shape, one step without workspace."""

    device_kind = DeviceKind.CPU
    config_type = CpuCacheConfig
    properties = Properties(deterministic=True, batch_invariant=True, graph_safe=True)

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Quantised pools are refused."""
        if pool_format.kv_dtype not in FLOAT_CODES:
            return f"{self.name} handles fp32, bf16 and fp16 pools, not {pool_format.kv_dtype}"
        return pool_format.reject(problem)

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """One library for every problem and format."""
        from .build_native import build_library

        return (build_library(SOURCE_DIR / "cache_ops.cpp", sorted(SOURCE_DIR.glob("*.h")), {}, _ABI),)

    def binary_id(self, problem: Problem, pool_format: PoolFormat, config: Config) -> str:
        """One library for all; see `Variant.binary_id`."""
        return "cache_ops"


class CpuKVWrite(_CpuCacheOp):
    """Stores new K and V at their slots, converting and scaling on the way."""

    name = "cpu_kv_write"
    summary = "C++ K/V write by slot mapping; negative slots are skipped"
    op = Op.KV_WRITE

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """One kernel over the tokens."""
        args: tuple[Arg, ...] = (
            *pointers("k", "v", "k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale"),
            *strides("k", (0, 1)),
            *strides("v", (0, 1)),
            *pool_strides(problem, pool_format),
            SizeArg("k", 0),
            *i64(problem.num_kv_heads, pool_format.block_size),
            SizeArg("k_cache", 0),
            *i64(problem.head_dim, problem.head_dim_v),
            *i64(FLOAT_CODES[problem.q_dtype], FLOAT_CODES[pool_format.kv_dtype], scale_stride(pool_format)),
        )
        return _single("pagedtune_kv_write", args, kv_write_slots(problem, pool_format), config)


class CpuCopyBlocks(_CpuCacheOp):
    """Copies whole blocks of both pools."""

    name = "cpu_copy_blocks"
    summary = "C++ copy of (source, destination) block pairs"
    op = Op.COPY_BLOCKS

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """One kernel over the pairs."""
        args: tuple[Arg, ...] = (
            *pointers("k_cache", "v_cache", "block_pairs"),
            *pool_strides(problem, pool_format),
            SizeArg("block_pairs", 0),
            *i64(problem.num_kv_heads, pool_format.block_size),
            SizeArg("k_cache", 0),
            *i64(problem.head_dim, problem.head_dim_v, FLOAT_CODES[pool_format.kv_dtype]),
        )
        return _single("pagedtune_copy_blocks", args, copy_blocks_slots(problem, pool_format), config)


class CpuGatherKV(_CpuCacheOp):
    """Collects the tokens of a batch from their blocks, bit for bit."""

    name = "cpu_gather_kv"
    summary = "C++ gather of paged K/V into packed tensors"
    op = Op.GATHER_KV

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """One kernel over the sequences' blocks; stored values are copied, scales stay apart."""
        code = FLOAT_CODES[pool_format.kv_dtype]
        args: tuple[Arg, ...] = (
            *pointers("k_cache", "v_cache", "block_table", "context_lens", "out_start", "no_scale", "no_scale"),
            *pointers("k_out", "v_out"),
            *pool_strides(problem, pool_format),
            *strides("k_out", (0,)),
            *strides("v_out", (0,)),
            *strides("block_table", (0,)),
            SizeArg("context_lens", 0),
            *i64(problem.num_kv_heads, pool_format.block_size),
            SizeArg("k_cache", 0),
            *i64(problem.head_dim, problem.head_dim_v, code, code, 0),
        )
        return _single("pagedtune_gather_kv", args, gather_kv_slots(problem, pool_format), config)


def _single(entry: str, args: tuple[Arg, ...], slots: dict[str, SlotSpec], config: Config) -> LaunchPlan:
    if not isinstance(config, CpuCacheConfig):
        raise TypeError(f"{entry} takes a CpuCacheConfig, not {type(config).__name__}")
    attributes = LaunchAttributes(num_threads=config.num_threads)
    return LaunchPlan((KernelStep(entry, (1, 1, 1), args, attributes=attributes),), slots)
