"""Host side of `cuda_split_simt`: split-K decode attention on the plain cores (`kernels/cuda/split_simt.cu`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    SlotArg,
    SlotSpec,
    Step,
    StrideArg,
    WorkspaceSpec,
)
from .native_args import abi_of, f32, i64, pointers, scale_stride, strides, token_scale_strides
from .pool_format import Layout, PoolFormat
from .problem import Problem
from .slots import aligned, attention_slots, batch_limits
from .split_mma_plan import Merge
from .variant import Config, Properties, Variant

SOURCE = Path(__file__).parent / "cuda" / "split_simt.cu"
INCLUDES = ("types.cuh", "merge.cuh", "split_rows.cuh", "split_merge.cuh")
MAX_HEAD_DIM = 256  # a lane holds its dims of the query and of the output in registers
MAX_SPLITS = 128  # of `kernels/cuda/merge.cuh`
MAX_STATIC_SHARED = 48 << 10  # bytes of a block that every device has without asking
ROW_FLOATS = 128  # floats of queries and outputs that a thread has registers for
LOAD_BYTES = 256  # of keys and values that a thread has on their way, by default
LANE_CHOICES = (8, 4)  # of one key: 128 bytes of a row at once, or 64 where that leaves fewer lanes idle
SPLIT_CHOICES = (1, 2, 4, 8, 16, 32, 64, 128)
FIXED_LENGTHS = ((128, 256), (128, 512), (128, 1024))  # splits, split tokens
WARP_CHOICES = (4, 8, 2)
KEY_CHOICES = (8, 4, 2, 1)
MERGE_WARPS = 8
_CODES = {DType.FP32: 0, DType.BF16: 1, DType.FP16: 2, DType.FP8_E4M3: 3, DType.INT8: 4}
_PIECE_BYTES = 16
_MERGE_CODES = {Merge.KERNEL.value: 1, Merge.LAST_BLOCK.value: 2, Merge.EARLY_KERNEL.value: 3}
_POINTERS = (
    "out", "q", "k_cache", "v_cache", "block_table", "context_lens", "query_start_loc", "sinks", "alibi_slopes",
    "k_scale", "v_scale", "lse",
)  # fmt: skip


@dataclass(frozen=True)
class CudaSplitSimtConfig(Config):
    """Tunables of `cuda_split_simt`.

    Args:
        num_splits: most parts that one sequence's keys are split into (1: no split, no merge).
        split_tokens: fewest keys of a split. With 128 splits this is in effect their fixed length, which balances a
            batch of unequal contexts.
        num_warps: warps of a block.
        keys_per_lane: keys whose 16-byte pieces a lane has in registers at once: a power of two, and with it the bytes
            on their way.
        merge: `kernel`, `early_kernel` or `last_block`.
    """

    num_splits: int = 8
    split_tokens: int = 128
    num_warps: int = 4
    keys_per_lane: int = 4
    merge: str = Merge.KERNEL.value


class CudaSplitSimt(Variant):
    """One block per sequence, KV head, split and chunk of query rows; all sums in fp32, weights too.

    Splits adapt to each sequence's context length on the device.
    """

    name = "cuda_split_simt"
    summary = "CUDA C++ split-K decode on the plain cores, for GQA ratios of 1 and 2; registers are the pipeline"
    device_kind = DeviceKind.CUDA
    config_type = CudaSplitSimtConfig
    properties = Properties(deterministic=True, batch_invariant=True, graph_safe=True)

    def default_config(self, problem: Problem, pool_format: PoolFormat, bounds: Bounds, device: Device) -> Config:
        """Enough splits to give every multiprocessor four blocks, and 256 bytes of each thread on their way."""
        items = max(1, bounds.max_num_seqs * problem.num_kv_heads * num_chunks(problem, pool_format, bounds))
        splits = next((s for s in SPLIT_CHOICES if items * s >= 4 * device.num_units), SPLIT_CHOICES[-1])
        keys = KEY_CHOICES[-1]
        if not _reject_types(problem, pool_format):
            one = _PIECE_BYTES * sum(steps(problem, pool_format))
            keys = next((k for k in KEY_CHOICES if k * one <= LOAD_BYTES), KEY_CHOICES[-1])
        return CudaSplitSimtConfig(splits, keys_per_lane=keys)

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        """Splits x warps x keys of a lane x merge."""
        for splits, split_tokens in (*((s, 128) for s in SPLIT_CHOICES), *FIXED_LENGTHS):
            for warps in WARP_CHOICES:
                for keys in KEY_CHOICES:
                    for merge in Merge if splits > 1 else (Merge.KERNEL,):
                        yield CudaSplitSimtConfig(splits, split_tokens, warps, keys, merge.value)

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Each constraint of the kernel."""
        config = _own(config)
        reason = _reject_types(problem, pool_format) or _reject_config(config) or pool_format.reject(problem)
        if reason is not None:
            return reason
        if config.num_splits > 1 and config.merge == Merge.EARLY_KERNEL and device.capability < 90:
            return f"a launch that starts early needs compute capability 9.0, not {device.capability / 10}"
        loads = config.keys_per_lane * _PIECE_BYTES * sum(steps(problem, pool_format))
        if loads > 2 * LOAD_BYTES:
            return f"keys_per_lane={config.keys_per_lane} takes {loads} bytes of registers, more than {2 * LOAD_BYTES}"
        shared = config.num_warps * num_rows(problem, pool_format) * (problem.head_dim_v + 3) * 4 + 4
        if shared > MAX_STATIC_SHARED:
            return f"a block needs {shared} bytes of shared memory, more than the {MAX_STATIC_SHARED} of any device"
        return None

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """One cubin with the split kernel, and the merge kernel where there is one."""
        from .build_nvrtc import CudaKernel, build_nvrtc

        config = _own(config)
        abi = {"attention_split": _split_abi(problem, pool_format, config)}
        shared = {}
        if _has_merge_kernel(config):
            shared["attention_merge"] = _scratch_bytes(problem)
            abi["attention_merge"] = abi_of(_merge_args(problem, pool_format, config, Bounds(1, 1)))
        includes = tuple(SOURCE.parent / name for name in INCLUDES)
        kernel = CudaKernel(SOURCE, abi, includes, _defines(problem, pool_format, config), shared)
        return (build_nvrtc(kernel, device.capability),)

    def binary_id(self, problem: Problem, pool_format: PoolFormat, config: Config) -> str:
        """The numbers of heads, splits and fewest keys of a split are arguments of the kernel."""
        defines = _defines(problem, pool_format, _own(config))
        return ",".join(f"{name[3:]}={value}" for name, value in sorted(defines.items()))

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """The split kernel alone, or split and merge over fp32 partials, or arrivals cleared and one kernel."""
        config = _own(config)
        blocks = bounds.max_num_seqs * num_chunks(problem, pool_format, bounds) * problem.num_kv_heads
        splits = live_splits(problem, pool_format, config, bounds)
        args = _split_args(problem, pool_format, config, bounds)
        split = KernelStep("attention_split", (blocks, splits, 1), args, (32 * config.num_warps, 1, 1))
        rows = (bounds.max_num_tokens, problem.num_q_heads, splits)
        steps_: tuple[Step, ...] = (split,)
        workspaces: dict[str, WorkspaceSpec] = {}
        if splits > 1:
            workspaces["partial_out"] = WorkspaceSpec(torch.float32, (*rows, problem.head_dim_v), partial_of="out")
            workspaces["partial_lse"] = WorkspaceSpec(torch.float32, rows, partial_of="lse")
        if splits > 1 and _has_merge_kernel(config):
            steps_ = (split, _merge_step(problem, pool_format, config, bounds))
        elif splits > 1:
            workspaces["arrivals"] = WorkspaceSpec(torch.int32, (blocks,))
            steps_ = (MemsetStep("arrivals"), split)
        return LaunchPlan(steps_, _slots(problem, pool_format), workspaces, batch_limits(bounds))


