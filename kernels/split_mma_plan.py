"""Launch plans of `cuda_split_mma`: its config, the shape of its blocks, and what its kernels are given."""

from __future__ import annotations

from dataclasses import dataclass

from .artifact import KernelAbi
from .bounds import Bounds
from .dtypes import DType
from .launch import Arg, SlotSpec, StrideArg
from .native_args import abi_of, scale_stride
from .pool_format import SCALE_BYTES, PoolFormat
from .problem import Problem
from .slots import aligned, attention_slots
from .split_launch import Merge, merge_code, split_arguments
from .variant import Config

OUTPUT_REGISTERS = 128  # of a thread, at most, for the output of all rows of a block
_CODES = {DType.BF16: 1, DType.FP16: 2, DType.FP8_E4M3: 3, DType.INT8: 4}
COPY_BYTES, QUERY_BYTES = 16, 4


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


def padded(dim: int) -> int:
    """A head dim as whole matrix products."""
    return -(-dim // 16) * 16


def row_tiles(problem: Problem) -> int:
    """N tiles of 8 query rows that one block takes: all of a sequence's, unless their output needs too many registers;
    then as few blocks as possible share them evenly."""
    wanted = -(-problem.gqa_ratio * problem.max_query_len // 8)
    most = max(1, OUTPUT_REGISTERS * 4 // padded(problem.head_dim_v))
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
    dim, dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
    scales = 2 * SCALE_BYTES if pool_format.has_token_scales else 0
    pipeline = config.num_stages * tokens * ((dim + dim_v) * pool_format.kv_dtype.itemsize + scales)
    outputs = config.num_warps * rows * (dim_v + 4) * 4
    places = 2 * tokens * 16
    query = 0 if dim // 16 * row_tiles(problem) <= 16 else rows * dim * 2
    stats = (2 * config.num_warps + 2) * rows * 4
    return max(pipeline, outputs) + places + query + stats + 16


def flight_bytes(problem: Problem, pool_format: PoolFormat, config: CudaSplitMmaConfig) -> int:
    """Bytes of keys and values that a block has on their way: all stages but the one that it works on."""
    dims = problem.head_dim + problem.head_dim_v
    return (config.num_stages - 1) * config.tile_tokens * dims * pool_format.kv_dtype.itemsize


def defines(problem: Problem, pool_format: PoolFormat, config: CudaSplitMmaConfig) -> dict[str, int | str]:
    """The kernels' compile-time definitions: all that the binary depends on."""
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
        "PT_HAS_SCALES": int(pool_format.has_constant_scales),
        "PT_TOKEN_SCALES": int(pool_format.has_token_scales),
        "PT_SCALE_STRIDE": scale_stride(pool_format),
        "PT_MERGE": merge_code(config),
        "PT_SHARED_BYTES": shared_bytes(problem, pool_format, config),
    }


def slots_of(problem: Problem, pool_format: PoolFormat) -> dict[str, SlotSpec]:
    """The op's slots; pools are read 16 bytes at a time, queries 4."""
    align = {"q": QUERY_BYTES, "k_cache": COPY_BYTES, "v_cache": COPY_BYTES}
    return aligned(attention_slots(problem, pool_format), align)


def split_args(
    problem: Problem, pool_format: PoolFormat, config: CudaSplitMmaConfig, bounds: Bounds
) -> tuple[Arg, ...]:
    """Arguments of the split kernel."""
    chunks, splits = num_chunks(problem, bounds), live_splits(problem, config, bounds)
    return split_arguments(problem, pool_format, config, chunks, splits)


def split_abi(problem: Problem, pool_format: PoolFormat, config: CudaSplitMmaConfig) -> KernelAbi:
    """Pools and their strides must be multiples of a 16-byte copy, partials of a four-float load."""
    args = split_args(problem, pool_format, config, Bounds(1, 1))
    elements = COPY_BYTES // pool_format.kv_dtype.itemsize
    align = {1: QUERY_BYTES, **dict.fromkeys((2, 3, 12), COPY_BYTES)}
    units = {"q": QUERY_BYTES // problem.q_dtype.itemsize, "k_cache": elements, "v_cache": elements}
    align |= {k: units[arg.slot] for k, arg in enumerate(args) if isinstance(arg, StrideArg) and arg.slot in units}
    return KernelAbi(abi_of(args).arg_types, align)
