// How the warps' outputs become the block's result.
#pragma once
#include "split_simt_state.cuh"

struct __align__(16) Shared {
    float outputs[WARPS][ROWS][DV], tops[WARPS][ROWS], totals[WARPS][ROWS], factors[WARPS][ROWS];
    int last;
};

// Adds up over the lanes that share dims; what the warp has then goes to shared memory.
__device__ __forceinline__ void put_down(State& state, Shared& shared, int warp, int lane) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) state.total[r] += __shfl_xor_sync(ALL_LANES, state.total[r], step);
        if (lane == 0) {
            shared.tops[warp][r] = state.top[r];
            shared.totals[warp][r] = KEYS < LANES ? state.total[r] * (float(KEYS) / LANES) : state.total[r];
        }
#pragma unroll
        for (int step = 0; step < SV; ++step) {
            const int piece = step * LANES + lane % LANES;
            float (&x)[N] = state.acc[r][step];
#pragma unroll
            for (int e = 0; e < N; ++e)
#pragma unroll
                for (int bit = 16; bit >= LANES; bit /= 2) x[e] += __shfl_xor_sync(ALL_LANES, x[e], bit);
            if (step % GROUPS == lane / LANES && piece < V_PIECES) {
                float4* to = reinterpret_cast<float4*>(&shared.outputs[warp][r][piece * N]);
#pragma unroll
                for (int e = 0; e < N; e += 4) to[e / 4] = make_float4(x[e], x[e + 1], x[e + 2], x[e + 3]);
            }
        }
    }
    __syncthreads();
}

// Writes the block's result: to the output if no other split is live, else to the partials.
__device__ __forceinline__ void write_result(const Params& p, const Work& w, const Rows& rows, bool whole, Shared& shared) {
    float value_scale = PT_HAS_SCALES ? p.v_scale[w.kv_head * PT_SCALE_STRIDE] : 1.0f;
    if constexpr (KV_BYTES == 1) value_scale *= EightBit<PT_KV_DTYPE>::FACTOR;
    for (int row = threadIdx.x; row < rows.count; row += 32 * WARPS) {
        const float sink = whole ? rows.sink(p, row) : -infinity();
        float top = fmaxf(LOWEST, sink), total = 0.0f;
        for (int warp = 0; warp < WARPS; ++warp) top = fmaxf(top, shared.tops[warp][row]);
        for (int warp = 0; warp < WARPS; ++warp) {
            shared.factors[warp][row] = exp2_fast(shared.tops[warp][row] - top);
            total += shared.totals[warp][row] * shared.factors[warp][row];
        }
        total += sink_term(sink, top);
        const float scale = value_scale * reciprocal_or_zero(total), lse = lse_of(top, total);
        for (int warp = 0; warp < WARPS; ++warp) shared.factors[warp][row] *= scale;
        float* to = whole ? rows.output(p, row).lse : p.partial_lse + rows.partial(row) * p.num_partials + w.split;
        if (to != nullptr) *to = lse;
    }
    __syncthreads();
    for (int at = threadIdx.x; at < rows.count * DV; at += 32 * WARPS) {
        const int row = at / DV, d = at % DV;
        float value = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) value = fmaf(shared.outputs[warp][row][d], shared.factors[warp][row], value);
        if (whole) rows.output(p, row).out[d] = Q(value);
        else p.partial_out[(rows.partial(row) * p.num_partials + w.split) * DV + d] = value;
    }
}

// Whether this block is the last one of its row to arrive; it then sees what all the others wrote.
__device__ __forceinline__ bool arrive_last(const Params& p, int live, Shared& shared) {
    __syncthreads();
    if (threadIdx.x == 0) {
        int before;
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(p.arrivals + blockIdx.x) : "memory");
        shared.last = before == live - 1;
    }
    __syncthreads();
    return shared.last;
}