def _own(config: Config) -> CudaSplitSimtConfig:
    if not isinstance(config, CudaSplitSimtConfig):
        raise TypeError(f"cuda_split_simt takes a CudaSplitSimtConfig, not {type(config).__name__}")
    return config


def _reject_types(problem: Problem, pool_format: PoolFormat) -> str | None:
    kv = pool_format.kv_dtype
    if kv not in _CODES:
        return f"cuda_split_simt cannot read {kv} pools"
    if pool_format.layout is Layout.XPACKED:
        return "layout xpacked scatters a value over its block: cuda_split_simt reads 16 bytes of a token at once"
    multiple = _PIECE_BYTES // kv.itemsize
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if dim % multiple or dim > MAX_HEAD_DIM:
            return f"{name}={dim} must be a multiple of {multiple}, for 16-byte loads, and at most {MAX_HEAD_DIM}"
    return None


def _reject_config(config: CudaSplitSimtConfig) -> str | None:
    limits = {"num_splits": (1, MAX_SPLITS), "num_warps": (1, 16), "keys_per_lane": (1, 8)}
    for name, (least, most) in limits.items():
        if not least <= getattr(config, name) <= most:
            return f"{name}={getattr(config, name)} must be from {least} to {most}"
    if config.keys_per_lane & (config.keys_per_lane - 1):
        return f"keys_per_lane={config.keys_per_lane} must be a power of two"
    if config.split_tokens < 1:
        return f"split_tokens={config.split_tokens} must be at least 1"
    if config.merge not in set(Merge):
        return f"merge={config.merge!r} must be one of {', '.join(Merge)}"
    return None


