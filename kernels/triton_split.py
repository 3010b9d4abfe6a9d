"""Host side of `triton_split`: split-K decode attention in Triton (`kernels/triton/split_kernel.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .artifact import Artifact
from .bounds import Bounds
from .device import Device, DeviceKind
from .dtypes import DType
from .launch import Arg, CType, KernelStep, LaunchPlan, ScalarArg, SizeArg, SlotArg, StrideArg, WorkspaceSpec
from .native_args import token_scale_strides
from .pool_format import Layout, PoolFormat, ScaleKind
from .problem import Problem
from .slots import aligned, attention_slots, batch_limits
from .split_defaults import SplitShape, default_splits
from .triton_split_shape import (
    MAX_HEAD_DIM,
    MIN_ROWS,
    VECTOR_BYTES,
    alignments,
    block_rows,
    dot_dtype,
    in_words,
    power_of_two,
    reject_tile,
    row_tiles,
    shared_bytes,
    tile_bytes,
)
from .variant import Config, Numerics, Properties, Variant

SOURCE = Path(__file__).parent / "triton" / "split_kernel.py"
TILE_CHOICES = (32, 64, 128)
SHAPE_CHOICES = (
    (4, 128),
    (2, 64),
    (8, 128),
    (4, 64),
    (8, 64),
    (4, 32),
    (8, 32),
    (4, 16),
    (8, 16),
)  # warps, tile tokens
DEFAULT_SPLITS = (1, 2, 4, 8, 16, 32)
SPLIT_CHOICES = (1, 4, 8, 16, 32)
_TYPES = {DType.BF16: "bf16", DType.FP16: "fp16", DType.FP32: "fp32", DType.FP8_E4M3: "fp8e4nv", DType.INT8: "i8"}
_POINTERS = (
    "q", "k_cache", "v_cache", "block_table", "context_lens", "query_start_loc", "sinks", "alibi_slopes", "k_scale",
    "v_scale", "out", "lse", "partial_out", "partial_lse",
)  # fmt: skip
_MERGE_POINTERS = ("partial_out", "partial_lse", "sinks", "query_start_loc", "out", "lse")


@dataclass(frozen=True)
class TritonSplitConfig(Config):
    """Tunables of `triton_split`.

    Args:
        num_splits: most parts that one sequence's keys are split into (1: no split, no merge).
        tile_tokens: keys of one matrix product.
        split_tokens: fewest keys worth a split of their own.
        num_warps: warps of a block.
        num_stages: depth of the software pipeline that prefetches tiles.
    """

    num_splits: int = 8
    tile_tokens: int = 64
    split_tokens: int = 256
    num_warps: int = 4
    num_stages: int = 2


class TritonSplit(Variant):
    """One block per query token, KV head and split; the query heads of a group are the rows of the products.

    Splits adapt to each sequence's context length on the device, so a plan serves any batch within its bounds.
    """

    name = "triton_split"
    summary = "Triton split-K decode with LSE merge; a GQA group reads its K and V once"
    device_kind = DeviceKind.CUDA
    config_type = TritonSplitConfig
    properties = Properties(deterministic=True, batch_invariant=True, graph_safe=True)

    def numerics(self, problem: Problem, pool_format: PoolFormat) -> Numerics:
        """Softmax weights (times the scales of tokens, relative to a power of two about the largest) are rounded to
        what the second product takes: the query's dtype, fp16 with e4m3 pools, fp32 where either is fp32."""
        return Numerics(p=dot_dtype(problem, pool_format))

    def default_config(self, problem: Problem, pool_format: PoolFormat, bounds: Bounds, device: Device) -> Config:
        """The first block shape that a context fills and that is not rejected, and the splits of `split_defaults`.

        With a tile of one token per thread each table entry is copied once; with fewer tokens every thread that loads a
        part of a token's row looks its block up.
        """
        tokens = min(bounds.max_context_len, problem.window or bounds.max_context_len)
        shapes = [
            TritonSplitConfig(1, t, num_warps=w) for w, t in SHAPE_CHOICES if t <= max(tokens, SHAPE_CHOICES[1][1])
        ]
        config = next((c for c in shapes if self.reject(problem, pool_format, c, device) is None), shapes[0])
        flight = tile_bytes(problem, pool_format, config.tile_tokens)
        fits_twice = 2 * shared_bytes(problem, pool_format, config.tile_tokens) <= device.shared_bytes_per_block
        blocks = bounds.max_num_tokens * problem.num_kv_heads * row_tiles(problem)
        shape = SplitShape(blocks, flight, resident=2 if fits_twice else 1)
        splits = default_splits(problem, pool_format, bounds, device, shape, DEFAULT_SPLITS)
        return replace(config, num_splits=splits)

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        """Splits x tile x warps x stages."""
        for num_splits in SPLIT_CHOICES:
            for tile_tokens in TILE_CHOICES:
                for num_warps in (2, 4, 8):
                    for num_stages in (2, 3):
                        yield TritonSplitConfig(num_splits, tile_tokens, 256, num_warps, num_stages)

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Each constraint of the kernel."""
        config = _own(config)
        if pool_format.kv_dtype not in _TYPES:
            return f"triton_split cannot read {pool_format.kv_dtype} pools"
        if {problem.q_dtype, pool_format.kv_dtype} == {DType.BF16, DType.FP16}:  # fp32 holds both, at a crawl
            return "bf16 lacks the digits of fp16 and fp16 the range of bf16: triton_split multiplies one of them"
        if pool_format.kv_dtype is DType.FP8_E4M3 and device.capability < 89:
            return f"e4m3 needs compute capability 8.9, not {device.capability / 10}"
        if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
            return f"head dims go up to {MAX_HEAD_DIM}, not {max(problem.head_dim, problem.head_dim_v)}"
        for name in ("num_splits", "tile_tokens", "num_warps", "num_stages"):
            value = getattr(config, name)
            if value < 1 or (name in ("tile_tokens", "num_warps") and value & (value - 1)):
                return f"{name}={value} must be a power of two of at least 1"
        if config.tile_tokens < MIN_ROWS:
            return f"tile_tokens={config.tile_tokens} must be at least {MIN_ROWS}"
        tile = (config.tile_tokens, config.num_warps, config.num_stages)
        if (reason := reject_tile(problem, pool_format, *tile, device)) is not None:
            return reason
        if config.split_tokens < 1:
            return f"split_tokens={config.split_tokens} must be at least 1"
        return pool_format.reject(problem)

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """The split kernel, and the merge where there is more than one split."""
        from .build_triton import TritonKernel, build_triton

        config = _own(config)
        signature = _signature(problem, pool_format)
        split = TritonKernel(
            SOURCE,
            "attention_split",
            signature,
            _constants(problem, pool_format, config),
            {n: d for n, d in _divisible(problem, pool_format).items() if n in signature},
            config.num_warps,
            config.num_stages,
        )
        if config.num_splits == 1:
            return (build_triton(split, device.capability),)
        merge_signature = {**_types(_MERGE_POINTERS, problem, pool_format), **dict.fromkeys(_MERGE_INTEGERS, "i64")}
        merge = TritonKernel(
            SOURCE,
            "attention_merge",
            merge_signature,
            {
                "DIM_V": problem.head_dim_v,
                "BLOCK_DV": power_of_two(problem.head_dim_v),
                "BLOCK_SPLITS": power_of_two(config.num_splits),
                "HAS_SINKS": problem.sinks,
            },
            {n: d for n, d in _divisible(problem, pool_format).items() if n in merge_signature},
            num_warps=1,
        )
        return build_triton(split, device.capability), build_triton(merge, device.capability)

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """The split kernel alone, or split and merge over fp32 partials."""
        config = _own(config)
        splits = config.num_splits
        steps = [_split_step(problem, pool_format, config, bounds)]
        workspaces = {}
        if splits > 1:
            steps.append(_merge_step(problem, config, bounds))
            rows = (bounds.max_num_tokens, problem.num_q_heads, splits)
            workspaces = {
                "partial_out": WorkspaceSpec(torch.float32, (*rows, problem.head_dim_v), partial_of="out"),
                "partial_lse": WorkspaceSpec(torch.float32, rows, partial_of="lse"),
            }
        slots = aligned(attention_slots(problem, pool_format), alignments(problem, pool_format))
        return LaunchPlan(tuple(steps), slots, workspaces, batch_limits(bounds))


_SCALE_STRIDES = ("scale_k_block", "scale_k_head", "scale_v_block", "scale_v_head")
_INTEGERS = (
    "q_token", "q_head", "k_block", "k_slot", "k_head", "k_outer", "v_block", "v_slot", "v_head", "v_dim", "out_token",
    "out_head", "lse_token", "table_seq", "num_seqs", "num_splits", *_SCALE_STRIDES,
)  # fmt: skip
_MERGE_INTEGERS = ("out_token", "out_head", "lse_token", "num_seqs", "num_splits")


def _own(config: Config) -> TritonSplitConfig:
    if not isinstance(config, TritonSplitConfig):
        raise TypeError(f"triton_split takes a TritonSplitConfig, not {type(config).__name__}")
    return config


def _types(names: tuple[str, ...], problem: Problem, pool_format: PoolFormat) -> dict[str, str]:
    special = {
        **dict.fromkeys(("q", "out"), _TYPES[problem.q_dtype]),
        **dict.fromkeys(("k_cache", "v_cache"), _TYPES[pool_format.kv_dtype]),
        **dict.fromkeys(("block_table", "context_lens", "query_start_loc"), "i32"),
    }
    return {name: f"*{special.get(name, 'fp32')}" for name in names}


def _unit_dims(pool_format: PoolFormat) -> dict[str, int]:
    """Strides that are 1 by the slots' own rule, and so compile-time constants."""
    xpacked = pool_format.layout is Layout.XPACKED
    return {"v_slot": 1} if xpacked else {"v_dim": 1}


