// The query as an operand, and the two products of a tile.
#pragma once
#include "split_mma_shape.cuh"

// The query rows as operand b of S^T = K Q^T: in registers (by way of a free stage of the pipeline, so that they are
// read once for all warps), or in shared memory where they would take too many. With 8-bit keys a lane holds four adjacent
// dims of each 16, so that its bytes of a key are those of its dims of the query.
struct Query {
    u32 fragments[QUERY_IN_REGISTERS ? KS : 1][QUERY_IN_REGISTERS ? NT : 1][2];
    u32 shared;

    __device__ __forceinline__ Query(const Params& p, const Rows& rows, u8* memory, int warp, int lane) : shared(0) {
        float* scales = reinterpret_cast<float*>(memory + QUERY_SCALES);
        if constexpr (SCALED_QUERY) {
            for (int row = warp; row < ROWS; row += WARPS) measure(p, rows, scales, row, lane);
            __syncthreads();
        }
        if constexpr (QUERY_IN_REGISTERS && STAGED) {
            u8* stage = memory + (STAGES - 1) * STAGE_BYTES;  // the one that no warp fills before the first tile
            store(p, rows, scales, stage);
            __syncthreads();
#pragma unroll
            for (int k = 0; k < KS; ++k)
#pragma unroll
                for (int n = 0; n < NT; ++n) load_fragment(fragments[k][n], shared_address(stage), k, n, lane);
            __syncthreads();
        } else if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
            for (int k = 0; k < KS; ++k)
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const int row = 8 * n + lane / 4, d = 16 * k + (KV_BYTES == 1 ? 4 : 2) * (lane % 4);
                    fragments[k][n][0] = pair(p, rows, scales, row, d);
                    fragments[k][n][1] = pair(p, rows, scales, row, KV_BYTES == 1 ? d + 2 : d + 8);
                }
        } else {
            store(p, rows, scales, memory + QUERY);
            shared = shared_address(memory + QUERY);
            __syncthreads();
        }
    }
    __device__ __forceinline__ void fragment(u32 (&b)[2], int k, int n, int lane) const {
        if constexpr (QUERY_IN_REGISTERS) b[0] = fragments[k][n][0], b[1] = fragments[k][n][1];
        else load_fragment(b, shared, k, n, lane);
    }

private:
    static constexpr bool STAGED = ROWS * QTile::PITCH <= STAGE_BYTES;

    __device__ static __forceinline__ void load_fragment(u32 (&b)[2], u32 from, int k, int n, int lane) {
        load_two_matrices(b, from + QTile::place(8 * n + lane % 8, 2 * k + lane / 8 % 2));
    }
    // All rows of the block, read once.
    __device__ static __forceinline__ void store(const Params& p, const Rows& rows, const float* scales, u8* memory) {
        for (int at = threadIdx.x; at < ROWS * 8 * KS; at += 32 * WARPS) {
            const int row = at / (8 * KS), d = at % (8 * KS) * 2;
            // Dims 4i + {0, 1} and 4i + {2, 3} of each 16 go where the layout of 16-bit keys has 2i and 2i + 8.
            const int to = KV_BYTES == 1 ? d / 16 * 16 + d % 16 / 4 * 2 + d % 4 * 4 : d;
            *reinterpret_cast<u32*>(memory + QTile::place(row, to / 8) + to % 8 * 2) = pair(p, rows, scales, row, d);
        }
    }
    __device__ static __forceinline__ const Q* at(const Params& p, const Rows& rows, int row) {
        return p.q + rows.token(row) * p.q_token + rows.q_head(row) * p.q_head;
    }
    __device__ static __forceinline__ u32 pair(const Params& p, const Rows& rows, const float* scales, int row, int d) {
        if (row >= rows.count || d >= DK) return 0;
        const Q* from = at(p, rows, row) + d;
        if constexpr (SCALED_QUERY) {
            const float scale = 1.0f / scales[row];
            return pack<MMA_DTYPE>(float(from[0]) * scale, float(from[1]) * scale);
        }
        return *reinterpret_cast<const u32*>(from);
    }
    // The power of two that takes the largest value of a row to 2^14 or above, below 2^15.
    __device__ static __forceinline__ void measure(const Params& p, const Rows& rows, float* scales, int row, int lane) {
        float most = 0.0f;
        if (row < rows.count)
            for (int d = lane; d < DK; d += 32) most = fmaxf(most, fabsf(float(at(p, rows, row)[d])));
#pragma unroll
        for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
        const int exponent = max(__float_as_int(most) >> 23, 16) - 14;
        if (lane == 0) scales[row] = most > 0.0f ? __int_as_float(exponent << 23) : 1.0f;
    }
};

