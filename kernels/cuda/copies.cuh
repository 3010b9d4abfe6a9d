// Asynchronous copies of KV rows and the swizzled layout that they take in shared memory.
#pragma once
#include "types.cuh"

namespace pt {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// 16 bytes past L1; where `live` is false the source is not read and zeros are written.
__device__ __forceinline__ void copy16(u32 to, const u8* from, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(live ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void* from, bool live) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(live ? 4 : 0) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A tile of rows of CHUNKS 16-byte chunks without padding. The low bits of a chunk's index are exclusive-ored with bits
// of its row, so that 8 successive rows of one chunk, what a matrix load reads at once, lie in 8 different bank groups.
template <int CHUNKS> struct Tile {
    static constexpr int PITCH = 16 * CHUNKS;  // bytes
    static constexpr int SPREAD = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1;
    static constexpr int TOGGLE = SPREAD / 2;  // what 4 rows further change in a chunk's place

    __device__ static __forceinline__ int place(int row, int chunk) {
        return row * PITCH + 16 * (chunk ^ (row / (8 / SPREAD) & (SPREAD - 1)));
    }
};

// Addresses of one lane's reads of a tile with matrix loads: of row `row`, the chunks `chunk`, + 2, + 4, ... (chunk 0
// or 1). The swizzle repeats every SPREAD chunks: the rest is a constant offset.
template <int CHUNKS> struct Reader {
    using T = Tile<CHUNKS>;
    static constexpr int PERIOD = T::SPREAD > 2 ? T::SPREAD / 2 : 1;
    u32 places[PERIOD];

    __device__ __forceinline__ Reader(int row, int chunk) {
#pragma unroll
        for (int k = 0; k < PERIOD; ++k) places[k] = T::place(row, chunk + 2 * k);
    }
    __device__ __forceinline__ u32 at(int pair) const { return places[pair % PERIOD] + pair / PERIOD * PERIOD * 32; }
};

// What one lane copies of a tile: rows lane / 8, + 4, + 8, ..., and of each the chunks lane % 8, + 8, ...: a warp reads
// 128 adjacent bytes of 4 rows at once. DATA chunks are read, the others (padding of the head dim) are zeros.
template <int CHUNKS, int DATA> struct RowCopier {
    using T = Tile<CHUNKS>;
    int even, odd;  // places in rows of even and of odd steps

    __device__ __forceinline__ explicit RowCopier(int lane)
        : even(T::place(lane / 8, lane % 8)), odd(lane / 8 * T::PITCH + ((even - lane / 8 * T::PITCH) ^ 16 * T::TOGGLE)) {}

    // Row lane / 8 + 4 * step of the tile at `to`; `from` is the lane's first chunk.
    __device__ __forceinline__ void copy(u32 to, int step, const u8* from, bool live, int lane) const {
        const u32 at = to + (step % 2 ? odd : even) + 4 * step * T::PITCH;
#pragma unroll
        for (int k = 0; k < CHUNKS; k += 8) {
            const int chunk = k + lane % 8;
            if (CHUNKS - k >= 8 || chunk < CHUNKS) copy16(at + 16 * k, from + 16 * k, live && (DATA - k >= 8 || chunk < DATA));
        }
    }
};

}  // namespace pt
