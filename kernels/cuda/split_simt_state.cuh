// What one lane computes: scores of its keys, the softmax over them, and its part of the output.
#pragma once
#include "split_simt_stream.cuh"

// The elements of 16 bytes as floats; 8-bit ones without the constant FACTOR of their type.
template <int DTYPE> __device__ __forceinline__ void unpack(const uint4& piece, float (&x)[N]) {
    const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (DTYPE == 0) {
            x[i] = __uint_as_float(words[i]);
        } else if constexpr (DTYPE == BF16) {
            x[2 * i] = __uint_as_float(words[i] << 16);
            x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        } else if constexpr (DTYPE == FP16) {
            const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
            x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
        } else {
            u32 first, second;
            EightBit<DTYPE>::template widen<false>(words[i], first, second);
            const float2 low = __half22float2(reinterpret_cast<const __half2&>(first));
            const float2 high = __half22float2(reinterpret_cast<const __half2&>(second));
            x[4 * i] = low.x, x[4 * i + 1] = low.y, x[4 * i + 2] = high.x, x[4 * i + 3] = high.y;
        }
    }
}

// The elements of a query row that belong to one piece of a key.
constexpr int QUERY_BYTES = N * sizeof(Q), QUERY_LOAD = QUERY_BYTES < 16 ? 8 : 16;
union QueryPiece {
    struct __align__(QUERY_LOAD) Word { u32 x[QUERY_LOAD / 4]; } words[QUERY_BYTES / QUERY_LOAD];
    Q x[N];
    __device__ QueryPiece() {}
};

// Sums COUNT values over the lanes of a key; each lane keeps its part of the sums, VALUES of them: the ones from
// lane % LANES * KEYS / LANES on.
template <int COUNT = KEYS, int BIT = LANES / 2> __device__ __forceinline__ void deal_sums(float (&s)[KEYS], int lane) {
    if constexpr (BIT > 0) {
        if constexpr (COUNT > 1) {
            constexpr int HALF = COUNT / 2;
            const bool upper = lane & BIT;
#pragma unroll
            for (int i = 0; i < HALF; ++i) {
                const float sent = upper ? s[i] : s[i + HALF], kept = upper ? s[i + HALF] : s[i];
                s[i] = kept + __shfl_xor_sync(ALL_LANES, sent, BIT);
            }
            deal_sums<HALF, BIT / 2>(s, lane);
        } else {
            s[0] += __shfl_xor_sync(ALL_LANES, s[0], BIT);
            deal_sums<1, BIT / 2>(s, lane);
        }
    }
}

// The query rows, the state of their softmax and their outputs, as far as one lane has them.
struct State {
    float q[ROWS][SK][N], acc[ROWS][SV][N], top[ROWS], total[ROWS], slopes[PT_HAS_ALIBI ? ROWS : 1];
    float raw_scale, soft_cap;

    __device__ __forceinline__ State(const Params& p, const Work& w, const Rows& rows, int lane)
        : raw_scale(p.scale), soft_cap(p.soft_cap) {
        if constexpr (KV_BYTES == 1) raw_scale *= EightBit<PT_KV_DTYPE>::FACTOR;
        if (PT_HAS_SCALES) raw_scale *= p.k_scale[w.kv_head * PT_SCALE_STRIDE];
        if (!PT_HAS_CAP && !PT_HAS_ALIBI) raw_scale *= LOG2E;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            top[r] = LOWEST, total[r] = 0.0f;
            const Q* from = p.q + rows.token(r) * p.q_token + rows.q_head(r) * p.q_head;
            if (PT_HAS_ALIBI) slopes[r] = r < rows.count ? p.alibi_slopes[rows.q_head(r)] : 0.0f;
#pragma unroll
            for (int step = 0; step < SK; ++step) {
                const int at = step * LANES + lane % LANES;
                const bool live = r < rows.count && at < K_PIECES;
                QueryPiece piece;
                if (live) {
#pragma unroll
                    for (int i = 0; i < QUERY_BYTES / QUERY_LOAD; ++i)
                        piece.words[i] = reinterpret_cast<const QueryPiece::Word*>(from + at * N)[i];
                }
#pragma unroll
                for (int e = 0; e < N; ++e) q[r][step][e] = live ? float(piece.x[e]) : 0.0f;
            }
#pragma unroll
            for (int step = 0; step < SV; ++step)
#pragma unroll
                for (int e = 0; e < N; ++e) acc[r][step][e] = 0.0f;
        }
    }

    // Scores of the lane's keys, each in one lane: VALUES of them in s[row][0...].
    __device__ __forceinline__ void multiply_keys(const RowsOf<SK, K_PIECES>& keys, float (&s)[ROWS][KEYS], int lane) const {
#pragma unroll
        for (int key = 0; key < KEYS; ++key) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) s[r][key] = 0.0f;
