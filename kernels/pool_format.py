"""How the one KV pool of a deployment is laid out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .dtypes import DType
from .problem import Problem, require_positive

LARGEST_STORED = {DType.FP8_E4M3: 448.0, DType.INT8: 127.0}  # of an 8-bit pool; -128 is never stored
SCALE_BYTES = 4  # of one scale


class Layout(StrEnum):
    """Order of the dimensions of a pool, outermost first (N = slot in block, H = KV head, D = head dim)."""

    NHD = "nhd"  # K and V [num_blocks, block_size, num_kv_heads, head_dim]
    HND = "hnd"  # K and V [num_blocks, num_kv_heads, block_size, head_dim]
    XPACKED = "xpacked"  # the 2023 layout: K [nb, H, D/x, N, x], V [nb, H, D, N]; x = 16 bytes of elements


class ScaleKind(StrEnum):
    """Which dequantisation scales (fp32 tensors `k_scale`, `v_scale`) a pool has."""

    NONE = "none"
    PER_TENSOR = "per_tensor"  # shape [1]
    PER_HEAD = "per_head"  # shape [num_kv_heads]
    # Of each stored token and KV head, a part of the pool: shape [num_blocks, num_kv_heads, block_size], whatever the
    # layout, since attention walks the tokens of one head, whose scales are then adjacent.
    PER_TOKEN_HEAD = "per_token_head"


@dataclass(frozen=True)
class KVAxes:
    """Which dimension of a pool tensor is which.

    `dim` is the dimension of the head dim's outer index and `pack` that of its inner index of `x` elements,
    None where the head dim is one dimension.
    """

    block: int
    slot: int
    head: int
    dim: int
    pack: int | None = None


@dataclass(frozen=True, order=True)
class PoolFormat:
    """The layout of a KV pool: one format per pool, whatever is launched on it.

    Args:
        block_size: tokens of one block.
        kv_dtype: stored dtype of K and V.
        layout: order of dimensions.
        scale_kind: dequantisation scales; a stored value times its scale is the value.

    Raises:
        ValueError: block size below 1.
    """

    block_size: int
    kv_dtype: DType
    layout: Layout = Layout.NHD
    scale_kind: ScaleKind = ScaleKind.NONE

    def __post_init__(self) -> None:
        require_positive("block_size", self.block_size)

    @property
    def pack(self) -> int:
        """`x` of the x-packed layout: elements in 16 bytes."""
        return 16 // self.kv_dtype.itemsize

    @property
    def has_token_scales(self) -> bool:
        """Whether the scales are a part of the pool, found through the block table like K and V."""
        return self.scale_kind is ScaleKind.PER_TOKEN_HEAD

    @property
    def has_constant_scales(self) -> bool:
        """Whether there are scales and none hangs on the token."""
        return self.scale_kind in (ScaleKind.PER_TENSOR, ScaleKind.PER_HEAD)

    @property
    def block_slots(self) -> tuple[str, ...]:
        """Names of the slots whose first dimension is the pool's blocks."""
        return ("k_cache", "v_cache", *(("k_scale", "v_scale") if self.has_token_scales else ()))

    def reject(self, problem: Problem) -> str | None:
        """Why `problem` cannot be stored in this format, or None."""
        if self.has_token_scales and self.kv_dtype not in LARGEST_STORED:
            return f"scales per token and head are made for 8-bit pools, which {self.kv_dtype} is not"
        if self.layout is Layout.XPACKED and problem.head_dim % self.pack:
            return (
                f"layout xpacked needs head_dim a multiple of {self.pack} for {self.kv_dtype}, not {problem.head_dim}"
            )
        return None

    def k_shape(self, num_blocks: int, problem: Problem) -> tuple[int, ...]:
        """Shape of the K pool tensor."""
        if self.layout is Layout.XPACKED:
            x = self.pack
            return (num_blocks, problem.num_kv_heads, problem.head_dim // x, self.block_size, x)
        return self._plain_shape(num_blocks, problem.num_kv_heads, problem.head_dim)

    def v_shape(self, num_blocks: int, problem: Problem) -> tuple[int, ...]:
        """Shape of the V pool tensor."""
        if self.layout is Layout.XPACKED:
            return (num_blocks, problem.num_kv_heads, problem.head_dim_v, self.block_size)
        return self._plain_shape(num_blocks, problem.num_kv_heads, problem.head_dim_v)

    def _plain_shape(self, num_blocks: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        if self.layout is Layout.NHD:
            return (num_blocks, self.block_size, num_kv_heads, head_dim)
        return (num_blocks, num_kv_heads, self.block_size, head_dim)

    @property
    def k_axes(self) -> KVAxes:
        """Dimensions of the K pool tensor."""
        return _K_AXES[self.layout]

    @property
    def v_axes(self) -> KVAxes:
        """Dimensions of the V pool tensor."""
        return _V_AXES[self.layout]

    def scale_shape(self, num_blocks: int, problem: Problem) -> tuple[int, ...] | None:
        """Shape of `k_scale` and of `v_scale`, None without scales; only scales of tokens hang on `num_blocks`."""
        shapes = {
            ScaleKind.NONE: None,
            ScaleKind.PER_TENSOR: (1,),
            ScaleKind.PER_HEAD: (problem.num_kv_heads,),
            ScaleKind.PER_TOKEN_HEAD: (num_blocks, problem.num_kv_heads, self.block_size),
        }
        return shapes[self.scale_kind]

    def bytes_per_token(self, problem: Problem) -> int:
        """KV bytes of one token in one layer on one rank, its own scales included."""
        scales = 2 * SCALE_BYTES if self.has_token_scales else 0
        return problem.num_kv_heads * ((problem.head_dim + problem.head_dim_v) * self.kv_dtype.itemsize + scales)

    @property
    def key(self) -> str:
        """Canonical one-line identity, e.g. `b16-nhd-bf16`."""
        scales = "" if self.scale_kind is ScaleKind.NONE else f"-{self.scale_kind}"
        return f"b{self.block_size}-{self.layout}-{self.kv_dtype}{scales}"


_K_AXES = {
    Layout.NHD: KVAxes(block=0, slot=1, head=2, dim=3),
    Layout.HND: KVAxes(block=0, slot=2, head=1, dim=3),
    Layout.XPACKED: KVAxes(block=0, slot=3, head=1, dim=2, pack=4),
}
_V_AXES = {
    Layout.NHD: _K_AXES[Layout.NHD],
    Layout.HND: _K_AXES[Layout.HND],
    Layout.XPACKED: KVAxes(block=0, slot=3, head=1, dim=2),
}
