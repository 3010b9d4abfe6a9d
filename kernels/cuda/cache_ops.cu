// Cache operations: K/V write by slot mapping, copies of blocks, gather of sequences, packing of blocks into a staging
// buffer and back. One kernel a build, by PT_OP.
//
// All walk vectors of adjacent elements of a head in the order (token or slot, head, dim), successive threads
// successive vectors, and have UNROLL of them on their way before the first is stored. Offsets into a pool are 64-bit.
//
// Compile-time definitions:
//   PT_OP                          0 write, 1 copy, 2 gather, 3 pack, 4 unpack
//   PT_HEADS                       KV heads
//   PT_HEAD_DIM_K, PT_HEAD_DIM_V   elements of a head
//   PT_BLOCK_SIZE                  tokens of a KV block
//   PT_PACK_K, PT_PACK_V           adjacent elements of a head in the pool: all, or x and 1 of the x-packed layout
//   PT_VECTOR_K, PT_VECTOR_V       elements of a vector (of 1, 3 and 4: bytes, where a block is not one piece)
//   PT_Q_DTYPE, PT_KV_DTYPE        0 fp32, 1 bf16, 2 fp16; KV also 3 e4m3, 4 int8
//   PT_SCALE_STRIDE                of heads in k_scale and v_scale; -1 without scales, and where tokens have their own
//   PT_TOKEN_SCALES                whether each token and head has scales: [num_blocks, HEADS, BLOCK_SIZE]
//   PT_THREADS, PT_ROWS, PT_UNROLL threads of a block, tokens of a block, vectors of a thread at once
//   PT_VECTOR_BYTES                of 1, 3 and 4: widest access
//   PT_SHAPE_K, PT_SHAPE_V         of 1, 3 and 4: a block as {A, B, C, L}, outermost first, L adjacent elements
#if PT_OP == 0  // the others move words, whatever they are, and parsing these takes a fifth of their build
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

using i64 = long long;
constexpr int HEADS = PT_HEADS, BLOCK_SIZE = PT_BLOCK_SIZE, THREADS = PT_THREADS, UNROLL = PT_UNROLL;
[[maybe_unused]] constexpr int KV_BYTES = PT_KV_DTYPE == 0 ? 4 : PT_KV_DTYPE <= 2 ? 2 : 1;

// The integer type that is loaded and stored in one piece.
template <int BYTES> struct Word;
template <> struct Word<1> { using T = unsigned char; };
template <> struct Word<2> { using T = unsigned short; };
template <> struct Word<4> { using T = unsigned int; };
template <> struct Word<8> { using T = uint2; };
template <> struct Word<16> { using T = uint4; };

// N adjacent elements.
template <class T, int N> union Vector {
    typename Word<sizeof(T) * N>::T word;
    T x[N];
    __device__ Vector() {}
};

// Where a head's elements are in a pool.
struct Pool {
    i64 block, slot, head, outer;

    template <int PACK, int DIM> __device__ __forceinline__ i64 place(i64 block_id, int slot_id, int head_id, int d) const {
        const i64 row = block_id * block + slot_id * slot + head_id * head;
        if constexpr (PACK >= DIM) return row + d;
        else return row + d / PACK * outer + d % PACK;
    }
};

// Where the scales of tokens are.
struct Scales {
    i64 block, head;

    __device__ __forceinline__ i64 place(i64 block_id, int slot_id, int head_id) const {
        return block_id * block + head_id * head + slot_id;
    }
};

#if PT_OP == 0
template <int DTYPE> struct Type;
template <> struct Type<0> { using T = float; };
template <> struct Type<1> { using T = __nv_bfloat16; };
template <> struct Type<2> { using T = __half; };
template <> struct Type<3> { using T = unsigned char; };
template <> struct Type<4> { using T = signed char; };
using Q = Type<PT_Q_DTYPE>::T;
using KV = Type<PT_KV_DTYPE>::T;

