"""The dimensions that the covering arrays span, with every value they take and why it is among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.problem import Problem

from .case import Hazard

BF16, FP16, FP32 = DType.BF16, DType.FP16, DType.FP32


@dataclass(frozen=True)
class Shape:
    """Heads, head dims and dtypes: what a compiled variant is specialised on."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    q_dtype: DType
    kv_dtype: DType

    @property
    def heads(self) -> tuple[int, int]:
        """Query and KV heads."""
        return self.num_q_heads, self.num_kv_heads

    @property
    def head_dims(self) -> tuple[int, int]:
        """Head dims of K and V."""
        return self.head_dim, self.head_dim_v

    @property
    def dtypes(self) -> tuple[DType, DType]:
        """Dtypes of query and pool."""
        return self.q_dtype, self.kv_dtype

    def problem(self, **features: Any) -> Problem:
        """The problem of this shape with `features`."""
        return Problem(
            self.num_q_heads, self.num_kv_heads, self.head_dim, self.head_dim_v, q_dtype=self.q_dtype, **features
        )


@dataclass(frozen=True)
class Feature:
    """What a model adds to plain attention, with the hazards that only it can have."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    hazards: tuple[Hazard, ...] = ()


# On a CPU one dimension: a kernel is compiled for each, and takes the features as arguments. Together they have every
# GQA ratio, head dim and pair of dtypes.
SHAPES = (
    Shape(4, 4, 64, 64, BF16, BF16),
    Shape(8, 4, 64, 64, FP16, FP16),
    Shape(9, 3, 64, 64, BF16, BF16),
    Shape(8, 2, 128, 128, BF16, BF16),
    Shape(5, 1, 128, 128, FP16, FP16),
    Shape(12, 2, 64, 64, FP32, FP32),
    Shape(14, 2, 128, 128, BF16, BF16),
    Shape(8, 1, 128, 128, BF16, BF16),
    Shape(71, 1, 64, 64, BF16, BF16),
    Shape(4, 2, 80, 80, FP32, FP32),
    Shape(4, 1, 96, 96, BF16, BF16),
    Shape(6, 2, 112, 112, FP16, FP16),
    Shape(4, 2, 192, 128, BF16, BF16),
    Shape(2, 2, 256, 256, BF16, BF16),
    Shape(3, 1, 72, 72, FP32, FP32),
    Shape(4, 2, 128, 64, FP32, FP32),
    Shape(4, 2, 64, 128, FP16, FP16),
    Shape(8, 2, 128, 128, FP32, BF16),
    Shape(4, 1, 64, 64, BF16, FP32),
    Shape(8, 4, 96, 96, FP16, BF16),
    Shape(16, 1, 64, 64, FP32, FP16),
    Shape(2, 1, 72, 72, BF16, BF16),
    Shape(2, 1, 65, 33, BF16, BF16),
)
# On a GPU three dimensions: a kernel is compiled for each case anyway, so that every pair of them is tried as well.
HEADS = ((4, 4), (8, 4), (9, 3), (8, 2), (5, 1), (12, 2), (14, 2), (8, 1), (16, 1), (71, 1))
HEAD_DIMS = (
    (128, 128), (64, 64), (96, 96), (256, 256), (80, 80), (112, 112), (192, 128), (72, 72), (64, 128), (65, 33),
)  # fmt: skip
# Of dtypes that cover as much, the first is taken: int8 before e4m3, since scales of tokens are made for it above all.
DTYPES = (
    (BF16, BF16), (FP16, FP16), (FP32, FP32), (FP32, BF16), (BF16, FP32), (FP16, BF16), (FP32, FP16),
    (BF16, DType.INT8), (BF16, DType.FP8_E4M3), (FP16, DType.FP8_E4M3),
)  # fmt: skip
# The same of real models, on one rank: llama-3-8b, llama-3-70b at TP 8, qwen2.5-7b, smollm2-135m, llama-2-7b at TP 4,
# gemma-2-9b at TP 2, qwen2.5-14b at TP 4, mixtral-8x22b at TP 8, qwen3-235b at TP 4, falcon-7b.
MODEL_HEADS = ((32, 8), (8, 1), (28, 4), (9, 3), (8, 8), (8, 4), (10, 2), (6, 1), (16, 1), (71, 1))
# A pool of fewer bits than the query, in the tiny level of devices whose kernels dequantise on the way to the product.
QUANTISED_SHAPE = Shape(8, 2, 128, 128, BF16, DType.FP8_E4M3)
# Cache operations are compiled for no shape: head dims, dtypes and every pair of dtypes once.
CACHE_SHAPES = (
    Shape(8, 2, 128, 128, BF16, BF16),
    Shape(9, 3, 64, 64, FP16, FP16),
    Shape(4, 2, 80, 80, FP32, FP32),
    Shape(4, 2, 192, 128, FP32, BF16),
    Shape(3, 1, 72, 72, BF16, FP32),
    Shape(4, 4, 64, 128, FP32, FP16),
    Shape(2, 1, 65, 33, FP16, BF16),
    Shape(2, 2, 96, 96, BF16, FP16),
)
# What the GPU writes, copies and gathers besides: 8-bit pools, from each query dtype.
QUANTISED_CACHE_SHAPES = (
    Shape(8, 2, 128, 128, BF16, DType.FP8_E4M3),
    Shape(4, 4, 64, 64, FP16, DType.INT8),
    Shape(3, 1, 80, 48, FP32, DType.FP8_E4M3),
    Shape(2, 1, 65, 33, BF16, DType.INT8),
)
# What only moves blocks or tokens knows no query dtype, and every pair of these costs no more than a pool of each.
MOVED_HEADS = ((8, 2), (9, 3), (4, 4), (2, 1))
MOVED_HEAD_DIMS = ((128, 128), (64, 64), (80, 80), (192, 128), (72, 72), (64, 128), (65, 33), (96, 96))
MOVED_DTYPES = tuple((BF16, dtype) for dtype in (BF16, FP16, FP32, DType.FP8_E4M3, DType.INT8))
TINY_SHAPES = (SHAPES[3], SHAPES[4], SHAPES[9], SHAPES[2])
# Of real models, heads per rank: llama-3-8b, llama-3-70b at TP 8, qwen2.5-7b, a head dim of 256 and one of 96,
# smollm2-135m.
MODEL_SHAPES = (
    Shape(32, 8, 128, 128, BF16, BF16),
    Shape(8, 1, 128, 128, BF16, BF16),
    Shape(28, 4, 128, 128, BF16, BF16),
    Shape(8, 4, 256, 256, BF16, BF16),
    Shape(32, 32, 96, 96, FP16, FP16),
    Shape(9, 3, 64, 64, BF16, BF16),
)

PLAIN = Feature("plain")
FEATURES = (
    PLAIN,
    Feature("window1", {"window": 1}),
    Feature("window16", {"window": 16}),
    Feature("window37", {"window": 37}),
    Feature("soft_cap", {"soft_cap": 30.0}),
    Feature("saturated_cap", {"soft_cap": 1.0}, (Hazard.SATURATED_CAP,)),
    Feature("sinks", {"sinks": True}),
    Feature("alibi", {"alibi": True}),
    Feature("window_sinks", {"window": 128, "sinks": True}),
    Feature("cap_alibi_scale", {"soft_cap": 20.0, "alibi": True, "scale": 0.25}),
)

BLOCK_SIZES = (16, 1, 32, 8, 24, 64, 128, 256)  # 24: no power of two


def _features(*names: str) -> tuple[Feature, ...]:
    return tuple(feature for feature in FEATURES if feature.name in names)


# Values of a dimension that stand in for each other: at corner level on a GPU, where each row is compiled, one place of
# the covering takes them in turn. At production level every one of them has a place of its own.
TURNS: Mapping[str, tuple[tuple[Any, ...], ...]] = {
    "heads": (((9, 3), (5, 1), (12, 2), (14, 2)),),  # ratios that leave some of eight rows unused
    "head_dims": (((96, 96), (112, 112), (80, 80)), ((192, 128), (64, 128))),  # no powers of two, and K unlike V
    "dtypes": (
        ((FP32, BF16), (FP32, FP16)),
        ((BF16, FP32), (FP16, BF16)),
        ((BF16, DType.FP8_E4M3), (FP16, DType.FP8_E4M3)),
    ),
    "shape": (CACHE_SHAPES[2:4], CACHE_SHAPES[4:6], CACHE_SHAPES[6:8]),
    "feature": (
        _features("window16", "window37"), _features("sinks", "window_sinks"), _features("alibi", "cap_alibi_scale")
    ),
    "block_size": ((32, 64), (8, 128)),
}  # fmt: skip

TABLES = ((), (Hazard.IDENTITY_TABLE,), (Hazard.SHARED_BLOCKS,))
TAILS = ((Hazard.TAIL_FOREIGN,), (Hazard.TAIL_INT_MAX,), (Hazard.TAIL_MINUS_ONE,))
MEMORIES = (
    (),
    (Hazard.STRIDED,),
    (Hazard.OFFSET_BASE,),
    (Hazard.HIGH_POOL,),
    (Hazard.STRIDED_POOL,),
    (Hazard.GAPPED_POOL, Hazard.OFFSET_BASE, Hazard.STRIDED, Hazard.STRIDED_POOL),
)
ATTENTION_MEMORIES = (*MEMORIES, (Hazard.HIGH_ROWS,))
SWAP_MEMORIES = (*MEMORIES, (Hazard.HIGH_STAGING,), (Hazard.GAPPED_POOL,))
LAUNCHES = ((), (Hazard.LOOSE_BOUNDS,), (Hazard.REPLAY,))
OUTPUTS = ((), (Hazard.NO_LSE,))
VALUES = ((), (Hazard.LIVE_NAN,), (Hazard.HUGE_SINKS,), (Hazard.INF_SINKS,))
SKIPS = ((), (Hazard.SKIPPED_TOKENS,))

# Context lengths of a batch, given the block size B.
Lengths = Callable[[int], tuple[int, ...]]
LENGTHS: Mapping[str, Lengths] = {
    "block_edges": lambda b: (b + 1, b, 0, max(b - 1, 1), 1, 2 * b, 3 * b - 1),
    "split_edges": lambda b: (257, 0, 255, 256, 129),
    "tile_edges": lambda b: (65, 63, 0, 64, 17, 31, 33),
    "one": lambda b: (1,),
    "long": lambda b: (1025, 3),
    "mostly_empty": lambda b: (0, 0, 5, 0),
    "empty": lambda b: (0,),
}
MODEL_LENGTHS: Mapping[str, Lengths] = {
    "ragged": lambda b: (2049, 130, 0, 777),
    "long_4k": lambda b: (4096,),
    "even": lambda b: (513,) * 6,
}
# The same for kernels that are interpreted: what a production case holds of K and V is limited, so that wide pools
# get the short ones.
VIRTUAL_LENGTHS: Mapping[str, Lengths] = {
    "ragged": lambda b: (2049, 130, 0, 777),
    "long_4k": lambda b: (4096,),
    "even_257": lambda b: (257,) * 6,
    "short": lambda b: (300, 0, 129, 64, 1),
    "brief": lambda b: (97, 0, 17, 1),
}
ALL_LENGTHS = {**LENGTHS, **MODEL_LENGTHS, **VIRTUAL_LENGTHS}
MAX_VIRTUAL_KV_BYTES = 2 << 20
# Multiplications of one launch: half a second of the slowest kernel at corner level, some seconds at production level.
MAX_VIRTUAL_PRODUCTS = {**dict.fromkeys(LENGTHS, 7 << 20), **dict.fromkeys(VIRTUAL_LENGTHS, 80 << 20)}
# Sizes that no pairwise case has, tried on few shapes: a batch past two warps of sequences, and a context past 8192.
SIZES: Mapping[str, Lengths] = {
    "many": lambda b: tuple((7 * i) % 40 for i in range(131)),
    "huge": lambda b: (8209, 5),
}
SPLIT_CONTEXT = 127 * 128 + 5  # 128 splits, the most that a kernel takes, of 128 keys, a whole number of tiles
SIZE_SHAPES = (SHAPES[2], SHAPES[5])
# Query tokens of the sequences, in turn, as far as the context has them.
QUERIES: Mapping[str, tuple[int, ...]] = {"decode": (1,), "mixed": (1, 3, 0, 2), "chunk": (8, 5)}
