"""Triton sources of the cache operations: K/V write by slot mapping, copies of blocks, gather of sequences.

All three walk the elements of K or V in the order (token or slot, head, dim), BLOCK at a time. Divisors are constants:
the compiler sees which elements are adjacent and aligned, and makes 16-byte accesses of them.
"""

# mypy: ignore-errors
# The language is Triton: what looks like Python is compiled for the GPU, and has no Python types.
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice


@triton.jit
def place(at, block, slot, outer_stride, block_stride, slot_stride, head_stride, HEADS: tl.constexpr,
          DIM: tl.constexpr, PACK: tl.constexpr):  # fmt: skip
    """Offsets in a pool of elements `at` of a batch of tokens, [token, HEADS, DIM], whose block and slot are given."""
    head = at // DIM % HEADS
    d = at % DIM
    row = block * block_stride + slot * slot_stride + head * head_stride
    if PACK < DIM:
        return row + d // PACK * outer_stride + d % PACK
    return row + d


@triton.jit
def to_e4m3(x):
    """fp32 to e4m3 in one rounding. Before sm_90 the compiler's own conversion goes through fp16 and rounds twice."""
    FOUR: tl.constexpr = """{.reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};}"""
    bits = tl.inline_asm_elementwise(FOUR, "=r,r,r,r,r", [x], dtype=tl.int8, is_pure=True, pack=4)
    return bits.to(tl.float8e4nv, bitcast=True)


@triton.jit
def stored(x, cache):
    """To nearest, ties to even; 8-bit types saturate."""
    if cache.dtype.element_ty == tl.float8e4nv:
        return to_e4m3(x.to(tl.float32))
    if cache.dtype.element_ty == tl.int8:
        x = libdevice.rint(x.to(tl.float32))
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -127.0), 127.0), 0.0)  # noqa: PLR0124 - NaN is 0
    elif cache.dtype.element_ty != x.dtype:
        x = x.to(tl.float32)
    return x.to(cache.dtype.element_ty)


@triton.jit
def write_rows(
    rows, row_token, row_head, cache, block_stride, slot_stride, head_stride, outer_stride, slots, scale, first,
    num_tokens, HEADS: tl.constexpr, DIM: tl.constexpr, PACK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_SCALES: tl.constexpr, SCALE_STRIDE: tl.constexpr,
):  # fmt: skip
    for start in range(0, ROWS * HEADS * DIM, BLOCK):
        at = start + tl.arange(0, BLOCK)
        head = at // DIM % HEADS
        if HEADS * DIM % BLOCK == 0:  # all of one token
            token = first + start // (HEADS * DIM)
            live = token < num_tokens
        else:
            token = first + at // (HEADS * DIM)
            live = (at < ROWS * HEADS * DIM) & (token < num_tokens)
        slot = tl.load(slots + token, mask=live, other=-1)
        live &= slot >= 0
        x = tl.load(rows + token * row_token + head * row_head + at % DIM, mask=live, other=0.0)
        if HAS_SCALES:
            x = tl.div_rn(x.to(tl.float32), tl.load(scale + head * SCALE_STRIDE, mask=live, other=1.0))
        to = place(at, slot // BLOCK_SIZE, slot % BLOCK_SIZE, outer_stride, block_stride, slot_stride, head_stride,
                   HEADS, DIM, PACK)  # fmt: skip
        tl.store(cache + to, stored(x, cache), mask=live)


