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
    template <class Values> __device__ __forceinline__ void load_values(Values& values, int tile) const {
        if (inside(tile)) values.template load<true>(v_base, blocks, v_block, v_slot, token(tile), begin, end, lane);
        else values.template load<false>(v_base, blocks, v_block, v_slot, token(tile), begin, end, lane);
    }
};
