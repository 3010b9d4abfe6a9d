"""Host side of `cuda_split_mma`: split-K decode on tensor cores in CUDA C++ (`kernels/cuda/split_mma.cu`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from .artifact import Artifact, KernelAbi
from .bounds import Bounds
from .device import Device, DeviceKind
from .dtypes import DType
from .launch import (
    Arg,
    CType,
    KernelStep,
    LaunchAttributes,
    LaunchPlan,
    MemsetStep,
    ScalarArg,
    SizeArg,
    SlotSpec,
    Step,
    StrideArg,
    WorkspaceSpec,
)
from .native_args import abi_of, f32, i64, pointers, scale_stride, strides
from .pool_format import Layout, PoolFormat, ScaleKind
from .problem import Problem
from .slots import aligned, attention_slots, batch_limits
from .variant import Config, Numerics, Properties, Variant

SOURCE = Path(__file__).parent / "cuda" / "split_mma.cu"
INCLUDES = ("types.cuh", "copies.cuh", "mma.cuh", "softmax.cuh", "merge.cuh")
MAX_HEAD_DIM = 256  # a warp holds the output of all value dims in registers
MAX_SPLITS = 128  # of `kernels/cuda/merge.cuh`
MAX_WARPS = 16
WARP_TOKENS = (16, 32)  # keys of a warp in one tile: whole matrix products, and at most one per lane
SPLIT_CHOICES = (1, 2, 4, 8, 16, 32, 64, 128)
FIXED_LENGTHS = ((128, 256), (128, 512), (128, 1024))  # splits, split tokens
SHAPE_CHOICES = ((4, 64), (2, 32), (8, 128), (4, 128))  # warps, tile tokens
STAGE_CHOICES = (3, 2, 4)
OUTPUT_REGISTERS = 128  # of a thread, at most, for the output of all rows of a block
MERGE_WARPS = 8
_CODES = {DType.BF16: 1, DType.FP16: 2, DType.FP8_E4M3: 3, DType.INT8: 4}
_COPY_BYTES, _QUERY_BYTES = 16, 4


class Merge(StrEnum):
    """Who merges the splits of a row."""

    KERNEL = "kernel"  # a second launch
    EARLY_KERNEL = "early_kernel"  # a second launch that starts early and waits for the first (compute capability 9.0)
    LAST_BLOCK = "last_block"  # the last block of the row to arrive


@dataclass(frozen=True)
class CudaSplitMmaConfig(Config):
    """Tunables of `cuda_split_mma`.

    Args:
        num_splits: most parts that one sequence's keys are split into (1: no split, no merge).
        tile_tokens: keys that the warps of a block take at once, 16 or 32 each.
        split_tokens: fewest keys of a split. With 128 splits this is in effect their fixed length, which balances a
            batch of unequal contexts.
        num_warps: warps of a block.
        num_stages: tiles of a warp in shared memory; all but one are on their way.
        merge: `kernel`, `early_kernel` or `last_block`.
    """

    num_splits: int = 8
    tile_tokens: int = 64
    split_tokens: int = 128
    num_warps: int = 4
    num_stages: int = 3
    merge: str = Merge.KERNEL.value


class CudaSplitMma(Variant):
    """One block per sequence, KV head and split; the keys are the M dimension, the query rows N in tiles of 8.

    The rows are the query heads of a group times the query tokens of a sequence: all of them share each key and value
    that is read. Splits adapt to each sequence's context length on the device.
    """

    name = "cuda_split_mma"
    summary = "CUDA C++ split-K decode on tensor cores, keys as M; each warp has its own asynchronous pipeline"
    device_kind = DeviceKind.CUDA
    config_type = CudaSplitMmaConfig
    properties = Properties(deterministic=True, batch_invariant=True, graph_safe=True)

    def numerics(self, problem: Problem, pool_format: PoolFormat) -> Numerics:
        """Softmax weights are rounded to what the second product takes: the query's dtype, fp16 with 8-bit pools."""
        return Numerics(p=problem.q_dtype if pool_format.kv_dtype is problem.q_dtype else DType.FP16)

    def default_config(self, problem: Problem, pool_format: PoolFormat, bounds: Bounds, device: Device) -> Config:
        """Enough splits to give every multiprocessor two blocks, in the first block shape that fits it."""
        items = max(1, bounds.max_num_seqs * problem.num_kv_heads * num_chunks(problem, bounds))
        splits = next((s for s in SPLIT_CHOICES if items * s >= 2 * device.num_units), SPLIT_CHOICES[-1])
        shapes = [CudaSplitMmaConfig(splits, t, 128, w, s) for w, t in SHAPE_CHOICES for s in STAGE_CHOICES]
        return next((c for c in shapes if self.reject(problem, pool_format, c, device) is None), shapes[0])

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        """Splits x block shape x stages x merge."""
        for splits, split_tokens in (*((s, 128) for s in SPLIT_CHOICES), *FIXED_LENGTHS):
            for warps, tile in SHAPE_CHOICES:
                for stages in STAGE_CHOICES:
                    for merge in Merge if splits > 1 else (Merge.KERNEL,):
                        yield CudaSplitMmaConfig(splits, tile, split_tokens, warps, stages, merge.value)

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Each constraint of the kernel."""
        config = _own(config)
        reason = _reject_types(problem, pool_format, device) or _reject_config(config) or pool_format.reject(problem)
        if reason is not None:
            return reason
        if config.num_splits > 1 and config.merge == Merge.EARLY_KERNEL and device.capability < 90:
            return f"a launch that starts early needs compute capability 9.0, not {device.capability / 10}"
        shared = shared_bytes(problem, pool_format, config)
        if shared > device.shared_bytes_per_block:
            return f"a block needs {shared} bytes of shared memory, {device.name} has {device.shared_bytes_per_block}"
        return None

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """One cubin with the split kernel, and the merge kernel where there is one."""
        from .build_nvrtc import CudaKernel, build_nvrtc

        config = _own(config)
        shared = {"attention_split": shared_bytes(problem, pool_format, config)}
        abi = {"attention_split": _split_abi(problem, pool_format, config)}
        if _merge_code(config) in _MERGE_KERNELS:
            shared["attention_merge"] = _scratch_bytes(problem)
            abi["attention_merge"] = abi_of(_merge_args(problem, config, Bounds(1, 1)))
        defines = _defines(problem, pool_format, config)
        includes = tuple(SOURCE.parent / name for name in INCLUDES)
        kernel = CudaKernel(SOURCE, abi, includes, defines, shared)
        return (build_nvrtc(kernel, device.capability),)

    def binary_id(self, problem: Problem, pool_format: PoolFormat, config: Config) -> str:
        """The numbers of heads, splits and fewest keys of a split are arguments of the kernel."""
        return ",".join(f"{k[3:]}={v}" for k, v in sorted(_defines(problem, pool_format, _own(config)).items()))

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """The split kernel alone, or split and merge over fp32 partials, or arrivals cleared and one kernel."""
        config = _own(config)
        blocks = bounds.max_num_seqs * num_chunks(problem, bounds) * problem.num_kv_heads
        splits = live_splits(problem, config, bounds)
        split = KernelStep(
            "attention_split",
            (blocks, splits, 1),
            _split_args(problem, pool_format, config, bounds),
            (32 * config.num_warps, 1, 1),
            shared_bytes=shared_bytes(problem, pool_format, config),
        )
        steps: tuple[Step, ...] = (split,)
        workspaces: dict[str, WorkspaceSpec] = {}
        if splits > 1:
            rows = (bounds.max_num_tokens, problem.num_q_heads, splits)
            workspaces["partial_out"] = WorkspaceSpec(torch.float32, (*rows, problem.head_dim_v), partial_of="out")
            workspaces["partial_lse"] = WorkspaceSpec(torch.float32, rows, partial_of="lse")
        if splits > 1 and _merge_code(config) in _MERGE_KERNELS:
            steps = (split, _merge_step(problem, config, bounds))
        elif splits > 1:
            workspaces["arrivals"] = WorkspaceSpec(torch.int32, (blocks,))
            steps = (MemsetStep("arrivals"), split)
        return LaunchPlan(steps, _slots(problem, pool_format), workspaces, batch_limits(bounds))


def _own(config: Config) -> CudaSplitMmaConfig:
    if not isinstance(config, CudaSplitMmaConfig):
        raise TypeError(f"cuda_split_mma takes a CudaSplitMmaConfig, not {type(config).__name__}")
    return config


def _reject_types(problem: Problem, pool_format: PoolFormat, device: Device) -> str | None:
    kv = pool_format.kv_dtype
    if problem.q_dtype not in (DType.BF16, DType.FP16):
        return f"tensor cores would round {problem.q_dtype} queries to tf32: cuda_split_mma takes bf16 and fp16"
    if kv is not problem.q_dtype and kv not in (DType.FP8_E4M3, DType.INT8):
        return f"cuda_split_mma cannot read {kv} pools with {problem.q_dtype} queries"
    if pool_format.layout is Layout.XPACKED:
        return "layout xpacked scatters a value over its block: cuda_split_mma copies 16 bytes of a token at once"
    if device.capability < 80:
        return f"asynchronous copies need compute capability 8.0, not {device.capability / 10}"
    multiple = _COPY_BYTES // kv.itemsize
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if dim % multiple or dim > MAX_HEAD_DIM:
            return f"{name}={dim} must be a multiple of {multiple}, for copies of 16 bytes, and at most {MAX_HEAD_DIM}"
    return None


def _reject_config(config: CudaSplitMmaConfig) -> str | None:
    limits = {"num_splits": (1, MAX_SPLITS), "num_warps": (1, MAX_WARPS), "num_stages": (2, 8)}
    for name, (least, most) in limits.items():
        if not least <= getattr(config, name) <= most:
            return f"{name}={getattr(config, name)} must be from {least} to {most}"
    if config.tile_tokens not in {config.num_warps * tokens for tokens in WARP_TOKENS}:
        return f"tile_tokens={config.tile_tokens} must be 16 or 32 for each of the {config.num_warps} warps"
    if config.split_tokens < 1:
        return f"split_tokens={config.split_tokens} must be at least 1"
    if config.merge not in set(Merge):
        return f"merge={config.merge!r} must be one of {', '.join(Merge)}"
    return None


def _padded(dim: int) -> int:
    """A head dim as whole matrix products."""
    return -(-dim // 16) * 16


def row_tiles(problem: Problem) -> int:
    """N tiles of 8 query rows that one block takes: all of a sequence's, unless their output needs too many registers;
    then as few blocks as possible share them evenly."""
    wanted = -(-problem.gqa_ratio * problem.max_query_len // 8)
    most = max(1, OUTPUT_REGISTERS * 4 // _padded(problem.head_dim_v))
    return -(-wanted // -(-wanted // most))


def num_chunks(problem: Problem, bounds: Bounds) -> int:
    """Blocks that share the query rows of one sequence and KV head."""
    return -(-problem.gqa_ratio * bounds.max_query_len // (8 * row_tiles(problem)))


def live_splits(problem: Problem, config: CudaSplitMmaConfig, bounds: Bounds) -> int:
    """Most splits that any sequence within `bounds` has: blocks beyond would find no keys."""
    visible = bounds.max_context_len
    if problem.window is not None:
        visible = min(visible, problem.window + bounds.max_query_len - 1)
    share = -(-config.split_tokens // config.tile_tokens) * config.tile_tokens
    return min(config.num_splits, -(-visible // share))


def shared_bytes(problem: Problem, pool_format: PoolFormat, config: CudaSplitMmaConfig) -> int:
    """Dynamic shared memory of a block of the split kernel; the kernel asserts the same number."""
    tokens, rows = config.tile_tokens, 8 * row_tiles(problem)
    dim, dim_v = _padded(problem.head_dim), _padded(problem.head_dim_v)
    pipeline = config.num_stages * tokens * (dim + dim_v) * pool_format.kv_dtype.itemsize
    outputs = config.num_warps * rows * (dim_v + 4) * 4
    places = 2 * tokens * 16
    query = 0 if dim // 16 * row_tiles(problem) <= 16 else rows * dim * 2
    stats = (2 * config.num_warps + 2) * rows * 4
    return max(pipeline, outputs) + places + query + stats + 16


def _scratch_bytes(problem: Problem) -> int:
    return MERGE_WARPS * problem.head_dim_v * 4


_MERGE_CODES = {Merge.KERNEL.value: 1, Merge.LAST_BLOCK.value: 2, Merge.EARLY_KERNEL.value: 3}
_MERGE_KERNELS = (1, 3)


def _merge_code(config: CudaSplitMmaConfig) -> int:
    """`PT_MERGE`: 0 where there is one split."""
    return 0 if config.num_splits == 1 else _MERGE_CODES[config.merge]


def _defines(problem: Problem, pool_format: PoolFormat, config: CudaSplitMmaConfig) -> dict[str, int | str]:
    return {
        "PT_HEAD_DIM_K": problem.head_dim,
        "PT_HEAD_DIM_V": problem.head_dim_v,
        "PT_GROUP": problem.gqa_ratio,
        "PT_ROW_TILES": row_tiles(problem),
        "PT_BLOCK_SIZE": pool_format.block_size,
        "PT_WARPS": config.num_warps,
        "PT_WARP_TOKENS": config.tile_tokens // config.num_warps,
        "PT_STAGES": config.num_stages,
        "PT_Q_DTYPE": _CODES[problem.q_dtype],
        "PT_KV_DTYPE": _CODES[pool_format.kv_dtype],
        "PT_WINDOW": problem.window or 0,
        "PT_HAS_CAP": int(problem.soft_cap is not None),
        "PT_HAS_SINKS": int(problem.sinks),
        "PT_HAS_ALIBI": int(problem.alibi),
        "PT_HAS_SCALES": int(pool_format.scale_kind is not ScaleKind.NONE),
        "PT_SCALE_STRIDE": scale_stride(pool_format),
        "PT_MERGE": _merge_code(config),
        "PT_SHARED_BYTES": shared_bytes(problem, pool_format, config),
    }


def _slots(problem: Problem, pool_format: PoolFormat) -> dict[str, SlotSpec]:
    """The op's slots; pools are read 16 bytes at a time, queries 4."""
    align = {"q": _QUERY_BYTES, "k_cache": _COPY_BYTES, "v_cache": _COPY_BYTES}
    return aligned(attention_slots(problem, pool_format), align)


