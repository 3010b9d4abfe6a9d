// Paged decode attention on the CPU: argument handling, choice of the code path, and the merge of splits.
// Interface and compile-time definitions: pagedtune_cpu.h.
#include "pagedtune_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common.h"
#include "pool.h"

// The header of intrinsics takes longer to read than a path to compile, and only fp16 needs it.
#if defined(__x86_64__) && (PT_Q_DTYPE == 2 || PT_KV_DTYPE == 2)
#include <immintrin.h>
#define PT_USE_F16C 1
#else
#define PT_USE_F16C 0
#endif

// Into the second-level cache: a tile is computed some microseconds after its prefetch.
#define PT_PREFETCH(address) __builtin_prefetch((address), 0, 2)
// Makes the compiler load again through this pointer: keeping what it loaded would cost registers that are not there.
#define PT_FORGET(pointer) asm("" : "+r"(pointer))

namespace pagedtune {
namespace {

constexpr int DK = PT_HEAD_DIM_K, DV = PT_HEAD_DIM_V, GROUP = PT_GROUP, MAX_TILE = 128;
static_assert(DK >= 1 && DK <= 256 && DV >= 1 && DV <= 256, "head dims are 1..256");
static_assert(GROUP >= 1 && GROUP <= 256, "the GQA ratio is 1..256");
static_assert(PT_Q_DTYPE >= 0 && PT_Q_DTYPE <= 2 && PT_KV_DTYPE >= 0 && PT_KV_DTYPE <= 2, "dtypes are 0..2");

struct SplitArgs {
    const void *q, *k, *v;
    const int32_t *block_table, *context_lens, *query_start_loc;
    const float *sinks, *alibi_slopes, *k_scale, *v_scale;
    void* out;
    float *lse, *partial_out, *partial_lse;
    int64_t q_token, q_head;
    int64_t k_block, k_slot, k_head, k_outer, k_inner, k_pack;
    int64_t v_block, v_slot, v_head, v_dim;
    int64_t out_token, out_head, lse_token, block_table_stride;
    int64_t num_seqs, num_tokens, num_kv_heads, block_size, num_splits, split_tokens, window, scale_stride;
    int64_t prefetch_tokens, isa, tile_tokens;
    float softmax_scale, soft_cap;
    bool k_packed;    // the elements of a K row are not contiguous
    int tiles_ahead;  // prefetch distance
};

struct WorkItem {
    int64_t token, sequence, position, begin, end;  // keys begin..end-1
    int32_t head, split;
};

// The sequence that owns a query token, or -1. One query token per sequence, the usual decode batch, needs no search.
int64_t sequence_of(const SplitArgs& args, int64_t token) {
    const int32_t* const starts = args.query_start_loc;
    if (token < args.num_seqs && starts[token] == token && starts[token + 1] == token + 1) return token;
    const int32_t* const past = std::upper_bound(starts, starts + args.num_seqs + 1, token);
    const int64_t sequence = past - starts - 1;
    return sequence < args.num_seqs ? sequence : -1;
}

// Decodes a work item: token-major, then KV head, then split. False if the token belongs to no sequence.
bool locate_item(const SplitArgs& args, int64_t index, WorkItem& item) {
    item.split = static_cast<int32_t>(index % args.num_splits);
    const int64_t row = index / args.num_splits;
    item.head = static_cast<int32_t>(row % args.num_kv_heads);
    item.token = row / args.num_kv_heads;
    item.sequence = sequence_of(args, item.token);
    if (item.sequence < 0) return false;
    const int64_t context = args.context_lens[item.sequence];
    const int64_t query_end = args.query_start_loc[item.sequence + 1];
    item.position = context - (query_end - item.token);
    const int64_t high = std::max<int64_t>(0, item.position + 1);
    const int64_t low = args.window > 0 ? std::max<int64_t>(0, high - args.window) : 0;
    const int64_t visible = high - low;
    const int64_t useful = std::max<int64_t>(1, (visible + args.split_tokens - 1) / args.split_tokens);
    const int64_t splits = std::min(args.num_splits, useful);
    const int64_t share = ((visible + splits - 1) / splits + 15) / 16 * 16;
    item.begin = std::min(high, low + item.split * share);
    item.end = item.split < splits ? std::min(high, item.begin + share) : item.begin;
    return true;
}

struct Normaliser {
    float factor, lse;
    bool empty;  // the output is zero whatever was accumulated
};

// From a running maximum and a sum of exp(score - maximum), with a sink's logit joined if there is one. A maximum
// knows no NaN, the sum does.
Normaliser normalise(float maximum, float sum, const float* sink) {
    if (std::isnan(sum)) return {sum, sum, false};
    if (sink == nullptr || *sink == -INFINITY) {
        if (maximum == -INFINITY) return {0.0f, -INFINITY, true};
        return {1.0f / sum, static_cast<float>(maximum + std::log(static_cast<double>(sum))), false};
    }
    if (maximum == -INFINITY || *sink == INFINITY) return {0.0f, *sink, true};
    const double top = std::max(maximum, *sink);
    const double total = sum * std::exp(maximum - top) + std::exp(*sink - top);
    return {static_cast<float>(std::exp(maximum - top) / total), static_cast<float>(top + std::log(total)), false};
}

namespace portable {
#define PT_W 4
#define PT_F16C 0
#define PT_TARGET_ATTR
#include "vec.h"
#include "attention_impl.h"
#include "undef.h"
}  // namespace portable

#if defined(__x86_64__)
namespace avx2 {
#define PT_W 8
#define PT_F16C PT_USE_F16C
#define PT_TARGET_ATTR __attribute__((target("avx2,fma,f16c")))
#include "vec.h"
#include "attention_impl.h"
#include "undef.h"
}  // namespace avx2

namespace avx512 {
#define PT_W 16
#define PT_F16C PT_USE_F16C
#define PT_TARGET_ATTR __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#include "vec.h"
#include "attention_impl.h"
#include "undef.h"
}  // namespace avx512

#if defined(PT_TEST_WIDE)
namespace test_wide {
#define PT_W 16
#define PT_F16C 0
#define PT_TARGET_ATTR __attribute__((target("avx2,fma,f16c")))
#include "vec.h"
#include "attention_impl.h"
#include "undef.h"
}  // namespace test_wide
#endif
#endif

Body path_of(int64_t isa) {
    const int32_t best = best_isa();
    switch (isa == -1 ? best : isa) {
        case PT_ISA_PORTABLE: return portable::split_body;
#if defined(__x86_64__)
        case PT_ISA_AVX2: return best >= PT_ISA_AVX2 ? avx2::split_body : nullptr;
        case PT_ISA_AVX512: return best >= PT_ISA_AVX512 ? avx512::split_body : nullptr;
#if defined(PT_TEST_WIDE)
        case PT_ISA_TEST_WIDE: return best >= PT_ISA_AVX2 ? test_wide::split_body : nullptr;
#endif
#endif
        default: return nullptr;
    }
}

SplitArgs unpack_split(void* const* params) {
    Params p(params);
    SplitArgs a;
    p.pointers(a.q, a.k, a.v, a.block_table, a.context_lens, a.query_start_loc, a.sinks, a.alibi_slopes, a.k_scale,
               a.v_scale, a.out, a.lse, a.partial_out, a.partial_lse);
    p.integers(a.q_token, a.q_head, a.k_block, a.k_slot, a.k_head, a.k_outer, a.k_inner, a.k_pack, a.v_block, a.v_slot,
               a.v_head, a.v_dim, a.out_token, a.out_head, a.lse_token, a.block_table_stride, a.num_seqs, a.num_tokens,
               a.num_kv_heads, a.block_size, a.num_splits, a.split_tokens, a.window, a.scale_stride, a.prefetch_tokens,
               a.isa, a.tile_tokens);
    p.floats(a.softmax_scale, a.soft_cap);
    a.k_packed = a.k_inner != 1 || (a.k_pack < DK && a.k_outer != a.k_pack);
    return a;
}

bool valid_split(const SplitArgs& a) {
    const bool needed = a.q && a.k && a.v && a.block_table && a.context_lens && a.query_start_loc;
    const bool counts = a.num_kv_heads >= 1 && a.block_size >= 1 && a.num_splits >= 1 && a.split_tokens >= 1 &&
                        a.window >= 0 && a.k_pack >= 1 && a.num_seqs >= 0 && a.prefetch_tokens >= 0;
    const bool tile = a.tile_tokens >= 16 && a.tile_tokens <= MAX_TILE && a.tile_tokens % 16 == 0;
    const bool results = a.num_splits == 1 ? a.out != nullptr : a.partial_out && a.partial_lse;
    return needed && counts && tile && results && a.num_tokens * a.num_kv_heads <= INT32_MAX / a.num_splits;
}

struct MergeArgs {
    const float *partial_out, *partial_lse, *sinks;
    const int32_t* query_start_loc;
    void* out;
    float* lse;
    int64_t out_token, out_head, lse_token, num_seqs, num_tokens, num_q_heads, num_splits;
};

void merge_row(const MergeArgs& a, int64_t token, int64_t head) {
    const int64_t first = (token * a.num_q_heads + head) * a.num_splits;
    const float* const lse = a.partial_lse + first;
    float top = -INFINITY, sum = 0.0f, row[DV + 8] = {};
    for (int64_t i = 0; i < a.num_splits; ++i) top = std::max(top, lse[i]);
    for (int64_t i = 0; i < a.num_splits; ++i) {
        if (lse[i] == -INFINITY) continue;  // an empty split, whatever its output holds
        const float weight = static_cast<float>(std::exp(static_cast<double>(lse[i]) - top));
        const float* const part = a.partial_out + (first + i) * DV;
        sum += weight;
        for (int d = 0; d < DV; ++d) row[d] += weight * part[d];
    }
    const Normaliser norm = normalise(top, sum, a.sinks != nullptr ? a.sinks + head : nullptr);
    for (int d = 0; d < DV; ++d) row[d] = norm.empty ? 0.0f : row[d] * norm.factor;
    using Out = portable::Qo;
    portable::narrow_row<Out>(row, DV, static_cast<Out::Stored*>(a.out) + token * a.out_token + head * a.out_head);
    if (a.lse != nullptr) a.lse[token * a.lse_token + head] = norm.lse;
}

// Items are runs of MERGE_ROWS rows: one row is too little work to claim.
constexpr int64_t MERGE_ROWS = 8;

void merge_body(void* context, Claims& claims) {
    const MergeArgs& a = *static_cast<const MergeArgs*>(context);
    for (int64_t item = claims.next(false); item >= 0; item = claims.next(false)) {
        const int64_t end = std::min((item + 1) * MERGE_ROWS, a.num_tokens * a.num_q_heads);
        for (int64_t row = item * MERGE_ROWS; row < end; ++row) merge_row(a, row / a.num_q_heads, row % a.num_q_heads);
    }
}

}  // namespace
}  // namespace pagedtune

