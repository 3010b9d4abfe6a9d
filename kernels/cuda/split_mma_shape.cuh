// What the parts of the split kernel share: its compile-time shape, its arguments, and which rows a block works on.
//
// Compile-time definitions:
//   PT_HEAD_DIM_K, PT_HEAD_DIM_V   elements of a head
//   PT_GROUP                       query heads of a KV head
//   PT_ROW_TILES                   N tiles of 8 query rows
//   PT_BLOCK_SIZE                  tokens of a KV block
//   PT_WARPS, PT_WARP_TOKENS, PT_STAGES
//   PT_Q_DTYPE, PT_KV_DTYPE        codes of types.cuh
//   PT_WINDOW                      keys that a query sees, 0 for all
//   PT_HAS_CAP, PT_HAS_SINKS, PT_HAS_ALIBI
//   PT_HAS_SCALES, PT_SCALE_STRIDE of the pool or of each head; PT_TOKEN_SCALES: of each token and head
//   PT_MERGE                       0 one split; 1 a second kernel merges; 2 the last block of a row merges; 3 a second
//                                  kernel merges that is launched while this one runs
//   PT_SHARED_BYTES                dynamic shared memory that the host asks for
#pragma once
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
// A stage: keys, values, and of each token the scales of both where it has them.
constexpr int V_START = WARP_TOKENS * KTile::PITCH, K_SCALES = V_START + WARP_TOKENS * VTile::PITCH;
constexpr int V_SCALES = K_SCALES + 4 * WARP_TOKENS, STAGE_BYTES = K_SCALES + (PT_TOKEN_SCALES ? 8 * WARP_TOKENS : 0);
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

#include "split_rows.cuh"
