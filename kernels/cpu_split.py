"""Host side of `cpu_split`: split-K decode attention in C++ (`kernels/cpu/attention.cpp`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .artifact import Artifact, KernelAbi
from .bounds import Bounds
from .device import Device, DeviceKind
from .launch import Arg, CType, KernelStep, LaunchAttributes, LaunchPlan, SizeArg, WorkspaceSpec
from .native_args import FLOAT_CODES, SOURCE_DIR, f32, i64, pointers, pool_strides, scale_stride, strides
from .pool_format import Layout, PoolFormat
from .problem import Problem
from .slots import attention_slots, batch_limits
from .variant import Config, Properties, Variant

MAX_HEAD_DIM = 256  # the kernel keeps a head in registers and on the stack
MAX_TILE_TOKENS = 128
TILE_CHOICES = (32, 64, 128)
SPLIT_CHOICES = (1, 2, 4, 8)
PREFETCH_CHOICES = (0, 64, 128)
ISA_CODES = {"auto": -1, "portable": 0, "avx2": 1, "avx512": 2}  # PagedtuneIsa

# The binary's own signature, stated apart from `plan` so that the two are checked against each other at launch.
ABI = {
    "pagedtune_cpu_split": KernelAbi((CType.POINTER,) * 14 + (CType.I64,) * 27 + (CType.F32,) * 2),
    "pagedtune_cpu_merge": KernelAbi((CType.POINTER,) * 6 + (CType.I64,) * 7),
}


@dataclass(frozen=True)
class CpuSplitConfig(Config):
    """Tunables of `cpu_split`.

    Args:
        num_splits: most parts that one sequence's keys are split into (1: no split, no merge).
        tile_tokens: keys that are scored before their values are summed.
        prefetch_tokens: how far ahead of the tile the pool is prefetched, in tokens; 0 is not at all.
        split_tokens: fewest keys worth a split of their own.
        num_threads: threads; 0 is every core this process may use.
        isa: vector path (`auto`, `avx512`, `avx2`, `portable`); one that the CPU lacks is rejected, or fails at launch.
    """

    num_splits: int = 1
    tile_tokens: int = 64
    prefetch_tokens: int = 64
    split_tokens: int = 256
    num_threads: int = 0
    isa: str = "auto"


class CpuSplit(Variant):
    """One work item per query token, KV head and split; a GQA group reads its K and V once.

    Splits adapt to each sequence's context length on the device, so a plan serves any batch within its bounds.
    AVX-512, AVX2 and portable paths lie in one library; the best one is chosen at run time.
    """

    name = "cpu_split"
    summary = "C++ split-K decode with LSE merge; AVX-512, AVX2 and portable paths in one library"
    device_kind = DeviceKind.CPU
    config_type = CpuSplitConfig
    properties = Properties(deterministic=True, batch_invariant=True, graph_safe=True)

    def default_config(self, problem: Problem, pool_format: PoolFormat, bounds: Bounds, device: Device) -> Config:
        """Splits only where sequences x KV heads leave cores idle."""
        items = bounds.max_num_seqs * problem.num_kv_heads
        prefetch_tokens = 0 if pool_format.layout is Layout.XPACKED else 64
        return CpuSplitConfig(num_splits=1 if items >= device.num_units else 2, prefetch_tokens=prefetch_tokens)

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        """Splits x tile x prefetch on all cores, and one thread without splits."""
        for num_splits in SPLIT_CHOICES:
            for tile_tokens in TILE_CHOICES:
                for prefetch_tokens in PREFETCH_CHOICES:
                    yield CpuSplitConfig(num_splits, tile_tokens, prefetch_tokens)
        for prefetch_tokens in PREFETCH_CHOICES:  # a small launch is over before another core has woken up
            yield CpuSplitConfig(prefetch_tokens=prefetch_tokens, num_threads=1)

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Each constraint of the kernel."""
        config = _own(config)
        if pool_format.kv_dtype not in FLOAT_CODES:
            return f"cpu_split reads fp32, bf16 and fp16 pools, not {pool_format.kv_dtype}"
        if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
            return f"head dims go up to {MAX_HEAD_DIM}, not {max(problem.head_dim, problem.head_dim_v)}"
        if config.tile_tokens % 16 or not 16 <= config.tile_tokens <= MAX_TILE_TOKENS:
            return f"tile_tokens={config.tile_tokens} must be a multiple of 16 from 16 to {MAX_TILE_TOKENS}"
        if config.num_splits < 1 or config.split_tokens < 1:
            return f"num_splits={config.num_splits} and split_tokens={config.split_tokens} must be at least 1"
        if config.prefetch_tokens < 0 or config.num_threads < 0:
            return f"prefetch_tokens={config.prefetch_tokens}, num_threads={config.num_threads} must not be negative"
        if pool_format.layout is Layout.XPACKED and config.prefetch_tokens:
            return "the xpacked layout is staged tile by tile: prefetch_tokens must be 0"
        if config.isa not in ISA_CODES:
            return f"isa={config.isa} must be one of {', '.join(ISA_CODES)}"
        if device.isa in ISA_CODES and ISA_CODES[config.isa] > ISA_CODES[device.isa]:
            return f"isa={config.isa} is more than this CPU has, which is {device.isa}: use auto"
        return pool_format.reject(problem)

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """One library per head dims, GQA ratio and dtypes."""
        from .build_native import build_library

        headers = sorted(SOURCE_DIR.glob("*.h"))
        return (build_library(SOURCE_DIR / "attention.cpp", headers, defines(problem, pool_format), ABI),)

    def binary_id(self, problem: Problem, pool_format: PoolFormat, config: Config) -> str:
        """The preprocessor definitions; see `Variant.binary_id`."""
        return ",".join(f"{name}={value}" for name, value in sorted(defines(problem, pool_format).items()))

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """The split kernel alone, or split and merge over fp32 partials."""
        config = _own(config)
        useful = -(-bounds.max_context_len // config.split_tokens)
        num_splits = max(1, min(config.num_splits, useful))
        steps = [_split_step(problem, pool_format, config, bounds, num_splits)]
        workspaces = {}
        if num_splits > 1:
            steps.append(_merge_step(problem, config, bounds, num_splits))
            workspaces = _partials(problem, bounds, num_splits)
        return LaunchPlan(tuple(steps), attention_slots(problem, pool_format), workspaces, batch_limits(bounds))


def defines(problem: Problem, pool_format: PoolFormat) -> dict[str, int]:
    """What the source is compiled for, by preprocessor name."""
    return {
        "PT_HEAD_DIM_K": problem.head_dim,
        "PT_HEAD_DIM_V": problem.head_dim_v,
        "PT_GROUP": problem.gqa_ratio,
        "PT_Q_DTYPE": FLOAT_CODES[problem.q_dtype],
        "PT_KV_DTYPE": FLOAT_CODES[pool_format.kv_dtype],
    }


def _own(config: Config) -> CpuSplitConfig:
    if not isinstance(config, CpuSplitConfig):
        raise TypeError(f"cpu_split takes a CpuSplitConfig, not {type(config).__name__}")
    return config


def _partials(problem: Problem, bounds: Bounds, num_splits: int) -> dict[str, WorkspaceSpec]:
    rows = (bounds.max_num_tokens, problem.num_q_heads, num_splits)
    return {
        "partial_out": WorkspaceSpec(torch.float32, (*rows, problem.head_dim_v), partial_of="out"),
        "partial_lse": WorkspaceSpec(torch.float32, rows, partial_of="lse"),
    }


def _split_step(
    problem: Problem, pool_format: PoolFormat, config: CpuSplitConfig, bounds: Bounds, num_splits: int
) -> KernelStep:
    partials = ("partial_out", "partial_lse")
    scales = ("k_scale", "v_scale")
    args: tuple[Arg, ...] = (
        *pointers("q", "k_cache", "v_cache", "block_table", "context_lens", "query_start_loc"),
        *pointers("sinks", "alibi_slopes", *scales, "out", "lse", *partials),
        *strides("q", (0, 1)),
        *pool_strides(problem, pool_format),
        *strides("out", (0, 1)),
        *strides("lse", (0,)),
        *strides("block_table", (0,)),
        SizeArg("context_lens", 0),
        SizeArg("q", 0),
        *i64(problem.num_kv_heads, pool_format.block_size, num_splits, config.split_tokens),
        *i64(
            problem.window or 0,
            scale_stride(pool_format),
            config.prefetch_tokens,
            ISA_CODES[config.isa],
            config.tile_tokens,
        ),
        *f32(problem.softmax_scale, problem.soft_cap or 0.0),
    )
    grid = (bounds.max_num_tokens, problem.num_kv_heads, num_splits)
    return KernelStep("pagedtune_cpu_split", grid, args, attributes=LaunchAttributes(num_threads=config.num_threads))


def _merge_step(problem: Problem, config: CpuSplitConfig, bounds: Bounds, num_splits: int) -> KernelStep:
    args: tuple[Arg, ...] = (
        *pointers("partial_out", "partial_lse", "sinks", "query_start_loc", "out", "lse"),
        *strides("out", (0, 1)),
        *strides("lse", (0,)),
        SizeArg("context_lens", 0),
        SizeArg("q", 0),
        *i64(problem.num_q_heads, num_splits),
    )
    grid = (bounds.max_num_tokens, problem.num_q_heads, 1)
    return KernelStep("pagedtune_cpu_merge", grid, args, attributes=LaunchAttributes(num_threads=config.num_threads))
