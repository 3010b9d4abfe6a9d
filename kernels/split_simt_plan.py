"""Launch plans of `cuda_split_simt`: its config, the shape of its blocks, and what its kernels are given."""

from __future__ import annotations

from dataclasses import dataclass

from .artifact import KernelAbi
from .bounds import Bounds
from .dtypes import DType
from .launch import Arg, SlotArg, SlotSpec
from .native_args import abi_of, scale_stride
from .pool_format import PoolFormat
from .problem import Problem
from .slots import aligned, attention_slots
from .split_launch import Merge, merge_code, split_arguments
from .variant import Config

PIECE_BYTES = 16  # of one load
ROW_FLOATS = 128  # floats of queries and outputs that a thread has registers for
LANE_CHOICES = (8, 4)  # of one key: 128 bytes of a row at once, or 64 where that leaves fewer lanes idle
CODES = {DType.FP32: 0, DType.BF16: 1, DType.FP16: 2, DType.FP8_E4M3: 3, DType.INT8: 4}


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
    elements = PIECE_BYTES // pool_format.kv_dtype.itemsize
    return -(-problem.head_dim // elements), -(-problem.head_dim_v // elements)


def num_rows(problem: Problem, pool_format: PoolFormat) -> int:
    """Query rows of one block: all of a sequence's, unless they need too many registers; then as few blocks as possible
    share them evenly, and each reads the keys."""
    wanted = problem.gqa_ratio * problem.max_query_len
    one = sum(steps(problem, pool_format)) * PIECE_BYTES // pool_format.kv_dtype.itemsize
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


def defines(problem: Problem, pool_format: PoolFormat, config: CudaSplitSimtConfig) -> dict[str, int | str]:
    """The kernels' compile-time definitions: all that the binary depends on."""
    return {
        "PT_HEAD_DIM_K": problem.head_dim,
        "PT_HEAD_DIM_V": problem.head_dim_v,
        "PT_GROUP": problem.gqa_ratio,
        "PT_ROWS": num_rows(problem, pool_format),
        "PT_BLOCK_SIZE": pool_format.block_size,
        "PT_WARPS": config.num_warps,
        "PT_LANES": num_lanes(problem, pool_format),
        "PT_KEYS": config.keys_per_lane,
        "PT_Q_DTYPE": CODES[problem.q_dtype],
        "PT_KV_DTYPE": CODES[pool_format.kv_dtype],
        "PT_WINDOW": problem.window or 0,
        "PT_HAS_CAP": int(problem.soft_cap is not None),
        "PT_HAS_SINKS": int(problem.sinks),
        "PT_HAS_ALIBI": int(problem.alibi),
        "PT_HAS_SCALES": int(pool_format.has_constant_scales),
        "PT_TOKEN_SCALES": int(pool_format.has_token_scales),
        "PT_SCALE_STRIDE": scale_stride(pool_format),
        "PT_MERGE": merge_code(config),
    }


def _alignments(problem: Problem, pool_format: PoolFormat) -> dict[str, int]:
    """Pools are read 16 bytes at a time, queries by as many elements, 16 bytes at most."""
    elements = PIECE_BYTES // pool_format.kv_dtype.itemsize
    query = min(PIECE_BYTES, elements * problem.q_dtype.itemsize)
    return {"q": query, "k_cache": PIECE_BYTES, "v_cache": PIECE_BYTES}


def slots_of(problem: Problem, pool_format: PoolFormat) -> dict[str, SlotSpec]:
    """The op's slots with their alignments."""
    return aligned(attention_slots(problem, pool_format), _alignments(problem, pool_format))


def split_args(
    problem: Problem, pool_format: PoolFormat, config: CudaSplitSimtConfig, bounds: Bounds
) -> tuple[Arg, ...]:
    """Arguments of the split kernel."""
    chunks, splits = num_chunks(problem, pool_format, bounds), live_splits(problem, pool_format, config, bounds)
    return split_arguments(problem, pool_format, config, chunks, splits)


def split_abi(problem: Problem, pool_format: PoolFormat, config: CudaSplitSimtConfig) -> KernelAbi:
    """Besides the slots, partials must be aligned to the merge's loads of four floats."""
    args = split_args(problem, pool_format, config, Bounds(1, 1))
    known = _alignments(problem, pool_format) | {"partial_out": PIECE_BYTES}
    align = {k: known[arg.slot] for k, arg in enumerate(args) if isinstance(arg, SlotArg) and arg.slot in known}
    return KernelAbi(abi_of(args).arg_types, align)
