// Split-K paged decode attention on tensor cores. A block takes one sequence, one KV head, one split of its keys and up
// to ROWS query rows (the query heads of the group, of every query token of the sequence), so each key and value is
// read once for all of them. Keys are the M dimension of S^T = K Q^T and value dims that of O^T = V^T P^T; the rows are
// N, in tiles of 8. Each warp walks its own keys (WARP_TOKENS of every TILE) with its own pipeline of asynchronous
// copies and its own online softmax: no barrier of the block in the loop. Every key's address comes from its own entry
// of the block table, so tiles and blocks need not fit each other.
//
// Compile-time definitions:
//   PT_HEAD_DIM_K, PT_HEAD_DIM_V   elements of a head
//   PT_GROUP                       query heads of a KV head
//   PT_ROW_TILES                   N tiles of 8 query rows
//   PT_BLOCK_SIZE                  tokens of a KV block
//   PT_WARPS, PT_WARP_TOKENS, PT_STAGES
//   PT_Q_DTYPE, PT_KV_DTYPE        codes of types.cuh
//   PT_WINDOW                      keys that a query sees, 0 for all
//   PT_HAS_CAP, PT_HAS_SINKS, PT_HAS_ALIBI, PT_HAS_SCALES, PT_SCALE_STRIDE
//   PT_MERGE                       0 one split; 1 a second kernel merges; 2 the last block of a row merges; 3 a second
//                                  kernel merges that is launched while this one runs
//   PT_SHARED_BYTES                dynamic shared memory that the host asks for
#include "types.cuh"
#include "copies.cuh"
#include "mma.cuh"
#include "softmax.cuh"
#include "merge.cuh"

using namespace pt;

constexpr int DK = PT_HEAD_DIM_K, DV = PT_HEAD_DIM_V, GROUP = PT_GROUP, NT = PT_ROW_TILES, ROWS = 8 * NT;
constexpr int WARPS = PT_WARPS, WARP_TOKENS = PT_WARP_TOKENS, STAGES = PT_STAGES, TILE = WARPS * WARP_TOKENS;
constexpr int MT = WARP_TOKENS / 16, KS = (DK + 15) / 16, VT = (DV + 15) / 16;
using Q = Type<PT_Q_DTYPE>::T;
// 8-bit pools are widened to halves on their way to the tensor core, which is exact; so are the weights then, and the
// query, times a power of two per row that keeps bf16 in range (a value 2^31 below the row's largest is still exact).
constexpr int KV_BYTES = PT_KV_DTYPE >= E4M3 ? 1 : 2, MMA_DTYPE = KV_BYTES == 1 ? FP16 : PT_Q_DTYPE;
constexpr bool SCALED_QUERY = MMA_DTYPE != PT_Q_DTYPE;
constexpr int K_CHUNKS = 16 * KS * KV_BYTES / 16, V_CHUNKS = 16 * VT * KV_BYTES / 16;
using KTile = Tile<K_CHUNKS>;
using VTile = Tile<V_CHUNKS>;
constexpr int V_START = WARP_TOKENS * KTile::PITCH, STAGE_BYTES = V_START + WARP_TOKENS * VTile::PITCH;
constexpr bool QUERY_IN_REGISTERS = KS * NT <= 16;
using QTile = Tile<2 * KS>;

// Shared memory: the warps' pipelines, later the warps' outputs; then the rest.
constexpr int OUT_PITCH = 16 * VT + 4;  // floats; two rows lie 8 banks apart
constexpr int PIPELINE_BYTES = WARPS * STAGES * STAGE_BYTES, OUT_BYTES = WARPS * ROWS * OUT_PITCH * 4;
constexpr int RING = PIPELINE_BYTES > OUT_BYTES ? PIPELINE_BYTES : OUT_BYTES, RING_BYTES = WARPS * 2 * WARP_TOKENS * 16;
constexpr int QUERY = RING + RING_BYTES, QUERY_BYTES = QUERY_IN_REGISTERS ? 0 : ROWS * QTile::PITCH;
constexpr int STATS = QUERY + QUERY_BYTES, STATS_BYTES = (2 * WARPS + 2) * ROWS * 4;
constexpr int QUERY_SCALES = STATS + (2 * WARPS + 1) * ROWS * 4;
constexpr int SHARED_BYTES = STATS + STATS_BYTES + 16;
static_assert(SHARED_BYTES == PT_SHARED_BYTES, "the host plans another amount of shared memory");

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
};

// What a block works on: the rows from `first_row` on of (query token, query head of the group) of one sequence.
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

// One warp's stream of tiles from the pool into its ring of stages. A lane knows the table entry of the token of its
// own number a tile before it is needed, and turns it into the token's place in the pool, which all lanes then read.
struct Stream {
    const int* table;
    const u8 *k_base, *v_base;  // of the head, at the lane's first chunk
    u64 k_block, k_slot, v_block, v_slot;
    longlong2* ring;
    u32 stages;
    int begin, end, lane;
    u32 entry;
    RowCopier<K_CHUNKS, DK * KV_BYTES / 16> k_copier;
    RowCopier<V_CHUNKS, DV * KV_BYTES / 16> v_copier;

