"""What the cache operations share: how a block lies in a pool, how wide rows may be accessed, what a launch covers."""

from __future__ import annotations

from .bounds import Bounds
from .device import Device
from .launch import Arg, StrideArg
from .native_args import i64, strides
from .pool_format import Layout, PoolFormat, ScaleKind
from .problem import Problem
from .variant import Config, Op, Variant

_SCALES_APART = frozenset((ScaleKind.NONE, ScaleKind.PER_TENSOR, ScaleKind.PER_HEAD))  # they belong to no block


def vector_elements(count: int, itemsize: int, vector_bytes: int) -> int:
    """Most elements, a power of two, that `count` adjacent ones are a multiple of and `vector_bytes` has room for."""
    elements = 1
    while 2 * elements * itemsize <= vector_bytes and count % (2 * elements) == 0:
        elements *= 2
    return elements


def widest_rows(vector_bytes: int, row_bytes: tuple[int, int]) -> str | None:
    """Why no row of K or V is accessed `vector_bytes` at a time, or None: such a config equals a narrower one."""
    if vector_bytes not in (1, 2, 4, 8, 16):
        return f"vector_bytes={vector_bytes} must be a power of two up to 16, the widest access of a thread"
    if all(num_bytes % vector_bytes for num_bytes in row_bytes):
        k, v = row_bytes
        return f"vector_bytes={vector_bytes} divides neither the {k} bytes of a K row nor the {v} of a V row"
    return None


def first_default(variant: Variant, problem: Problem, pool_format: PoolFormat, device: Device) -> Config:
    """The defaults of a variant's config, with the widest `vector_bytes` that it accepts."""
    known = variant.config_type().as_dict()
    choices = [variant.config_from({**known, "vector_bytes": num_bytes}) for num_bytes in (16, 8, 4, 2, 1)]
    return next((c for c in choices if variant.reject(problem, pool_format, c, device) is None), choices[0])


def runs_of(problem: Problem, pool_format: PoolFormat) -> dict[str, tuple[int, int, int, int]]:
    """By `k` and `v`, a block as runs of adjacent elements: three counts of runs, outermost first, and their length."""
    shapes = {"k": pool_format.k_shape(1, problem)[1:], "v": pool_format.v_shape(1, problem)[1:]}
    padded = {name: (1,) * (4 - len(shape)) + shape for name, shape in shapes.items()}
    return {name: (a, b, c, length) for name, (a, b, c, length) in padded.items()}


def strided_dims(pool_format: PoolFormat) -> dict[str, tuple[int, ...]]:
    """By `k` and `v`, the dimensions of a pool tensor that the runs of a block lie along, outermost first."""
    return {"k": (1, 2, 3) if pool_format.layout is Layout.XPACKED else (1, 2), "v": (1, 2)}


def block_strides(pool_format: PoolFormat, name: str) -> tuple[Arg, ...]:
    """Strides of the block and of its three counts of runs, of pool `k` or `v`; 0 for a count that the layout lacks."""
    dims = strided_dims(pool_format)[name]
    return (StrideArg(f"{name}_cache", 0), *i64(*(0,) * (3 - len(dims))), *strides(f"{name}_cache", dims))


def reject_scales_of_blocks(pool_format: PoolFormat) -> str | None:
    """Why a staging row, which holds K and V alone, is not all that belongs to a block, or None."""
    if pool_format.scale_kind in _SCALES_APART:
        return None
    return f"scale kind {pool_format.scale_kind} has scales in each block, and a packed block is K and V alone"


def chunks_of(total: int, one: int) -> int:
    """Chunks of `one` that cover `total`."""
    return -(-total // one)


def cache_limits(op: Op, bounds: Bounds) -> dict[str, int]:
    """Largest sizes that a launch of a cache operation covers. A block pair, and a block that is packed or unpacked,
    counts as a sequence: `Bounds` knows no other sizes; of a gather the tokens are those of the output, which may be
    longer than what is gathered."""
    limits = {
        Op.KV_WRITE: {"num_tokens": bounds.max_num_tokens},
        Op.COPY_BLOCKS: {"num_pairs": bounds.max_num_seqs},
        Op.GATHER_KV: {"num_seqs": bounds.max_num_seqs},
        Op.PACK_BLOCKS: {"num_listed": bounds.max_num_seqs},
        Op.UNPACK_BLOCKS: {"num_listed": bounds.max_num_seqs},
    }
    return limits[op]
