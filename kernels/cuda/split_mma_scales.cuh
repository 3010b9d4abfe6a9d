// Scales of tokens (PT_TOKEN_SCALES): how they reach a warp, and where they meet scores and weights.
#pragma once
#include "split_mma_shape.cuh"

// Where the scales of a lane's own token are. They are copied into the stage along with the tile; what was placed last is
// what is copied next.
struct TokenScales {
    const float *k, *v;  // of the head
    i64 k_block, v_block;
    u32 block, slot;

    __device__ __forceinline__ TokenScales(const Params& p, const Work& w)
        : k(p.k_scale + w.kv_head * p.k_scale_head), v(p.v_scale + w.kv_head * p.v_scale_head), k_block(p.k_scale_block),
          v_block(p.v_scale_block), block(0), slot(0) {}
    __device__ __forceinline__ void place(u32 of_block, u32 of_slot) { block = of_block, slot = of_slot; }
    __device__ __forceinline__ void copy(u32 stage, bool live, int lane) const {
        if (WARP_TOKENS < 32 && lane >= WARP_TOKENS) return;
        copy4(stage + K_SCALES + 4 * lane, k + (i64(block) * k_block + slot), live);
        copy4(stage + V_SCALES + 4 * lane, v + (i64(block) * v_block + slot), live);
    }
};

// The scales of a lane's keys: see OnlineSoftmax.
__device__ __forceinline__ void load_scales(float (&own)[MT][2], const u8* from, int lane) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) own[m][h] = reinterpret_cast<const float*>(from)[16 * m + 8 * h + lane / 4];
}
__device__ __forceinline__ void multiply_by_scales(float (&s)[MT][NT][4], const float (&own)[MT][2]) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int k = 0; k < 4; ++k) s[m][n][k] *= own[m][k / 2];
}
__device__ __forceinline__ void scale_scores(float (&s)[MT][NT][4], const u8* stage, int lane) {
    float own[MT][2];
    load_scales(own, stage + K_SCALES, lane);
    multiply_by_scales(s, own);
}

// Weights times the scales of their values, relative to `unit`: a power of two that grows with the largest scale so far,
// so that a weight stays in the range of a half whatever the scales are. It keeps a half's precision where the scales of
// a sequence lie within a factor of about 2^13; of smaller ones than that, next to the largest, bits are lost.
struct ValueScales {
    float unit = 0.0f;  // 0: no scale yet

    __device__ __forceinline__ void apply(float (&p)[MT][NT][4], float (&out)[VT][NT][4], const u8* stage, int lane) {
        float own[MT][2], most = 0.0f;
        load_scales(own, stage + V_SCALES, lane);
#pragma unroll
        for (int m = 0; m < MT; ++m) most = fmaxf(most, fmaxf(fabsf(own[m][0]), fabsf(own[m][1])));
        if (__any_sync(ALL_LANES, most >= 2.0f * unit)) raise(most, out);
        const float inverse = __int_as_float((254 << 23) - __float_as_int(unit));
#pragma unroll
        for (int m = 0; m < MT; ++m) own[m][0] *= inverse, own[m][1] *= inverse;
        multiply_by_scales(p, own);
    }

private:
    __device__ __forceinline__ void raise(float most, float (&out)[VT][NT][4]) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
        const int exponent = min(max(__float_as_int(most) >> 23, 1), 253);  // of a normal number with a normal inverse
        const float raised = fmaxf(unit, __int_as_float(exponent << 23));
        const float shrink = unit * __int_as_float((254 << 23) - __float_as_int(raised));
        unit = raised;
#pragma unroll
        for (int v = 0; v < VT; ++v)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int k = 0; k < 4; ++k) out[v][n][k] *= shrink;
    }
};