    __device__ __forceinline__ Stream(const Params& p, const Work& w, const Share& share, u8* shared, int warp, int lane)
        : table(p.block_table + w.seq * p.table_seq),
          k_base(p.k_cache + w.kv_head * p.k_head * KV_BYTES + lane % 8 * 16),
          v_base(p.v_cache + w.kv_head * p.v_head * KV_BYTES + lane % 8 * 16), k_block(p.k_block * KV_BYTES),
          k_slot(p.k_slot * KV_BYTES), v_block(p.v_block * KV_BYTES), v_slot(p.v_slot * KV_BYTES),
          ring(reinterpret_cast<longlong2*>(shared + RING) + warp * 2 * WARP_TOKENS),
          stages(shared_address(shared) + warp * STAGES * STAGE_BYTES), begin(share.begin + warp * WARP_TOKENS),
          end(share.end), lane(lane), entry(0), k_copier(lane), v_copier(lane) {}

    __device__ __forceinline__ int first_token(int tile) const { return begin + tile * TILE; }
    __device__ __forceinline__ int num_tiles() const { return end > begin ? (end - begin + TILE - 1) / TILE : 0; }

    // The lane's token of a tile; past the end, the last one there is: no entry past the sequence is ever read.
    __device__ __forceinline__ u32 token(int tile) const { return u32(min(first_token(tile) + lane, end - 1)); }
    __device__ __forceinline__ u32 read_entry(int tile) const { return u32(table[token(tile) / PT_BLOCK_SIZE]); }
    // Places of the tile's tokens, from the entries that the lanes hold.
    __device__ __forceinline__ void place(int tile, u32 block) const {
        const u32 slot = token(tile) % PT_BLOCK_SIZE;
        if (WARP_TOKENS == 32 || lane < WARP_TOKENS)
            ring[tile % 2 * WARP_TOKENS + lane] = {i64(block * k_block + slot * k_slot), i64(block * v_block + slot * v_slot)};
    }
    __device__ __forceinline__ void copy(int tile, int stage) const {
        const longlong2* places = ring + tile % 2 * WARP_TOKENS + lane / 8;
        const u32 to = stages + stage * STAGE_BYTES;
        const int live = end - first_token(tile) - lane / 8;
#pragma unroll
        for (int step = 0; step < WARP_TOKENS / 4; ++step) {
            const longlong2 at = places[4 * step];
            k_copier.copy(to, step, k_base + at.x, 4 * step < live, lane);
            v_copier.copy(to + V_START, step, v_base + at.y, 4 * step < live, lane);
        }
    }
    // The table entries that `start` needs; what is loaded between the two calls arrives in the same time.
    __device__ __forceinline__ void request(u32 (&entries)[STAGES]) {
#pragma unroll
        for (int tile = 0; tile < STAGES; ++tile) entries[tile] = end > begin ? read_entry(tile) : 0;
        entry = end > begin ? read_entry(STAGES) : 0;
    }
    // Fills all stages but one.
    __device__ __forceinline__ void start(const u32 (&entries)[STAGES]) {
        if (end <= begin) return;
#pragma unroll
        for (int tile = 0; tile < STAGES; ++tile) {
            place(tile, entries[tile]);
            if (tile == STAGES - 1) break;
            __syncwarp();
            copy(tile, tile);
            copies_commit();
        }
    }
    // Waits for `tile`, then puts the next one into the stage that the tile before it has left.
    __device__ __forceinline__ void advance(int tile, int free_stage) {
        copies_wait<STAGES - 2>();
        __syncwarp();
        copy(tile + STAGES - 1, free_stage);
        copies_commit();
        place(tile + STAGES, entry);
        entry = read_entry(tile + STAGES + 1);
    }
};

// The query rows as operand b of S^T = K Q^T: in registers, or in shared memory where they would take too many. With
// 8-bit keys a lane holds four adjacent dims of each 16, so that its bytes of a key are those of its dims of the query.
struct Query {
    u32 fragments[QUERY_IN_REGISTERS ? KS : 1][QUERY_IN_REGISTERS ? NT : 1][2];
    u32 shared;

