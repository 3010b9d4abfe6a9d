// Data of a launch: the decoded program, memory, CTAs and warps. Plain C layouts are shared with ctypes (`native.py`).
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace vgpu {

using u8 = uint8_t; using u16 = uint16_t; using u32 = uint32_t; using u64 = uint64_t;
using i8 = int8_t; using i16 = int16_t; using i32 = int32_t; using i64 = int64_t;

constexpr u32 FULL = 0xffffffffu;
constexpr int UNIT = 64;  // bytes; registers are rows of 32 lanes and start at multiples of it
constexpr int MAX_OPS = 16, NUM_P = 8;

struct Ctx; struct Warp; struct Instr;
using Handler = void (*)(Ctx&, Warp&, const Instr&, u32);

// One decoded instruction. `ops` are register rows in units; meaning of `p`, `imm` by handler.
struct Instr {
    union { Handler fn; i64 key; };
    i32 guard;
    i16 guard_negated, waits;   // waits: reads what a global load has written
    i32 num_ops, target;
    i32 ops[MAX_OPS];
    i32 p[NUM_P];
    i64 imm;
    i32 line, cls;
};
static_assert(sizeof(Instr) == 136, "mirrored by the numpy dtype in program.py");

enum Access : i32 { IN = 0, OUT = 1, INOUT = 2, WORKSPACE = 3, CONSTANT = 4 };

// One allocation of the virtual address space. Bitmaps hold one bit per byte of memory, or are null.
struct Alloc {
    u64 base, size;
    u8* host;
    u8* init;      // null: all of it is initialised
    u8* gaps;      // bytes inside that belong to no element: an access to them is out of bounds; may be null
    u8* read;      // bytes that were read
    u8* written;   // bytes that were written
    i32 access, granule, freed, index;
    // Bytes that the previous kernel wrote and read, where this one may start before it has ended; null elsewhere.
    u8 *pending_written, *pending_read;
};

enum FaultKind : i32 {
    OUT_OF_BOUNDS = 1, MISALIGNED, USE_AFTER_FREE, UNINIT_BRANCH, UNINIT_ADDRESS, UNINIT_OUTPUT, RACE_SHARED, RACE_GLOBAL,
    DIVERGENT_BARRIER, BARRIER_MISUSE, DEADLOCK, ENDLESS_LOOP, ASYNC_UNWAITED, MUTATED_INPUT, TRAP, DIVERGENT_SYNC, UNINIT_OPERAND,
    PROGRAMMATIC_ORDER = 19,
};

struct Fault {
    i32 kind, pc, thread, other_thread;
    i64 cta, other_cta;
    u64 address;
    i32 alloc, size, space, other_pc;
};

// flight: bytes asked for x instructions that the block issued until they were waited for.
struct SiteCounters { u64 executed, lanes, sectors, lines, bytes, conflicts, flight, alloc; };  // alloc: from 1, 0 for none
struct FlyingLoad { i32 load; u32 bytes; u64 since; };

struct Options {
    i32 num_threads, reverse_warps, reverse_ctas, async_early, check_races, max_faults, quantum, cooperative;
    u64 max_warp_instructions;
    i32 shuffle_seed, strict_stores;
};

struct LaunchArgs {
    i32 grid[3], block[3];
    i32 dynamic_shared, static_shared, local_bytes, num_units, num_consts, param_bytes;
    const u8* params;
    const i32* const_units;     // [num_consts]: where each constant row goes
    const i32* const_widths;    // bytes per lane; 0 is a predicate
    const u64* const_values;
    const i32* special_units;   // by SpecialId, -1 where unused
    Alloc* allocs;              // sorted by base
    i32 num_allocs, reserved;
    Options options;
    const i32* use_starts;      // [num_instrs + 1]: by instruction with `waits`, its part of `uses`
    const i32* uses;            // global loads whose result it is, or may be, the first to read
};

enum SpecialId { TID_X, TID_Y, TID_Z, NTID_X, NTID_Y, NTID_Z, CTAID_X, CTAID_Y, CTAID_Z, NCTAID_X, NCTAID_Y, NCTAID_Z,
    LANEID, WARPID, NWARPID, SMID, NSMID, GRIDID, MASK_EQ, MASK_LE, MASK_LT, MASK_GE, MASK_GT, DYN_SMEM, TOTAL_SMEM,
    ZERO, ONE, NUM_SPECIALS };

// ---- addresses
enum Space : i32 { GENERIC = 0, GLOBAL = 1, SHARED = 2, LOCAL = 3 };
constexpr u64 SHARED_WINDOW = 0x7f0000000000ull, LOCAL_WINDOW = 0x7e0000000000ull, WINDOW_BYTES = 1ull << 32;
constexpr u32 SHARED_START = 1024, LOCAL_START = 256;  // below these nothing is mapped: null pointers fault

// ---- warps
enum class SplitState : u8 { RUN, CONVERGE, BARRIER, WARP_SYNC };
struct Split { i32 pc; u32 mask; SplitState state; i32 barrier; u32 sync_mask; i32 reduce, dst; };

struct AsyncCopy { u32 dst; u8 size, src_size, lane; i32 pc; u64 src; i64 group; u64 since; u8 data[16]; u16 valid; };

using Known = std::map<u64, std::vector<u32>>;  // by CTA: time of each of its warps

struct Warp {
    u8* regs;
    u32* bad;   // by unit: lanes whose value has an invalid byte
    u8* inv;    // by unit and lane: invalid bytes, one bit each; meaningful for lanes in `bad`
    i32 pc, next, index;
    u32 active, live;
    bool stop;                // the handler ended this run of the current split
    bool yield;
    i32 current;              // index of the running split
    i32 back_edges, forced;   // forced: instructions left of a turn that fairness gave to this split
    u64 executed;
    std::vector<Split> splits;
    std::vector<AsyncCopy> copies;   // in issue order
    i64 groups[32];                  // cp.async groups committed so far, by lane
    u32 carry, carry_bad = FULL;     // CC.CF by lane; whether it depends on uninitialised data
    std::vector<u32> fenced;         // by warp: what the fences before now have made ready to be released; empty: none
    std::vector<u32> fenced_cta;     // the same of fences of any scope: for the threads of this CTA
    std::vector<u64> observed;       // synchronising variables read since the last fence, which acquires from them
    u32 waited;                      // lanes for which griddepcontrol.wait has ordered the previous kernel
    std::shared_ptr<const Known> known;  // accesses of other CTAs that happened before now
    std::vector<u32> seen;           // race detection: accesses of each warp up to this time happened before
    u32 seen_by_all;                 // the least of `seen`
    std::vector<u32> lanes_seen;     // the same within the warp, by lane and other lane, where part of it has synchronised
    std::vector<FlyingLoad> loads;   // global loads in flight
};

struct Barrier { i32 expected, arrived, pc; std::vector<u32> clock; i32 count; bool all, any; };

struct WordRecord { u32 writer_time, reader_time, reader_warps; u16 writer; u8 reader_lane, flags; i32 writer_pc, reader_pc; };

struct GlobalRecord { u32 cta; u32 time; u16 thread; u16 flags; i32 pc; };
struct GlobalRecords { GlobalRecord write, read; u32 more; };  // more: 1 + index of the set of further readers, or 0
using Readers = std::vector<GlobalRecord>;
struct ReaderSets { std::vector<Readers> sets; std::vector<u32> free; };

struct Cta {
    i64 linear;
    i32 num_threads, num_warps;
    std::vector<Warp> warps;
    std::vector<u8> memory;       // register files of all warps
    std::vector<u32> bad;
    std::vector<u8> inv;
    std::vector<u8> shared, shared_state;   // state: bit 0 initialised, bit 1 cp.async on its way
    std::vector<u8> local, local_state;
    std::map<u64, std::vector<u32>> released;  // by synchronising variable: what a thread of this CTA has released there
    std::unordered_map<const WordRecord*, std::array<u32, 32>> reader_times;  // of each warp, where they differ
    std::vector<WordRecord> chunks, words, bytes;  // of 16, 4 and 1 bytes; the finer ones count where a coarser is split
    Barrier barriers[16];
    u32 time;
    bool failed, progress;
    u64 executed;
    u64 clock;                // instructions issued
    u64 flying, most_flying;  // bytes on their way from global memory
};

struct Launch {
    LaunchArgs args;
    const Instr* code;
    i32 num_instrs;
    std::atomic<i64> next_cta;
    std::atomic<bool> stop;
    std::mutex fault_mutex;
    std::vector<Fault> faults;
    std::unordered_map<u64, int> fault_index;
    std::atomic_flag atomics = ATOMIC_FLAG_INIT;
    std::vector<std::unique_ptr<GlobalRecords[]>> records;  // by allocation, for those that can be written
    std::vector<ReaderSets> readers;                        // by allocation; under its lock
    std::vector<std::atomic_flag> record_locks;
    std::map<u64, Known> released;  // by address of a synchronising variable; under `atomics`
    i64 num_ctas;
};

struct Worker {
    std::vector<SiteCounters> sites;
    std::vector<i32> site_alloc;
    u64 bar_count = 0, most_flying = 0, flying_area = 0, instructions = 0, busiest = 0;
    u64 benign = 0;  // unordered stores of the value that is there already
};

struct Ctx { Launch& launch; Cta& cta; Worker& worker; };

struct SpinLock {
    std::atomic_flag& flag;
    explicit SpinLock(std::atomic_flag& f) : flag(f) { while (flag.test_and_set(std::memory_order_acquire)) std::this_thread::yield(); }
    ~SpinLock() { flag.clear(std::memory_order_release); }
};

template <class T> inline T* row(Warp& w, i32 op) { return reinterpret_cast<T*>(w.regs + size_t(op) * UNIT); }
inline u32& pred(Warp& w, i32 op) { return *row<u32>(w, op); }
inline i32 pc_of(const Ctx& c, const Instr& i) { return i32(&i - c.launch.code); }
inline SiteCounters& site(Ctx& c, const Instr& i) { return c.worker.sites[size_t(pc_of(c, i))]; }

// Records a fault once per kind and instruction; a second one only raises its count (`size` of the entry is kept).
inline void report(Ctx& c, i32 kind, i32 pc, i32 thread, u64 address = 0, i32 alloc = -1, i32 size = 0, i32 space = 0,
                   i32 other_thread = -1, i64 other_cta = -1, i32 other_pc = -1) {
    std::lock_guard<std::mutex> lock(c.launch.fault_mutex);
    const u64 key = u64(kind) << 32 | u32(pc);
    if (!c.launch.fault_index.emplace(key, 1).second) { ++c.launch.fault_index[key]; return; }
    c.launch.faults.push_back({kind, pc, thread, other_thread, c.cta.linear, other_cta, address, alloc, size, space, other_pc});
    if (i32(c.launch.faults.size()) >= c.launch.args.options.max_faults) c.launch.stop = true;
}

// Ends the CTA after a fault that leaves nothing sensible to continue with.
inline void fatal(Ctx& c, Warp& w) { c.cta.failed = true; w.stop = true; }

// A loop that polls gives the lanes it may wait for a turn soon (`FAIR_BACK_EDGES`).
inline void polled(Warp& w) { if (w.splits.size() > 1) w.back_edges += 128; }
inline i32 first_lane(u32 mask) { return __builtin_ctz(mask); }
inline i32 thread_of(const Warp& w, i32 lane) { return w.index * 32 + lane; }

// ---- validity of register values
inline u32 lane_bytes_mask(i32 width) { return width >= 8 ? 0xffu : (1u << width) - 1u; }
inline void settle(Warp& w, i32 dst, u32 exec, u32 bad_sources) {
    u32& bad = w.bad[dst];
    const u32 now = bad_sources & exec;
    if (!now) { bad &= ~exec; return; }
    bad = (bad & ~exec) | now;
    for (u32 m = now; m; m &= m - 1) w.inv[size_t(dst) * 32 + first_lane(m)] = 0xff;
}
inline u8 invalid_bytes(const Warp& w, i32 op, i32 lane) {
    return (w.bad[op] >> lane & 1) ? w.inv[size_t(op) * 32 + lane] : u8(0);
}
inline void set_invalid(Warp& w, i32 op, i32 lane, u32 bytes, i32 width) {
    bytes &= lane_bytes_mask(width);
    w.inv[size_t(op) * 32 + lane] = u8(bytes);
    if (bytes) w.bad[op] |= 1u << lane; else w.bad[op] &= ~(1u << lane);
}

// dst[lane] = f(lane) for the lanes of `exec`. Rows are the same or disjoint, so lanes never depend on each other.
template <class D, class F> inline __attribute__((always_inline)) void each(u32 exec, D* dst, F f) {
    if (exec == FULL) {
#pragma GCC ivdep
        for (int l = 0; l < 32; ++l) dst[l] = f(l);
    } else {
        for (u32 m = exec; m; m &= m - 1) { const int l = __builtin_ctz(m); dst[l] = f(l); }
    }
}
template <class F> inline u32 mask_of(u32 exec, F f) {
    u32 out = 0;
    for (int l = 0; l < 32; ++l) out |= u32(f(l) ? 1 : 0) << l;
    return out & exec;
}

std::unordered_map<std::string, Handler>& registry();
struct Register { Register(const char* key, Handler h) { registry()[key] = h; } };

}  // namespace vgpu
