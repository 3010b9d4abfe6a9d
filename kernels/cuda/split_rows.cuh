// What the split kernels share: their arguments, which rows a block works on, and the kernel that merges splits. Included
// after DV, GROUP, ROWS, TILE and Q are defined; PT_MERGE as in split_mma_shape.cuh.
#pragma once
#include "merge.cuh"

struct Params {
    Q* out;                      // [num_tokens, num_q_heads, DV]
    const Q* q;                  // [num_tokens, num_q_heads, DK]
    const u8 *k_cache, *v_cache;
    const int* block_table;      // [num_seqs, max_blocks]
    const int* context_lens;     // [num_seqs]
    const int* query_start_loc;  // [num_seqs + 1]
    const float *sinks, *alibi_slopes, *k_scale, *v_scale;
    float *lse, *partial_out, *partial_lse;  // partials [num_tokens, num_q_heads, num_partials, ...]
    int* arrivals;               // [sequence, row chunk, KV head], zero at launch
    i64 q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, out_token, out_head, lse_token, table_seq;
    i64 num_seqs, num_kv_heads, num_chunks, num_splits, split_tokens, num_partials;
    float scale, soft_cap;
    i64 k_scale_block, k_scale_head, v_scale_block, v_scale_head;  // of the scales of tokens
};

// What a block works on: the rows from `chunk` * ROWS on of (query token, query head of the group) of one sequence.
struct Work {
    int kv_head, chunk, seq, split;

    __device__ __forceinline__ explicit Work(const Params& p) : split(blockIdx.y) {
        const u32 heads = u32(p.num_kv_heads), chunks = u32(p.num_chunks), rest = blockIdx.x / heads;
        kv_head = int(blockIdx.x - rest * heads);
        seq = int(rest / chunks);
        chunk = int(rest - u32(seq) * chunks);
    }
};

// Where a row's query is and where its results go.
struct Rows {
    int first, count, start, position;  // of the chunk; count: live rows; position: of the first query token
    i64 head, num_heads;

    __device__ __forceinline__ Rows(const Params& p, const Work& w, const Sequence& s)
        : first(w.chunk * ROWS), count(min(s.query_len * GROUP - first, ROWS)), start(s.start),
          position(s.context - s.query_len), head(i64(w.kv_head) * GROUP), num_heads(p.num_kv_heads * GROUP) {}
    __device__ __forceinline__ int query(int row) const { return (first + row) / GROUP; }
    __device__ __forceinline__ i64 token(int row) const { return start + query(row); }
    __device__ __forceinline__ i64 q_head(int row) const { return head + (first + row) % GROUP; }
    __device__ __forceinline__ i64 partial(int row) const { return token(row) * num_heads + q_head(row); }
    __device__ __forceinline__ RowOutput<Q> output(const Params& p, int row) const {
        float* lse = p.lse == nullptr ? nullptr : p.lse + token(row) * p.lse_token + q_head(row);
        return {p.out + token(row) * p.out_token + q_head(row) * p.out_head, lse};
    }
    __device__ __forceinline__ float sink(const Params& p, int row) const {
        return PT_HAS_SINKS ? p.sinks[q_head(row)] * LOG2E : -infinity();
    }
};
