// Binary interface of the CPU kernels.
//
// Launch convention (that of cuLaunchKernel, so one packing code serves both):
//     int32_t NAME(const PagedtuneLaunch* launch, void* const* params)
// params[i] points AT the value of argument i: pointer arguments are `void**`, int64 and float arguments are
// `int64_t*` and `float*`. A kernel returns when its whole work is done: 0, or a PagedtuneStatus; on a non-zero
// status found by argument checks nothing has been written. Arguments are listed below by index. All strides and
// counts are in ELEMENTS, int64. No kernel modifies its inputs. Data need only the alignment of their elements.
//
// Compile-time definitions of attention.cpp (cache_ops.cpp and swap_ops.cpp need none):
//     PT_HEAD_DIM_K, PT_HEAD_DIM_V   1..256
//     PT_GROUP                       query heads per KV head, 1..256
//     PT_Q_DTYPE, PT_KV_DTYPE        0 fp32, 1 bf16, 2 fp16 (out has q's dtype)
//     PT_TEST_WIDE                   optional, adds path 9: the AVX-512 source compiled for AVX2 (tests only)
// Flags: -std=c++17 -O3 -fPIC -shared -pthread -fno-math-errno -fno-trapping-math -ffp-contract=fast -Wno-psabi
//        -fvisibility=hidden. Never -ffast-math (it sets FTZ for the loading thread), no -march (chosen at run time).
//
// ---- pagedtune_cpu_split (attention.cpp): one query token x KV head x split per work item
//   pointers
//     0 q             [num_tokens, Hq, Dk]        q dtype, unit stride in Dk
//     1 k_cache       strides 16..21              KV dtype
//     2 v_cache       strides 22..25              KV dtype
//     3 block_table   int32 [num_seqs, >= ceil(context/block_size)], row stride 29; entries past that are not read,
//                     nor are those of blocks wholly before the window
//     4 context_lens  int32 [num_seqs], query tokens included
//     5 query_start_loc int32 [num_seqs + 1]      query token t of sequence s: query_start_loc[s] <= t < [s + 1];
//                     tokens of no sequence (padding) are left unwritten
//     6 sinks         fp32 [Hq] or null           logit joined to the denominator once
//     7 alibi_slopes  fp32 [Hq] or null           adds slope * (key position - query position), after the soft cap
//     8 k_scale       fp32 [1 or Hkv] or null     K = stored * k_scale
//     9 v_scale       fp32 [1 or Hkv] or null
//    10 out           [num_tokens, Hq, Dv]        q dtype, unit stride in Dv; written when num_splits == 1
//    11 lse           fp32 [num_tokens, Hq] or null, natural log, head stride 1; written when num_splits == 1
//    12 partial_out   fp32 [num_tokens, Hq, num_splits, Dv] contiguous; needed when num_splits > 1
//    13 partial_lse   fp32 [num_tokens, Hq, num_splits] contiguous; needed when num_splits > 1
//   int64
//    14 q_stride_token  15 q_stride_head
//    16 k_stride_block  17 k_stride_slot  18 k_stride_head  19 k_stride_dim_outer  20 k_stride_dim_inner  21 k_pack
//       element d of K lies at (d / pack) * dim_outer + (d % pack) * dim_inner; unpacked: pack = Dk, dim_inner = 1
//    22 v_stride_block  23 v_stride_slot  24 v_stride_head  25 v_stride_dim
//    26 out_stride_token  27 out_stride_head  28 lse_stride_token
//    29 block_table_stride  30 num_seqs  31 num_tokens  32 num_kv_heads  33 block_size
//    34 num_splits      splits in the partial arrays, >= 1
//    35 split_tokens    fewest keys worth a split, >= 1
//    36 window          0 none; key j is visible to query position i iff j <= i and i - j < window
//    37 scale_stride    0 one scale per tensor, 1 one per KV head
//    38 prefetch_tokens software prefetch distance, 0 off; rounded up to whole tiles, at most 4 tiles
//    39 isa             PagedtuneIsa or -1 for the best one here
//    40 tile_tokens     keys scored before their values are summed: a multiple of 16 in 16..128
//   float
//    41 softmax_scale   42 soft_cap (0 none; score = cap * tanh(score / cap))
//   Query token t of a sequence of context L with n query tokens is at position L - n + t. Rows without a visible
//   key give O = 0, LSE = -inf (or the sink). Of v visible keys min(num_splits, max(1, ceil(v / split_tokens)))
//   splits are used, with boundaries at multiples of 16 keys from the first visible one; the other splits, like those
//   left empty by this rounding, hold O = 0, LSE = -inf. Partials are normalised per split (v_scale applied, sink not).
//   The same bits come out for any num_threads and any batch around a sequence.
//
// ---- pagedtune_cpu_merge (attention.cpp): combines the partials of num_splits >= 1
//   pointers  0 partial_out  1 partial_lse  2 sinks or null  3 query_start_loc  4 out (q dtype)  5 lse or null
//   int64     6 out_stride_token  7 out_stride_head  8 lse_stride_token  9 num_seqs  10 num_tokens
//             11 num_q_heads  12 num_splits
//
// ---- pagedtune_kv_write (cache_ops.cpp): dtype conversion rounds to nearest even; NaN stays NaN
//   pointers  0 k [num_tokens, Hkv, Dk] unit stride in Dk  1 v [num_tokens, Hkv, Dv]  2 k_cache  3 v_cache
//             4 slot_mapping int64 [num_tokens]: block * block_size + slot; negative: skipped; a slot past the pool:
//               error, nothing written  5 k_scale  6 v_scale (null, or stored = x / scale)
//   int64     7 k_stride_token  8 k_stride_head  9 v_stride_token  10 v_stride_head
//             11..16 k_cache strides (block, slot, head, dim_outer, dim_inner, pack)
//             17..20 v_cache strides (block, slot, head, dim)
//             21 num_tokens  22 num_kv_heads  23 block_size  24 num_blocks  25 head_dim_k  26 head_dim_v
//             27 src_dtype  28 kv_dtype  29 scale_stride
//   Two tokens with one slot: undefined which of them stays (with one thread the later one).
//
// ---- pagedtune_copy_blocks (cache_ops.cpp)
//   pointers  0 k_cache  1 v_cache  2 block_pairs int64 [num_pairs, 2] (source, destination); a pair with a negative
//             id is skipped; ids past the pool, a destination named twice, or one that is another pair's source: error
//   int64     3..8 k_cache strides  9..12 v_cache strides  13 num_pairs  14 num_kv_heads  15 block_size
//             16 num_blocks  17 head_dim_k  18 head_dim_v  19 kv_dtype
//
// ---- pagedtune_gather_kv (cache_ops.cpp)
//   pointers  0 k_cache  1 v_cache  2 block_table int32  3 context_lens int32 [num_seqs]
//             4 out_start int32 [num_seqs]: first output row of each sequence  5 k_scale  6 v_scale (or null)
//             7 k_out [total_tokens, Hkv, Dk]  8 v_out [total_tokens, Hkv, Dv]: unit stride in D, head stride D
//   int64     9..14 k_cache strides  15..18 v_cache strides  19 k_out_stride_token  20 v_out_stride_token
//             21 block_table_stride  22 num_seqs  23 num_kv_heads  24 block_size  25 num_blocks  26 head_dim_k
//             27 head_dim_v  28 kv_dtype  29 out_dtype (kv_dtype with null scales: bits are copied; 0: fp32, scales
//             applied)  30 scale_stride
//   A live block-table entry outside 0..num_blocks-1: error, nothing written.
//
// ---- pagedtune_pack_blocks, pagedtune_unpack_blocks (swap_ops.cpp): blocks to the rows of a staging buffer, and back
//   pointers  0 k_cache  1 v_cache  2 block_ids int64 [num_listed]: a negative id is skipped; an id past the pool, or one
//             listed twice to be unpacked: error, nothing written  3 staging [num_listed, elements of K, then of V]
//   int64     4..7 k_cache strides (block, and runs a, b, c)  8..11 a K block as a x b x c runs of so many elements
//             12..19 likewise v_cache  20 staging_stride_row  21 num_listed  22 num_blocks  23 bytes of an element
#pragma once

