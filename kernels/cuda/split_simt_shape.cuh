// What the parts of the plain-core split kernel share: its compile-time shape.
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
#pragma once
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
