// Split-K paged decode attention on the plain cores, for the GQA ratios where a tensor core would mostly multiply zeros.
// A block takes one sequence, one KV head, one split of its keys and up to ROWS query rows (query heads of the group, of
// every query token). LANES lanes share a key: they read its row in 16-byte pieces, 128 adjacent bytes at a time where
// the row has them, and each lane holds its dims of KEYS keys at once. Their scores are summed over the lanes while the
// keys are dealt out to them, so a weight costs one shuffle more and its exponential is taken once, not by each lane.
// While keys are multiplied the values are on their way, and the other way round: registers are the pipeline, and
// nothing in the loop is shared between warps.
//
// Compile-time definitions:
//   PT_HEAD_DIM_K, PT_HEAD_DIM_V   elements of a head
//   PT_GROUP                       query heads of a KV head
//   PT_ROWS                        query rows of a block
//   PT_BLOCK_SIZE                  tokens of a KV block
//   PT_WARPS, PT_LANES, PT_KEYS    warps of a block, lanes of a key, keys of a lane at once
//   PT_Q_DTYPE, PT_KV_DTYPE        codes of types.cuh, and 0 for fp32
//   PT_WINDOW                      keys that a query sees, 0 for all
//   PT_HAS_CAP, PT_HAS_SINKS, PT_HAS_ALIBI
//   PT_HAS_SCALES, PT_SCALE_STRIDE of the pool or of each head; PT_TOKEN_SCALES: of each token and head
//   PT_MERGE                       0 one split; 1 a second kernel merges; 2 the last block of a row merges; 3 a second
//                                  kernel merges that is launched while this one runs
#include "types.cuh"
#include "merge.cuh"

namespace pt {
template <> struct Type<0> { using T = float; };
}  // namespace pt
using namespace pt;

__host__ __device__ constexpr int greatest_divisor(int a, int b) { return b == 0 ? a : greatest_divisor(b, a % b); }

constexpr int DK = PT_HEAD_DIM_K, DV = PT_HEAD_DIM_V, GROUP = PT_GROUP, ROWS = PT_ROWS, WARPS = PT_WARPS;
constexpr int LANES = PT_LANES, KEYS = PT_KEYS, GROUPS = 32 / LANES, WARP_TOKENS = GROUPS * KEYS, TILE = WARPS * WARP_TOKENS;
constexpr int KV_BYTES = PT_KV_DTYPE == 0 ? 4 : PT_KV_DTYPE >= E4M3 ? 1 : 2, N = 16 / KV_BYTES;  // elements of a piece
constexpr int K_PIECES = DK / N, V_PIECES = DV / N, SK = (K_PIECES + LANES - 1) / LANES, SV = (V_PIECES + LANES - 1) / LANES;
constexpr int VALUES = KEYS > LANES ? KEYS / LANES : 1;  // scores that a lane ends up with
constexpr int RUN = greatest_divisor(PT_BLOCK_SIZE, KEYS), RUNS = KEYS / RUN;  // keys that surely lie in one block
constexpr float SLACK = 8.0f;  // octaves by which a score may exceed the reference: see OnlineSoftmax of softmax.cuh
using Q = Type<PT_Q_DTYPE>::T;

#include "split_rows.cuh"

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

// One lane's pieces of KEYS rows of K or V.
template <int STEPS, int PIECES> struct RowsOf {
    uint4 pieces[KEYS][STEPS];

    // Of the keys from `token` on; those outside [begin, end) are not read and become zeros.
    template <bool ALL>
    __device__ __forceinline__ void load(
        const u8* base, const u32 (&blocks)[RUNS], u64 block_bytes, u64 slot_bytes, int token, int begin, int end, int lane) {
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            const u8* row = base + blocks[run] * block_bytes + u32(token + run * RUN) % PT_BLOCK_SIZE * slot_bytes;
#pragma unroll
            for (int i = 0; i < RUN; ++i, row += slot_bytes) {
                const int key = run * RUN + i;
                const bool live = ALL || (token + key >= begin && token + key < end);
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    const bool inside = PIECES % LANES == 0 || step * LANES + lane % LANES < PIECES;
                    uint4& piece = pieces[key][step];
                    if (live && inside) piece = __ldg(reinterpret_cast<const uint4*>(row + step * LANES * 16));
                    else piece = make_uint4(0, 0, 0, 0);
                }
            }
        }
    }
};

// One warp's walk over the keys of its split.
struct Stream {
    const int* table;
    const u8 *k_base, *v_base;  // of the head, at the lane's first piece
    u64 k_block, k_slot, v_block, v_slot;
    int begin, end, start, lane;  // start: of the warp's first tile; blocks and `start` meet at multiples of KEYS
    u32 blocks[RUNS];             // of the lane's keys of the next tile

