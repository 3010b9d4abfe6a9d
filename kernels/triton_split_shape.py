"""The tiles of `triton_split`: what they are made of, what registers and memory they take, which are too large."""

from __future__ import annotations

from .device import Device
from .dtypes import DType
from .pool_format import Layout, PoolFormat
from .problem import Problem

MIN_ROWS, MAX_ROWS = 16, 32  # of a matrix product: what `mma.sync` takes, and before `wgmma` sets in
MAX_HEAD_DIM = 512
VECTOR_BYTES = 16  # widest load of a thread
REDUCTION_BYTES = 512  # of shared memory, for maxima and sums across warps: 320 at most in 15 builds
MAX_FP32_TILE = 1024  # elements of a tile that a warp multiplies in fp32: beyond it, registers run out
# Of a thread for a tile and the outputs, in pipelines of two stages, and in deeper ones: found by building the space at
# head dims of 128 and 256. An estimate; a build that spills all the same is rejected by what its binary says.
MAX_TILE_REGISTERS = 160, 127


def reject_tile(
    problem: Problem, pool_format: PoolFormat, tile_tokens: int, num_warps: int, num_stages: int, device: Device
) -> str | None:
    """Why a tile is too large for the registers of its warps or the shared memory of a block, or None."""
    if fp32_tile(problem, pool_format, tile_tokens) > MAX_FP32_TILE * num_warps:
        return (
            f"fp32 products are unrolled on the plain cores: a tile of {tile_tokens} tokens is more than "
            f"{MAX_FP32_TILE} elements for each of {num_warps} warps"
        )
    registers, most = tile_registers(problem, pool_format, tile_tokens, num_warps), MAX_TILE_REGISTERS[num_stages > 2]
    if registers > most:
        return (
            f"a tile of {tile_tokens} tokens and the outputs take {registers} registers of each thread: "
            f"with {num_stages} stages they spill above {most}"
        )
    shared = shared_bytes(problem, pool_format, tile_tokens)
    if 0 < device.shared_bytes_per_block < shared:
        return f"a block needs {shared} bytes of shared memory, {device.name} has {device.shared_bytes_per_block}"
    return None


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`: what Triton's tiles are padded to."""
    return 1 << (n - 1).bit_length()


def row_tiles(problem: Problem) -> int:
    """Programs that share the query heads of a group."""
    return -(-problem.gqa_ratio // MAX_ROWS)


def dot_dtype(problem: Problem, pool_format: PoolFormat) -> DType:
    """What both factors of a product are converted to: nothing that the query or the pool holds is lost.

    e4m3 becomes fp16, which the hardware converts two at a time; bf16 takes it another step, four times as slow.
    """
    if DType.FP32 in (problem.q_dtype, pool_format.kv_dtype):
        return DType.FP32
    return DType.FP16 if pool_format.kv_dtype is DType.FP8_E4M3 else problem.q_dtype


def fp32_tile(problem: Problem, pool_format: PoolFormat, tile_tokens: int) -> int:
    """Elements of a K or V tile whose product is fp32, 0 where the tensor cores take it."""
    if dot_dtype(problem, pool_format) is not DType.FP32:
        return 0
    return tile_tokens * power_of_two(max(problem.head_dim, problem.head_dim_v))


def tile_bytes(problem: Problem, pool_format: PoolFormat, tile_tokens: int) -> int:
    """Bytes of the keys and values of one tile, which are on their way while another is worked on."""
    dims = power_of_two(problem.head_dim) + power_of_two(problem.head_dim_v)
    return tile_tokens * dims * pool_format.kv_dtype.itemsize


def shared_bytes(problem: Problem, pool_format: PoolFormat, tile_tokens: int) -> int:
    """Shared memory of a block, as Triton lays it out: a tile on its way, the queries, the weights, one of K and V as
    fp32 where the product is and the pool is not, and what reductions between warps take at most."""
    dot = dot_dtype(problem, pool_format)
    rows = block_rows(problem) * (power_of_two(problem.head_dim) + tile_tokens)
    widened = pool_format.kv_dtype is not dot and dot is DType.FP32
    converted = fp32_tile(problem, pool_format, tile_tokens) * dot.itemsize if widened else 0
    return tile_bytes(problem, pool_format, tile_tokens) + rows * dot.itemsize + converted + REDUCTION_BYTES


def tile_registers(problem: Problem, pool_format: PoolFormat, tile_tokens: int, num_warps: int) -> int:
    """Registers of a thread for one tile and the outputs; 0 where products are fp32, which `MAX_FP32_TILE` limits.

    A tile counts as it is multiplied, and half as it was loaded if that differs; words become elements when used.
    """
    dot, kv = dot_dtype(problem, pool_format), pool_format.kv_dtype
    if dot is DType.FP32:
        return 0
    element = float(dot.itemsize if kv is dot else dot.itemsize + kv.itemsize / 2)  # bytes
    if in_words(problem, pool_format):
        element = kv.itemsize
    dim = power_of_two(max(problem.head_dim, problem.head_dim_v))
    return int(dim * (tile_tokens * element / 4 + block_rows(problem))) // (32 * num_warps)


def block_rows(problem: Problem) -> int:
    """Rows of a matrix product: the query heads of a group, padded."""
    return min(MAX_ROWS, max(MIN_ROWS, power_of_two(problem.gqa_ratio)))


def in_words(problem: Problem, pool_format: PoolFormat) -> bool:
    """Whether the kernel reads two e4m3 elements at once: rows lie in 16-byte pieces, and half a row is a product."""
    return (
        min(problem.head_dim, problem.head_dim_v) >= 2 * MIN_ROWS
        and dot_dtype(problem, pool_format) is DType.FP16
        and pool_format.kv_dtype is DType.FP8_E4M3
        and pool_format.layout is not Layout.XPACKED
        and {"k_cache", "v_cache"} <= alignments(problem, pool_format).keys()
    )


def alignments(problem: Problem, pool_format: PoolFormat) -> dict[str, int]:
    """Tensors whose rows are loaded and stored 16 bytes at a time: those with rows of a multiple of that size."""
    xpacked, size = pool_format.layout is Layout.XPACKED, pool_format.kv_dtype.itemsize
    rows = {
        "q": problem.head_dim * problem.q_dtype.itemsize,
        "out": problem.head_dim_v * problem.q_dtype.itemsize,
        "k_cache": (pool_format.pack if xpacked else problem.head_dim) * size,
        "v_cache": (pool_format.block_size if xpacked else problem.head_dim_v) * size,
    }
    return {name: VECTOR_BYTES for name, num_bytes in rows.items() if num_bytes % VECTOR_BYTES == 0}
