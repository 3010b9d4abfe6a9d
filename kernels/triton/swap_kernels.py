"""Triton source of packing: blocks of the pools to the rows of a staging buffer, and back.

BLOCK elements of a block at a time, in the order of the pool's dimensions. What is constant and known to be aligned
becomes 16-byte accesses.
"""

# mypy: ignore-errors
# The language is Triton: what looks like Python is compiled for the GPU, and has no Python types.
import triton
import triton.language as tl


@triton.jit
def move_chunk(pool, block, block_stride, a_stride, b_stride, c_stride, to, chunk, A: tl.constexpr, B: tl.constexpr,
               C: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr, PACK: tl.constexpr):  # fmt: skip
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    run = at // L
    place = run // (B * C) * a_stride + run // C % B * b_stride + run % C * c_stride + at % L
    in_pool = pool + block * block_stride + place
    live = at < A * B * C * L
    if PACK:
        tl.store(to + at, tl.load(in_pool, mask=live), mask=live)
    else:
        tl.store(in_pool, tl.load(to + at, mask=live), mask=live)


@triton.jit
def move_blocks(
    k_cache,
    v_cache,
    block_ids,  # int64 [num_listed]
    staging,  # [num_listed, elements of K, then of V]
    k_block,
    k_a,
    k_b,
    k_c,
    v_block,
    v_a,
    v_b,
    v_c,
    row,  # stride of staging
    num_listed,
    K_A: tl.constexpr,  # a K block is K_A x K_B x K_C runs of K_L adjacent elements
    K_B: tl.constexpr,
    K_C: tl.constexpr,
    K_L: tl.constexpr,
    V_A: tl.constexpr,
    V_B: tl.constexpr,
    V_C: tl.constexpr,
    V_L: tl.constexpr,
    K_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PACK: tl.constexpr,  # from the pools to staging, else back
):
    """One program moves BLOCK elements of one K or V block; a negative id is skipped."""
    listed = tl.program_id(0).to(tl.int64)
    if listed >= num_listed:
        return
    block = tl.load(block_ids + listed)
    if block < 0:
        return
    place = staging + listed * row
    chunk = tl.program_id(1)
    if chunk < K_CHUNKS:
        move_chunk(k_cache, block, k_block, k_a, k_b, k_c, place, chunk, K_A, K_B, K_C, K_L, BLOCK, PACK)
    else:
        move_chunk(v_cache, block, v_block, v_a, v_b, v_c, place + K_A * K_B * K_C * K_L, chunk - K_CHUNKS, V_A, V_B,
                   V_C, V_L, BLOCK, PACK)  # fmt: skip
