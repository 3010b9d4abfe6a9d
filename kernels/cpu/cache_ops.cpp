// Cache operations on the CPU: KV write by slot mapping, block copies, gather. Interface: pagedtune_cpu.h.
#include "pagedtune_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "common.h"
#include "pool.h"

namespace pagedtune {
namespace {

namespace portable {
#define PT_W 4
#define PT_F16C 0
#define PT_TARGET_ATTR
#include "vec.h"
#include "undef.h"
}  // namespace portable
using portable::Element;

constexpr int MAX_DIM = 256;
constexpr int64_t GATHER_TOKENS = 64;  // per work item

int64_t bytes_of(int64_t dtype) { return dtype == 0 ? 4 : 2; }
bool known(int64_t dtype) { return dtype >= 0 && dtype <= 2; }

// One cache, K or V (V is the case pack = dim). Strides in elements, `bytes` per element.
struct CacheView {
    char* base;
    int64_t block, slot, head, outer, inner, pack, dim, bytes;

    bool contiguous() const { return inner == 1 && (pack >= dim || outer == pack); }
    char* row(int64_t block_id, int64_t slot_id, int64_t head_id) const {
        return base + (block_id * block + slot_id * slot + head_id * head) * bytes;
    }
    int64_t element(int64_t d) const { return (d / pack * outer + d % pack * inner) * bytes; }
};

void scatter_row(const CacheView& pool, const char* from, char* to) {
    if (pool.contiguous()) {
        std::memcpy(to, from, pool.dim * pool.bytes);
        return;
    }
    for (int64_t d = 0; d < pool.dim; ++d) std::memcpy(to + pool.element(d), from + d * pool.bytes, pool.bytes);
}

// The row, where it lies if it is contiguous, else copied into `room`.
const char* gather_row(const CacheView& pool, const char* from, char* room) {
    if (pool.contiguous()) return from;
    for (int64_t d = 0; d < pool.dim; ++d) std::memcpy(room + d * pool.bytes, from + pool.element(d), pool.bytes);
    return room;
}

void widen(int64_t dtype, const char* from, int64_t count, float* to) {
    const int n = static_cast<int>(count);
    switch (dtype) {
        case 0: std::memcpy(to, from, count * sizeof(float)); break;
        case 1: portable::widen_row<Element<1>>(reinterpret_cast<const uint16_t*>(from), n, to); break;
        default: portable::widen_row<Element<2>>(reinterpret_cast<const uint16_t*>(from), n, to); break;
    }
}
void narrow(int64_t dtype, const float* from, int64_t count, char* to) {
    const int n = static_cast<int>(count);
    switch (dtype) {
        case 0: std::memcpy(to, from, count * sizeof(float)); break;
        case 1: portable::narrow_row<Element<1>>(from, n, reinterpret_cast<uint16_t*>(to)); break;
        default: portable::narrow_row<Element<2>>(from, n, reinterpret_cast<uint16_t*>(to)); break;
    }
}

struct Geometry {
    int64_t num_kv_heads, block_size, num_blocks, head_dim_k, head_dim_v;