// To nearest, ties to even; 8-bit types saturate.
template <int DTYPE> __device__ __forceinline__ typename Type<DTYPE>::T stored(float x) {
    if constexpr (DTYPE == 0) return x;
    else if constexpr (DTYPE == 1) return __float2bfloat16_rn(x);
    else if constexpr (DTYPE == 2) return __float2half_rn(x);
    else if constexpr (DTYPE == 3) return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    else return static_cast<signed char>(max(-127, min(127, __float2int_rn(x))));
}

// The rows of PT_ROWS tokens from `first` on; a token with a negative slot is not even read.
template <int DIM, int N, int PACK>
__device__ __forceinline__ void write(
    const Q* from, i64 from_token, i64 from_head, KV* to, const Pool& pool, const i64* slots, const float* scale, i64 first,
    i64 num_tokens) {
    constexpr int CHUNKS = DIM / N, VECTORS = HEADS * CHUNKS, PIECE = N < PACK ? N : PACK;
    const int total = int(min(num_tokens - first, i64(PT_ROWS))) * VECTORS;
    for (int base = threadIdx.x; base < total; base += THREADS * UNROLL) {
        Vector<Q, N> values[UNROLL];
        i64 slot[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int at = base + u * THREADS;
            slot[u] = at < total ? slots[first + at / VECTORS] : -1;
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int at = base + u * THREADS, head = at % VECTORS / CHUNKS, d = at % CHUNKS * N;
            if (slot[u] < 0) continue;
            const Q* row = from + (first + at / VECTORS) * from_token + head * from_head;
            values[u].word = *reinterpret_cast<const typename Word<sizeof(Q) * N>::T*>(row + d);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int at = base + u * THREADS, head = at % VECTORS / CHUNKS, d = at % CHUNKS * N;
            if (slot[u] < 0) continue;
            const i64 block = slot[u] / BLOCK_SIZE;
            const int in_block = int(slot[u] - block * BLOCK_SIZE);
            const float divisor = PT_SCALE_STRIDE >= 0 ? scale[head * PT_SCALE_STRIDE] : 1.0f;
#pragma unroll
            for (int p = 0; p < N; p += PIECE) {
                Vector<KV, PIECE> piece;
#pragma unroll
                for (int k = 0; k < PIECE; ++k) {
                    if constexpr (PT_SCALE_STRIDE < 0 && PT_Q_DTYPE == PT_KV_DTYPE) {
                        piece.x[k] = values[u].x[p + k];
                    } else {
                        const float wide = float(values[u].x[p + k]);
                        piece.x[k] = stored<PT_KV_DTYPE>(PT_SCALE_STRIDE >= 0 ? __fdiv_rn(wide, divisor) : wide);
                    }
                }
                KV* target = to + pool.place<PACK, DIM>(block, in_block, head, d + p);
                *reinterpret_cast<typename Word<sizeof(KV) * PIECE>::T*>(target) = piece.word;
            }
        }
    }
}

