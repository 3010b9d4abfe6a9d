"""Triton source of `triton_split`: split-K paged decode attention, and the merge of its partials.

One program of `attention_split` takes one query token, one KV head and one split of the visible keys: the query heads
of the group are the rows of the matrix products, padded to BLOCK_H, so K and V are read once per group (of more than
BLOCK_H heads: once per ROW_TILES; more rows would make sm_90 take its other kind of matrix instruction). Tiles of
TILE_TOKENS keys are found through the block table and need not be a multiple or a divisor of the block size.
Scores are kept in base 2: `log2(e)` is folded into the scale.
"""

# mypy: ignore-errors
# The language is Triton: what looks like Python is compiled for the GPU, and has no Python types.
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def find_sequence(query_start_loc, token, num_seqs):
    """The sequence that query token `token` belongs to: the last one that starts at or before it."""
    low = 0
    high = num_seqs.to(tl.int32)
    while high - low > 1:
        middle = (low + high) // 2
        starts_before = tl.load(query_start_loc + middle) <= token
        low = tl.where(starts_before, middle, low)
        high = tl.where(starts_before, high, middle)
    return low


@triton.jit
def power_of_two(x):
    """The largest power of two up to `x`, between 2^-126 and 2^126: those whose reciprocals are normal numbers."""
    exponent = tl.minimum(tl.maximum(x.to(tl.int32, bitcast=True) >> 23, 1), 253)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def halves_of(words, WHICH: tl.constexpr):
    """The low (0) or high (1) e4m3 byte of each 16-bit word as fp16, two words at once.

    Loaded as bytes, a factor would have the layout of 8-bit products, and the other one be brought into it through
    shared memory; with words both have that of 16-bit products.
    """
    BYTES: tl.constexpr = "0x0020" if WHICH == 0 else "0x0031"
    return tl.inline_asm_elementwise(
        "{.reg .b32 x; .reg .b16 l, h; prmt.b32 x, $1, 0, " + BYTES
        + "; mov.b32 {l, h}, x; cvt.rn.f16x2.e4m3x2 $0, l;}",
        "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def attention_split(
    q,  # [num_tokens, num_q_heads, DIM_K]
    k_cache,
    v_cache,
    block_table,  # int32 [num_seqs, max_blocks]
    context_lens,  # int32 [num_seqs]
    query_start_loc,  # int32 [num_seqs + 1]
    sinks,  # fp32 [num_q_heads] or null
    alibi_slopes,  # fp32 [num_q_heads] or null
    k_scale,  # fp32 [1] or [num_kv_heads] or [num_blocks, num_kv_heads, BLOCK_SIZE], or null
    v_scale,
    out,  # [num_tokens, num_q_heads, DIM_V]
    lse,  # fp32 [num_tokens, num_q_heads] or null
    partial_out,  # fp32 [num_tokens, num_q_heads, num_splits, DIM_V]; unused with one split
    partial_lse,  # fp32 [num_tokens, num_q_heads, num_splits]
    q_token,
    q_head,
    k_block,
    k_slot,
    k_head,
    k_outer,
    v_block,
    v_slot,
    v_head,
    v_dim,
    out_token,
    out_head,
    lse_token,
    table_seq,
    num_seqs,
    num_splits,
    scale_k_block,
    scale_k_head,
    scale_v_block,
    scale_v_head,
    scale,
    soft_cap,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROW_TILES: tl.constexpr,  # programs that share a group
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PACK: tl.constexpr,  # elements of the inner K dimension; DIM_K where there is only one
    TILE_TOKENS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,  # fewest keys worth a split of their own
    WINDOW: tl.constexpr,  # 0: none
    SPLIT: tl.constexpr,  # whether partials are written, not the output
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    TOKEN_SCALES: tl.constexpr,  # whether each token and head has scales of its own
    DOT_FP32: tl.constexpr,  # whether the factors of both products are fp32, not of the query's dtype
    WORDS: tl.constexpr,  # whether pools are read as words of two e4m3 elements: even dims and odd ones apart
    DOT_HALF: tl.constexpr,  # whether they are fp16 and the query is not: e4m3 becomes fp16 at half the cost of bf16
):
    DOT_TYPE: tl.constexpr = tl.float32 if DOT_FP32 else tl.float16 if DOT_HALF else q.dtype.element_ty
    DOT_PRECISION: tl.constexpr = "ieee" if DOT_FP32 else "tf32"
    token = tl.program_id(0)
    kv_head = tl.program_id(1) // ROW_TILES
    split = tl.program_id(2)
    if token >= tl.load(query_start_loc + num_seqs):
        return
    seq = find_sequence(query_start_loc, token, num_seqs)
    context_len = tl.load(context_lens + seq)
    position = context_len - (tl.load(query_start_loc + seq + 1) - token)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    visible = tl.maximum(position + 1 - first, 0)
    share = tl.maximum(tl.cdiv(visible, num_splits.to(tl.int32)), SPLIT_TOKENS)
    share = tl.cdiv(share, TILE_TOKENS) * TILE_TOKENS
    begin = first + split * share
    end = tl.minimum(begin + share, position + 1)

    rows = tl.program_id(1) % ROW_TILES * BLOCK_H + tl.arange(0, BLOCK_H)
    cols_k = tl.arange(0, BLOCK_DK)
    cols_v = tl.arange(0, BLOCK_DV)
    live_rows = rows < GROUP
    heads = kv_head * GROUP + rows
    token_head = token.to(tl.int64) * (tl.num_programs(1) // ROW_TILES * GROUP) + heads
    part = token_head * num_splits + split
    if SPLIT:  # noqa: SIM102 - a constant decides what is compiled, the other what runs
        if begin >= end:  # an empty split says so, and its output is not looked at
            tl.store(partial_lse + part, tl.full([BLOCK_H], -float("inf"), tl.float32), live_rows)
            return
    q_at = q + token * q_token + heads[:, None] * q_head + cols_k[None, :]
    words_k = tl.arange(0, BLOCK_DK // 2)
    words_v = tl.arange(0, BLOCK_DV // 2)
    q_tile = tl.load(q_at, mask=live_rows[:, None] & (cols_k < DIM_K)[None, :], other=0.0)
    score_scale = scale * LOG2E
    out_scale = 1.0
    if HAS_SCALES:
        score_scale *= tl.load(k_scale + kv_head * SCALE_STRIDE)
        out_scale = tl.load(v_scale + kv_head * SCALE_STRIDE)
    if DOT_HALF:  # a power of two for each row keeps a bf16 query in range: its largest value is taken to 2^14 or above
        most = tl.max(tl.abs(q_tile.to(tl.float32)), 1)
        exponent = tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 16) - 14
        row_scale = tl.where(most > 0.0, (exponent << 23).to(tl.float32, bitcast=True), 1.0)
        q_tile = q_tile.to(tl.float32) * (1.0 / row_scale)[:, None]
        score_scale = (score_scale * row_scale)[:, None]
    q_tile = q_tile.to(DOT_TYPE)
    if WORDS:
        q_low, q_high = tl.split(tl.reshape(q_tile, [BLOCK_H, BLOCK_DK // 2, 2]))
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + heads, mask=live_rows, other=0.0) * LOG2E

    k_base = k_cache + kv_head * k_head
    v_base = v_cache + kv_head * v_head
    if PACK < BLOCK_DK:
        k_cols = (cols_k // PACK) * k_outer + cols_k % PACK
    else:  # an unknown stride, even times zero, would hide from the compiler that rows are aligned
        k_cols = cols_k
    v_cols = cols_v * v_dim
    top = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    if WORDS:
        acc_low = tl.zeros([BLOCK_H, BLOCK_DV // 2], tl.float32)
        acc_high = acc_low
        k_words = k_base.to(tl.pointer_type(tl.int16))
        v_words = v_base.to(tl.pointer_type(tl.int16))
    else:
        acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    table = block_table + seq * table_seq
    # Values' scales are relative to a power of two about the largest so far: weights stay in the range of their type,
    # and are rounded to it as without.
    unit = 0.0
    for start in range(begin, end, TILE_TOKENS):
        tokens = start + tl.arange(0, TILE_TOKENS)
        seen = tokens < end
        block = tl.load(table + tokens // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        slot = tokens % BLOCK_SIZE
        k_rows = block * k_block + slot * k_slot
        if WORDS:
            k_at = k_words + (k_rows // 2)[None, :] + words_k[:, None]
            pairs = tl.load(k_at, mask=seen[None, :] & (words_k < DIM_K // 2)[:, None], other=0)
            scores = tl.dot(q_high, halves_of(pairs, 1), tl.dot(q_low, halves_of(pairs, 0))) * score_scale
        else:
            k_at = k_base + k_rows[None, :] + k_cols[:, None]
            k_tile = tl.load(k_at, mask=seen[None, :] & (cols_k < DIM_K)[:, None], other=0.0).to(DOT_TYPE)
            scores = tl.dot(q_tile, k_tile, input_precision=DOT_PRECISION) * score_scale
        if TOKEN_SCALES:
            k_scales = tl.load(k_scale + (block * scale_k_block + kv_head * scale_k_head + slot), mask=seen, other=0.0)
            scores *= k_scales[None, :]
        if HAS_CAP:
            # Not made of exp alone: that loses the digits of small scores, and a large cap makes the loss visible.
            cap = soft_cap * LOG2E
            scores = cap * libdevice.tanh(scores / cap)
        if HAS_ALIBI:
            scores += slopes[:, None] * (tokens - position).to(tl.float32)[None, :]
        scores = tl.where(seen[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe_top = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp2(scores - safe_top[:, None])
        shrink = tl.exp2(top - safe_top)
        total = total * shrink + tl.sum(p, 1)
        if TOKEN_SCALES:
            v_scales = tl.load(v_scale + (block * scale_v_block + kv_head * scale_v_head + slot), mask=seen, other=0.0)
            raised = tl.maximum(unit, power_of_two(tl.max(tl.abs(v_scales), 0)))
            inverse = 1.0 / raised
            p *= (v_scales * inverse)[None, :]
            shrink *= unit * inverse
            unit = raised
        v_rows = block * v_block + slot * v_slot
        weights = p.to(DOT_TYPE)
        if WORDS:
            v_at = v_words + (v_rows // 2)[:, None] + words_v[None, :]
            pairs = tl.load(v_at, mask=seen[:, None] & (words_v < DIM_V // 2)[None, :], other=0)
            acc_low = tl.dot(weights, halves_of(pairs, 0), acc_low * shrink[:, None])
            acc_high = tl.dot(weights, halves_of(pairs, 1), acc_high * shrink[:, None])
        else:
            v_at = v_base + v_rows[:, None] + v_cols[None, :]
            v_tile = tl.load(v_at, mask=seen[:, None] & (cols_v < DIM_V)[None, :], other=0.0).to(DOT_TYPE)
            acc = tl.dot(weights, v_tile, acc * shrink[:, None], input_precision=DOT_PRECISION)
        top = new_top

    if TOKEN_SCALES:
        out_scale = unit
    if WORDS:
        acc = tl.interleave(acc_low, acc_high)
    live_out = live_rows[:, None] & (cols_v < DIM_V)[None, :]
    if SPLIT:
        safe_total = tl.where(total == 0.0, 1.0, total)  # a NaN stays one: it must not pass for a split without keys
        tl.store(
            partial_out + part[:, None] * DIM_V + cols_v[None, :], acc * (out_scale / safe_total)[:, None], live_out
        )
        split_lse = tl.where(total == 0.0, -float("inf"), (top + tl.log2(safe_total)) * LN2)
        tl.store(partial_lse + part, split_lse, live_rows)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=live_rows, other=0.0) * LOG2E
            # An infinite sink takes all weight or none: neither may meet infinity minus infinity.
            infinity = float("inf")
            new_top = tl.maximum(top, sink)
            safe_top = tl.where(tl.abs(new_top) == infinity, 0.0, new_top)
            shrink = tl.where(sink == infinity, 0.0, tl.exp2(top - safe_top))
            total = total * shrink + tl.where(sink == infinity, 1.0, tl.exp2(sink - safe_top))
            acc *= shrink[:, None]
            top = new_top
        safe_total = tl.where(total == 0.0, 1.0, total)
        result = acc * (out_scale / safe_total)[:, None]
        tl.store(out + token * out_token + heads[:, None] * out_head + cols_v[None, :], result, live_out)
        if lse.to(tl.int64) != 0:
            row_lse = tl.where(total == 0.0, top, (top + tl.log2(safe_total)) * LN2)
            tl.store(lse + token * lse_token + heads, row_lse, live_rows)


@triton.jit
def attention_merge(
    partial_out,
    partial_lse,
    sinks,
    query_start_loc,
    out,
    lse,
    out_token,
    out_head,
    lse_token,
    num_seqs,
    num_splits,
    DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program merges the splits of one query token and head; an empty split weighs nothing."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    if token >= tl.load(query_start_loc + num_seqs):
        return
    cols = tl.arange(0, BLOCK_DV)
    parts = tl.arange(0, BLOCK_SPLITS)
    row = (token.to(tl.int64) * tl.num_programs(1) + head) * num_splits
    lses = tl.load(partial_lse + row + parts, mask=parts < num_splits, other=-float("inf")) * LOG2E
    top = tl.max(lses, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2E
        top = tl.maximum(top, sink)
    safe_top = tl.where(top == -float("inf"), 0.0, top)
    weights = tl.exp2(lses - safe_top)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.where(sink == float("inf"), 1.0, tl.exp2(sink - safe_top))  # infinity minus infinity is no weight
    live = (lses != -float("inf"))[:, None] & (cols < DIM_V)[None, :]
    values = tl.load(partial_out + (row + parts)[:, None] * DIM_V + cols[None, :], mask=live, other=0.0)
    acc = tl.sum(values * weights[:, None], 0)
    safe_total = tl.where(total == 0.0, 1.0, total)
    tl.store(out + token * out_token + head * out_head + cols, acc / safe_total, cols < DIM_V)
    if lse.to(tl.int64) != 0:
        tl.store(lse + token * lse_token + head, tl.where(total == 0.0, top, (top + tl.log2(safe_total)) * LN2))