def _signature(problem: Problem, pool_format: PoolFormat) -> dict[str, str]:
    constant = _unit_dims(pool_format)
    integers = {name: "i64" for name in _INTEGERS if name not in constant}
    return {**_types(_POINTERS, problem, pool_format), **integers, "scale": "fp32", "soft_cap": "fp32"}


def _divisible(problem: Problem, pool_format: PoolFormat) -> dict[str, int]:
    """What pointers (in bytes) and strides (in elements) are multiples of, by argument; see `alignments`."""
    aligned = alignments(problem, pool_format)
    found = {"partial_out": VECTOR_BYTES, "partial_lse": VECTOR_BYTES}
    for name, tensor, dtype in (
        ("q", "q", problem.q_dtype),
        ("out", "out", problem.q_dtype),
        ("k", "k_cache", pool_format.kv_dtype),
        ("v", "v_cache", pool_format.kv_dtype),
    ):
        if tensor in aligned:
            found[tensor] = VECTOR_BYTES
            found |= {n: VECTOR_BYTES // dtype.itemsize for n in _INTEGERS if n.startswith(f"{name}_")}
    if pool_format.layout is not Layout.XPACKED:
        found.pop("k_outer", None)  # the innermost dimension's stride, which is 1
    return found


def _constants(problem: Problem, pool_format: PoolFormat, config: TritonSplitConfig) -> dict[str, object]:
    return {
        "GROUP": problem.gqa_ratio,
        "BLOCK_H": block_rows(problem),
        "ROW_TILES": row_tiles(problem),
        "DIM_K": problem.head_dim,
        "DIM_V": problem.head_dim_v,
        "BLOCK_DK": max(MIN_ROWS, power_of_two(problem.head_dim)),
        "BLOCK_DV": max(MIN_ROWS, power_of_two(problem.head_dim_v)),
        "BLOCK_SIZE": pool_format.block_size,
        "PACK": pool_format.pack if pool_format.layout is Layout.XPACKED else power_of_two(problem.head_dim),
        "TILE_TOKENS": config.tile_tokens,
        "SPLIT_TOKENS": config.split_tokens,
        "WINDOW": problem.window or 0,
        "SPLIT": config.num_splits > 1,
        "HAS_CAP": problem.soft_cap is not None,
        "HAS_SINKS": problem.sinks,
        "HAS_ALIBI": problem.alibi,
        "HAS_SCALES": pool_format.has_constant_scales,
        "TOKEN_SCALES": pool_format.has_token_scales,
        "SCALE_STRIDE": int(pool_format.scale_kind is ScaleKind.PER_HEAD),
        "DOT_FP32": dot_dtype(problem, pool_format) is DType.FP32,
        "WORDS": in_words(problem, pool_format),
        "DOT_HALF": dot_dtype(problem, pool_format) is DType.FP16 and problem.q_dtype is not DType.FP16,
        **_unit_dims(pool_format),
    }


def _integers(names: tuple[str, ...], pool_format: PoolFormat, num_splits: int) -> dict[str, Arg]:
    k, v = pool_format.k_axes, pool_format.v_axes
    args: dict[str, Arg] = {
        "q_token": StrideArg("q", 0),
        "q_head": StrideArg("q", 1),
        "k_block": StrideArg("k_cache", k.block),
        "k_slot": StrideArg("k_cache", k.slot),
        "k_head": StrideArg("k_cache", k.head),
        "k_outer": StrideArg("k_cache", k.dim),
        "v_block": StrideArg("v_cache", v.block),
        "v_slot": StrideArg("v_cache", v.slot),
        "v_head": StrideArg("v_cache", v.head),
        "v_dim": StrideArg("v_cache", v.dim),
        "out_token": StrideArg("out", 0),
        "out_head": StrideArg("out", 1),
        "lse_token": StrideArg("lse", 0),
        "table_seq": StrideArg("block_table", 0),
        "num_seqs": SizeArg("context_lens", 0),
        "num_splits": ScalarArg(num_splits, CType.I64),
        **dict(zip(_SCALE_STRIDES, token_scale_strides(pool_format), strict=True)),
    }
    return {name: args[name] for name in names}


_HIDDEN = (ScalarArg(0, CType.POINTER), ScalarArg(0, CType.POINTER))  # Triton's scratch memories, which are unused


def _split_step(problem: Problem, pool_format: PoolFormat, config: TritonSplitConfig, bounds: Bounds) -> KernelStep:
    integers = _integers(_INTEGERS, pool_format, config.num_splits)
    args: tuple[Arg, ...] = (
        *(SlotArg(name) for name in _POINTERS),
        *(integers[n] for n in _INTEGERS if n not in _unit_dims(pool_format)),
        ScalarArg(problem.softmax_scale, CType.F32),
        ScalarArg(problem.soft_cap or 0.0, CType.F32),
        *_HIDDEN,
    )
    grid = (bounds.max_num_tokens, problem.num_kv_heads * row_tiles(problem), config.num_splits)
    return KernelStep("attention_split", grid, args, (32 * config.num_warps, 1, 1), shared_bytes=0)


def _merge_step(problem: Problem, config: TritonSplitConfig, bounds: Bounds) -> KernelStep:
    integers = _integers(_MERGE_INTEGERS, PoolFormat(16, DType.BF16), config.num_splits)
    args: tuple[Arg, ...] = (*(SlotArg(name) for name in _MERGE_POINTERS), *integers.values(), *_HIDDEN)
    return KernelStep("attention_merge", (bounds.max_num_tokens, problem.num_q_heads, 1), args, (32, 1, 1))
