// How a warp walks over the keys of its split, and how one lane holds their rows.
#pragma once
#include "split_simt_shape.cuh"

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
