// Exchange between the lanes of a warp, and clocks.
#pragma once
#include "control.h"

namespace vgpu {

enum Shuffle : i32 { UP, DOWN, BFLY, IDX };
// ops: d, p, a, b, c, mask. p0 = mode. A value from a lane that does not take part is invalid.
inline void op_shfl(Ctx& c, Warp& w, const Instr& i, u32 exec) {
    const i32 control = w.bad[i.ops[3]] | w.bad[i.ops[4]];
    if (u32(control) & exec) { report(c, UNINIT_OPERAND, pc_of(c, i), thread_of(w, first_lane(u32(control) & exec))); return fatal(c, w); }
    u32 a[32]; u8 invalid[32]; u32 in_range = 0, bad = 0;
    std::memcpy(a, row<u32>(w, i.ops[2]), sizeof a);
    const u32 *b = row<u32>(w, i.ops[3]), *cc = row<u32>(w, i.ops[4]);
    if (i.p[0] == BFLY && exec == FULL && !w.bad[i.ops[2]]) {  // a butterfly over the whole warp
        u32 other = 0;
        for (i32 l = 0; l < 32; ++l) other |= (b[l] ^ b[0]) | (cc[l] ^ 31u);
        if (!other) {
            u32* d = row<u32>(w, i.ops[0]);
            const u32 by = b[0] & 31;
            for (u32 l = 0; l < 32; ++l) d[l] = a[l ^ by];
            w.bad[i.ops[0]] = 0;
            return set_pred(w, i.ops[1], exec, FULL, 0);
        }
    }
    u32 out[32];
    const u32 source_bad = w.bad[i.ops[2]];
    for (i32 l = 0; l < 32; ++l) {
        const i32 bv = i32(b[l] & 31), cv = i32(cc[l] & 31), seg = i32(cc[l] >> 8 & 31);
        const i32 top = (l & seg) | (cv & ~seg), bottom = l & seg;
        i32 j = i.p[0] == UP ? l - bv : i.p[0] == DOWN ? l + bv : i.p[0] == BFLY ? l ^ bv : bottom | (bv & ~seg);
        const bool ok = i.p[0] == UP ? j >= top : j <= top;
        if (ok) in_range |= 1u << l; else j = l;
        out[l] = a[j & 31];
        invalid[l] = exec >> (j & 31) & 1 ? (source_bad >> (j & 31) & 1 ? w.inv[size_t(i.ops[2]) * 32 + size_t(j & 31)] : u8(0)) : u8(0xff);
        if (invalid[l]) bad |= 1u << l;
    }
    each(exec, row<u32>(w, i.ops[0]), [&](int l) { return out[l]; });
    settle_exact(w, i.ops[0], exec, bad, 4, [&](int l) { return u32(invalid[l]); });
    set_pred(w, i.ops[1], exec, in_range, 0);
}
VG_ON("shfl", by_members(c, w, i, exec, i.ops[5], [&](u32 group) { op_shfl(c, w, i, group); });)

// vote: ops d, a, mask; p0: 0 all, 1 any, 2 uni, 3 ballot; p1 = a is negated
inline void op_vote(Ctx& c, Warp& w, const Instr& i, u32 exec) {
    const u32 a = (i.p[1] ? ~pred(w, i.ops[1]) : pred(w, i.ops[1])) & exec, bad = w.bad[i.ops[1]] & exec ? FULL : 0;
    if (i.p[0] == 3) { each(exec, row<u32>(w, i.ops[0]), [=](int) { return a; }); settle(w, i.ops[0], exec, bad); return; }
    const bool r = i.p[0] == 0 ? a == exec : i.p[0] == 1 ? a != 0 : a == exec || !a;
    set_pred(w, i.ops[0], exec, r ? FULL : 0, bad);
}
VG_ON("vote", by_members(c, w, i, exec, i.ops[2], [&](u32 group) { op_vote(c, w, i, group); });)
// match: ops d, p, a, mask; p0 = 1 for all; p1 = bytes
inline void op_match(Ctx& c, Warp& w, const Instr& i, u32 exec) {
    u64 v[32];
    for (int l = 0; l < 32; ++l) v[l] = i.p[1] == 8 ? row<u64>(w, i.ops[2])[l] : row<u32>(w, i.ops[2])[l];
    const u32 bad = w.bad[i.ops[2]] & exec ? FULL : 0;
    u32 equal[32], every = exec;
    for (int l = 0; l < 32; ++l) { equal[l] = 0; for (int k = 0; k < 32; ++k) if ((exec >> k & 1) && v[k] == v[l]) equal[l] |= 1u << k; }
    for (u32 m = exec; m; m &= m - 1) every &= equal[first_lane(m)];
    const bool same = every == exec;
    each(exec, row<u32>(w, i.ops[0]), [&](int l) { return i.p[0] ? (same ? exec : 0u) : equal[l]; });
    settle(w, i.ops[0], exec, bad);
    set_pred(w, i.ops[1], exec, same ? FULL : 0, bad);
}
VG_ON("match", by_members(c, w, i, exec, i.ops[3], [&](u32 group) { op_match(c, w, i, group); });)
// redux: ops d, a, mask; p0: 0 add, 1 min, 2 max, 3 and, 4 or, 5 xor; p1: 0 unsigned, 1 signed, 2 f32; p2 flags
inline void op_redux(Ctx& c, Warp& w, const Instr& i, u32 exec) {
    const u32* a = row<u32>(w, i.ops[1]);
    const u32 bad = w.bad[i.ops[1]] & exec ? FULL : 0;
    u32 r = a[first_lane(exec)];
    for (u32 m = exec & (exec - 1); m; m &= m - 1) {
        const u32 x = a[first_lane(m)];
        if (i.p[1] == 2) {
            float f = bits_as<float>(r), g = bits_as<float>(x);
            if (i.p[2] & ABS_FLAG) { f = std::fabs(f); g = std::fabs(g); }
            r = bits_as<u32>(min_max(f, g, i.p[2] & NAN_FLAG, i.p[0] == 2));
            continue;
        }
        switch (i.p[0]) {
            case 0: r += x; break;
            case 1: r = i.p[1] ? u32(std::min(i32(r), i32(x))) : std::min(r, x); break;
            case 2: r = i.p[1] ? u32(std::max(i32(r), i32(x))) : std::max(r, x); break;
            case 3: r &= x; break;
            case 4: r |= x; break;
            default: r ^= x;
        }
    }
    each(exec, row<u32>(w, i.ops[0]), [=](int) { return r; });
    settle(w, i.ops[0], exec, bad);
}
VG_ON("redux", by_members(c, w, i, exec, i.ops[2], [&](u32 group) { op_redux(c, w, i, group); });)
// elect: ops d, p, mask
inline void op_elect(Ctx& c, Warp& w, const Instr& i, u32 exec) {
    const i32 leader = first_lane(exec);
    each(exec, row<u32>(w, i.ops[0]), [=](int) { return u32(leader); });
    w.bad[i.ops[0]] &= ~exec;
    set_pred(w, i.ops[1], exec, 1u << leader, 0);
}
VG_ON("elect", by_members(c, w, i, exec, i.ops[2], [&](u32 group) { op_elect(c, w, i, group); });)
VG_ON("activemask", { each(exec, row<u32>(w, i.ops[0]), [=](int) { return exec; }); w.bad[i.ops[0]] &= ~exec; })
// Time is the number of instructions that the warp has executed; it means nothing else.
VG_ON("clock.b32", { const u32 t = u32(w.executed); each(exec, row<u32>(w, i.ops[0]), [=](int) { return t; }); w.bad[i.ops[0]] &= ~exec; })
VG_ON("clock.b64", { const u64 t = w.executed; each(exec, row<u64>(w, i.ops[0]), [=](int) { return t; }); w.bad[i.ops[0]] &= ~exec; })

}  // namespace vgpu