def num_lanes(problem: Problem, pool_format: PoolFormat) -> int:
    """Lanes that share a key: those that leave the fewest idle in the last step over a row."""

    def slots(lanes: int) -> int:
        return lanes * sum(-(-pieces // lanes) for pieces in _pieces(problem, pool_format))

    return min(LANE_CHOICES, key=slots)


def steps(problem: Problem, pool_format: PoolFormat) -> tuple[int, int]:
    """16-byte pieces of a K row and of a V row that one lane holds."""
    lanes = num_lanes(problem, pool_format)
    k, v = _pieces(problem, pool_format)
    return -(-k // lanes), -(-v // lanes)


def _pieces(problem: Problem, pool_format: PoolFormat) -> tuple[int, int]:
    elements = _PIECE_BYTES // pool_format.kv_dtype.itemsize
    return -(-problem.head_dim // elements), -(-problem.head_dim_v // elements)


def num_rows(problem: Problem, pool_format: PoolFormat) -> int:
    """Query rows of one block: all of a sequence's, unless they need too many registers; then as few blocks as possible
    share them evenly, and each reads the keys."""
    wanted = problem.gqa_ratio * problem.max_query_len
    one = sum(steps(problem, pool_format)) * _PIECE_BYTES // pool_format.kv_dtype.itemsize
    return -(-wanted // -(-wanted // max(1, ROW_FLOATS // one)))


def num_chunks(problem: Problem, pool_format: PoolFormat, bounds: Bounds) -> int:
    """Blocks that share the query rows of one sequence and KV head."""
    return -(-problem.gqa_ratio * bounds.max_query_len // num_rows(problem, pool_format))


def tile_tokens(problem: Problem, pool_format: PoolFormat, config: CudaSplitSimtConfig) -> int:
    """Keys that the warps of a block take at once."""
    return config.num_warps * 32 // num_lanes(problem, pool_format) * config.keys_per_lane


def live_splits(problem: Problem, pool_format: PoolFormat, config: CudaSplitSimtConfig, bounds: Bounds) -> int:
    """Most splits that any sequence within `bounds` has: blocks beyond would find no keys."""
    visible = bounds.max_context_len
    if problem.window is not None:
        visible = min(visible, problem.window + bounds.max_query_len - 1)
    tile = tile_tokens(problem, pool_format, config)
    share = -(-config.split_tokens // tile) * tile
    return min(config.num_splits, -(-visible // share))


def _scratch_bytes(problem: Problem) -> int:
    return MERGE_WARPS * problem.head_dim_v * 4


def _has_merge_kernel(config: CudaSplitSimtConfig) -> bool:
    return config.num_splits > 1 and config.merge != Merge.LAST_BLOCK


def _defines(problem: Problem, pool_format: PoolFormat, config: CudaSplitSimtConfig) -> dict[str, int | str]:
    return {
        "PT_HEAD_DIM_K": problem.head_dim,
        "PT_HEAD_DIM_V": problem.head_dim_v,
        "PT_GROUP": problem.gqa_ratio,
        "PT_ROWS": num_rows(problem, pool_format),
        "PT_BLOCK_SIZE": pool_format.block_size,
        "PT_WARPS": config.num_warps,
        "PT_LANES": num_lanes(problem, pool_format),
        "PT_KEYS": config.keys_per_lane,
        "PT_Q_DTYPE": _CODES[problem.q_dtype],
        "PT_KV_DTYPE": _CODES[pool_format.kv_dtype],
        "PT_WINDOW": problem.window or 0,
        "PT_HAS_CAP": int(problem.soft_cap is not None),
        "PT_HAS_SINKS": int(problem.sinks),
        "PT_HAS_ALIBI": int(problem.alibi),
        "PT_HAS_SCALES": int(pool_format.has_constant_scales),
        "PT_TOKEN_SCALES": int(pool_format.has_token_scales),
        "PT_SCALE_STRIDE": scale_stride(pool_format),
        "PT_MERGE": 0 if config.num_splits == 1 else _MERGE_CODES[config.merge],
    }


def _alignments(problem: Problem, pool_format: PoolFormat) -> dict[str, int]:
    """Pools are read 16 bytes at a time, queries by as many elements, 16 bytes at most."""
    elements = _PIECE_BYTES // pool_format.kv_dtype.itemsize
    query = min(_PIECE_BYTES, elements * problem.q_dtype.itemsize)
    return {"q": query, "k_cache": _PIECE_BYTES, "v_cache": _PIECE_BYTES}


def _slots(problem: Problem, pool_format: PoolFormat) -> dict[str, SlotSpec]:
    return aligned(attention_slots(problem, pool_format), _alignments(problem, pool_format))


def _split_args(
    problem: Problem, pool_format: PoolFormat, config: CudaSplitSimtConfig, bounds: Bounds
) -> tuple[Arg, ...]:
    k, v = pool_format.k_axes, pool_format.v_axes
    splits = live_splits(problem, pool_format, config, bounds)
    partials: tuple[Arg, ...] = (
        *(pointers("partial_out", "partial_lse") if splits > 1 else _null(2)),
        *(pointers("arrivals") if splits > 1 and config.merge == Merge.LAST_BLOCK else _null(1)),
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
        *i64(problem.num_kv_heads, num_chunks(problem, pool_format, bounds), config.num_splits, config.split_tokens),
        *i64(splits),
        *f32(problem.softmax_scale, problem.soft_cap or 0.0),
        *token_scale_strides(pool_format),
    )


def _null(count: int) -> tuple[Arg, ...]:
    return (ScalarArg(0, CType.POINTER),) * count


def _split_abi(problem: Problem, pool_format: PoolFormat, config: CudaSplitSimtConfig) -> KernelAbi:
    """Besides the slots, partials must be aligned to the merge's loads of four floats."""
    args = _split_args(problem, pool_format, config, Bounds(1, 1))
    known = _alignments(problem, pool_format) | {"partial_out": _PIECE_BYTES}
    align = {k: known[arg.slot] for k, arg in enumerate(args) if isinstance(arg, SlotArg) and arg.slot in known}
    return KernelAbi(abi_of(args).arg_types, align)


def _merge_args(
    problem: Problem, pool_format: PoolFormat, config: CudaSplitSimtConfig, bounds: Bounds
) -> tuple[Arg, ...]:
    return (
        *pointers("out", "lse", "partial_out", "partial_lse", "context_lens", "query_start_loc", "sinks"),
        *strides("out", (0, 1)),
        StrideArg("lse", 0),
        SizeArg("context_lens", 0),
        *i64(problem.num_q_heads, bounds.max_query_len, config.num_splits, config.split_tokens),
        *i64(live_splits(problem, pool_format, config, bounds)),
    )


def _merge_step(problem: Problem, pool_format: PoolFormat, config: CudaSplitSimtConfig, bounds: Bounds) -> KernelStep:
    warps = min(MERGE_WARPS, -(-live_splits(problem, pool_format, config, bounds) // 4))
    grid = (bounds.max_num_tokens * problem.num_q_heads, 1, 1)
    args = _merge_args(problem, pool_format, config, bounds)
    attributes = LaunchAttributes(programmatic_dependent_launch=config.merge == Merge.EARLY_KERNEL)
    scratch = _scratch_bytes(problem)
    return KernelStep("attention_merge", grid, args, (32 * warps, 1, 1), shared_bytes=scratch, attributes=attributes)
