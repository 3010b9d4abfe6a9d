// Races by happens-before. Shared memory: one record per 16 bytes, per word or byte where accesses are narrower; clocks
// per warp.
// Global memory: one record per element, between CTAs by released and acquired times.
// A clock per warp: a lane that releases takes along what the other lanes of its warp did before, and one that acquires
// hands on to them, as if the warp had synchronised. A missing __syncwarp in front of a one-lane release is therefore not
// found, and one behind a one-lane acquire only under a schedule in which the other lanes run ahead; every other one is.
#pragma once
#include "convert.h"

namespace vgpu {

enum MemFlags : i32 { STRONG = 1, ACQUIRE = 2, RELEASE = 4, CTA_SCOPE = 8, READ_ONLY = 16 };  // READ_ONLY: ld.global.nc

// Whether lane `other` of the same warp (-1: any) has synchronised with `lane`, and few others, at `time` or later.
inline bool ordered_in_part(const Warp& w, i32 lane, i32 other, u32 time) {
    if (w.lanes_seen.empty()) return false;
    const u32* seen = &w.lanes_seen[size_t(lane) * 32];
    return other >= 0 ? seen[other] >= time : std::any_of(seen, seen + 32, [=](u32 t) { return t >= time; });
}
// Whether an access stamped `time` by thread `other` happened before what lane `lane` of `w` does now.
inline bool ordered(const Warp& w, i32 lane, u32 other, u32 time) {
    if (other == u32(thread_of(w, lane)) || w.seen[other / 32] >= time) return true;
    return other / 32 == u32(w.index) && ordered_in_part(w, lane, i32(other % 32), time);
}

constexpr u8 SPLIT = 1, ATOMIC_WRITE = 2, ATOMIC_READ = 4, MIXED = 8;  // MIXED: readers of different times, in `reader_times`

inline bool readers_ordered(const Cta& cta, const Warp& w, i32 lane, const WordRecord& r) {
    if (!r.reader_time) return true;
    const std::array<u32, 32>* times = r.flags & MIXED ? &cta.reader_times.at(&r) : nullptr;
    for (u32 m = r.reader_warps; m; m &= m - 1) {
        const u32 warp = u32(__builtin_ctz(m));
        const u32 time = times ? (*times)[warp] : r.reader_time;
        if (w.seen[warp] >= time) continue;
        if (warp == u32(w.index) && (r.reader_lane == lane || ordered_in_part(w, lane, r.reader_lane < 32 ? r.reader_lane : -1, time))) continue;
        return false;
    }
    return true;
}
// `same`: the store leaves the bytes as they are. Two threads that write one value race by the letter of the memory model,
// yet no hardware shows it and compilers rely on it (replicated stores of a reduction): counted, a fault only on request.
inline bool benign(Ctx& c, bool clashes, bool same) {
    if (!clashes || !same || c.launch.args.options.strict_stores) return false;
    ++c.worker.benign;
    return true;
}
inline void race_word(Ctx& c, Warp& w, i32 lane, WordRecord& r, u32 address, bool write, bool atomic, bool same, i32 pc) {
    const u32 now = c.cta.time;
    const i32 me = thread_of(w, lane);
    bool write_race = r.writer_time && !(atomic && (r.flags & ATOMIC_WRITE)) && !ordered(w, lane, r.writer, r.writer_time);
    if (benign(c, write_race, write && same)) write_race = false;
    if (write_race) report(c, RACE_SHARED, pc, me, address, -1, 4, SHARED, r.writer, c.cta.linear, r.writer_pc);
    if (write) {
        if (!write_race && !(atomic && (r.flags & ATOMIC_READ)) && !readers_ordered(c.cta, w, lane, r))
            report(c, RACE_SHARED, pc, me, address, -1, 4, SHARED, __builtin_ctz(r.reader_warps) * 32 + (r.reader_lane & 31), c.cta.linear, r.reader_pc);
        r.writer_time = now; r.writer = u16(me); r.writer_pc = pc; r.reader_time = 0; r.reader_warps = 0;
        r.flags = u8((r.flags & SPLIT) | (atomic ? ATOMIC_WRITE : 0));
        return;
    }
    const bool fresh = !r.reader_time || readers_ordered(c.cta, w, lane, r);
    const u32 bit = 1u << (w.index & 31);
    if (fresh) { r.reader_warps = 0; r.reader_lane = u8(lane); r.flags = u8((r.flags & ~(ATOMIC_READ | MIXED)) | (atomic ? ATOMIC_READ : 0)); }
    else {
        r.reader_lane = 255;
        if (!atomic) r.flags = u8(r.flags & ~ATOMIC_READ);
        if (!(r.flags & MIXED) && r.reader_time != now && (r.reader_warps & ~bit)) {
            r.flags |= MIXED;
            c.cta.reader_times[&r].fill(r.reader_time);
        }
        if (r.flags & MIXED) c.cta.reader_times[&r][size_t(w.index & 31)] = now;
    }
    r.reader_warps |= bit; r.reader_time = now; r.reader_pc = pc;
}
// The common case: everything recorded happened before what any warp does now, or this interval has only seen reads.
inline bool race_word_quick(const Warp& w, i32 lane, WordRecord& r, u32 now, bool write, i32 pc) {
    if ((r.flags & (SPLIT | MIXED)) || r.writer_time > w.seen_by_all) return false;
    if (write) {
        if (r.reader_time > w.seen_by_all) return false;
        r = {now, 0, 0, u16(thread_of(w, lane)), 0, 0, pc, 0};
        return true;
    }
    const u32 bit = 1u << (w.index & 31);
    if (r.reader_time <= w.seen_by_all) { r.reader_warps = bit; r.reader_lane = u8(lane); r.flags = 0; }
    else if (r.reader_time != now) return false;
    else { if (r.reader_warps != bit || r.reader_lane != lane) r.reader_lane = 255; r.reader_warps |= bit; r.flags = u8(r.flags & ~ATOMIC_READ); }
    r.reader_time = now; r.reader_pc = pc;
    return true;
}
inline void race_record(Ctx& c, Warp& w, i32 lane, WordRecord& r, u32 address, bool write, bool atomic, bool same, i32 pc) {
    if (!atomic && race_word_quick(w, lane, r, c.cta.time, write, pc)) return;
    race_word(c, w, lane, r, address, write, atomic, same, pc);
}
inline void split_record(WordRecord& record, WordRecord* parts) {  // mixed readers all get the latest of their times
    record.flags = u8(record.flags & ~MIXED);
    for (u32 k = 0; k < 4; ++k) parts[k] = record;
    record.flags |= SPLIT;
}
inline void race_word_at(Ctx& c, Warp& w, i32 lane, u32 word, u32 at, i32 size, bool write, bool atomic, bool same, i32 pc) {
    Cta& cta = c.cta;
    WordRecord& record = cta.words[word];
    const bool whole = at <= word * 4 && at + u32(size) >= word * 4 + 4;
    if (whole && !(record.flags & SPLIT)) return race_record(c, w, lane, record, SHARED_START + word * 4, write, atomic, same, pc);
    if (cta.bytes.empty()) cta.bytes.resize(cta.words.size() * 4);
    if (!(record.flags & SPLIT)) {
        split_record(record, &cta.bytes[word * 4]);
    }
    for (u32 k = std::max(at, word * 4); k < std::min(at + u32(size), word * 4 + 4); ++k)
        race_word(c, w, lane, cta.bytes[k], SHARED_START + k, write, atomic, same, pc);
}
inline void race_shared(Ctx& c, Warp& w, i32 lane, u32 address, i32 size, bool write, bool atomic, i32 pc, bool same = false) {
    if (!c.launch.args.options.check_races) return;
    Cta& cta = c.cta;
    const u32 at = address - SHARED_START;
    for (u32 chunk = at / 16; chunk <= (at + u32(size) - 1) / 16; ++chunk) {
        WordRecord& record = cta.chunks[chunk];
        const u32 first = std::max(at, chunk * 16), last = std::min(at + u32(size), chunk * 16 + 16);
        if (last - first == 16 && !(record.flags & SPLIT)) {
            race_record(c, w, lane, record, SHARED_START + first, write, atomic, same, pc);
            continue;
        }
        if (!(record.flags & SPLIT)) {
            split_record(record, &cta.words[chunk * 4]);
        }
        for (u32 word = first / 4; word <= (last - 1) / 4; ++word) race_word_at(c, w, lane, word, at, size, write, atomic, same, pc);
    }
}
// The bytes of an asynchronous copy, which nobody has touched since its issue, count as written now.
inline void restamp_shared(Ctx& c, Warp& w, i32 lane, u32 address, i32 size, i32 pc) {
    if (!c.launch.args.options.check_races) return;
    WordRecord& record = c.cta.chunks[(address - SHARED_START) / 16];
    if (size == 16 && !(record.flags & SPLIT)) { record.writer_time = c.cta.time; return; }
    race_shared(c, w, lane, address, size, true, false, pc);
}

inline void least_seen(Warp& w) { w.seen_by_all = *std::min_element(w.seen.begin(), w.seen.end()); }

// A barrier or warp synchronisation among warps: what each did before happens before what any does after.
inline void join_clocks(Cta& cta, const std::vector<Warp*>& warps) {
    std::vector<u32> all(warps.empty() ? 0 : warps[0]->seen.size(), 0);
    for (Warp* w : warps) {
        w->seen[size_t(w->index)] = cta.time;
        for (size_t k = 0; k < all.size(); ++k) all[k] = std::max(all[k], w->seen[k]);
    }
    for (Warp* w : warps) { w->seen = all; least_seen(*w); }
    ++cta.time;
}
inline void sync_warp(Cta& cta, Warp& w) { w.seen[size_t(w.index)] = cta.time++; least_seen(w); }
inline void sync_lanes(Cta& cta, Warp& w, u32 lanes) {
    if (!(w.live & ~lanes)) return sync_warp(cta, w);
    if (w.lanes_seen.empty()) w.lanes_seen.resize(32 * 32, 0);
    std::array<u32, 32> all{};
    for (u32 m = lanes; m; m &= m - 1) for (u32 k = 0; k < 32; ++k) all[k] = std::max(all[k], w.lanes_seen[u32(first_lane(m)) * 32 + k]);
    for (u32 m = lanes; m; m &= m - 1) all[u32(first_lane(m))] = cta.time;
    for (u32 m = lanes; m; m &= m - 1) std::copy(all.begin(), all.end(), w.lanes_seen.begin() + first_lane(m) * 32);
    ++cta.time;
}

// ---- global memory
constexpr u16 G_ATOMIC = 1, G_LANES = 2, G_CTA = 4;  // G_LANES: by several lanes of the warp; G_CTA: atomic for its CTA alone

// Whether neither access races with the other, whatever their order: strong ones whose scopes include both threads.
inline bool both_atomic(const GlobalRecord& a, const GlobalRecord& b) {
    return (a.flags & b.flags & G_ATOMIC) && (a.cta == b.cta || !((a.flags | b.flags) & G_CTA));
}
inline bool global_ordered(Ctx& c, const Warp& w, i32 lane, const GlobalRecord& r) {
    if (r.cta == u32(c.cta.linear) && (r.flags & G_LANES))
        return w.seen[r.thread / 32] >= r.time || (r.thread / 32 == w.index && ordered_in_part(w, lane, -1, r.time));
    if (r.cta == u32(c.cta.linear)) return ordered(w, lane, r.thread, r.time);
    if (!w.known) return false;
    const auto found = w.known->find(r.cta);
    return found != w.known->end() && found->second[r.thread / 32] >= r.time;
}
// ---- readers of an element since its last write: one per warp is enough, for its later reads cover its earlier ones
inline bool same_warp(const GlobalRecord& a, const GlobalRecord& b) { return a.cta == b.cta && a.thread / 32 == b.thread / 32; }
inline void merge_reader(GlobalRecord& into, const GlobalRecord& now) {
    const bool lanes = (into.flags & G_LANES) || into.thread != now.thread, atomic = into.flags & now.flags & G_ATOMIC;
    const u16 scope = (into.flags | now.flags) & G_CTA;
    into = now;
    into.flags = u16((lanes ? G_LANES : 0) | (atomic ? G_ATOMIC : 0) | scope);
}
inline void forget_readers(ReaderSets& all, GlobalRecords& r) {
    r.read.time = 0;
    if (!r.more) return;
    all.sets[r.more - 1].clear();
    all.free.push_back(r.more);
    r.more = 0;
}
inline void add_reader(Ctx& c, const Warp& w, i32 lane, ReaderSets& all, GlobalRecords& r, const GlobalRecord& now) {
    if (r.read.time && same_warp(r.read, now)) return merge_reader(r.read, now);
    if (!r.read.time || (!r.more && global_ordered(c, w, lane, r.read))) { r.read = now; return; }
    if (!r.more) {
        if (all.free.empty()) { all.sets.emplace_back(); all.free.push_back(u32(all.sets.size())); }
        r.more = all.free.back();
        all.free.pop_back();
    }
    for (GlobalRecord& other : all.sets[r.more - 1]) if (same_warp(other, now)) return merge_reader(other, now);
    all.sets[r.more - 1].push_back(now);
}
inline const GlobalRecord* clashing_reader(Ctx& c, const Warp& w, i32 lane, const ReaderSets& all, const GlobalRecords& r, const GlobalRecord& now) {
    const auto clashes = [&](const GlobalRecord& x) { return x.time && !both_atomic(x, now) && !global_ordered(c, w, lane, x); };
    if (clashes(r.read)) return &r.read;
    if (r.more) for (const GlobalRecord& x : all.sets[r.more - 1]) if (clashes(x)) return &x;
    return nullptr;
}
// A load of read-only data clashes with every write of this kernel: what it caches is never brought up to date.
inline void race_global(Ctx& c, Warp& w, i32 lane, const Alloc& a, u64 offset, i32 size, bool write, i32 mem, i32 pc, bool same = false) {
    if (!c.launch.args.options.check_races || a.access == IN || a.access == CONSTANT) return;
    GlobalRecords* records = c.launch.records[size_t(a.index)].get();
    if (!records) return;
    SpinLock lock(c.launch.record_locks[size_t(a.index)]);
    ReaderSets& all = c.launch.readers[size_t(a.index)];
    const u64 g = u64(a.granule);
    const i32 me = thread_of(w, lane);
    const GlobalRecord now{u32(c.cta.linear), c.cta.time, u16(me), u16((mem & STRONG ? G_ATOMIC : 0) | (mem & CTA_SCOPE ? G_CTA : 0)), pc};
    for (u64 k = offset / g; k <= (offset + u64(size) - 1) / g; ++k) {
        GlobalRecords& r = records[k];
        const bool unordered = r.write.time && ((mem & READ_ONLY) || (!both_atomic(r.write, now) && !global_ordered(c, w, lane, r.write)));
        const GlobalRecord* clash = unordered && !benign(c, unordered, write && same) ? &r.write : nullptr;
        if (!clash && write) clash = clashing_reader(c, w, lane, all, r, now);
        if (clash) report(c, RACE_GLOBAL, pc, me, a.base + k * g, a.index, i32(g), GLOBAL, clash->thread, clash->cta, clash->pc);
        if (write) { r.write = now; forget_readers(all, r); } else add_reader(c, w, lane, all, r, now);
    }
}
inline void join_times(std::vector<u32>& into, const std::vector<u32>& from) {
    if (into.size() < from.size()) into.resize(from.size(), 0);
    for (size_t k = 0; k < from.size(); ++k) into[k] = std::max(into[k], from[k]);
}
inline void join_known(Known& into, const Known& from) {
    for (const auto& [cta, times] : from) join_times(into[cta], times);
}
// Release and acquire through a synchronising variable. Held under the lock of the atomics. `times`: what this CTA's
// warps have done up to here and is published.
inline void release_times(Ctx& c, Warp& w, u64 address, const std::vector<u32>& times) {
    Known& published = c.launch.released[address];
    join_times(published[u64(c.cta.linear)], times);
    if (w.known) join_known(published, *w.known);
}
// `strong_release`: the operation itself releases; else it does so for what an earlier fence covers.
inline void release_to(Ctx& c, Warp& w, u64 address, bool strong_release) {
    if (!strong_release) { if (!w.fenced.empty()) release_times(c, w, address, w.fenced); return; }
    std::vector<u32> times = w.seen;
    times[size_t(w.index)] = c.cta.time++;
    release_times(c, w, address, times);
}
inline void acquire_from(Ctx& c, Warp& w, u64 address) {
    const auto found = c.launch.released.find(address);
    if (found == c.launch.released.end()) return;
    Known all = w.known ? *w.known : Known{};
    join_known(all, found->second);
    const auto own = all.find(u64(c.cta.linear));
    if (own != all.end()) { join_times(w.seen, own->second); least_seen(w); all.erase(own); }
    w.known = std::make_shared<const Known>(std::move(all));
}
inline void observe(Warp& w, u64 address) {
    if (std::find(w.observed.begin(), w.observed.end(), address) == w.observed.end()) w.observed.push_back(address);
}
// ---- the same between the threads of a CTA, through shared or global variables and fences of any scope
inline void release_in_cta(Ctx& c, Warp& w, u64 address, bool strong_release) {
    if (!strong_release) { if (!w.fenced_cta.empty()) join_times(c.cta.released[address], w.fenced_cta); return; }
    std::vector<u32> times = w.seen;
    times[size_t(w.index)] = c.cta.time++;
    join_times(c.cta.released[address], times);
}
inline void acquire_in_cta(Ctx& c, Warp& w, u64 address) {
    const auto found = c.cta.released.find(address);
    if (found == c.cta.released.end()) return;
    join_times(w.seen, found->second);
    least_seen(w);
}
inline void fence_cta(Ctx& c, Warp& w) {
    for (const u64 address : w.observed) acquire_in_cta(c, w, address);
    w.fenced_cta = w.seen;
    w.fenced_cta[size_t(w.index)] = c.cta.time++;
}
inline void fence_device(Ctx& c, Warp& w) {
    for (const u64 address : w.observed) acquire_from(c, w, address);
    w.observed.clear();
    w.fenced = w.seen;
    w.fenced[size_t(w.index)] = c.cta.time++;
}
// Barriers hand on what each warp knows of other CTAs, and what it has fenced and observed.
inline void share_known(const std::vector<Warp*>& warps) {
    bool any = false;
    for (const Warp* w : warps) any |= w->known != nullptr || !w->fenced.empty() || !w->fenced_cta.empty() || !w->observed.empty();
    if (!any) return;
    Known all; std::vector<u32> fenced, fenced_cta; std::vector<u64> observed;
    for (const Warp* w : warps) {
        if (w->known) join_known(all, *w->known);
        join_times(fenced, w->fenced);
        join_times(fenced_cta, w->fenced_cta);
        observed.insert(observed.end(), w->observed.begin(), w->observed.end());
    }
    const auto known = all.empty() ? nullptr : std::make_shared<const Known>(std::move(all));
    for (Warp* w : warps) { w->known = known; w->fenced = fenced; w->fenced_cta = fenced_cta; for (const u64 address : observed) observe(*w, address); }
}

}  // namespace vgpu