    __device__ __forceinline__ Stream(const Params& p, const Work& w, const Share& share, int warp, int lane)
        : table(p.block_table + w.seq * p.table_seq),
          k_base(p.k_cache + w.kv_head * p.k_head * KV_BYTES + lane % LANES * 16),
          v_base(p.v_cache + w.kv_head * p.v_head * KV_BYTES + lane % LANES * 16), k_block(p.k_block * KV_BYTES),
          k_slot(p.k_slot * KV_BYTES), v_block(p.v_block * KV_BYTES), v_slot(p.v_slot * KV_BYTES), begin(share.begin),
          end(share.end), start(share.begin / KEYS * KEYS + warp * WARP_TOKENS), lane(lane) {}

    __device__ __forceinline__ int first_token(int tile) const { return start + tile * TILE; }
    __device__ __forceinline__ int token(int tile) const { return first_token(tile) + lane / LANES * KEYS; }
    __device__ __forceinline__ bool inside(int tile) const {
        return first_token(tile) >= begin && first_token(tile) + WARP_TOKENS <= end;
    }
    // No entry before the split's first key or past its last one is read.
    __device__ __forceinline__ void look_up(int tile) {
#pragma unroll
        for (int run = 0; run < RUNS; ++run)
            blocks[run] = u32(table[u32(max(begin, min(token(tile) + run * RUN, end - 1))) / PT_BLOCK_SIZE]);
    }
    template <class Keys> __device__ __forceinline__ void load_keys(Keys& keys, int tile) const {
        if (inside(tile)) keys.template load<true>(k_base, blocks, k_block, k_slot, token(tile), begin, end, lane);
        else keys.template load<false>(k_base, blocks, k_block, k_slot, token(tile), begin, end, lane);
    }
    // Of the keys of `tile` whose scores the lane ends up with; `blocks` are those of that tile. `from`: of the head.
    __device__ __forceinline__ void load_scales(float (&scales)[VALUES], const float* from, i64 block_stride, int tile) const {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const int key = lane % LANES * KEYS / LANES + i, at = token(tile) + key;
            u32 block = blocks[0];
#pragma unroll
            for (int run = 1; run < RUNS; ++run) block = key / RUN >= run ? blocks[run] : block;
            const float* place = from + (i64(block) * block_stride + u32(at) % PT_BLOCK_SIZE);
            scales[i] = at >= begin && at < end ? __ldg(place) : 0.0f;
        }
    }
    template <class Values> __device__ __forceinline__ void load_values(Values& values, int tile) const {
        if (inside(tile)) values.template load<true>(v_base, blocks, v_block, v_slot, token(tile), begin, end, lane);
        else values.template load<false>(v_base, blocks, v_block, v_slot, token(tile), begin, end, lane);
    }
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

// The scores or weights that a lane has times the scales of their tokens.
__device__ __forceinline__ void multiply_by_scales(float (&s)[ROWS][KEYS], const float (&scales)[VALUES]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int i = 0; i < VALUES; ++i) s[r][i] *= scales[i];
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
    float k_scales[VALUES], v_scales[VALUES];
    const float *own_k_scale = k_scale + work.kv_head * k_scale_head, *own_v_scale = v_scale + work.kv_head * v_scale_head;
    const bool some = stream.first_token(0) < stream.end && share.begin < share.end;
    if (some) {
        stream.look_up(0);
        stream.load_keys(keys, 0);
        stream.load_values(values, 0);
        if (PT_TOKEN_SCALES) stream.load_scales(k_scales, own_k_scale, k_scale_block, 0);
        if (PT_TOKEN_SCALES) stream.load_scales(v_scales, own_v_scale, v_scale_block, 0);
        stream.look_up(1);
    }
    State state(p, work, rows, lane);
    for (int tile = 0; some && stream.first_token(tile) < stream.end; ++tile) {
        float s[ROWS][KEYS];
        state.multiply_keys(keys, s, lane);
        if (PT_TOKEN_SCALES) multiply_by_scales(s, k_scales);
        stream.load_keys(keys, tile + 1);
        if (PT_TOKEN_SCALES) stream.load_scales(k_scales, own_k_scale, k_scale_block, tile + 1);
        state.finish(s, rows, stream, tile);
        state.weigh(s);
        if (PT_TOKEN_SCALES) multiply_by_scales(s, v_scales);
        state.multiply_values(values, s);
        stream.load_values(values, tile + 1);
        if (PT_TOKEN_SCALES) stream.load_scales(v_scales, own_v_scale, v_scale_block, tile + 1);
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
