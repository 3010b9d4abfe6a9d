// Split-K paged decode attention on tensor cores. A block takes one sequence, one KV head, one split of its keys and up
// to ROWS query rows (the query heads of the group, of every query token of the sequence), so each key and value is
// read once for all of them. Keys are the M dimension of S^T = K Q^T and value dims that of O^T = V^T P^T; the rows are
// N, in tiles of 8. Each warp walks its own keys (WARP_TOKENS of every TILE) with its own pipeline of asynchronous
// copies and its own online softmax: no barrier of the block in the loop. Every key's address comes from its own entry
// of the block table, so tiles and blocks need not fit each other.
#include "split_mma_stream.cuh"
#include "split_mma_products.cuh"
#include "split_mma_result.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS) attention_split(
    Q* out, const Q* q, const u8* k_cache, const u8* v_cache, const int* block_table, const int* context_lens,
    const int* query_start_loc, const float* sinks, const float* alibi_slopes, const float* k_scale, const float* v_scale,
    float* lse, float* partial_out, float* partial_lse, int* arrivals, i64 q_token, i64 q_head, i64 k_block, i64 k_slot,
    i64 k_head, i64 v_block, i64 v_slot, i64 v_head, i64 out_token, i64 out_head, i64 lse_token, i64 table_seq, i64 num_seqs,
    i64 num_kv_heads, i64 num_chunks, i64 num_splits, i64 split_tokens, i64 num_partials, float scale, float soft_cap,
    i64 k_scale_block, i64 k_scale_head, i64 v_scale_block, i64 v_scale_head) {
    extern __shared__ __align__(128) u8 shared[];
    const Params p{out, q, k_cache, v_cache, block_table, context_lens, query_start_loc, sinks, alibi_slopes, k_scale,
                   v_scale, lse, partial_out, partial_lse, arrivals, q_token, q_head, k_block, k_slot, k_head, v_block,
                   v_slot, v_head, out_token, out_head, lse_token, table_seq, num_seqs, num_kv_heads, num_chunks,
                   num_splits, split_tokens, num_partials, scale, soft_cap, k_scale_block, k_scale_head, v_scale_block,
                   v_scale_head};
    if (PT_MERGE == 3) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const Work work(p);
    if (work.seq >= num_seqs) return;
    const Sequence sequence(query_start_loc, context_lens, work.seq);
    const Rows rows(p, work, sequence);
    const Share share(sequence, PT_WINDOW, int(num_splits), int(split_tokens), TILE, work.split);
    if (rows.count <= 0 || work.split >= share.live) return;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Stream stream(p, work, share, shared, warp, lane);
    u32 entries[STAGES];
    stream.request(entries);
    const Query query(p, rows, shared, warp, lane);
    stream.start(entries);
    const Scores scores(p, work, rows, shared, lane);
    const TileReaders readers(lane);
    OnlineSoftmax<MT, NT> softmax;
    ValueScales value_scales;
    float acc[VT][NT][4] = {};
    int stage = 0, free_stage = STAGES - 1;
    for (int tile = 0; tile < stream.num_tiles(); ++tile) {
        stream.advance(tile, free_stage);
        const u32 at = stream.stages + stage * STAGE_BYTES;
        float s[MT][NT][4] = {};
        multiply_keys(s, query, at, readers, lane);
        if (PT_TOKEN_SCALES) scale_scores(s, shared + (warp * STAGES + stage) * STAGE_BYTES, lane);
        scores.finish(s, rows, stream.first_token(tile), share.end, lane);
        softmax.update(s, scores.scale, acc);
        if (PT_TOKEN_SCALES) value_scales.apply(s, acc, shared + (warp * STAGES + stage) * STAGE_BYTES, lane);
        multiply_weights(acc, s, at + V_START, readers);
        free_stage = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    copies_wait<0>();
    const bool whole = PT_MERGE == 0 || share.live == 1;
    const float unit = PT_TOKEN_SCALES ? value_scales.unit : 1.0f;
    write_result(p, work, rows, whole, acc, softmax, unit, shared, warp, lane);
    if (PT_MERGE != 2 || whole || !arrive_last(p, share.live, shared)) return;
    merge_rows<DV, Q>(
        partial_out, partial_lse, rows.count, int(num_partials), share.live, reinterpret_cast<float*>(shared),
        [&](int r) { return rows.partial(r); }, [&](int r) { return rows.sink(p, r); }, [&](int r) { return rows.output(p, r); });
}

#include "split_merge.cuh"