    __device__ __forceinline__ Query(const Params& p, const Rows& rows, u8* memory, int warp, int lane) : shared(0) {
        float* scales = reinterpret_cast<float*>(memory + QUERY_SCALES);
        if constexpr (SCALED_QUERY) {
            for (int row = warp; row < ROWS; row += WARPS) measure(p, rows, scales, row, lane);
            __syncthreads();
        }
        if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
            for (int k = 0; k < KS; ++k)
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const int row = 8 * n + lane / 4, d = 16 * k + (KV_BYTES == 1 ? 4 : 2) * (lane % 4);
                    fragments[k][n][0] = pair(p, rows, scales, row, d);
                    fragments[k][n][1] = pair(p, rows, scales, row, KV_BYTES == 1 ? d + 2 : d + 8);
                }
        } else {
            for (int at = threadIdx.x; at < ROWS * 8 * KS; at += 32 * WARPS) {
                const int row = at / (8 * KS), d = at % (8 * KS) * 2;
                // Dims 4i + {0, 1} and 4i + {2, 3} of each 16 go where the layout of 16-bit keys has 2i and 2i + 8.
                const int to = KV_BYTES == 1 ? d / 16 * 16 + d % 16 / 4 * 2 + d % 4 * 4 : d;
                *reinterpret_cast<u32*>(memory + QUERY + QTile::place(row, to / 8) + to % 8 * 2) = pair(p, rows, scales, row, d);
            }
            shared = shared_address(memory + QUERY);
            __syncthreads();
        }
    }
    __device__ __forceinline__ void fragment(u32 (&b)[2], int k, int n, int lane) const {
        if constexpr (QUERY_IN_REGISTERS) b[0] = fragments[k][n][0], b[1] = fragments[k][n][1];
        else load_two_matrices(b, shared + QTile::place(8 * n + lane % 8, 2 * k + lane / 8 % 2));
    }

private:
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

// Adds up the warps' outputs and writes the block's result: to the output if no other split is live, else to the partials.
__device__ __forceinline__ void write_result(
    const Params& p, const Work& w, const Rows& rows, bool whole, float (&out)[VT][NT][4], OnlineSoftmax<MT, NT>& softmax,
    u8* shared, int warp, int lane) {
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
            const float factor = exp2_fast(softmax.top[n][e] - top);
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

extern "C" __global__ void __launch_bounds__(32 * WARPS) attention_split(
    Q* out, const Q* q, const u8* k_cache, const u8* v_cache, const int* block_table, const int* context_lens,
    const int* query_start_loc, const float* sinks, const float* alibi_slopes, const float* k_scale, const float* v_scale,
    float* lse, float* partial_out, float* partial_lse, int* arrivals, i64 q_token, i64 q_head, i64 k_block, i64 k_slot,
    i64 k_head, i64 v_block, i64 v_slot, i64 v_head, i64 out_token, i64 out_head, i64 lse_token, i64 table_seq, i64 num_seqs,
    i64 num_kv_heads, i64 num_chunks, i64 num_splits, i64 split_tokens, i64 num_partials, float scale, float soft_cap) {
    extern __shared__ __align__(128) u8 shared[];
    const Params p{out, q, k_cache, v_cache, block_table, context_lens, query_start_loc, sinks, alibi_slopes, k_scale,
                   v_scale, lse, partial_out, partial_lse, arrivals, q_token, q_head, k_block, k_slot, k_head, v_block,
                   v_slot, v_head, out_token, out_head, lse_token, table_seq, num_seqs, num_kv_heads, num_chunks,
                   num_splits, split_tokens, num_partials, scale, soft_cap};
    if (PT_MERGE == 3) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const Work work(p);
    if (work.seq >= num_seqs) return;
    const Sequence sequence(query_start_loc, context_lens, work.seq);
    const Rows rows(p, work, sequence);
    const Share share(sequence, PT_WINDOW, int(num_splits), int(split_tokens), TILE, work.split);
    if (rows.count <= 0 || work.split >= share.live) return;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Stream stream(p, work, share, shared, warp, lane);
    u32 entries[STAGES];
    stream.request(entries);
    const Query query(p, rows, shared, warp, lane);
    stream.start(entries);
    const Scores scores(p, work, rows, shared, lane);
    const TileReaders readers(lane);
    OnlineSoftmax<MT, NT> softmax;
    float acc[VT][NT][4] = {};
    int stage = 0, free_stage = STAGES - 1;
    for (int tile = 0; tile < stream.num_tiles(); ++tile) {
        stream.advance(tile, free_stage);
        const u32 at = stream.stages + stage * STAGE_BYTES;
        float s[MT][NT][4] = {};
        multiply_keys(s, query, at, readers, lane);
        scores.finish(s, rows, stream.first_token(tile), share.end, lane);
        softmax.update(s, scores.scale, acc);
        multiply_weights(acc, s, at + V_START, readers);
        free_stage = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    copies_wait<0>();
    const bool whole = PT_MERGE == 0 || share.live == 1;
    write_result(p, work, rows, whole, acc, softmax, shared, warp, lane);
    if (PT_MERGE != 2 || whole || !arrive_last(p, share.live, shared)) return;
    merge_rows<DV, Q>(
        partial_out, partial_lse, rows.count, int(num_partials), share.live, reinterpret_cast<float*>(shared),
        [&](int r) { return rows.partial(r); }, [&](int r) { return rows.sink(p, r); }, [&](int r) { return rows.output(p, r); });
}

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