    bool valid() const {
        return num_kv_heads >= 1 && block_size >= 1 && num_blocks >= 0 && head_dim_k >= 1 && head_dim_k <= MAX_DIM &&
               head_dim_v >= 1 && head_dim_v <= MAX_DIM;
    }
};

void read_strides(Params& p, CacheView& k, CacheView& v) {
    p.integers(k.block, k.slot, k.head, k.outer, k.inner, k.pack, v.block, v.slot, v.head, v.inner);
}
void set_shape(const Geometry& g, int64_t dtype, CacheView& k, CacheView& v) {
    k.dim = g.head_dim_k, v.dim = v.pack = g.head_dim_v, v.outer = 0;
    k.bytes = v.bytes = bytes_of(dtype);
}

// ---- KV write
struct Source {
    const char* base;
    int64_t token, head;
    const float* scale;
};
struct WriteArgs {
    CacheView k, v;
    Source k_from, v_from;
    const int64_t* slots;
    Geometry geometry;
    int64_t num_tokens, src_dtype, kv_dtype, scale_stride;
};

void write_row(const WriteArgs& a, const CacheView& pool, const Source& from, int64_t token, int64_t head, char* to) {
    const char* row = from.base + (token * from.token + head * from.head) * bytes_of(a.src_dtype);
    alignas(16) char narrowed[MAX_DIM * sizeof(float)];
    if (a.src_dtype != a.kv_dtype || from.scale != nullptr) {
        alignas(16) float wide[MAX_DIM];
        widen(a.src_dtype, row, pool.dim, wide);
        if (from.scale != nullptr) {
            const float scale = from.scale[head * a.scale_stride];
            for (int64_t d = 0; d < pool.dim; ++d) wide[d] /= scale;
        }
        narrow(a.kv_dtype, wide, pool.dim, narrowed);
        row = narrowed;
    }
    scatter_row(pool, row, to);
}

void write_body(void* context, Claims& claims) {
    const WriteArgs& a = *static_cast<const WriteArgs*>(context);
    for (int64_t token = claims.next(false); token >= 0; token = claims.next(false)) {
        if (a.slots[token] < 0) continue;
        const int64_t block = a.slots[token] / a.geometry.block_size, slot = a.slots[token] % a.geometry.block_size;
        for (int64_t head = 0; head < a.geometry.num_kv_heads; ++head) {
            write_row(a, a.k, a.k_from, token, head, a.k.row(block, slot, head));
            write_row(a, a.v, a.v_from, token, head, a.v.row(block, slot, head));
        }
    }
}

// ---- block copies
// The elements of a block as nested runs, merged where one dimension continues the next: a plain block is one run.
struct Runs {
    int64_t size[4], stride[4];
    int count = 0;
};

Runs runs_of(const CacheView& pool, const Geometry& g) {
    const int64_t packs = pool.pack >= pool.dim ? 1 : pool.dim / pool.pack;
    struct Dim { int64_t stride, size; };
    Dim dims[4] = {
        {pool.inner, pool.dim / packs}, {pool.outer, packs}, {pool.slot, g.block_size}, {pool.head, g.num_kv_heads}};
    std::sort(dims, dims + 4, [](const Dim& x, const Dim& y) { return x.stride < y.stride; });
    Runs runs;
    for (const Dim& dim : dims) {
        if (dim.size == 1) continue;
        const int last = runs.count - 1;
        if (last >= 0 && dim.stride == runs.stride[last] * runs.size[last]) {
            runs.size[last] *= dim.size;
            continue;
        }
        runs.size[runs.count] = dim.size, runs.stride[runs.count++] = dim.stride;
    }
    return runs;
}

void copy_runs(const Runs& runs, int level, const char* from, char* to, int64_t bytes) {
    if (level < 0) {
        std::memcpy(to, from, bytes);
        return;
    }
    if (level == 0 && runs.stride[0] == 1) {
        std::memcpy(to, from, runs.size[0] * bytes);
        return;
    }
    for (int64_t i = 0; i < runs.size[level]; ++i) {
        const int64_t at = i * runs.stride[level] * bytes;
        copy_runs(runs, level - 1, from + at, to + at, bytes);
    }
}

struct CopyArgs {
    CacheView k, v;
    Runs k_runs, v_runs;
    const int64_t* pairs;
};

void copy_body(void* context, Claims& claims) {
    const CopyArgs& a = *static_cast<const CopyArgs*>(context);
    for (int64_t item = claims.next(false); item >= 0; item = claims.next(false)) {
        const int64_t from = a.pairs[item / 2 * 2], to = a.pairs[item / 2 * 2 + 1];
        if (from < 0 || to < 0 || from == to) continue;
        const CacheView& pool = item % 2 == 0 ? a.k : a.v;
        const Runs& runs = item % 2 == 0 ? a.k_runs : a.v_runs;
        copy_runs(runs, runs.count - 1, pool.row(from, 0, 0), pool.row(to, 0, 0), pool.bytes);
    }
}

// Copies run in any order, so no pair may depend on another one.
int32_t check_pairs(const int64_t* pairs, int64_t count, int64_t num_blocks) {
    std::vector<int64_t> sources, destinations;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t from = pairs[2 * i], to = pairs[2 * i + 1];
        if (from < 0 || to < 0) continue;
        if (from >= num_blocks || to >= num_blocks) return PT_BAD_BLOCK;
        if (from != to) sources.push_back(from);
        destinations.push_back(to);
    }
    std::sort(sources.begin(), sources.end());
    std::sort(destinations.begin(), destinations.end());
    if (std::adjacent_find(destinations.begin(), destinations.end()) != destinations.end()) return PT_BAD_PAIRS;
    for (const int64_t block : destinations)
        if (std::binary_search(sources.begin(), sources.end(), block)) return PT_BAD_PAIRS;
    return PT_OK;
}

// ---- gather
struct Target {
    char* base;
    int64_t token;
    const float* scale;
};
struct GatherArgs {
    CacheView k, v;
    Target k_to, v_to;
    const int32_t *block_table, *context_lens, *out_start;
    Geometry geometry;
    int64_t block_table_stride, num_seqs, kv_dtype, out_dtype, scale_stride, chunks;
    bool raw;
};

void gather_one(const GatherArgs& a, const CacheView& pool, const Target& to, int64_t block, int64_t slot,
                int64_t out_row) {
    alignas(16) char room[MAX_DIM * sizeof(float)];
    const int64_t out_bytes = bytes_of(a.out_dtype);
    for (int64_t head = 0; head < a.geometry.num_kv_heads; ++head) {
        const char* const row = gather_row(pool, pool.row(block, slot, head), room);
        char* const out = to.base + (out_row * to.token + head * pool.dim) * out_bytes;
        if (a.raw) {
            std::memcpy(out, row, pool.dim * pool.bytes);
            continue;
        }
        float wide[MAX_DIM];
        widen(a.kv_dtype, row, pool.dim, wide);
        if (to.scale != nullptr) {
            const float scale = to.scale[head * a.scale_stride];
            for (int64_t d = 0; d < pool.dim; ++d) wide[d] *= scale;
        }
        std::memcpy(out, wide, pool.dim * sizeof(float));
    }
}

void gather_body(void* context, Claims& claims) {
    const GatherArgs& a = *static_cast<const GatherArgs*>(context);
    for (int64_t item = claims.next(false); item >= 0; item = claims.next(false)) {
        const int64_t sequence = item / a.chunks, first = item % a.chunks * GATHER_TOKENS;
        const int64_t end = std::min<int64_t>(first + GATHER_TOKENS, a.context_lens[sequence]);
        for (int64_t token = first; token < end; ++token) {
            const int64_t block = a.block_table[sequence * a.block_table_stride + token / a.geometry.block_size];
            const int64_t slot = token % a.geometry.block_size, out_row = a.out_start[sequence] + token;
            gather_one(a, a.k, a.k_to, block, slot, out_row);
            gather_one(a, a.v, a.v_to, block, slot, out_row);
        }
    }
}

int32_t check_table(const GatherArgs& a) {
    for (int64_t s = 0; s < a.num_seqs; ++s) {
        const int64_t blocks = (std::max(a.context_lens[s], 0) + a.geometry.block_size - 1) / a.geometry.block_size;
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t block = a.block_table[s * a.block_table_stride + b];
            if (block < 0 || block >= a.geometry.num_blocks) return PT_BAD_BLOCK;
        }
    }
    return PT_OK;
}

}  // namespace
}  // namespace pagedtune

