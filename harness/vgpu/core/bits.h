// Moves, logic and shifts: operations whose result may be valid in some bytes only. Invalid bytes are tracked exactly.
#pragma once
#include "integer.h"

namespace vgpu {

// 0xff for every byte that `bytes` names.
inline u64 spread(u32 bytes) {
    u64 out = 0;
    for (int k = 0; k < 8; ++k) if (bytes >> k & 1) out |= 0xffull << 8 * k;
    return out;
}
inline u32 gather(u64 mask) {
    u32 out = 0;
    for (int k = 0; k < 8; ++k) if (mask >> 8 * k & 0xff) out |= 1u << k;
    return out;
}

// Runs after the value: `f(lane)` gives the invalid bytes of the result for the lanes where a source has any.
template <class F> inline __attribute__((always_inline)) void settle_exact(Warp& w, i32 dst, u32 exec, u32 bad, i32 width, F f) {
    const u32 now = bad & exec;
    w.bad[dst] &= ~(exec & ~now);
    for (u32 m = now; m; m &= m - 1) { const int l = __builtin_ctz(m); set_invalid(w, dst, l, f(l), width); }
}

template <class U> inline void op_mov(Warp& w, const Instr& i, u32 exec) {
    const U* a = row<U>(w, i.ops[1]);
    each(exec, row<U>(w, i.ops[0]), [=](int l) { return a[l]; });
    const i32 s = i.ops[1];
    settle_exact(w, i.ops[0], exec, w.bad[s], sizeof(U), [&](int l) { return u32(invalid_bytes(w, s, l)); });
}
VG_ON("mov.b16", op_mov<u16>(w, i, exec);)
VG_ON("mov.b32", op_mov<u32>(w, i, exec);)
VG_ON("mov.b64", op_mov<u64>(w, i, exec);)

// An invalid byte stays harmless where the other side forces it: 0 for `and`, 0xff for `or`.
enum Logic { AND, OR, XOR };
template <class U, Logic L> inline void op_logic(Warp& w, const Instr& i, u32 exec) {
    const U *a = row<U>(w, i.ops[1]), *b = row<U>(w, i.ops[2]);
    const i32 sa = i.ops[1], sb = i.ops[2];
    const u32 bad = (w.bad[sa] | w.bad[sb]) & exec;
    u8 out[32];
    for (u32 m = bad; m; m &= m - 1) {  // before the value: the destination may be a source
        const int l = __builtin_ctz(m);
        const u32 xa = invalid_bytes(w, sa, l), xb = invalid_bytes(w, sb, l);
        u32 forced = 0;
        for (size_t k = 0; k < sizeof(U) && L != XOR; ++k) {
            const u8 va = u8(a[l] >> 8 * k), vb = u8(b[l] >> 8 * k), force = L == AND ? 0 : 0xff;
            if ((!(xa >> k & 1) && va == force) || (!(xb >> k & 1) && vb == force)) forced |= 1u << k;
        }
        out[l] = u8((xa | xb) & ~forced);
    }
    each(exec, row<U>(w, i.ops[0]), [=](int l) { return U(L == AND ? a[l] & b[l] : L == OR ? a[l] | b[l] : a[l] ^ b[l]); });
    settle_exact(w, i.ops[0], exec, bad, sizeof(U), [&](int l) { return u32(out[l]); });
}
#define VG_LOGIC(U, n)                                     \
    VG_ON("and.b" n, (op_logic<U, AND>(w, i, exec));)      \
    VG_ON("or.b" n, (op_logic<U, OR>(w, i, exec));)        \
    VG_ON("xor.b" n, (op_logic<U, XOR>(w, i, exec));)
VG_LOGIC(u16, "16") VG_LOGIC(u32, "32") VG_LOGIC(u64, "64")

// `T` signed: arithmetic right shift, whose fill comes from the top byte.
template <class T, bool LEFT> inline void op_shift(Warp& w, const Instr& i, u32 exec) {
    using U = std::make_unsigned_t<T>;
    const T* a = row<T>(w, i.ops[1]);
    const u32* n = row<u32>(w, i.ops[2]);
    const i32 sa = i.ops[1], sn = i.ops[2];
    const u32 bad = (w.bad[sa] | w.bad[sn]) & exec;
    u8 out[32];
    for (u32 m = bad; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        const U x = U(spread(invalid_bytes(w, sa, l)));
        if (invalid_bytes(w, sn, l)) out[l] = 0xff;
        else out[l] = u8(gather(u64(U(LEFT ? U(shift_left<U>(x, n[l])) : U(shift_right<T>(T(x), n[l]))))));
    }
    each(exec, row<T>(w, i.ops[0]), [=](int l) { return LEFT ? T(shift_left<U>(U(a[l]), n[l])) : shift_right<T>(a[l], n[l]); });
    settle_exact(w, i.ops[0], exec, bad, sizeof(T), [&](int l) { return u32(out[l]); });
}
#define VG_SHIFT(U, S, n)                                  \
    VG_ON("shl.b" n, (op_shift<U, true>(w, i, exec));)     \
    VG_ON("shr.u" n, (op_shift<U, false>(w, i, exec));)    \
    VG_ON("shr.s" n, (op_shift<S, false>(w, i, exec));)
VG_SHIFT(u16, i16, "16") VG_SHIFT(u32, i32, "32") VG_SHIFT(u64, i64, "64")

// shf: p0 = 1 for left, p1 = 1 for clamp. [b:a] is the funnel, b the upper word.
inline u32 funnel(u32 a, u32 b, u32 n, bool left, bool clamp) {
    n = clamp ? std::min(n, 32u) : n & 31;
    const u64 both = u64(b) << 32 | a;
    return left ? u32(both << n >> 32) : u32(both >> n);
}
inline void op_shf(Warp& w, const Instr& i, u32 exec) {
    const u32 *a = row<u32>(w, i.ops[1]), *b = row<u32>(w, i.ops[2]), *n = row<u32>(w, i.ops[3]);
    const bool left = i.p[0], clamp = i.p[1];
    const u32 bad = (w.bad[i.ops[1]] | w.bad[i.ops[2]] | w.bad[i.ops[3]]) & exec;
    u8 out[32];
    for (u32 m = bad; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        const u32 xa = u32(spread(invalid_bytes(w, i.ops[1], l))), xb = u32(spread(invalid_bytes(w, i.ops[2], l)));
        out[l] = invalid_bytes(w, i.ops[3], l) ? 0xff : u8(gather(funnel(xa, xb, n[l], left, clamp)));
    }
    each(exec, row<u32>(w, i.ops[0]), [=](int l) { return funnel(a[l], b[l], n[l], left, clamp); });
    settle_exact(w, i.ops[0], exec, bad, 4, [&](int l) { return u32(out[l]); });
}
VG_ON("shf", op_shf(w, i, exec);)

inline u32 lut3(u32 a, u32 b, u32 c, u32 lut) {
    u32 r = 0;
    if (lut & 0x01) r |= ~a & ~b & ~c;
    if (lut & 0x02) r |= ~a & ~b & c;
    if (lut & 0x04) r |= ~a & b & ~c;
    if (lut & 0x08) r |= ~a & b & c;
    if (lut & 0x10) r |= a & ~b & ~c;
    if (lut & 0x20) r |= a & ~b & c;
    if (lut & 0x40) r |= a & b & ~c;
    if (lut & 0x80) r |= a & b & c;
    return r;
}
inline void op_lop3(Warp& w, const Instr& i, u32 exec) {  // a bit is invalid if flipping invalid inputs can change it
    const u32 *a = row<u32>(w, i.ops[1]), *b = row<u32>(w, i.ops[2]), *c = row<u32>(w, i.ops[3]);
    const u32 lut = u32(i.p[0]);
    const u32 bad = (w.bad[i.ops[1]] | w.bad[i.ops[2]] | w.bad[i.ops[3]]) & exec;
    u8 out[32];
    for (u32 m = bad; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        const u32 xa = u32(spread(invalid_bytes(w, i.ops[1], l))), xb = u32(spread(invalid_bytes(w, i.ops[2], l)));
        const u32 xc = u32(spread(invalid_bytes(w, i.ops[3], l)));
        u32 all = 0, any = 0;
        for (int k = 0; k < 8; ++k) {
            const u32 r = lut3(a[l] ^ (k & 1 ? xa : 0), b[l] ^ (k & 2 ? xb : 0), c[l] ^ (k & 4 ? xc : 0), lut);
            all = k ? all & r : r; any |= r;
        }
        out[l] = u8(gather(any & ~all));
    }
    each(exec, row<u32>(w, i.ops[0]), [=](int l) { return lut3(a[l], b[l], c[l], lut); });
    settle_exact(w, i.ops[0], exec, bad, 4, [&](int l) { return u32(out[l]); });
}
VG_ON("lop3", op_lop3(w, i, exec);)

// prmt: p0 = mode (0 generic, 1 f4e, 2 b4e, 3 rc8, 4 ecl, 5 ecr, 6 rc16). Selector nibble k picks byte k of the result.
inline u32 prmt_selector(u32 c, i32 mode) {
    const u32 n = c & 3;
    switch (mode) {
        case 1: return (n) | (n + 1) << 4 | (n + 2) << 8 | (n + 3) << 12;
        case 2: return (n) | ((n + 7) & 7) << 4 | ((n + 6) & 7) << 8 | ((n + 5) & 7) << 12;
        case 3: return n * 0x1111u;
        case 4: return n | std::max(n, 1u) << 4 | std::max(n, 2u) << 8 | 3u << 12;
        case 5: return 0 | std::min(n, 1u) << 4 | std::min(n, 2u) << 8 | n << 12;
        case 6: return (n & 1) * 0x2222u + 0x1010u;
        default: return c;
    }
}
inline u32 permute(u64 bytes, u32 sel, bool invalid) {
    u32 r = 0;
    for (int k = 0; k < 4; ++k) {
        u32 byte = u32(bytes >> 8 * (sel >> 4 * k & 7)) & 0xff;
        if (sel >> 4 * k & 8) byte = invalid ? byte : (byte & 0x80 ? 0xffu : 0u);
        r |= byte << 8 * k;
    }
    return r;
}
inline void op_prmt(Warp& w, const Instr& i, u32 exec) {
    const u32 *a = row<u32>(w, i.ops[1]), *b = row<u32>(w, i.ops[2]), *s = row<u32>(w, i.ops[3]);
    const i32 mode = i.p[0];
    const u32 bad = (w.bad[i.ops[1]] | w.bad[i.ops[2]] | w.bad[i.ops[3]]) & exec;
    u8 out[32];
    for (u32 m = bad; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        const u64 x = spread(invalid_bytes(w, i.ops[1], l) | u32(invalid_bytes(w, i.ops[2], l)) << 4);
        out[l] = invalid_bytes(w, i.ops[3], l) ? 0xff : u8(gather(permute(x, prmt_selector(s[l], mode), true)));
    }
    each(exec, row<u32>(w, i.ops[0]), [=](int l) { return permute(u64(b[l]) << 32 | a[l], prmt_selector(s[l], mode), false); });
    settle_exact(w, i.ops[0], exec, bad, 4, [&](int l) { return u32(out[l]); });
}
VG_ON("prmt", op_prmt(w, i, exec);)

// {a, b, ..} -> d and d -> {a, b, ..}: p0 = bytes of an element, p1 = bytes of the whole.
inline void op_pack(Warp& w, const Instr& i, u32 exec) {
    const int eb = i.p[0], total = i.p[1], n = total / eb;
    u64 value[32]; u8 out[32] = {};
    u32 bad = 0;
    for (int l = 0; l < 32; ++l) value[l] = 0;
    for (int k = 0; k < n; ++k) {
        const u8* a = row<u8>(w, i.ops[1 + k]);
        for (int l = 0; l < 32; ++l) { u64 x = 0; std::memcpy(&x, a + l * std::max(eb, 2), size_t(eb)); value[l] |= x << 8 * eb * k; }
        const u32 b = w.bad[i.ops[1 + k]] & exec;
        bad |= b;
        for (u32 m = b; m; m &= m - 1) { const int l = __builtin_ctz(m); out[l] |= u8((invalid_bytes(w, i.ops[1 + k], l) & lane_bytes_mask(eb)) << eb * k); }
    }
    u8* d = row<u8>(w, i.ops[0]);
    const int stride = std::max(total, 2);
    for (u32 m = exec; m; m &= m - 1) { const int l = __builtin_ctz(m); std::memcpy(d + l * stride, &value[l], size_t(total)); }
    settle_exact(w, i.ops[0], exec, bad, total, [&](int l) { return u32(out[l]); });
}
inline void op_unpack(Warp& w, const Instr& i, u32 exec) {
    const int eb = i.p[0], total = i.p[1], n = total / eb;
    u64 value[32]; u8 invalid[32] = {};
    const i32 src = i.ops[n];
    const u8* a = row<u8>(w, src);
    for (int l = 0; l < 32; ++l) { value[l] = 0; std::memcpy(&value[l], a + l * std::max(total, 2), size_t(total)); }
    const u32 bad = w.bad[src] & exec;
    for (u32 m = bad; m; m &= m - 1) { const int l = __builtin_ctz(m); invalid[l] = invalid_bytes(w, src, l); }
    for (int k = 0; k < n; ++k) {
        u8* d = row<u8>(w, i.ops[k]);
        const int stride = std::max(eb, 2);
        for (u32 m = exec; m; m &= m - 1) {
            const int l = __builtin_ctz(m);
            const u64 x = value[l] >> 8 * eb * k;
            std::memcpy(d + l * stride, &x, size_t(eb));
            if (eb == 1) d[l * stride + 1] = 0;
        }
        settle_exact(w, i.ops[k], exec, bad, eb, [&](int l) { return u32(invalid[l] >> eb * k); });
    }
}
VG_ON("pack", op_pack(w, i, exec);)
VG_ON("unpack", op_unpack(w, i, exec);)

// selp and the copy it makes; ops: d, a, b, p; p0 = 1 where the predicate is negated
template <class U> inline void op_selp(Warp& w, const Instr& i, u32 exec) {
    const U *a = row<U>(w, i.ops[1]), *b = row<U>(w, i.ops[2]);
    const u32 p = i.p[0] ? ~pred(w, i.ops[3]) : pred(w, i.ops[3]);
    const u32 sa = w.bad[i.ops[1]], sb = w.bad[i.ops[2]], sp = w.bad[i.ops[3]];
    const u32 bad = ((sa & p) | (sb & ~p) | sp) & exec;
    u8 out[32];
    for (u32 m = bad; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        out[l] = sp >> l & 1 ? u8(0xff) : invalid_bytes(w, p >> l & 1 ? i.ops[1] : i.ops[2], l);
    }
    each(exec, row<U>(w, i.ops[0]), [=](int l) { return p >> l & 1 ? a[l] : b[l]; });
    settle_exact(w, i.ops[0], exec, bad, sizeof(U), [&](int l) { return u32(out[l]); });
}
VG_ON("selp.b16", op_selp<u16>(w, i, exec);)
VG_ON("selp.b32", op_selp<u32>(w, i, exec);)
VG_ON("selp.b64", op_selp<u64>(w, i, exec);)

// ---- predicates: a register is one mask over the lanes. p0, p1 negate the sources.
inline void set_pred(Warp& w, i32 dst, u32 exec, u32 value, u32 bad) {
    u32& d = pred(w, dst);
    d = (d & ~exec) | (value & exec);
    w.bad[dst] = (w.bad[dst] & ~exec) | (bad & exec);
    if (bad & exec) for (u32 m = bad & exec; m; m &= m - 1) w.inv[size_t(dst) * 32 + first_lane(m)] = 0xff;
}
inline void op_pred(Warp& w, const Instr& i, u32 exec, int kind) {
    const u32 a = i.p[0] ? ~pred(w, i.ops[1]) : pred(w, i.ops[1]);
    u32 xa = w.bad[i.ops[1]], value = a, bad = xa;
    if (kind != 3) {
        const u32 b = i.p[1] ? ~pred(w, i.ops[2]) : pred(w, i.ops[2]), xb = w.bad[i.ops[2]];
        value = kind == 0 ? a & b : kind == 1 ? a | b : a ^ b;
        const u32 forced = kind == 0 ? (~xa & ~a) | (~xb & ~b) : kind == 1 ? (~xa & a) | (~xb & b) : 0;
        bad = (xa | xb) & ~forced;
    }
    set_pred(w, i.ops[0], exec, value, bad);
}
VG_ON("and.pred", op_pred(w, i, exec, 0);)
VG_ON("or.pred", op_pred(w, i, exec, 1);)
VG_ON("xor.pred", op_pred(w, i, exec, 2);)
VG_ON("mov.pred", op_pred(w, i, exec, 3);)
VG_ON("not.pred", { Instr j = i; j.p[0] = !j.p[0]; op_pred(w, j, exec, 3); })

}  // namespace vgpu
