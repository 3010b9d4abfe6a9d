// Scores before the softmax, and a block's result after the last tile.
#pragma once
#include "split_mma_shape.cuh"

// Scores of one warp's rows: cap and ALiBi, and -inf where a query does not see a key.
struct Scores {
    static constexpr bool PLAIN = !PT_HAS_CAP && !PT_HAS_ALIBI && KV_BYTES == 2 && !PT_HAS_SCALES;
    float raw_scale[SCALED_QUERY ? NT : 1][2], scale;  // to the natural score; to base 2, what the softmax applies
    float soft_cap, slopes[PT_HAS_ALIBI ? NT : 1][2];

    __device__ __forceinline__ Scores(const Params& p, const Work& w, const Rows& rows, const u8* memory, int lane)
        : scale(PLAIN ? p.scale * LOG2E : LOG2E), soft_cap(p.soft_cap) {
        float factor = p.scale;
        if constexpr (KV_BYTES == 1) factor *= EightBit<PT_KV_DTYPE>::FACTOR;
        if (PT_HAS_SCALES) factor *= p.k_scale[w.kv_head * PT_SCALE_STRIDE];
        const float* query_scales = reinterpret_cast<const float*>(memory + QUERY_SCALES);
#pragma unroll
        for (int n = 0; n < (SCALED_QUERY ? NT : 1); ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) raw_scale[n][e] = SCALED_QUERY ? factor * query_scales[8 * n + lane % 4 * 2 + e] : factor;
        if constexpr (PT_HAS_ALIBI) {
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int row = 8 * n + lane % 4 * 2 + e;
                    slopes[n][e] = row < rows.count ? p.alibi_slopes[rows.q_head(row)] : 0.0f;
                }
        }
    }
    __device__ __forceinline__ void finish(float (&s)[MT][NT][4], const Rows& rows, int first_token, int end, int lane) const {
        const int own = first_token + lane / 4, last_query = rows.query(ROWS - 1);
        if constexpr (!PLAIN) {
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int distance = own - rows.position - rows.query(8 * n + lane % 4 * 2 + e);
#pragma unroll
                    for (int m = 0; m < MT; ++m)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            float& x = s[m][n][2 * h + e];
                            x *= raw_scale[SCALED_QUERY ? n : 0][e];
                            if (PT_HAS_CAP) x = soft_cap * tanhf(x / soft_cap);
                            if (PT_HAS_ALIBI) x = fmaf(slopes[n][e], float(distance + 16 * m + 8 * h), x);
                        }
                }
        }
        const int seen_by_all = PT_WINDOW > 0 ? rows.position + last_query - PT_WINDOW + 1 : 0;
        if (first_token >= seen_by_all && first_token + WARP_TOKENS <= min(end, rows.position + rows.query(0) + 1)) return;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int position = rows.position + rows.query(8 * n + lane % 4 * 2 + e), stop = min(end, position + 1);
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int token = own + 16 * m + 8 * h;
                        if (token >= stop || (PT_WINDOW > 0 && token <= position - PT_WINDOW)) s[m][n][2 * h + e] = -infinity();
                    }
            }
    }
};

// Adds up the warps' outputs, each relative to the warp's `unit`, and writes the block's result: to the output if no other
// split is live, else to the partials.
__device__ __forceinline__ void write_result(
    const Params& p, const Work& w, const Rows& rows, bool whole, float (&out)[VT][NT][4], OnlineSoftmax<MT, NT>& softmax,
    float unit, u8* shared, int warp, int lane) {
    float* outputs = reinterpret_cast<float*>(shared);
    float *tops = reinterpret_cast<float*>(shared + STATS), *totals = tops + WARPS * ROWS, *scales = totals + WARPS * ROWS;
    softmax.reduce_totals();
    if (lane < 4) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int row = warp * ROWS + 8 * n + 2 * lane + e;
                tops[row] = softmax.top[n][e];
                totals[row] = softmax.total[n][e];
            }
    }
    __syncthreads();  // the statistics are there, and no warp needs its pipeline any more
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int row = 8 * n + lane % 4 * 2 + e;
            float top = LOWEST;
#pragma unroll
            for (int other = 0; other < WARPS; ++other) top = fmaxf(top, tops[other * ROWS + row]);
            const float factor = exp2_fast(softmax.top[n][e] - top) * unit;
            constexpr int STEP = KV_BYTES == 1 ? 2 : 1, HALF = KV_BYTES == 1 ? 1 : 8;  // see load_operands
            float* to = outputs + (warp * ROWS + row) * OUT_PITCH + lane / 4 * STEP;
#pragma unroll
            for (int v = 0; v < VT; ++v) to[16 * v] = out[v][n][e] * factor, to[16 * v + HALF] = out[v][n][e + 2] * factor;
        }
    float value_scale = PT_HAS_SCALES ? p.v_scale[w.kv_head * PT_SCALE_STRIDE] : 1.0f;
    if constexpr (KV_BYTES == 1) value_scale *= EightBit<PT_KV_DTYPE>::FACTOR;
    for (int row = threadIdx.x; row < rows.count; row += 32 * WARPS) {
        const float sink = whole ? rows.sink(p, row) : -infinity();
        float top = fmaxf(LOWEST, sink), total = 0.0f;
        for (int other = 0; other < WARPS; ++other) top = fmaxf(top, tops[other * ROWS + row]);
        float unscaled = LOWEST;  // the maximum that the outputs are relative to
        for (int other = 0; other < WARPS; ++other) {
            unscaled = fmaxf(unscaled, tops[other * ROWS + row]);
            total += totals[other * ROWS + row] * exp2_fast(tops[other * ROWS + row] - top);
        }
        total += sink_term(sink, top);
        scales[row] = value_scale * exp2_fast(unscaled - top) * reciprocal_or_zero(total);
        const float lse = lse_of(top, total);
        if (whole) {
            float* to = rows.output(p, row).lse;
            if (to != nullptr) *to = lse;
        } else {
            p.partial_lse[rows.partial(row) * p.num_partials + w.split] = lse;
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < rows.count * DV; at += 32 * WARPS) {
        const int row = at / DV, d = at % DV;
        float value = 0.0f;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) value += outputs[(other * ROWS + row) * OUT_PITCH + d];
        value *= scales[row];
        if (whole) rows.output(p, row).out[d] = Q(value);
        else p.partial_out[(rows.partial(row) * p.num_partials + w.split) * DV + d] = value;
    }
}

// Whether this block is the last one of its row to arrive; it then sees what all the others wrote.
__device__ __forceinline__ bool arrive_last(const Params& p, int live, u8* shared) {
    int* last = reinterpret_cast<int*>(shared + STATS + STATS_BYTES);
    __syncthreads();
    if (threadIdx.x == 0) {
        int before;
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(p.arrivals + blockIdx.x) : "memory");
        *last = before == live - 1;
    }
    __syncthreads();
    return *last;
}