PT_EXPORT int32_t pagedtune_kv_write(const PagedtuneLaunch* launch, void* const* params) {
    using namespace pagedtune;
    WriteArgs a;
    Geometry& g = a.geometry;
    Params p(params);
    p.pointers(a.k_from.base, a.v_from.base, a.k.base, a.v.base, a.slots, a.k_from.scale, a.v_from.scale);
    p.integers(a.k_from.token, a.k_from.head, a.v_from.token, a.v_from.head);
    read_strides(p, a.k, a.v);
    p.integers(a.num_tokens, g.num_kv_heads, g.block_size, g.num_blocks, g.head_dim_k, g.head_dim_v, a.src_dtype,
               a.kv_dtype, a.scale_stride);
    if (a.num_tokens <= 0) return PT_OK;
    if (!known(a.src_dtype) || !known(a.kv_dtype)) return PT_BAD_DTYPE;
    const bool present = a.k_from.base && a.v_from.base && a.k.base && a.v.base && a.slots;
    if (!present || !g.valid() || a.k.pack < 1 || a.num_tokens > INT32_MAX) return PT_BAD_ARGUMENT;
    set_shape(g, a.kv_dtype, a.k, a.v);
    for (int64_t token = 0; token < a.num_tokens; ++token)
        if (a.slots[token] >= g.num_blocks * g.block_size) return PT_BAD_SLOT;
    return parallel(write_body, &a, a.num_tokens, launch->num_threads);
}