_POINTERS = (
    "out", "q", "k_cache", "v_cache", "block_table", "context_lens", "query_start_loc", "sinks", "alibi_slopes",
    "k_scale", "v_scale", "lse",
)  # fmt: skip


def _split_args(
    problem: Problem, pool_format: PoolFormat, config: CudaSplitMmaConfig, bounds: Bounds
) -> tuple[Arg, ...]:
    k, v = pool_format.k_axes, pool_format.v_axes
    split = live_splits(problem, config, bounds) > 1
    partials: tuple[Arg, ...] = (
        *(pointers("partial_out", "partial_lse") if split else _null(2)),
        *(pointers("arrivals") if split and config.merge == Merge.LAST_BLOCK else _null(1)),
    )
    return (
        *pointers(*_POINTERS),
        *partials,
        *strides("q", (0, 1)),
        *strides("k_cache", (k.block, k.slot, k.head)),
        *strides("v_cache", (v.block, v.slot, v.head)),
        *strides("out", (0, 1)),
        StrideArg("lse", 0),
        StrideArg("block_table", 0),
        SizeArg("context_lens", 0),
        *i64(problem.num_kv_heads, num_chunks(problem, bounds), config.num_splits, config.split_tokens),
        *i64(live_splits(problem, config, bounds)),
        *f32(problem.softmax_scale, problem.soft_cap or 0.0),
    )