// Where a lane reads a stage with matrix loads.
struct TileReaders {
    Reader<K_CHUNKS> keys;
    Reader<V_CHUNKS> values;

    __device__ __forceinline__ explicit TileReaders(int lane)
        : keys(lane % 16, lane / 16), values(KV_BYTES == 1 ? lane % 16 : lane % 8 + lane / 16 * 8, KV_BYTES == 1 ? lane / 16 : lane / 8 % 2) {}
};

// Operands a of COUNT steps of 16 dims (keys) or 16 value dims, from pair `pair` of chunks on: one step of 16-bit
// elements, two of 8-bit ones, or one where the head dim has an odd number of chunks.
template <bool VALUES, int COUNT> __device__ __forceinline__ void load_operands(u32 (&a)[COUNT][4], u32 at) {
    if constexpr (KV_BYTES == 2) {
        if constexpr (VALUES) load_matrices_transposed(a[0], at);
        else load_matrices(a[0], at);
    } else {
        u32 raw[2 * COUNT];
        if constexpr (VALUES && COUNT == 2) load_matrices_transposed(raw, at);
        else if constexpr (VALUES) load_two_matrices_transposed(raw, at);
        else if constexpr (COUNT == 2) load_matrices(raw, at);
        else load_two_matrices(raw, at);
#pragma unroll
        for (int c = 0; c < COUNT; ++c) {
            using Widen = EightBit<PT_KV_DTYPE>;
            if constexpr (VALUES) {  // rows of the product are the even value dims of 16, then the odd ones
                Widen::template widen<true>(raw[2 * c], a[c][0], a[c][1]);
                Widen::template widen<true>(raw[2 * c + 1], a[c][2], a[c][3]);
            } else {
                Widen::template widen<false>(raw[2 * c], a[c][0], a[c][2]);
                Widen::template widen<false>(raw[2 * c + 1], a[c][1], a[c][3]);
            }
        }
    }
}

template <int FIRST, int COUNT>
__device__ __forceinline__ void multiply_key_steps(float (&s)[MT][NT][4], const Query& query, u32 tile, const TileReaders& readers, int lane) {
    u32 b[COUNT][NT][2];
#pragma unroll
    for (int c = 0; c < COUNT; ++c)
#pragma unroll
        for (int n = 0; n < NT; ++n) query.fragment(b[c][n], FIRST + c, n, lane);
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        u32 a[COUNT][4];
        load_operands<false>(a, tile + 16 * m * KTile::PITCH + readers.keys.at(FIRST * KV_BYTES / 2));
#pragma unroll
        for (int c = 0; c < COUNT; ++c)
#pragma unroll
            for (int n = 0; n < NT; ++n) mma<MMA_DTYPE>(s[m][n], a[c], b[c][n][0], b[c][n][1]);
    }
}
template <int FIRST = 0>
__device__ __forceinline__ void multiply_keys(float (&s)[MT][NT][4], const Query& query, u32 tile, const TileReaders& readers, int lane) {
    if constexpr (FIRST < KS) {
        constexpr int COUNT = KV_BYTES == 1 && FIRST + 1 < KS ? 2 : 1;
        multiply_key_steps<FIRST, COUNT>(s, query, tile, readers, lane);
        multiply_keys<FIRST + COUNT>(s, query, tile, readers, lane);
    }
}

template <int FIRST = 0>
__device__ __forceinline__ void multiply_values(float (&out)[VT][NT][4], const u32 (&b)[NT][2], u32 tile, const TileReaders& readers) {
    if constexpr (FIRST < VT) {
        constexpr int COUNT = KV_BYTES == 1 && FIRST + 1 < VT ? 2 : 1;
        u32 a[COUNT][4];
        load_operands<true>(a, tile + readers.values.at(FIRST * KV_BYTES / 2));
#pragma unroll
        for (int c = 0; c < COUNT; ++c)
#pragma unroll
            for (int n = 0; n < NT; ++n) mma<MMA_DTYPE>(out[FIRST + c][n], a[c], b[n][0], b[n][1]);
        multiply_values<FIRST + COUNT>(out, b, tile, readers);
    }
}
__device__ __forceinline__ void multiply_weights(float (&out)[VT][NT][4], const float (&p)[MT][NT][4], u32 tile, const TileReaders& readers) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        u32 b[NT][2];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            b[n][0] = transpose(pack<MMA_DTYPE>(p[m][n][0], p[m][n][1]));
            b[n][1] = transpose(pack<MMA_DTYPE>(p[m][n][2], p[m][n][3]));
        }
        multiply_values(out, b, tile + 16 * m * VTile::PITCH, readers);
    }
}
