// A warp's pipeline of asynchronous copies from the paged pool into shared memory.
#pragma once
#include "split_mma_scales.cuh"

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
    TokenScales scales;
    RowCopier<K_CHUNKS, DK * KV_BYTES / 16> k_copier;
    RowCopier<V_CHUNKS, DV * KV_BYTES / 16> v_copier;

    __device__ __forceinline__ Stream(const Params& p, const Work& w, const Share& share, u8* shared, int warp, int lane)
        : table(p.block_table + w.seq * p.table_seq),
          k_base(p.k_cache + w.kv_head * p.k_head * KV_BYTES + lane % 8 * 16),
          v_base(p.v_cache + w.kv_head * p.v_head * KV_BYTES + lane % 8 * 16), k_block(p.k_block * KV_BYTES),
          k_slot(p.k_slot * KV_BYTES), v_block(p.v_block * KV_BYTES), v_slot(p.v_slot * KV_BYTES),
          ring(reinterpret_cast<longlong2*>(shared + RING) + warp * 2 * WARP_TOKENS),
          stages(shared_address(shared) + warp * STAGES * STAGE_BYTES), begin(share.begin + warp * WARP_TOKENS),
          end(share.end), lane(lane), entry(0), scales(p, w), k_copier(lane), v_copier(lane) {}

    __device__ __forceinline__ int first_token(int tile) const { return begin + tile * TILE; }
    __device__ __forceinline__ int num_tiles() const { return end > begin ? (end - begin + TILE - 1) / TILE : 0; }

    // The lane's token of a tile; past the end, the last one there is: no entry past the sequence is ever read.
    __device__ __forceinline__ u32 token(int tile) const { return u32(min(first_token(tile) + lane, end - 1)); }
    __device__ __forceinline__ u32 read_entry(int tile) const { return u32(table[token(tile) / PT_BLOCK_SIZE]); }
    // Places of the tile's tokens, from the entries that the lanes hold.
    __device__ __forceinline__ void place(int tile, u32 block) {
        const u32 slot = token(tile) % PT_BLOCK_SIZE;
        if (PT_TOKEN_SCALES) scales.place(block, slot);
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
        if (PT_TOKEN_SCALES) scales.copy(to, first_token(tile) + lane < end, lane);
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
