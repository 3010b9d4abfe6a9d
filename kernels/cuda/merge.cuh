// How the keys of a sequence are split, and how the splits' partial results are merged.
#pragma once
#include "types.cuh"

namespace pt {

constexpr int MAX_SPLITS = 128;

// One sequence of the batch: first query token, query tokens, tokens in the cache (the query's included).
struct Sequence {
    int start, query_len, context;

    __device__ __forceinline__ Sequence(const int* query_start_loc, const int* context_lens, int seq)
        : start(query_start_loc[seq]), query_len(query_start_loc[seq + 1] - start), context(context_lens[seq]) {}
};

// The part of a sequence's keys that one split takes: what the sequence alone decides, so that its bits never depend on
// the rest of the batch. At least one split is live, even without keys: it writes the empty result.
struct Share {
    int begin, end, live;

    __device__ __forceinline__ Share(const Sequence& s, int window, int splits, int split_tokens, int tile, int split) {
        const int first = window > 0 ? max(s.context - s.query_len - window + 1, 0) : 0;
        const int visible = max(s.context - first, 0);
        const int wanted = max((visible + splits - 1) / splits, split_tokens);
        const int share = (wanted + tile - 1) / tile * tile;
        begin = first + split * share;
        end = min(begin + share, s.context);
        live = max((visible + share - 1) / share, 1);
    }
};

// Weights of the live splits of one row, spread over the lanes of a warp, and what they add up to with the sink.
struct Weights {
    float weight[MAX_SPLITS / 32];
    float top, total;

    __device__ __forceinline__ Weights(const float* partial_lse, int live, float sink, int lane) {
        top = sink;
#pragma unroll
        for (int k = 0; k < MAX_SPLITS / 32; ++k) {
            const int split = 32 * k + lane;
            weight[k] = split < live ? __ldcg(partial_lse + split) * LOG2E : -infinity();
            top = fmaxf(top, weight[k]);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
        const float safe_top = fmaxf(top, LOWEST);
        total = 0.0f;
#pragma unroll
        for (int k = 0; k < MAX_SPLITS / 32; ++k) {
            weight[k] = exp2_fast(weight[k] - safe_top);
            total += weight[k];
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(ALL_LANES, total, step);
        total += sink_term(sink, safe_top);
    }

    __device__ __forceinline__ float operator[](int split) const {
        float value = weight[0];
#pragma unroll
        for (int k = 1; k < MAX_SPLITS / 32; ++k) value = split / 32 == k ? weight[k] : value;
        return __shfl_sync(ALL_LANES, value, split % 32);
    }
};

// What stores four adjacent elements of a size in one piece.
template <int BYTES> struct Four;
template <> struct Four<2> { using Vector = uint2; };
template <> struct Four<4> { using Vector = uint4; };

// Where a row's result goes.
template <class Q> struct RowOutput {
    Q* out;
    float* lse;  // null if nobody wants it
};

// Merges rows of fp32 partials: `row_of(r)` gives row r's index in the partials, `sink_of(r)` its sink in base 2 and
// `output_of(r)` its destination. All warps of the block take part; where there are more warps than rows, several share
// one row and add up in `scratch` (DV floats a warp). A split's partial is only read if it is live, for the others are
// never written.
template <int DV, class Q, class Row, class Sink, class Out>
__device__ __forceinline__ void merge_rows(
    const float* partial_out, const float* partial_lse, int rows, int splits, int live, float* scratch, Row row_of,
    Sink sink_of, Out output_of) {
    constexpr int QUADS = (DV + 127) / 128;
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int parts = max(warps / rows, 1), batch = warps / parts, part = warp % parts;
    for (int base = 0; base < rows; base += batch) {
        const int r = base + warp / parts;
        const bool active = warp / parts < batch && r < rows;
        float4 acc[QUADS];
        float top = 0.0f, total = 0.0f;
#pragma unroll
        for (int k = 0; k < QUADS; ++k) acc[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (active) {
            const i64 first = row_of(r) * splits;
            const Weights weights(partial_lse + first, live, sink_of(r), lane);
            top = weights.top;
            total = weights.total;
#pragma unroll 8
            for (int split = part; split < live; split += parts) {
                const float weight = weights[split];
                const float4* from = reinterpret_cast<const float4*>(partial_out + (first + split) * DV);
#pragma unroll
                for (int k = 0; k < QUADS; ++k) {
                    if (32 * k + lane >= DV / 4) continue;
                    const float4 x = __ldcg(from + 32 * k + lane);
                    acc[k].x += weight * x.x, acc[k].y += weight * x.y, acc[k].z += weight * x.z, acc[k].w += weight * x.w;
                }
            }
        }
        if (parts > 1) {
            float4* mine = reinterpret_cast<float4*>(scratch + warp * DV);
#pragma unroll
            for (int k = 0; k < QUADS; ++k)
                if (32 * k + lane < DV / 4) mine[32 * k + lane] = acc[k];
            __syncthreads();
            if (part == 0)
                for (int other = 1; other < parts; ++other) {
#pragma unroll
                    for (int k = 0; k < QUADS; ++k) {
                        if (32 * k + lane >= DV / 4) continue;
                        const float4 x = mine[other * (DV / 4) + 32 * k + lane];
                        acc[k].x += x.x, acc[k].y += x.y, acc[k].z += x.z, acc[k].w += x.w;
                    }
                }
            __syncthreads();
        }
        if (!active || part != 0) continue;
        const RowOutput<Q> to = output_of(r);
        const float scale = reciprocal_or_zero(total);
#pragma unroll
        for (int k = 0; k < QUADS; ++k) {
            const int d = 4 * (32 * k + lane);
            if (d >= DV) continue;
            using Vector = typename Four<sizeof(Q)>::Vector;
            alignas(Vector) const Q values[4] = {Q(acc[k].x * scale), Q(acc[k].y * scale), Q(acc[k].z * scale), Q(acc[k].w * scale)};
            if (reinterpret_cast<u64>(to.out) % sizeof(Vector) == 0) {
                *reinterpret_cast<Vector*>(to.out + d) = *reinterpret_cast<const Vector*>(values);
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e) to.out[d + e] = values[e];
            }
        }
        if (lane == 0 && to.lse != nullptr) *to.lse = lse_of(top, total);
    }
}

}  // namespace pt
