// How a warp walks over the keys of its split, and how one lane holds their rows.
#pragma once
#include "split_simt_shape.cuh"

// One lane's pieces of KEYS rows of K or V.
template <int STEPS, int PIECES> struct RowsOf {
    uint4 pieces[KEYS][STEPS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int key = 0; key < KEYS; ++key)
#pragma unroll
            for (int step = 0; step < STEPS; ++step) pieces[key][step] = make_uint4(0, 0, 0, 0);
    }

    // Of the keys from `token` on; those without their bit in `live` are not read and stay as they are.
    __device__ __forceinline__ void load(
        const u8* base, const u32 (&blocks)[RUNS], u64 block_bytes, u64 slot_bytes, int token, u32 live, int lane) {
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            const u8* row = base + blocks[run] * block_bytes + u32(token + run * RUN) % PT_BLOCK_SIZE * slot_bytes;
#pragma unroll
            for (int i = 0; i < RUN; ++i, row += slot_bytes) {
                const int key = run * RUN + i;
                if (!(live >> key & 1)) continue;
#pragma unroll
                for (int step = 0; step < STEPS; ++step)
                    if (PIECES % LANES == 0 || step * LANES + lane % LANES < PIECES)
                        pieces[key][step] = __ldg(reinterpret_cast<const uint4*>(row + step * LANES * 16));
            }
        }
    }
};

// The lowest `count` of 32 bits, at most KEYS.
__device__ __forceinline__ u32 bits_below(int count) { return (1u << max(0, min(count, KEYS))) - 1; }

// One warp's walk over the keys of its split.
struct Stream {
    // Where a key's entry serves few of a lane's keys, the lanes fetch each entry of a tile once and pass them on.
    static constexpr bool SHARED_ENTRIES = RUNS > 1;
    static constexpr int ENTRIES = SHARED_ENTRIES ? (GROUPS * RUNS + 31) / 32 : 1;

    const int* table;
    const u8 *k_base, *v_base;  // of the head, at the lane's first piece
    u64 k_block, k_slot, v_block, v_slot;
    int begin, end, start, lane;  // start: of the warp's first tile; blocks and `start` meet at multiples of KEYS
    u32 entries[ENTRIES];         // of the next tile
    u32 blocks[RUNS];             // of the lane's keys of the tile that is being loaded
    u32 live;                     // bit k: whether key k of the lane's belongs to the split, of the next tile

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
    __device__ __forceinline__ u32 entry_of(int key) const {
        return u32(table[u32(max(begin, min(key, end - 1))) / PT_BLOCK_SIZE]);
    }
    __device__ __forceinline__ void look_up(int tile) {
        const int first = token(tile);
        live = bits_below(end - first) & ~bits_below(begin - first);
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            const int at = 32 * i + lane;  // in run-major order, so that lanes agree on which of their entries is meant
            entries[i] = entry_of(SHARED_ENTRIES ? first_token(tile) + at % GROUPS * KEYS + at / GROUPS * RUN : first);
        }
    }
    __device__ __forceinline__ void load_keys(RowsOf<SK, K_PIECES>& keys, int tile) {
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            const int at = run * GROUPS;
            blocks[run] = SHARED_ENTRIES ? __shfl_sync(ALL_LANES, entries[at / 32], at % 32 + lane / LANES) : entries[0];
        }
        keys.load(k_base, blocks, k_block, k_slot, token(tile), live, lane);
    }
    // Those of keys outside the split become zeros: their weights are 0, and so must the products be.
    __device__ __forceinline__ void load_values(RowsOf<SV, V_PIECES>& values, int tile) const {
        if (!inside(tile)) {
            __syncwarp();  // keeps this a branch, which few tiles take: as selects it would cost every tile
            values.clear();
        }
        values.load(v_base, blocks, v_block, v_slot, token(tile), live, lane);
    }
};

// The scales of the tokens whose scores a lane ends up with (see deal_sums): of K, to multiply them, or of V, to multiply
// the weights.
struct TokenScales {
    const float* from;  // of the head
    i64 block_stride;
    float own[VALUES];

    __device__ __forceinline__ TokenScales(const float* scale, i64 block, i64 head, const Work& w)
        : from(scale + w.kv_head * head), block_stride(block) {}
    // Of the tile whose blocks the stream has looked up; tokens outside the split are not read.
    __device__ __forceinline__ void load(const Stream& stream, int tile) {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const int key = stream.lane % LANES * KEYS / LANES + i, token = stream.token(tile) + key;
            u32 block = stream.blocks[0];
#pragma unroll
            for (int run = 1; run < RUNS; ++run) block = key / RUN >= run ? stream.blocks[run] : block;
            const float* place = from + (i64(block) * block_stride + u32(token) % PT_BLOCK_SIZE);
            own[i] = token >= stream.begin && token < stream.end ? __ldg(place) : 0.0f;
        }
    }
    __device__ __forceinline__ void multiply(float (&s)[ROWS][KEYS]) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < VALUES; ++i) s[r][i] *= own[i];
    }
};