PT_EXPORT int32_t pagedtune_isa() { return pagedtune::best_isa(); }

PT_EXPORT int32_t pagedtune_cpu_split(const PagedtuneLaunch* launch, void* const* params) {
    using namespace pagedtune;
    SplitArgs args = unpack_split(params);
    if (args.num_tokens <= 0) return PT_OK;
    if (!valid_split(args)) return PT_BAD_ARGUMENT;
    const int64_t tiles = (args.prefetch_tokens + args.tile_tokens - 1) / args.tile_tokens;
    args.tiles_ahead = static_cast<int>(std::min<int64_t>(tiles, 4));
    const Body path = path_of(args.isa);
    if (path == nullptr) return PT_BAD_ISA;
    return parallel(path, &args, args.num_tokens * args.num_kv_heads * args.num_splits, launch->num_threads);
}

PT_EXPORT int32_t pagedtune_cpu_merge(const PagedtuneLaunch* launch, void* const* params) {
    using namespace pagedtune;
    Params p(params);
    MergeArgs a;
    p.pointers(a.partial_out, a.partial_lse, a.sinks, a.query_start_loc, a.out, a.lse);
    p.integers(a.out_token, a.out_head, a.lse_token, a.num_seqs, a.num_tokens, a.num_q_heads, a.num_splits);
    const bool needed = a.partial_out && a.partial_lse && a.query_start_loc && a.out;
    if (!needed || a.num_q_heads < 1 || a.num_splits < 1 || a.num_seqs < 0) return PT_BAD_ARGUMENT;
    a.num_tokens = std::min<int64_t>(a.num_tokens, a.query_start_loc[a.num_seqs]);  // the rest is padding
    if (a.num_tokens <= 0) return PT_OK;
    const int64_t rows = a.num_tokens * a.num_q_heads;
    if (rows > INT32_MAX) return PT_BAD_ARGUMENT;
    // Below about ten microseconds of work other threads cost more than they bring.
    const int threads = rows * a.num_splits * DV < 65536 ? 1 : launch->num_threads;
    return parallel(merge_body, &a, (rows + MERGE_ROWS - 1) / MERGE_ROWS, threads);
}
