// Runs warps, CTAs and grids.
#pragma once
#include "matrix.h"

namespace vgpu {

constexpr i32 FAIR_BACK_EDGES = 4096, FAIR_TURN = 2048;  // a spinning split gives the others of its warp a turn

// Merges with the splits that wait or run at the same place; then the lanes furthest behind go first.
inline void regroup(Warp& w) {
    for (size_t k = 0; k < w.splits.size(); ++k) {
        Split& s = w.splits[k];
        if (i32(k) == w.current || s.pc != w.pc || (s.state != SplitState::RUN && s.state != SplitState::CONVERGE)) continue;
        w.active |= s.mask;
        w.splits.erase(w.splits.begin() + i64(k));
        if (i32(k) < w.current) --w.current;
        --k;
    }
    if (w.forced > 0) { --w.forced; return; }
    i32 best = -1;
    if (w.back_edges > FAIR_BACK_EDGES) {  // the split that is furthest ahead may hold what this one waits for
        w.back_edges = 0;
        for (size_t k = 0; k < w.splits.size(); ++k)
            if (i32(k) != w.current && w.splits[k].state == SplitState::RUN && (best < 0 || w.splits[k].pc > w.splits[size_t(best)].pc)) best = i32(k);
        if (best >= 0) w.forced = FAIR_TURN;
    } else
        for (size_t k = 0; k < w.splits.size(); ++k)
            if (i32(k) != w.current && w.splits[k].state == SplitState::RUN && w.splits[k].pc < w.pc && (best < 0 || w.splits[k].pc < w.splits[size_t(best)].pc)) best = i32(k);
    if (best < 0) return;
    Split& mine = w.splits[size_t(w.current)];
    mine.pc = w.pc; mine.mask = w.active; mine.state = SplitState::RUN;
    w.current = best; w.pc = w.splits[size_t(best)].pc; w.active = w.splits[size_t(best)].mask;
}
inline bool pick_split(Warp& w) {
    i32 best = -1;
    for (size_t k = 0; k < w.splits.size(); ++k)
        if (w.splits[k].state == SplitState::RUN && (best < 0 || w.splits[k].pc < w.splits[size_t(best)].pc)) best = i32(k);
    if (best < 0) return false;
    w.current = best; w.pc = w.splits[size_t(best)].pc; w.active = w.splits[size_t(best)].mask;
    w.forced = 0;
    if (w.splits.size() > 1) regroup(w);
    return true;
}
inline void save_split(Warp& w) {
    if (w.current < 0 || size_t(w.current) >= w.splits.size()) return;
    Split& s = w.splits[size_t(w.current)];
    if (s.state == SplitState::RUN) { s.pc = w.pc; s.mask = w.active; }
}

// Runs a warp for at most `budget` instructions; false if none of its splits can run.
inline bool run_warp(Ctx& c, Warp& w, i32 budget) {
    const Instr* code = c.launch.code;
    SiteCounters* sites = c.worker.sites.data();
    if (!pick_split(w)) return false;
    w.yield = false;
    const i32 start = budget;
    while (budget > 0) {
        const Instr& i = code[w.pc];
        u32 exec = w.active;
        w.next = w.pc + 1;
        if (i.guard >= 0) {
            const u32 p = pred(w, i.guard), bad = w.bad[i.guard] & exec;
            if (bad) { report(c, UNINIT_BRANCH, w.pc, thread_of(w, first_lane(bad))); fatal(c, w); break; }
            exec &= i.guard_negated ? ~p : p;
        }
        --budget;
        ++c.cta.clock;
        if (exec) {
            if (i.waits && !w.loads.empty())
                for (i32 k = c.launch.args.use_starts[w.pc]; k < c.launch.args.use_starts[w.pc + 1]; ++k) land_load(c, w, c.launch.args.uses[k]);
            SiteCounters& s = sites[w.pc];
            ++s.executed; s.lanes += u64(__builtin_popcount(exec));
            i.fn(c, w, i, exec);
            if (w.stop) {
                w.stop = false;
                if (c.cta.failed || !pick_split(w)) break;
                continue;
            }
        }
        w.pc = w.next;
        if (w.splits.size() > 1) regroup(w);
        if (w.yield) break;
    }
    save_split(w);
    w.executed += u64(start - budget);
    c.cta.executed += u64(start - budget);
    return true;
}

inline void fill_row(Warp& w, i32 unit, i32 width, u64 value) {
    if (unit < 0) return;
    if (width == 0) pred(w, unit) = value ? FULL : 0;
    else for (int l = 0; l < 32; ++l) std::memcpy(row<u8>(w, unit) + l * width, &value, size_t(width));
    w.bad[unit] = 0;
}
inline void fill_specials(const Launch& launch, const Cta& cta, Warp& w) {
    const LaunchArgs& a = launch.args;
    const i32* unit = a.special_units;
    const i64 gx = a.grid[0], gy = a.grid[1];
    const u64 uniform[NUM_SPECIALS] = {0, 0, 0, u64(a.block[0]), u64(a.block[1]), u64(a.block[2]), u64(cta.linear % gx),
        u64(cta.linear / gx % gy), u64(cta.linear / gx / gy), u64(a.grid[0]), u64(a.grid[1]), u64(a.grid[2]), 0, u64(w.index),
        u64(cta.num_warps), u64(cta.linear % 132), 132, 1, 0, 0, 0, 0, 0, u64(a.dynamic_shared), u64(a.dynamic_shared + a.static_shared), 0, 1};
    for (int s = NTID_X; s < NUM_SPECIALS; ++s) fill_row(w, unit[s], 4, uniform[s]);
    for (u32 l = 0; l < 32; ++l) {
        const i32 t = w.index * 32 + i32(l);
        const u32 own[] = {u32(t % a.block[0]), u32(t / a.block[0] % a.block[1]), u32(t / a.block[0] / a.block[1])};
        for (int s = TID_X; s <= TID_Z; ++s) if (unit[s] >= 0) { row<u32>(w, unit[s])[l] = own[s]; w.bad[unit[s]] = 0; }
        const u32 bit = 1u << l;
        const u32 masks[] = {bit, bit | (bit - 1), bit - 1, ~(bit - 1), ~(bit | (bit - 1))};
        for (int s = MASK_EQ; s <= MASK_GT; ++s) if (unit[s] >= 0) row<u32>(w, unit[s])[l] = masks[s - MASK_EQ];
        if (unit[LANEID] >= 0) row<u32>(w, unit[LANEID])[l] = l;
    }
}
inline void start_cta(const Launch& launch, Cta& cta, i64 linear) {
    const LaunchArgs& a = launch.args;
    cta.linear = linear;
    cta.num_threads = a.block[0] * a.block[1] * a.block[2];
    cta.num_warps = (cta.num_threads + 31) / 32;
    const size_t units = size_t(a.num_units), nw = size_t(cta.num_warps);
    const bool fresh = cta.memory.empty();
    if (fresh) cta.memory.resize(units * UNIT * nw + 64);
    cta.bad.assign(units * nw, FULL);
    cta.inv.assign(units * nw * 32, 0xff);
    const size_t shared = size_t(a.static_shared) + size_t(a.dynamic_shared);
    cta.shared.assign(shared, 0xff);
    cta.shared_state.assign(shared, 0);
    cta.local.assign(size_t(a.local_bytes) * size_t(cta.num_warps) * 32, 0xff);
    cta.local_state.assign(cta.local.size(), 0);
    cta.chunks.assign(a.options.check_races ? (shared + 15) / 16 : 0, WordRecord{});
    cta.words.resize(cta.chunks.size() * 4);  // filled when a chunk is split
    cta.bytes.clear();
    cta.released.clear();
    cta.reader_times.clear();
    for (Barrier& b : cta.barriers) b = Barrier{0, 0, -1, {}, 0, true, false};
    cta.time = 1;
    cta.failed = false;
    cta.executed = cta.clock = cta.flying = cta.most_flying = 0;
    cta.warps.assign(nw, Warp{});
    u8* base = cta.memory.data() + (64 - reinterpret_cast<uintptr_t>(cta.memory.data()) % 64) % 64;
    for (size_t k = 0; k < nw; ++k) {
        Warp& w = cta.warps[k];
        w.regs = base + k * units * UNIT;
        w.bad = cta.bad.data() + k * units;
        w.inv = cta.inv.data() + k * units * 32;
        w.index = i32(k);
        const i32 lanes = std::min(32, cta.num_threads - i32(k) * 32);
        w.live = w.active = lanes == 32 ? FULL : (1u << lanes) - 1;
        w.splits.push_back({0, w.live, SplitState::RUN, 0, 0, 0, 0});
        w.seen.assign(nw, 0);
        for (i32 n = 0; n < a.num_consts; ++n) fill_row(w, a.const_units[n], a.const_widths[n], a.const_values[n]);
        fill_specials(launch, cta, w);
    }
}
// What the warps that cannot go on are waiting for.
inline void report_stuck(Ctx& c, i32 kind) {
    for (Warp& w : c.cta.warps)
        for (const Split& s : w.splits) {
            i32 what = kind;
            if (kind == DEADLOCK && s.state == SplitState::CONVERGE) {
                const bool bar = c.launch.code[s.pc].fn == registry()["bar"];
                what = bar ? DIVERGENT_BARRIER : DIVERGENT_SYNC;
            }
            // once per place: the address tells the limit, the other thread how many warps are there
            i32 here = 0;
            for (const Warp& v : c.cta.warps) {
                bool stuck = false;
                for (const Split& t : v.splits) stuck |= t.pc == s.pc && t.mask & v.live;
                here += stuck;
            }
            const u64 limit = kind == ENDLESS_LOOP ? c.launch.args.options.max_warp_instructions : 0;
            report(c, what, s.pc, thread_of(w, first_lane(s.mask)), limit, -1, 0, 0, here);
        }
    c.cta.failed = true;
}
enum class Outcome { DONE, MORE };

inline Outcome run_cta(Ctx& c, u64 limit) {
    Cta& cta = c.cta;
    const Options& o = c.launch.args.options;
    const u64 until = cta.executed + limit;
    const i32 n = cta.num_warps;
    u32 seed = u32(o.shuffle_seed) * 2654435761u + u32(cta.linear) * 40503u;
    while (true) {
        bool progress = false, alive = false;
        const i32 shift = o.shuffle_seed ? i32((seed = seed * 1664525u + 1013904223u) >> 8) % n : 0;
        for (i32 k = 0; k < n; ++k) {
            const i32 at = (o.reverse_warps ? n - 1 - k : k);
            Warp& w = cta.warps[size_t((at + shift) % n)];
            if (!w.live) continue;
            progress |= run_warp(c, w, o.quantum);
            if (cta.failed || c.launch.stop) return Outcome::DONE;
            if (w.executed > o.max_warp_instructions) { report_stuck(c, ENDLESS_LOOP); return Outcome::DONE; }
            if (!w.live) for (i32 b = 0; b < 16; ++b) complete_barrier(cta, b);
            alive |= w.live != 0;
        }
        if (!alive) return Outcome::DONE;
        if (!progress) { for (i32 b = 0; b < 16; ++b) complete_barrier(cta, b); }
        if (!progress) {
            bool ready = false;
            for (Warp& w : cta.warps) for (const Split& s : w.splits) ready |= s.state == SplitState::RUN;
            if (!ready) { report_stuck(c, DEADLOCK); return Outcome::DONE; }
        }
        if (cta.executed > until) return Outcome::MORE;
    }
}
constexpr u64 CTA_TURN = 2000000;  // instructions before another CTA gets a turn: CTAs may wait for each other
constexpr u64 TOGETHER_TURN = 4096;  // of a cooperative launch
constexpr size_t MAX_RESIDENT = 4096;

inline void run_grid(Launch& launch, Worker& worker) {
    std::vector<std::unique_ptr<Cta>> resident, spare;
    const bool together = launch.args.options.cooperative;
    while (!launch.stop) {
        while ((resident.empty() || together) && resident.size() < MAX_RESIDENT) {
            i64 next = launch.next_cta.fetch_add(1);
            if (next >= launch.num_ctas) break;
            if (launch.args.options.reverse_ctas) next = launch.num_ctas - 1 - next;
            if (spare.empty()) spare.push_back(std::make_unique<Cta>());
            resident.push_back(std::move(spare.back())); spare.pop_back();
            start_cta(launch, *resident.back(), next);
        }
        if (resident.empty()) return;
        const u64 turn = together ? TOGETHER_TURN : CTA_TURN;
        bool waiting = false;
        for (size_t k = 0; k < resident.size() && !launch.stop; ++k) {
            Ctx c{launch, *resident[k], worker};
            if (run_cta(c, turn) == Outcome::MORE) { waiting = true; continue; }
            worker.most_flying = std::max(worker.most_flying, resident[k]->most_flying);
            worker.instructions += resident[k]->executed;
            spare.push_back(std::move(resident[k]));
            resident.erase(resident.begin() + i64(k)); --k;
        }
        if (waiting && resident.size() < MAX_RESIDENT) {  // whoever they wait for may not have started
            const i64 next = launch.next_cta.fetch_add(1);
            if (next >= launch.num_ctas) continue;
            if (spare.empty()) spare.push_back(std::make_unique<Cta>());
            resident.push_back(std::move(spare.back())); spare.pop_back();
            start_cta(launch, *resident.back(), launch.args.options.reverse_ctas ? launch.num_ctas - 1 - next : next);
        }
    }
}

}  // namespace vgpu
