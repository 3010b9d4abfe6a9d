// Packing of KV blocks into a staging buffer and back, on the CPU. Interface: pagedtune_cpu.h.
#include "pagedtune_cpu.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#include "common.h"
#include "pool.h"

namespace pagedtune {
namespace {

// A pool whose blocks are size[0] x size[1] x size[2] runs of `run` adjacent elements; strides in elements.
struct BlockPool {
    char* base;
    int64_t block, stride[3], size[3], run;

    int64_t elements() const { return size[0] * size[1] * size[2] * run; }
    bool valid() const { return base && run >= 1 && size[0] >= 1 && size[1] >= 1 && size[2] >= 1; }
    // Innermost runs that lie one behind the other become one.
    void join_runs() {
        for (int d = 2; d >= 0 && (size[d] == 1 || stride[d] == run); --d) run *= size[d], size[d] = 1;
    }
};

struct MoveArgs {
    BlockPool k, v;
    const int64_t* ids;
    char* staging;
    int64_t row, bytes, k_elements;
    bool pack;
};

void move_block(const MoveArgs& a, const BlockPool& pool, int64_t id, char* place) {
    const int64_t bytes = pool.run * a.bytes;
    for (int64_t i = 0; i < pool.size[0]; ++i)
        for (int64_t j = 0; j < pool.size[1]; ++j)
            for (int64_t k = 0; k < pool.size[2]; ++k, place += bytes) {
                const int64_t at = id * pool.block + i * pool.stride[0] + j * pool.stride[1] + k * pool.stride[2];
                char* const in_pool = pool.base + at * a.bytes;
                std::memcpy(a.pack ? place : in_pool, a.pack ? in_pool : place, bytes);
            }
}

void move_body(void* context, Claims& claims) {
    const MoveArgs& a = *static_cast<const MoveArgs*>(context);
    for (int64_t item = claims.next(false); item >= 0; item = claims.next(false)) {
        const int64_t listed = item / 2, id = a.ids[listed];
        if (id < 0) continue;
        char* const place = a.staging + listed * a.row * a.bytes;
        if (item % 2 == 0) move_block(a, a.k, id, place);
        else move_block(a, a.v, id, place + a.k_elements * a.bytes);
    }
}

int32_t check_ids(const MoveArgs& a, int64_t count, int64_t num_blocks) {
    std::vector<int64_t> ids;
    std::copy_if(a.ids, a.ids + count, std::back_inserter(ids), [](int64_t id) { return id >= 0; });
    std::sort(ids.begin(), ids.end());
    if (!ids.empty() && ids.back() >= num_blocks) return PT_BAD_BLOCK;
    const bool twice = std::adjacent_find(ids.begin(), ids.end()) != ids.end();
    return twice && !a.pack ? PT_BAD_IDS : PT_OK;
}

void read_pool(Params& p, BlockPool& pool) {
    p.integers(pool.block, pool.stride[0], pool.stride[1], pool.stride[2], pool.size[0], pool.size[1], pool.size[2],
               pool.run);
}

int32_t move_blocks(bool pack, const PagedtuneLaunch* launch, void* const* params) {
    MoveArgs a;
    int64_t num_listed, num_blocks;
    Params p(params);
    p.pointers(a.k.base, a.v.base, a.ids, a.staging);
    read_pool(p, a.k), read_pool(p, a.v);
    p.integers(a.row, num_listed, num_blocks, a.bytes);
    a.pack = pack;
    if (num_listed <= 0) return PT_OK;
    if (!a.k.valid() || !a.v.valid() || !a.ids || !a.staging) return PT_BAD_ARGUMENT;
    if (a.bytes < 1 || num_listed > INT32_MAX / 2) return PT_BAD_ARGUMENT;
    a.k_elements = a.k.elements();
    a.k.join_runs(), a.v.join_runs();
    const int32_t status = check_ids(a, num_listed, num_blocks);
    if (status != PT_OK) return status;
    return parallel(move_body, &a, 2 * num_listed, launch->num_threads);
}

}  // namespace
}  // namespace pagedtune

PT_EXPORT int32_t pagedtune_pack_blocks(const PagedtuneLaunch* launch, void* const* params) {
    return pagedtune::move_blocks(true, launch, params);
}

PT_EXPORT int32_t pagedtune_unpack_blocks(const PagedtuneLaunch* launch, void* const* params) {
    return pagedtune::move_blocks(false, launch, params);
}
