// Split-K paged decode attention on the plain cores, for the GQA ratios where a tensor core would mostly multiply zeros.
// A block takes one sequence, one KV head, one split of its keys and up to ROWS query rows (query heads of the group, of
// every query token). LANES lanes share a key: they read its row in 16-byte pieces, 128 adjacent bytes at a time where
// the row has them, and each lane holds its dims of KEYS keys at once. Their scores are summed over the lanes while the
// keys are dealt out to them, so a weight costs one shuffle more and its exponential is taken once, not by each lane.
// While keys are multiplied the values are on their way, and the other way round: registers are the pipeline, and
// nothing in the loop is shared between warps.
#include "split_simt_result.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS) attention_split(
    Q* out, const Q* q, const u8* k_cache, const u8* v_cache, const int* block_table, const int* context_lens,
    const int* query_start_loc, const float* sinks, const float* alibi_slopes, const float* k_scale, const float* v_scale,
    float* lse, float* partial_out, float* partial_lse, int* arrivals, i64 q_token, i64 q_head, i64 k_block, i64 k_slot,
    i64 k_head, i64 v_block, i64 v_slot, i64 v_head, i64 out_token, i64 out_head, i64 lse_token, i64 table_seq, i64 num_seqs,
    i64 num_kv_heads, i64 num_chunks, i64 num_splits, i64 split_tokens, i64 num_partials, float scale, float soft_cap,
    i64 k_scale_block, i64 k_scale_head, i64 v_scale_block, i64 v_scale_head) {
    __shared__ Shared shared;
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

    const int lane = threadIdx.x % 32, warp = __shfl_sync(ALL_LANES, int(threadIdx.x) / 32, 0);  // one value, visibly
    Stream stream(p, work, share, warp, lane);
    RowsOf<SK, K_PIECES> keys;
    RowsOf<SV, V_PIECES> values;
    TokenScales k_scales(k_scale, k_scale_block, k_scale_head, work), v_scales(v_scale, v_scale_block, v_scale_head, work);
    keys.clear();  // scores of keys that are never read are masked, but must be made of something
    const bool some = stream.first_token(0) < stream.end && share.begin < share.end;
    if (some) {
        stream.look_up(0);
        stream.load_keys(keys, 0);
        stream.load_values(values, 0);
        if (PT_TOKEN_SCALES) k_scales.load(stream, 0), v_scales.load(stream, 0);
        stream.look_up(1);
    }
    State state(p, work, rows, lane);
    for (int tile = 0; some && stream.first_token(tile) < stream.end; ++tile) {
        float s[ROWS][KEYS];
        state.multiply_keys(keys, s, lane);
        if (PT_TOKEN_SCALES) k_scales.multiply(s);
        stream.load_keys(keys, tile + 1);
        if (PT_TOKEN_SCALES) k_scales.load(stream, tile + 1);
        state.finish(s, rows, stream, tile);
        state.weigh(s);
        if (PT_TOKEN_SCALES) v_scales.multiply(s);
        state.multiply_values(values, s);
        stream.load_values(values, tile + 1);
        if (PT_TOKEN_SCALES) v_scales.load(stream, tile + 1);
        stream.look_up(tile + 2);
    }
    put_down(state, shared, warp, lane);
    const bool whole = PT_MERGE == 0 || share.live == 1;
    write_result(p, work, rows, whole, shared);
    if (PT_MERGE != 2 || whole || !arrive_last(p, share.live, shared)) return;
    merge_rows<DV, Q>(
        partial_out, partial_lse, rows.count, int(num_partials), share.live, &shared.outputs[0][0][0],
        [&](int r) { return rows.partial(r); }, [&](int r) { return rows.sink(p, r); }, [&](int r) { return rows.output(p, r); });
}

#include "split_merge.cuh"