// The same, with a scale of its own for each row of a token and head. LANES lanes hold a row; a warp has UNROLL times as
// many rows at once as lanes allow, and all of its lanes take part in every reduction.
template <int DIM, int N, int PACK>
__device__ __forceinline__ void write_scaled(
    const Q* from, i64 from_token, i64 from_head, KV* to, const Pool& pool, const i64* slots, float* scale,
    const Scales& scales, i64 first, i64 num_tokens) {
    constexpr int CHUNKS = DIM / N, LANES = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : CHUNKS > 2 ? 4 : CHUNKS;
    constexpr int STEPS = (CHUNKS + LANES - 1) / LANES, GROUPS = 32 / LANES, AT_ONCE = THREADS / LANES;
    constexpr int PIECE = N < PACK ? N : PACK;
    constexpr float LARGEST = PT_KV_DTYPE == 3 ? 448.0f : 127.0f, SMALLEST_NORMAL = 1.17549435e-38f;
    const int total = int(min(num_tokens - first, i64(PT_ROWS))) * HEADS, lane = threadIdx.x % LANES;
    for (int base = threadIdx.x / 32 * GROUPS; base < total; base += AT_ONCE * UNROLL) {
        Vector<Q, N> values[UNROLL][STEPS];
        i64 slot[UNROLL];
        float own[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int row = base + threadIdx.x % 32 / LANES + u * AT_ONCE;
            slot[u] = row < total ? slots[first + row / HEADS] : -1;
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int row = base + threadIdx.x % 32 / LANES + u * AT_ONCE;
            const Q* at = from + (first + row / HEADS) * from_token + row % HEADS * from_head;
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const int d = (s * LANES + lane) * N;
                if (slot[u] >= 0 && d < DIM)
                    values[u][s].word = *reinterpret_cast<const typename Word<sizeof(Q) * N>::T*>(at + d);
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            float most = 0.0f;
#pragma unroll
            for (int s = 0; s < STEPS; ++s)
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    if (slot[u] < 0 || (s * LANES + lane) * N >= DIM) continue;
                    const float size = fabsf(float(values[u][s].x[k]));
                    if (size < __int_as_float(0x7f800000)) most = fmaxf(most, size);  // no infinity, no NaN
                }
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
            own[u] = __fdiv_rn(most, LARGEST);
            if (own[u] < SMALLEST_NORMAL) own[u] = 1.0f;
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (slot[u] < 0) continue;
            const int head = (base + threadIdx.x % 32 / LANES + u * AT_ONCE) % HEADS;
            const i64 block = slot[u] / BLOCK_SIZE;
            const int in_block = int(slot[u] % BLOCK_SIZE);
            if (lane == 0) scale[scales.place(block, in_block, head)] = own[u];
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const int d = (s * LANES + lane) * N;
                if (d >= DIM) continue;
#pragma unroll
                for (int p = 0; p < N; p += PIECE) {
                    Vector<KV, PIECE> piece;
#pragma unroll
                    for (int k = 0; k < PIECE; ++k)
                        piece.x[k] = stored<PT_KV_DTYPE>(__fdiv_rn(float(values[u][s].x[p + k]), own[u]));
                    KV* target = to + pool.place<PACK, DIM>(block, in_block, head, d + p);
                    *reinterpret_cast<typename Word<sizeof(KV) * PIECE>::T*>(target) = piece.word;
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) kv_write(
    const Q* __restrict__ k,             // [num_tokens, HEADS, PT_HEAD_DIM_K]
    const Q* __restrict__ v,             // [num_tokens, HEADS, PT_HEAD_DIM_V]
    KV* __restrict__ k_cache, KV* __restrict__ v_cache,
    const i64* __restrict__ slots,       // [num_tokens]
    float* __restrict__ k_scale, float* __restrict__ v_scale, i64 k_token, i64 k_row, i64 v_token, i64 v_row,
    i64 k_block, i64 k_slot, i64 k_head, i64 k_outer, i64 v_block, i64 v_slot, i64 v_head, i64 v_outer, i64 num_tokens,
    i64 k_scale_block, i64 k_scale_head, i64 v_scale_block, i64 v_scale_head) {
    const i64 first = i64(blockIdx.x) * PT_ROWS;
    if (first >= num_tokens) return;
#if PT_TOKEN_SCALES
    if (blockIdx.y == 0)
        write_scaled<PT_HEAD_DIM_K, PT_VECTOR_K, PT_PACK_K>(
            k, k_token, k_row, k_cache, Pool{k_block, k_slot, k_head, k_outer}, slots, k_scale,
            Scales{k_scale_block, k_scale_head}, first, num_tokens);
    else
        write_scaled<PT_HEAD_DIM_V, PT_VECTOR_V, PT_PACK_V>(
            v, v_token, v_row, v_cache, Pool{v_block, v_slot, v_head, v_outer}, slots, v_scale,
            Scales{v_scale_block, v_scale_head}, first, num_tokens);
#else
    if (blockIdx.y == 0)
        write<PT_HEAD_DIM_K, PT_VECTOR_K, PT_PACK_K>(
            k, k_token, k_row, k_cache, Pool{k_block, k_slot, k_head, k_outer}, slots, k_scale, first, num_tokens);
    else
        write<PT_HEAD_DIM_V, PT_VECTOR_V, PT_PACK_V>(
            v, v_token, v_row, v_cache, Pool{v_block, v_slot, v_head, v_outer}, slots, v_scale, first, num_tokens);
#endif
}
#elif PT_OP != 2
// A block as A x B x C runs of L adjacent elements.
template <int A_, int B_, int C_, int L_> struct Shape {
    static constexpr int A = A_, B = B_, C = C_, L = L_, BYTES = A * B * C * L * KV_BYTES;
    i64 a, b, c;  // strides of the runs in elements

    __device__ __forceinline__ bool one_piece() const {
        return (C == 1 || c == L) && (B == 1 || b == C * L) && (A == 1 || a == B * C * L);
    }
    __device__ __forceinline__ i64 place(int byte) const {
        const int element = byte / KV_BYTES, run = element / L;
        return (run / (C * B) * a + run / C % B * b + run % C * c + element % L) * KV_BYTES;
    }
};

// Copies chunk `chunk` of a block, in pieces of BYTES. A side that is not one piece has the strides of `shape`.
template <int BYTES, bool FROM_ONE_PIECE, bool TO_ONE_PIECE, class S>
__device__ __forceinline__ void copy(const S& shape, const unsigned char* from, unsigned char* to, int chunk) {
    using T = typename Word<BYTES>::T;
    constexpr int COUNT = S::BYTES / BYTES, PER_CHUNK = THREADS * UNROLL * PT_VECTOR_BYTES / BYTES;
    const int end = min(COUNT, (chunk + 1) * PER_CHUNK);
    for (int base = chunk * PER_CHUNK + threadIdx.x; base < end; base += THREADS * UNROLL) {
        T values[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int at = (base + u * THREADS) * BYTES;
            if (at < end * BYTES) values[u] = *reinterpret_cast<const T*>(from + (FROM_ONE_PIECE ? at : shape.place(at)));
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int at = (base + u * THREADS) * BYTES;
            if (at < end * BYTES) *reinterpret_cast<T*>(to + (TO_ONE_PIECE ? at : shape.place(at))) = values[u];
        }
    }
}

#if PT_OP == 1
// One piece of a pool that starts where a wide access may: as such; else run by run.
template <int RUN_BYTES, class S>
__device__ __forceinline__ void copy_chunk(const S& shape, unsigned char* pool, i64 block, i64 from, i64 to, int chunk) {
    const i64 apart = block * KV_BYTES;
    const bool wide = S::BYTES % PT_VECTOR_BYTES == 0 && (reinterpret_cast<i64>(pool) | apart) % PT_VECTOR_BYTES == 0;
    if (shape.one_piece() && wide) copy<PT_VECTOR_BYTES, true, true>(shape, pool + from * apart, pool + to * apart, chunk);
    else copy<RUN_BYTES, false, false>(shape, pool + from * apart, pool + to * apart, chunk);
}

// All scales of one block, of K or of V.
__device__ __forceinline__ void copy_scales(float* scale, const Scales& scales, i64 from, i64 to) {
    constexpr int COUNT = HEADS * BLOCK_SIZE;
    for (int base = threadIdx.x; base < COUNT; base += THREADS * UNROLL) {
        float values[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int at = base + u * THREADS;
            if (at < COUNT) values[u] = scale[scales.place(from, at % BLOCK_SIZE, at / BLOCK_SIZE)];
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int at = base + u * THREADS;
            if (at < COUNT) scale[scales.place(to, at % BLOCK_SIZE, at / BLOCK_SIZE)] = values[u];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_blocks(
    unsigned char* k_cache, unsigned char* v_cache,
    const i64* __restrict__ pairs,  // [num_pairs, 2]: source, destination
    i64 k_block, i64 k_a, i64 k_b, i64 k_c, i64 v_block, i64 v_a, i64 v_b, i64 v_c, i64 num_pairs, i64 k_chunks,
    float* k_scale, float* v_scale, i64 k_scale_block, i64 k_scale_head, i64 v_scale_block, i64 v_scale_head) {
    if (blockIdx.x >= num_pairs) return;
    const i64 from = pairs[2 * i64(blockIdx.x)], to = pairs[2 * i64(blockIdx.x) + 1];
    if (from < 0 || to < 0 || from == to) return;
    const int chunk = blockIdx.y;
    if (PT_TOKEN_SCALES && chunk == gridDim.y - 1) {  // those of both are few
        copy_scales(k_scale, Scales{k_scale_block, k_scale_head}, from, to);
        copy_scales(v_scale, Scales{v_scale_block, v_scale_head}, from, to);
        return;
    }
    if (chunk < k_chunks)
        copy_chunk<PT_VECTOR_K>(Shape<PT_SHAPE_K>{k_a, k_b, k_c}, k_cache, k_block, from, to, chunk);
    else
        copy_chunk<PT_VECTOR_V>(Shape<PT_SHAPE_V>{v_a, v_b, v_c}, v_cache, v_block, from, to, chunk - int(k_chunks));
}
#else
// Chunk `chunk` of a block in the pieces that both sides allow: `block` in its pool, `place` without gaps in a staging row.
template <int BYTES, bool ONE_PIECE, class S>
__device__ __forceinline__ void move(const S& shape, unsigned char* block, unsigned char* place, int chunk) {
    if constexpr (PT_OP == 3) copy<BYTES, ONE_PIECE, true>(shape, block, place, chunk);
    else copy<BYTES, true, ONE_PIECE>(shape, place, block, chunk);
}

template <int RUN_BYTES, class S>
__device__ __forceinline__ void move_chunk(const S& shape, unsigned char* block, unsigned char* place, int chunk) {
    const i64 starts = reinterpret_cast<i64>(block) | reinterpret_cast<i64>(place);
    const bool wide = S::BYTES % PT_VECTOR_BYTES == 0 && starts % PT_VECTOR_BYTES == 0;
    if (shape.one_piece() && wide) move<PT_VECTOR_BYTES, true>(shape, block, place, chunk);
    else move<RUN_BYTES, false>(shape, block, place, chunk);
}

extern "C" __global__ void __launch_bounds__(THREADS) move_blocks(
    unsigned char* k_cache, unsigned char* v_cache,
    const i64* __restrict__ ids,  // [num_listed]
    unsigned char* staging,       // [num_listed, elements of K, then of V]
    i64 k_block, i64 k_a, i64 k_b, i64 k_c, i64 v_block, i64 v_a, i64 v_b, i64 v_c, i64 row, i64 num_listed,
    i64 k_chunks) {
    using K = Shape<PT_SHAPE_K>;
    if (blockIdx.x >= num_listed) return;
    const i64 id = ids[blockIdx.x];
    if (id < 0) return;
    unsigned char* place = staging + blockIdx.x * row * KV_BYTES;
    const int chunk = blockIdx.y;
    if (chunk < k_chunks)
        move_chunk<PT_VECTOR_K>(K{k_a, k_b, k_c}, k_cache + id * k_block * KV_BYTES, place, chunk);
    else
        move_chunk<PT_VECTOR_V>(
            Shape<PT_SHAPE_V>{v_a, v_b, v_c}, v_cache + id * v_block * KV_BYTES, place + K::BYTES, chunk - int(k_chunks));
}
#endif
#else
using Element = Word<KV_BYTES>::T;

// `count` tokens of a sequence from `first` on, to `out`, where the first of them goes.
template <int DIM, int N, int PACK>
__device__ __forceinline__ void gather(
    const Element* from, const Pool& pool, const int* table, int first, int count, Element* out) {
    constexpr int CHUNKS = DIM / N, VECTORS = HEADS * CHUNKS, PIECE = N < PACK ? N : PACK;
    const int total = count * VECTORS;
    for (int base = threadIdx.x; base < total; base += THREADS * UNROLL) {
        Vector<Element, N> values[UNROLL];
        i64 block[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int at = base + u * THREADS;
            block[u] = at < total ? table[(first + at / VECTORS) / BLOCK_SIZE] : 0;
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int at = base + u * THREADS, head = at % VECTORS / CHUNKS, d = at % CHUNKS * N;
            if (at >= total) continue;
#pragma unroll
            for (int p = 0; p < N; p += PIECE) {
                const int slot = (first + at / VECTORS) % BLOCK_SIZE;
                const Element* source = from + pool.place<PACK, DIM>(block[u], slot, head, d + p);
                Vector<Element, PIECE> piece;
                piece.word = *reinterpret_cast<const typename Word<KV_BYTES * PIECE>::T*>(source);
#pragma unroll
                for (int k = 0; k < PIECE; ++k) values[u].x[p + k] = piece.x[k];
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int at = base + u * THREADS;
            if (at < total) *reinterpret_cast<typename Word<KV_BYTES * N>::T*>(out + i64(at) * N) = values[u].word;
        }
    }
}

// The scales of the same tokens, to `out` [token, HEADS].
__device__ __forceinline__ void gather_scales(
    const float* scale, const Scales& scales, const int* table, int first, int count, float* out) {
    for (int at = threadIdx.x; at < count * HEADS; at += THREADS) {
        const int token = first + at / HEADS;
        out[at] = scale[scales.place(table[token / BLOCK_SIZE], token % BLOCK_SIZE, at % HEADS)];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gather_kv(
    const Element* __restrict__ k_cache, const Element* __restrict__ v_cache,
    const int* __restrict__ block_table,   // [num_seqs, max_blocks]
    const int* __restrict__ context_lens,  // [num_seqs]
    const int* __restrict__ out_start,     // [num_seqs + 1]
    Element* __restrict__ k_out,           // [num_tokens, HEADS, PT_HEAD_DIM_K]
    Element* __restrict__ v_out,           // [num_tokens, HEADS, PT_HEAD_DIM_V]
    i64 k_block, i64 k_slot, i64 k_head, i64 k_outer, i64 v_block, i64 v_slot, i64 v_head, i64 v_outer, i64 table_seq,
    i64 num_seqs, i64 chunks, const float* k_scale, const float* v_scale, float* k_scale_out, float* v_scale_out,
    i64 k_scale_block, i64 k_scale_head, i64 v_scale_block, i64 v_scale_head) {
    const unsigned seq = blockIdx.x / unsigned(chunks), chunk = blockIdx.x % unsigned(chunks);
    if (seq >= num_seqs) return;
    const int first = int(chunk) * PT_ROWS, count = min(context_lens[seq] - first, PT_ROWS);
    if (count <= 0) return;
    const int* table = block_table + seq * table_seq;
    const i64 row = i64(out_start[seq]) + first;
    if (PT_TOKEN_SCALES) {
        if (blockIdx.y == 0) gather_scales(k_scale, Scales{k_scale_block, k_scale_head}, table, first, count, k_scale_out + row * HEADS);
        else gather_scales(v_scale, Scales{v_scale_block, v_scale_head}, table, first, count, v_scale_out + row * HEADS);
    }
    if (blockIdx.y == 0)
        gather<PT_HEAD_DIM_K, PT_VECTOR_K, PT_PACK_K>(
            k_cache, Pool{k_block, k_slot, k_head, k_outer}, table, first, count, k_out + row * (HEADS * PT_HEAD_DIM_K));
    else
        gather<PT_HEAD_DIM_V, PT_VECTOR_V, PT_PACK_V>(
            v_cache, Pool{v_block, v_slot, v_head, v_outer}, table, first, count, v_out + row * (HEADS * PT_HEAD_DIM_V));
}
#endif