def _null(count: int) -> tuple[Arg, ...]:
    return (ScalarArg(0, CType.POINTER),) * count


def _split_abi(problem: Problem, pool_format: PoolFormat, config: CudaSplitMmaConfig) -> KernelAbi:
    """Pools and their strides must be multiples of a 16-byte copy, partials of a four-float load."""
    args = _split_args(problem, pool_format, config, Bounds(1, 1))
    elements = _COPY_BYTES // pool_format.kv_dtype.itemsize
    align = {1: _QUERY_BYTES, **dict.fromkeys((2, 3, 12), _COPY_BYTES)}
    units = {"q": _QUERY_BYTES // problem.q_dtype.itemsize, "k_cache": elements, "v_cache": elements}
    align |= {k: units[arg.slot] for k, arg in enumerate(args) if isinstance(arg, StrideArg) and arg.slot in units}
    return KernelAbi(abi_of(args).arg_types, align)


def _merge_args(problem: Problem, config: CudaSplitMmaConfig, bounds: Bounds) -> tuple[Arg, ...]:
    return (
        *pointers("out", "lse", "partial_out", "partial_lse", "context_lens", "query_start_loc", "sinks"),
        *strides("out", (0, 1)),
        StrideArg("lse", 0),
        SizeArg("context_lens", 0),
        *i64(problem.num_q_heads, bounds.max_query_len, config.num_splits, config.split_tokens),
        *i64(live_splits(problem, config, bounds)),
    )


def _merge_step(problem: Problem, config: CudaSplitMmaConfig, bounds: Bounds) -> KernelStep:
    warps = min(MERGE_WARPS, -(-live_splits(problem, config, bounds) // 4))
    grid = (bounds.max_num_tokens * problem.num_q_heads, 1, 1)
    args = _merge_args(problem, config, bounds)
    attributes = LaunchAttributes(programmatic_dependent_launch=config.merge == Merge.EARLY_KERNEL)
    scratch = _scratch_bytes(problem)
    return KernelStep("attention_merge", grid, args, (32 * warps, 1, 1), shared_bytes=scratch, attributes=attributes)