#include <cstdint>

#define PT_EXPORT extern "C" __attribute__((visibility("default")))

struct PagedtuneLaunch {
    int64_t grid[3];      // {num_tokens, num_kv_heads, num_splits} or {1, 1, 1}: informative, not read
    int32_t num_threads;  // threads that share the work, the caller included; < 1 counts as 1
    int32_t reserved;
};

enum PagedtuneStatus : int32_t {
    PT_OK = 0,
    PT_BAD_ARGUMENT = 1,      // null pointer, non-positive count or stride that cannot be
    PT_BAD_ISA = 2,           // forced path not in this library or not on this CPU
    PT_BAD_SLOT = 3,          // slot mapping names a slot past the pool
    PT_BAD_BLOCK = 4,         // block id outside the pool
    PT_BAD_PAIRS = 5,         // block pairs depend on each other
    PT_BAD_DTYPE = 6,         // dtype code or combination not known
    PT_NO_MEMORY = 7,         // scratch or threads could not be had
    PT_BAD_IDS = 8,           // a block is listed twice
};

enum PagedtuneIsa : int32_t { PT_ISA_PORTABLE = 0, PT_ISA_AVX2 = 1, PT_ISA_AVX512 = 2, PT_ISA_TEST_WIDE = 9 };

PT_EXPORT const char* pagedtune_error(int32_t status);
PT_EXPORT int32_t pagedtune_isa();
PT_EXPORT const char* pagedtune_isa_name(int32_t isa);

PT_EXPORT int32_t pagedtune_cpu_split(const PagedtuneLaunch* launch, void* const* params);
PT_EXPORT int32_t pagedtune_cpu_merge(const PagedtuneLaunch* launch, void* const* params);
PT_EXPORT int32_t pagedtune_kv_write(const PagedtuneLaunch* launch, void* const* params);
PT_EXPORT int32_t pagedtune_copy_blocks(const PagedtuneLaunch* launch, void* const* params);
PT_EXPORT int32_t pagedtune_gather_kv(const PagedtuneLaunch* launch, void* const* params);
PT_EXPORT int32_t pagedtune_pack_blocks(const PagedtuneLaunch* launch, void* const* params);
PT_EXPORT int32_t pagedtune_unpack_blocks(const PagedtuneLaunch* launch, void* const* params);
