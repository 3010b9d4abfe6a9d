// Online softmax over keys that are the rows of a product: lane l holds, for query rows 2 * (l % 4) + {0, 1} of each N
// tile, the scores of keys l / 4 and l / 4 + 8 of each 16.
#pragma once
#include "types.cuh"

namespace pt {

// Scores in base 2 relative to a reference that is raised only when a score exceeds it by more than SLACK octaves: most
// tiles then need neither a reduction over lanes nor a rescaling of the output. Weights reach up to 2^SLACK, which
// rounds no differently and is far from any overflow.
template <int MT, int NT> struct OnlineSoftmax {
    static constexpr float SLACK = 8.0f;
    float top[NT][2], total[NT][2];  // total: over this lane's keys only

    __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
        for (int n = 0; n < NT; ++n) top[n][0] = top[n][1] = LOWEST, total[n][0] = total[n][1] = 0.0f;
    }

    // Scores (times `scale`) -> weights, in place; `out` is rescaled where the reference moves.
    template <int VT> __device__ __forceinline__ void update(float (&s)[MT][NT][4], float scale, float (&out)[VT][NT][4]) {
        float excess = -infinity();
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int k = 0; k < 4; ++k) excess = fmaxf(excess, fmaf(s[m][n][k], scale, -top[n][k & 1]));
        if (__any_sync(ALL_LANES, excess > SLACK)) raise(s, scale, out);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    s[m][n][k] = exp2_fast(fmaf(s[m][n][k], scale, -top[n][k & 1]));
                    total[n][k & 1] += s[m][n][k];
                }
    }

    // The sums over all keys of the warp, in every lane.
    __device__ __forceinline__ void reduce_totals() {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int step = 4; step < 32; step *= 2) total[n][e] += __shfl_xor_sync(ALL_LANES, total[n][e], step);
    }

private:
    template <int VT> __device__ __forceinline__ void raise(const float (&s)[MT][NT][4], float scale, float (&out)[VT][NT][4]) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float most = -infinity();
#pragma unroll
                for (int m = 0; m < MT; ++m) most = fmaxf(most, fmaxf(s[m][n][e], s[m][n][e + 2]));
#pragma unroll
                for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
                const float raised = fmaxf(top[n][e], most * scale), shrink = exp2_fast(top[n][e] - raised);
                top[n][e] = raised;
                total[n][e] *= shrink;
#pragma unroll
                for (int v = 0; v < VT; ++v) out[v][n][e] *= shrink, out[v][n][e + 2] *= shrink;
            }
    }
};

}  // namespace pt