PT_EXPORT int32_t pagedtune_copy_blocks(const PagedtuneLaunch* launch, void* const* params) {
    using namespace pagedtune;
    CopyArgs a;
    Geometry g;
    int64_t num_pairs, kv_dtype;
    Params p(params);
    p.pointers(a.k.base, a.v.base, a.pairs);
    read_strides(p, a.k, a.v);
    p.integers(num_pairs, g.num_kv_heads, g.block_size, g.num_blocks, g.head_dim_k, g.head_dim_v, kv_dtype);
    if (num_pairs <= 0) return PT_OK;
    if (!known(kv_dtype)) return PT_BAD_DTYPE;
    const bool present = a.k.base && a.v.base && a.pairs;
    if (!present || !g.valid() || a.k.pack < 1 || num_pairs > INT32_MAX / 2) return PT_BAD_ARGUMENT;
    if (a.k.pack < g.head_dim_k && g.head_dim_k % a.k.pack != 0) return PT_BAD_ARGUMENT;
    set_shape(g, kv_dtype, a.k, a.v);
    a.k_runs = runs_of(a.k, g), a.v_runs = runs_of(a.v, g);
    const int32_t status = check_pairs(a.pairs, num_pairs, g.num_blocks);
    if (status != PT_OK) return status;
    return parallel(copy_body, &a, 2 * num_pairs, launch->num_threads);
}

PT_EXPORT int32_t pagedtune_gather_kv(const PagedtuneLaunch* launch, void* const* params) {
    using namespace pagedtune;
    GatherArgs a;
    Geometry& g = a.geometry;
    Params p(params);
    p.pointers(a.k.base, a.v.base, a.block_table, a.context_lens, a.out_start, a.k_to.scale, a.v_to.scale, a.k_to.base,
               a.v_to.base);
    read_strides(p, a.k, a.v);
    p.integers(a.k_to.token, a.v_to.token, a.block_table_stride, a.num_seqs, g.num_kv_heads, g.block_size, g.num_blocks,
               g.head_dim_k, g.head_dim_v, a.kv_dtype, a.out_dtype, a.scale_stride);
    if (a.num_seqs <= 0) return PT_OK;
    a.raw = a.kv_dtype == a.out_dtype && a.k_to.scale == nullptr && a.v_to.scale == nullptr;
    if (!known(a.kv_dtype) || (!a.raw && a.out_dtype != 0)) return PT_BAD_DTYPE;
    const bool inputs = a.k.base && a.v.base && a.block_table && a.context_lens && a.out_start;
    if (!inputs || !a.k_to.base || !a.v_to.base || !g.valid() || a.k.pack < 1) return PT_BAD_ARGUMENT;
    set_shape(g, a.kv_dtype, a.k, a.v);
    const int64_t longest = std::max(0, *std::max_element(a.context_lens, a.context_lens + a.num_seqs));
    a.chunks = std::max<int64_t>(1, (longest + GATHER_TOKENS - 1) / GATHER_TOKENS);
    if (a.num_seqs > INT32_MAX / a.chunks) return PT_BAD_ARGUMENT;
    const int32_t status = check_table(a);
    if (status != PT_OK) return status;
    return parallel(gather_body, &a, a.num_seqs * a.chunks, launch->num_threads);
}
