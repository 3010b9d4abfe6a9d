// The execution core of the virtual GPU: interface for ctypes, and every handler but those of integers.cpp. Parts by topic
// in the headers.
#include "host.h"
#include "schedule.h"

namespace vgpu {
std::unordered_map<std::string, Handler>& registry() { static std::unordered_map<std::string, Handler> r; return r; }
}  // namespace vgpu

#define VGPU_API extern "C" __attribute__((visibility("default")))
using namespace vgpu;

// Names of all handlers, one per line; returns the length, writes at most `size` bytes.
VGPU_API i64 vgpu_handlers(char* out, i64 size) {
    std::vector<std::string> names;
    for (const auto& [key, handler] : registry()) names.push_back(key);
    std::sort(names.begin(), names.end());
    std::string text;
    for (const std::string& n : names) text += n + "\n";
    if (out && size > 0) std::memcpy(out, text.data(), size_t(std::min(size, i64(text.size()))));
    return i64(text.size());
}

// Replaces `key` (an index into `keys`, names ended by newlines) of every instruction by its handler.
// Returns -1, or the index of the first instruction whose name is unknown.
VGPU_API i32 vgpu_link(Instr* code, i32 n, const char* keys) {
    std::vector<Handler> handlers;
    for (const char* at = keys; *at;) {
        const char* end = std::strchr(at, '\n');
        const auto found = registry().find(std::string(at, end));
        handlers.push_back(found == registry().end() ? nullptr : found->second);
        at = end + 1;
    }
    for (i32 k = 0; k < n; ++k) if (!handlers[size_t(code[k].key)]) return k;
    for (i32 k = 0; k < n; ++k) code[k].fn = handlers[size_t(code[k].key)];
    return -1;
}

// Runs a grid. Writes up to `max_faults` faults and one SiteCounters per instruction; returns the number of faults.
VGPU_API i32 vgpu_run(const Instr* code, i32 num_instrs, const LaunchArgs* args, Fault* faults, SiteCounters* sites, u64* totals) {
    Launch launch;
    launch.args = *args;
    launch.code = code;
    launch.num_instrs = num_instrs;
    launch.next_cta = 0;
    launch.stop = false;
    launch.num_ctas = i64(args->grid[0]) * args->grid[1] * args->grid[2];
    launch.records.resize(size_t(args->num_allocs));
    launch.readers.resize(size_t(args->num_allocs));
    launch.record_locks = std::vector<std::atomic_flag>(size_t(args->num_allocs));
    for (i32 k = 0; k < args->num_allocs; ++k) {
        const Alloc& a = args->allocs[k];
        launch.record_locks[size_t(k)].clear();
        if (args->options.check_races && a.access != IN && a.access != CONSTANT && !a.freed)
            launch.records[size_t(a.index)].reset(new GlobalRecords[size_t(a.size / u64(a.granule) + 1)]());
    }
    const i32 count = std::max(1, args->options.num_threads);
    std::vector<Worker> workers(static_cast<size_t>(count));
    for (Worker& w : workers) { w.sites.resize(size_t(num_instrs)); w.site_alloc.assign(size_t(num_instrs), -1); }
    std::vector<std::thread> threads;
    for (i32 k = 1; k < count; ++k) threads.emplace_back([&launch, &workers, k] { run_grid(launch, workers[size_t(k)]); });
    run_grid(launch, workers[0]);
    for (std::thread& t : threads) t.join();
    for (const Worker& w : workers) {
        totals[0] += w.bar_count;
        totals[1] = std::max(totals[1], w.most_flying); totals[2] += w.flying_area; totals[3] += w.instructions;
        totals[4] += w.benign;
        totals[5] = std::max(totals[5], w.busiest);
        for (i32 k = 0; k < num_instrs; ++k) {
            const SiteCounters& s = w.sites[size_t(k)];
            sites[k].executed += s.executed; sites[k].lanes += s.lanes; sites[k].sectors += s.sectors;
            sites[k].lines += s.lines; sites[k].bytes += s.bytes; sites[k].conflicts += s.conflicts;
            sites[k].flight += s.flight;
            if (w.site_alloc[size_t(k)] >= 0) sites[k].alloc = u64(w.site_alloc[size_t(k)]) + 1;
        }
    }
    const i32 n = std::min(i32(launch.faults.size()), args->options.max_faults);
    for (i32 k = 0; k < n; ++k) faults[k] = launch.faults[size_t(k)];
    return n;
}