#pragma unroll
            for (int step = 0; step < SK; ++step) {
                float x[N];
                unpack<PT_KV_DTYPE>(keys.pieces[key][step], x);
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int e = 0; e < N; ++e) s[r][key] = fmaf(q[r][step][e], x[e], s[r][key]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) deal_sums(s[r], lane);
    }

    // Scale, cap and ALiBi, in base 2, and -inf where a query does not see a key.
    __device__ __forceinline__ void finish(float (&s)[ROWS][KEYS], const Rows& rows, const Stream& stream, int tile) const {
        const int own = stream.token(tile) + stream.lane % LANES * KEYS / LANES, last_query = rows.query(ROWS - 1);
        const int seen_by_all = PT_WINDOW > 0 ? rows.position + last_query - PT_WINDOW + 1 : 0;
        const int first = stream.first_token(tile);
        const bool all = stream.inside(tile) && first >= seen_by_all && first + WARP_TOKENS <= rows.position + rows.query(0) + 1;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int position = rows.position + rows.query(r), stop = min(stream.end, position + 1);
            const int from = PT_WINDOW > 0 ? max(stream.begin, position - PT_WINDOW + 1) : stream.begin;
#pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                float& x = s[r][i];
                x *= raw_scale;
                if (PT_HAS_CAP) x = soft_cap * tanhf(x / soft_cap);
                if (PT_HAS_ALIBI) x = fmaf(slopes[r], float(own + i - position), x);
                if (PT_HAS_CAP || PT_HAS_ALIBI) x *= LOG2E;
                if (!all && (own + i < from || own + i >= stop)) x = -infinity();
            }
        }
    }

    // Scores -> weights; the reference and all that is relative to it move only when a score is far above it.
    __device__ __forceinline__ void weigh(float (&s)[ROWS][KEYS]) {
        float excess = -infinity();
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < VALUES; ++i) excess = fmaxf(excess, s[r][i] - top[r]);
        if (__any_sync(ALL_LANES, excess > SLACK)) raise(s);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                s[r][i] = exp2_fast(s[r][i] - top[r]);
                total[r] += s[r][i];
            }
    }
    __device__ __forceinline__ void raise(const float (&s)[ROWS][KEYS]) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float raised = top[r];
#pragma unroll
            for (int i = 0; i < VALUES; ++i) raised = fmaxf(raised, s[r][i]);
#pragma unroll
            for (int step = 16; step > 0; step /= 2) raised = fmaxf(raised, __shfl_xor_sync(ALL_LANES, raised, step));
            const float shrink = exp2_fast(top[r] - raised);
            top[r] = raised;
            total[r] *= shrink;
#pragma unroll
            for (int step = 0; step < SV; ++step)
#pragma unroll
                for (int e = 0; e < N; ++e) acc[r][step][e] *= shrink;
        }
    }

    __device__ __forceinline__ void multiply_values(const RowsOf<SV, V_PIECES>& values, const float (&p)[ROWS][KEYS]) {
#pragma unroll
        for (int key = 0; key < KEYS; ++key) {
            float weights[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) weights[r] = __shfl_sync(ALL_LANES, p[r][key % VALUES], key * LANES / KEYS, LANES);
#pragma unroll
            for (int step = 0; step < SV; ++step) {
                float x[N];
                unpack<PT_KV_DTYPE>(values.pieces[key][step], x);
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int e = 0; e < N; ++e) acc[r][step][e] = fmaf(weights[r], x[e], acc[r][step][e]);
            }
        }
    }
};
