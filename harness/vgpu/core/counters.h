// What is counted of each access: sectors and lines of global memory, passes of shared memory, bytes in flight.
#pragma once
#include "race.h"

namespace vgpu {

// ---- sectors, lines and bank conflicts
inline u32 count_distinct(u64* ids, int n) {
    bool sorted = true;
    u32 distinct = n > 0;
    for (int k = 1; k < n; ++k) { if (ids[k] < ids[k - 1]) { sorted = false; break; } distinct += ids[k] != ids[k - 1]; }
    if (sorted) return distinct;
    std::sort(ids, ids + n);
    return u32(std::unique(ids, ids + n) - ids);
}
// Returns the sectors of the access.
inline u32 count_global(Ctx& c, const Instr& i, u32 exec, const u64* address, i32 size) {
    SiteCounters& s = site(c, i);
    u64 ids[64]; int n = 0;
    for (u32 m = exec; m; m &= m - 1) {
        const u64 a = address[__builtin_ctz(m)];
        ids[n++] = a >> 5;
        if ((a + u64(size) - 1) >> 5 != a >> 5) ids[n++] = (a + u64(size) - 1) >> 5;
    }
    const u32 sectors = count_distinct(ids, n);
    s.sectors += sectors;
    for (int k = 0; k < n; ++k) ids[k] >>= 2;
    s.lines += count_distinct(ids, n);
    s.bytes += u64(__builtin_popcount(exec)) * u64(size);
    return sectors;
}
// ---- bytes in flight: asynchronous copies until their wait, loads until an instruction reads their result
inline void take_off(Cta& cta, u64 bytes) { cta.flying += bytes; cta.most_flying = std::max(cta.most_flying, cta.flying); }
inline void note_flight(Ctx& c, i32 pc, u64 bytes, u64 since) {
    const u64 area = bytes * (c.cta.clock - since);
    c.cta.flying -= bytes;
    c.worker.sites[size_t(pc)].flight += area;
    c.worker.flying_area += area;
}
inline void land_load(Ctx& c, Warp& w, i32 load) {
    for (size_t k = 0; k < w.loads.size(); ++k) {
        const FlyingLoad f = w.loads[k];
        if (f.load != load) continue;
        note_flight(c, load, f.bytes, f.since);
        w.loads[k] = w.loads.back();
        w.loads.pop_back();
        return;
    }
}
inline void start_load(Ctx& c, Warp& w, i32 load, u32 bytes) {
    land_load(c, w, load);
    w.loads.push_back({load, bytes, c.cta.clock});
    take_off(c.cta, bytes);
}
inline void land_copy(Ctx& c, const AsyncCopy& k) { note_flight(c, k.pc, k.src_size, k.since); }
// A warp that ends waits for nothing any more.
inline void land_all(Ctx& c, Warp& w) {
    while (!w.loads.empty()) land_load(c, w, w.loads.back().load);
    for (const AsyncCopy& k : w.copies) land_copy(c, k);
    w.copies.clear();
}
// Extra passes over the 32 banks of 4 bytes: lanes are served in groups of 128 bytes; one word is broadcast to many.
inline void count_shared16(SiteCounters& s, u32 exec, const u64* address) {  // 16 bytes a lane: eight lanes a pass
    for (int from = 0; from < 32; from += 8) {
        u32 columns = 0;
        for (int l = from; l < from + 8; ++l) columns |= 1u << (address[l] >> 4 & 7);
        if (columns == 0xff) continue;
        u32 row[8]; u8 column[8], times[8] = {}; int n = 0; u32 worst = 1;
        for (int l = from; l < from + 8; ++l) {
            if (!(exec >> l & 1)) continue;
            const u32 r = u32(address[l] >> 7); const u8 col = u8(address[l] >> 4 & 7);
            bool seen = false;
            for (int k = 0; k < n && !seen; ++k) seen = row[k] == r && column[k] == col;
            if (seen) continue;
            row[n] = r; column[n++] = col;
            worst = std::max(worst, u32(++times[col]));
        }
        s.conflicts += worst - 1;
    }
}
inline void count_shared(Ctx& c, const Instr& i, u32 exec, const u64* address, i32 size) {
    SiteCounters& s = site(c, i);
    s.bytes += u64(__builtin_popcount(exec)) * u64(size);
    if (size == 16) return count_shared16(s, exec, address);
    const int words = std::max(1, size / 4), group = 32 / words;
    bool consecutive = exec == FULL;
    for (int l = 1; l < 32 && consecutive; ++l) consecutive = address[l] == address[l - 1] + u64(size);
    if (consecutive && size >= 4) return;
    for (int from = 0; from < 32; from += group) {
        u32 held[32][32]; u8 n[32] = {}; u32 worst = 1;
        for (int l = from; l < from + group; ++l) {
            if (!(exec >> l & 1)) continue;
            for (int k = 0; k < words; ++k) {
                const u32 word = u32(address[l] >> 2) + u32(k), bank = word & 31;
                bool seen = false;
                for (int j = 0; j < n[bank] && !seen; ++j) seen = held[bank][j] == word;
                if (!seen) { held[bank][n[bank]++] = word; worst = std::max(worst, u32(n[bank])); }
            }
        }
        s.conflicts += worst - 1;
    }
}

}  // namespace vgpu
