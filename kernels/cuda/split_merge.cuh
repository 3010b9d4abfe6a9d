// The second kernel of a split launch, where PT_MERGE asks for one. Included last.
#pragma once
#include "split_rows.cuh"

#if PT_MERGE == 1 || PT_MERGE == 3
// One block merges the splits of one query token and head.
extern "C" __global__ void attention_merge(
    Q* out, float* lse, const float* partial_out, const float* partial_lse, const int* context_lens,
    const int* query_start_loc, const float* sinks, i64 out_token, i64 out_head, i64 lse_token, i64 num_seqs, i64 num_q_heads,
    i64 max_query_len, i64 num_splits, i64 split_tokens, i64 num_partials) {
    if (PT_MERGE == 3) asm volatile("griddepcontrol.wait;" ::: "memory");  // what the split kernel wrote is there
    extern __shared__ __align__(16) float scratch[];
    const u32 heads = u32(num_q_heads), queries = u32(max_query_len), rest = blockIdx.x / heads, seq = rest / queries;
    const int head = int(blockIdx.x - rest * heads), query = int(rest - seq * queries);
    if (seq >= num_seqs) return;
    const Sequence sequence(query_start_loc, context_lens, int(seq));
    const Share share(sequence, PT_WINDOW, int(num_splits), int(split_tokens), TILE, 0);
    if (query >= sequence.query_len || share.live == 1) return;
    const i64 token = sequence.start + query;
    merge_rows<DV, Q>(
        partial_out, partial_lse, 1, int(num_partials), share.live, scratch,
        [&](int) { return token * num_q_heads + head; },
        [&](int) { return PT_HAS_SINKS ? sinks[head] * LOG2E : -infinity(); },
        [&](int) {
            float* to = lse == nullptr ? nullptr : lse + token * lse_token + head;
            return RowOutput<Q>{out + token * out_token + head * out_head, to};
        });
}
#endif
