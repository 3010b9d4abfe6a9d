// Branches, exits, barriers, and what has to wait until lanes have come together again.
#pragma once
#include "async_copy.h"

namespace vgpu {

// The guard holds for part of the active lanes only: the others go on without this instruction.
inline void part_ways(Warp& w, u32 exec) {
    if (exec == w.active) return;
    w.splits.push_back({w.pc + 1, w.active & ~exec, SplitState::RUN, 0, 0, 0, 0});
    w.active = exec;
}
inline void park(Warp& w, SplitState state) {
    Split& s = w.splits[size_t(w.current)];
    s.pc = w.pc; s.mask = w.active; s.state = state;
    w.stop = true;
}
// Whether all live lanes of `need` are here; if not, the current lanes wait for them at this instruction.
inline bool converge(Warp& w, u32 exec, u32 need) {
    if (!(need & w.live & ~exec)) return true;
    part_ways(w, exec);
    park(w, SplitState::CONVERGE);
    return false;
}
// Whether all lanes execute this; if not, the current ones wait, or it is a fault as others have exited.
inline bool whole_warp(Ctx& c, Warp& w, const Instr& i, u32 exec) {
    if (!converge(w, exec, FULL)) return false;
    if (exec == FULL) return true;
    report(c, DIVERGENT_SYNC, pc_of(c, i), thread_of(w, first_lane(exec)));
    fatal(c, w);
    return false;
}
// The lanes of all member masks of a `.sync` instruction; 0 after a fault or while waiting.
inline u32 members(Ctx& c, Warp& w, const Instr& i, u32 exec, i32 op) {
    const u32* mask = row<u32>(w, op);
    u32 need = 0;
    for (u32 m = exec; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        if (w.bad[op] >> l & 1) { report(c, UNINIT_OPERAND, pc_of(c, i), thread_of(w, l)); fatal(c, w); return 0; }
        if (!(mask[l] >> l & 1)) { report(c, DIVERGENT_SYNC, pc_of(c, i), thread_of(w, l)); fatal(c, w); return 0; }
        need |= mask[l];
    }
    return converge(w, exec, need) ? need : 0;
}
// Runs a `.sync` instruction once for each set of lanes that name one another in their masks.
template <class F> inline void by_members(Ctx& c, Warp& w, const Instr& i, u32 exec, i32 op, F f) {
    if (!members(c, w, i, exec, op)) return;
    u32 masks[32];
    std::memcpy(masks, row<u32>(w, op), sizeof masks);
    for (u32 left = exec; left && !w.stop;) {
        const u32 mask = masks[first_lane(left)], group = mask_of(left, [&](int l) { return masks[l] == mask; });
        left &= ~group;
        if (!(mask & w.live & ~group)) { f(group); continue; }
        report(c, DIVERGENT_SYNC, pc_of(c, i), thread_of(w, first_lane(group)));
        fatal(c, w);
    }
}

VG_ON("bra", {
    (void)c;
    const u32 rest = w.active & ~exec;
    if (i.target <= w.pc) ++w.back_edges;
    if (!rest) w.next = i.target;
    else {
        w.splits.push_back({w.pc + 1, rest, SplitState::RUN, 0, 0, 0, 0});
        w.active = exec;
        w.next = i.target;
    }
})
// brx.idx: ops = index; imm = first entry of the table in `targets`. Decoded to a chain of compares and branches.

inline void retire(Warp& w, u32 exec) {
    w.live &= ~exec;
    w.active &= ~exec;
    if (w.active) return;
    w.splits.erase(w.splits.begin() + w.current);
    w.current = -1;
    w.stop = true;
}
VG_ON("exit", (void)i; retire(w, exec); if (!w.live) land_all(c, w);)
VG_ON("trap", report(c, TRAP, pc_of(c, i), thread_of(w, first_lane(exec))); fatal(c, w);)
VG_ON("brkpt", report(c, TRAP, pc_of(c, i), thread_of(w, first_lane(exec))); fatal(c, w);)
VG_ON("nop", (void)i; (void)w; (void)exec;)
VG_ON("griddepcontrol.wait", (void)i; w.waited |= exec;)
// A barrier hands on that the previous kernel's results are visible.
inline void share_waited(const std::vector<Warp*>& warps) {
    bool any = false;
    for (const Warp* w : warps) any |= w->waited != 0;
    if (any) for (Warp* w : warps) w->waited = FULL;
}
VG_ON("nanosleep", (void)i; (void)exec; w.yield = true;)
inline void meet(Ctx& c, Warp& w, u32 lanes) {
    sync_lanes(c.cta, w, lanes);
    if (w.waited & lanes) w.waited |= lanes;
}
VG_ON("bar.warp.sync", {
    const u32* mask = row<u32>(w, i.ops[0]);
    const u32 need = mask[first_lane(exec)], bad = w.bad[i.ops[0]] & exec, group = mask_of(exec, [=](int l) { return mask[l] == need; });
    if (bad || (group & ~need)) {
        report(c, bad ? UNINIT_OPERAND : DIVERGENT_SYNC, pc_of(c, i), thread_of(w, first_lane(bad ? bad : group & ~need)));
        return fatal(c, w);
    }
    if (!(need & w.live & ~exec) && group == exec) return meet(c, w, exec);
    part_ways(w, exec);
    if (group != exec) {  // lanes with other masks come here again
        w.splits.push_back({w.pc, exec & ~group, SplitState::RUN, 0, 0, 0, 0});
        w.active = group;
    }
    u32 here = group;  // other places may wait for the same members
    for (const Split& s : w.splits) if (s.state == SplitState::WARP_SYNC && s.sync_mask == need) here |= s.mask;
    if (need & w.live & ~here) {
        w.splits[size_t(w.current)].sync_mask = need;
        park(w, SplitState::WARP_SYNC);
        return;
    }
    for (Split& s : w.splits)
        if (s.state == SplitState::WARP_SYNC && s.sync_mask == need) { s.state = SplitState::RUN; ++s.pc; }
    meet(c, w, need & w.live);
})

// ---- CTA barriers
inline i32 live_threads(const Cta& cta) {
    i32 n = 0;
    for (const Warp& w : cta.warps) n += __builtin_popcount(w.live);
    return n;
}
enum BarKind : i32 { BAR_SYNC, BAR_ARRIVE, BAR_AND, BAR_OR, BAR_POPC };

inline void complete_barrier(Cta& cta, i32 id) {
    Barrier& b = cta.barriers[id];
    if (!b.arrived || b.arrived < (b.expected ? b.expected : live_threads(cta))) return;
    std::vector<Warp*> waiting;
    for (Warp& w : cta.warps) {
        bool here = false;
        for (Split& s : w.splits) {
            if (s.state != SplitState::BARRIER || s.barrier != id) continue;
            s.state = SplitState::RUN; ++s.pc; here = true;
            if (s.reduce == BAR_AND) set_pred(w, s.dst, s.mask, b.all ? FULL : 0, 0);
            if (s.reduce == BAR_OR) set_pred(w, s.dst, s.mask, b.any ? FULL : 0, 0);
            if (s.reduce == BAR_POPC) {
                each(s.mask, row<u32>(w, s.dst), [&](int) { return u32(b.count); });
                w.bad[s.dst] &= ~s.mask;
            }
        }
        if (here) waiting.push_back(&w);
    }
    join_clocks(cta, waiting);
    share_known(waiting);
    share_waited(waiting);
    for (Warp* w : waiting) {
        for (size_t k = 0; k < b.clock.size(); ++k) w->seen[k] = std::max(w->seen[k], b.clock[k]);
        least_seen(*w);
    }
    b = Barrier{0, 0, -1, {}, 0, true, false};
}
// ops: d, id, count, c. p: 0 kind, 1 aligned, 2 has a count, 3 c is negated.
VG_ON("bar", {
    const bool aligned = i.p[1];
    if (aligned && !converge(w, exec, w.live)) return;
    part_ways(w, exec);
    const i32 l0 = first_lane(exec);
    const u32 id = row<u32>(w, i.ops[1])[l0];
    const i32 expected = i.p[2] ? i32(row<u32>(w, i.ops[2])[l0]) : 0;
    const u32 bad = (w.bad[i.ops[1]] | (i.p[2] ? w.bad[i.ops[2]] : 0)) & exec;
    if (bad) { report(c, UNINIT_OPERAND, pc_of(c, i), thread_of(w, first_lane(bad))); return fatal(c, w); }
    bool differ = false;
    for (u32 m = exec; m; m &= m - 1)
        differ |= row<u32>(w, i.ops[1])[first_lane(m)] != id || (i.p[2] && i32(row<u32>(w, i.ops[2])[first_lane(m)]) != expected);
    Barrier& b = c.cta.barriers[id & 15];
    const bool wrong = differ || id > 15 || (i.p[2] && (expected <= 0 || expected % 32)) || (b.arrived && b.expected != expected);
    const i32 add = expected && (aligned || exec == w.live) ? 32 : __builtin_popcount(exec);
    if (wrong || (expected && b.arrived + add > expected)) {
        report(c, BARRIER_MISUSE, pc_of(c, i), thread_of(w, l0), id, -1, expected);
        return fatal(c, w);
    }
    b.expected = expected; b.arrived += add; b.pc = w.pc;
    ++c.worker.bar_count;
    if (i.p[0] >= BAR_AND) {
        if (w.bad[i.ops[3]] & exec) { report(c, UNINIT_OPERAND, pc_of(c, i), thread_of(w, first_lane(w.bad[i.ops[3]] & exec))); return fatal(c, w); }
        const u32 p = (i.p[3] ? ~pred(w, i.ops[3]) : pred(w, i.ops[3])) & exec;
        b.count += __builtin_popcount(p); b.all = b.all && p == exec; b.any = b.any || p;
    }
    if (i.p[0] == BAR_ARRIVE) {
        if (b.clock.empty()) b.clock.resize(w.seen.size(), 0);
        for (size_t k = 0; k < b.clock.size(); ++k) b.clock[k] = std::max(b.clock[k], w.seen[k]);
        b.clock[size_t(w.index)] = c.cta.time++;
        complete_barrier(c.cta, i32(id));
        return;
    }
    Split& s = w.splits[size_t(w.current)];
    s.barrier = i32(id); s.reduce = i.p[0]; s.dst = i.ops[0];
    park(w, SplitState::BARRIER);
    complete_barrier(c.cta, i32(id));
})

}  // namespace vgpu