@triton.jit
def write_scaled_rows(
    rows, row_token, row_head, cache, block_stride, slot_stride, head_stride, outer_stride, slots, scale, scale_block,
    scale_head, first, num_tokens, HEADS: tl.constexpr, DIM: tl.constexpr, PACK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The same, with a scale of its own for each row of a token and head: AT_ONCE rows of WIDTH, DIM of them live."""
    LARGEST: tl.constexpr = 127.0 if cache.dtype.element_ty == tl.int8 else 448.0
    SMALLEST_NORMAL: tl.constexpr = 2.0**-126
    d = tl.arange(0, WIDTH)
    for start in range(0, ROWS * HEADS, AT_ONCE):
        row = start + tl.arange(0, AT_ONCE)
        token = first + row // HEADS
        head = row % HEADS
        live = (row < ROWS * HEADS) & (token < num_tokens)
        slot = tl.load(slots + token, mask=live, other=-1)
        live &= slot >= 0
        both = live[:, None] & (d < DIM)[None, :]
        x = tl.load(rows + (token * row_token + head * row_head)[:, None] + d[None, :], mask=both, other=0.0)
        x = x.to(tl.float32)
        size = tl.abs(x)
        most = tl.max(tl.where(size < float("inf"), size, 0.0), 1)  # no infinity, no NaN
        own = tl.div_rn(most, tl.full([AT_ONCE], LARGEST, tl.float32))
        own = tl.where(own < SMALLEST_NORMAL, 1.0, own)
        block = slot // BLOCK_SIZE
        tl.store(scale + (block * scale_block + head * scale_head + slot % BLOCK_SIZE), own, mask=live)
        to = (block * block_stride + slot % BLOCK_SIZE * slot_stride + head * head_stride)[:, None]
        to += (d // PACK * outer_stride + d % PACK)[None, :] if PACK < DIM else d[None, :]
        x = tl.div_rn(x, tl.broadcast_to(own[:, None], x.shape))
        tl.store(cache + to, stored(x, cache), mask=both)


@triton.jit
def kv_write(
    k,  # [num_tokens, HEADS, DIM_K]
    v,  # [num_tokens, HEADS, DIM_V]
    k_cache,
    v_cache,
    slot_mapping,  # int64 [num_tokens]
    k_scale,  # fp32 [1] or [HEADS] or [num_blocks, HEADS, BLOCK_SIZE], or null
    v_scale,
    k_token,
    k_row,
    v_token,
    v_row,
    k_block,
    k_slot,
    k_head,
    k_outer,
    v_block,
    v_slot,
    v_head,
    v_outer,
    num_tokens,
    scale_k_block,
    scale_k_head,
    scale_v_block,
    scale_v_head,
    HEADS: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    PACK_K: tl.constexpr,  # adjacent elements of a head
    PACK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # tokens of a program
    BLOCK: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    TOKEN_SCALES: tl.constexpr,
    WIDTH_K: tl.constexpr,  # powers of two
    WIDTH_V: tl.constexpr,
):
    """One program stores ROWS tokens of K or of V; a token with a negative slot is not even read."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    if TOKEN_SCALES:
        if tl.program_id(1) == 0:
            write_scaled_rows(k, k_token, k_row, k_cache, k_block, k_slot, k_head, k_outer, slot_mapping, k_scale,
                              scale_k_block, scale_k_head, first, num_tokens, HEADS, DIM_K, PACK_K, BLOCK_SIZE, ROWS,
                              WIDTH_K, BLOCK // WIDTH_K if BLOCK > WIDTH_K else 1)  # fmt: skip
        else:
            write_scaled_rows(v, v_token, v_row, v_cache, v_block, v_slot, v_head, v_outer, slot_mapping, v_scale,
                              scale_v_block, scale_v_head, first, num_tokens, HEADS, DIM_V, PACK_V, BLOCK_SIZE, ROWS,
                              WIDTH_V, BLOCK // WIDTH_V if BLOCK > WIDTH_V else 1)  # fmt: skip
    elif tl.program_id(1) == 0:
        write_rows(k, k_token, k_row, k_cache, k_block, k_slot, k_head, k_outer, slot_mapping, k_scale, first,
                   num_tokens, HEADS, DIM_K, PACK_K, BLOCK_SIZE, ROWS, BLOCK, HAS_SCALES, SCALE_STRIDE)  # fmt: skip
    else:
        write_rows(v, v_token, v_row, v_cache, v_block, v_slot, v_head, v_outer, slot_mapping, v_scale, first,
                   num_tokens, HEADS, DIM_V, PACK_V, BLOCK_SIZE, ROWS, BLOCK, HAS_SCALES, SCALE_STRIDE)  # fmt: skip


@triton.jit
def copy_chunk(pool, block_stride, a_stride, b_stride, c_stride, source, destination, chunk, A: tl.constexpr,
               B: tl.constexpr, C: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    run = at // L
    place = run // (B * C) * a_stride + run // C % B * b_stride + run % C * c_stride + at % L
    live = at < A * B * C * L
    values = tl.load(pool + source * block_stride + place, mask=live)
    tl.store(pool + destination * block_stride + place, values, mask=live)


@triton.jit
def copy_scales(scale, block_stride, head_stride, source, destination, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    for start in range(0, HEADS * BLOCK_SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        place = at // BLOCK_SIZE * head_stride + at % BLOCK_SIZE
        live = at < HEADS * BLOCK_SIZE
        values = tl.load(scale + source * block_stride + place, mask=live)
        tl.store(scale + destination * block_stride + place, values, mask=live)


@triton.jit
def copy_blocks(
    k_cache,
    v_cache,
    block_pairs,  # int64 [num_pairs, 2]: source, destination
    k_scale,  # fp32 [num_blocks, HEADS, BLOCK_SIZE], or null
    v_scale,
    k_block,
    k_a,
    k_b,
    k_c,
    v_block,
    v_a,
    v_b,
    v_c,
    num_pairs,
    scale_k_block,
    scale_k_head,
    scale_v_block,
    scale_v_head,
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
    TOKEN_SCALES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program copies BLOCK elements of one K or V block; a pair with a negative block is skipped."""
    pair = tl.program_id(0).to(tl.int64)
    if pair >= num_pairs:
        return
    source = tl.load(block_pairs + 2 * pair)
    destination = tl.load(block_pairs + 2 * pair + 1)
    if (source < 0) | (destination < 0) | (source == destination):
        return
    chunk = tl.program_id(1)
    if TOKEN_SCALES and chunk == tl.num_programs(1) - 1:  # those of both are few
        copy_scales(k_scale, scale_k_block, scale_k_head, source, destination, HEADS, BLOCK_SIZE, BLOCK)
        copy_scales(v_scale, scale_v_block, scale_v_head, source, destination, HEADS, BLOCK_SIZE, BLOCK)
    elif chunk < K_CHUNKS:
        copy_chunk(k_cache, k_block, k_a, k_b, k_c, source, destination, chunk, K_A, K_B, K_C, K_L, BLOCK)
    else:
        copy_chunk(v_cache, v_block, v_a, v_b, v_c, source, destination, chunk - K_CHUNKS, V_A, V_B, V_C, V_L, BLOCK)


@triton.jit
def gather_rows(
    cache, block_stride, slot_stride, head_stride, outer_stride, table, first, count, out, out_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, PACK: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    for start in range(0, ROWS * HEADS * DIM, BLOCK):
        at = start + tl.arange(0, BLOCK)
        if HEADS * DIM % BLOCK == 0:  # all of one token
            token = first + start // (HEADS * DIM)
            live = token < first + count
        else:
            token = first + at // (HEADS * DIM)
            live = at < count * (HEADS * DIM)
        block = tl.load(table + token // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        source = place(at, block, token % BLOCK_SIZE, outer_stride, block_stride, slot_stride, head_stride, HEADS, DIM,
                       PACK)  # fmt: skip
        values = tl.load(cache + source, mask=live)
        tl.store(out + out_row * (HEADS * DIM) + at, values, mask=live)


@triton.jit
def gather_scales(scale, block_stride, head_stride, table, first, count, out, out_row, HEADS: tl.constexpr,
                  BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    for start in range(0, ROWS * HEADS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        token = first + at // HEADS
        live = at < count * HEADS
        block = tl.load(table + token // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        place = block * block_stride + at % HEADS * head_stride + token % BLOCK_SIZE
        tl.store(out + out_row * HEADS + at, tl.load(scale + place, mask=live), mask=live)


@triton.jit
def gather_kv(
    k_cache,
    v_cache,
    block_table,  # int32 [num_seqs, max_blocks]
    context_lens,  # int32 [num_seqs]
    out_start,  # int32 [num_seqs + 1]
    k_out,  # [num_tokens, HEADS, DIM_K]
    v_out,  # [num_tokens, HEADS, DIM_V]
    k_scale,  # fp32 [num_blocks, HEADS, BLOCK_SIZE], or null
    v_scale,
    k_scale_out,  # fp32 [num_tokens, HEADS], or null
    v_scale_out,
    k_block,
    k_slot,
    k_head,
    k_outer,
    v_block,
    v_slot,
    v_head,
    v_outer,
    table_seq,
    num_seqs,
    chunks,  # programs of a sequence
    scale_k_block,
    scale_k_head,
    scale_v_block,
    scale_v_head,
    HEADS: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    PACK_K: tl.constexpr,
    PACK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKEN_SCALES: tl.constexpr,
):
    """One program gathers ROWS tokens of K or of V of one sequence."""
    seq = tl.program_id(0) // chunks
    first = (tl.program_id(0) % chunks).to(tl.int32) * ROWS
    if seq >= num_seqs:
        return
    count = tl.minimum(tl.load(context_lens + seq) - first, ROWS)
    if count <= 0:
        return
    table = block_table + seq * table_seq
    row = tl.load(out_start + seq).to(tl.int64) + first
    if TOKEN_SCALES:
        if tl.program_id(1) == 0:
            gather_scales(k_scale, scale_k_block, scale_k_head, table, first, count, k_scale_out, row, HEADS,
                          BLOCK_SIZE, ROWS, BLOCK)  # fmt: skip
        else:
            gather_scales(v_scale, scale_v_block, scale_v_head, table, first, count, v_scale_out, row, HEADS,
                          BLOCK_SIZE, ROWS, BLOCK)  # fmt: skip
    if tl.program_id(1) == 0:
        gather_rows(k_cache, k_block, k_slot, k_head, k_outer, table, first, count, k_out, row, HEADS, DIM_K, PACK_K,
                    BLOCK_SIZE, ROWS, BLOCK)  # fmt: skip
    else:
        gather_rows(v_cache, v_block, v_slot, v_head, v_outer, table, first, count, v_out, row, HEADS, DIM_V, PACK_V,
                    BLOCK_SIZE, ROWS, BLOCK)  # fmt: skip
