// cvt: every pair of scalar types, and the packed forms.
#pragma once
#include "floating.h"

namespace vgpu {

// Scalar cvt. p0 = flags (FTZ, SAT, RELU), p1 = rounding (Round), p2 = 1: round to a whole number, p3 = saturate finite,
// p4, p5 = bytes of the destination and source registers (they may be wider than the types), p6, p7 = CvtType.
template <class T> inline T load_lane(const u8* at, i32 stride, int l) { T v; std::memcpy(&v, at + l * stride, sizeof v); return v; }

inline void store_lane(u8* at, i32 stride, int l, u64 bits) { std::memcpy(at + l * stride, &bits, size_t(stride)); }

enum CvtType : i32 { C_U8, C_U16, C_U32, C_U64, C_S8, C_S16, C_S32, C_S64, C_F16, C_BF16, C_F32, C_F64 };
inline bool is_float(i32 t) { return t >= C_F16; }
inline int cvt_bytes(i32 t) { return t < C_F16 ? 1 << (t & 3) : t == C_F64 ? 8 : t == C_F32 ? 4 : 2; }

inline i64 read_int(const u8* a, i32 stride, int l, i32 t, u64& raw) {
    raw = 0;
    std::memcpy(&raw, a + l * stride, size_t(cvt_bytes(t)));
    switch (t) {
        case C_S8: return i8(raw);
        case C_S16: return i16(raw);
        case C_S32: return i32(raw);
        default: return i64(raw);
    }
}
inline double read_float(const u8* a, i32 stride, int l, i32 t) {
    switch (t) {
        case C_F16: return f16_to_f32(load_lane<u16>(a, stride, l));
        case C_BF16: return bf16_to_f32(load_lane<u16>(a, stride, l));
        case C_F32: return load_lane<float>(a, stride, l);
        default: return load_lane<double>(a, stride, l);
    }
}
inline u64 float_to_int(double x, i32 t, i32 from, Round r) {
    const bool sign = t >= C_S8;
    const int bits = cvt_bytes(t) * 8;
    if (x != x && bits < 64 && from != C_F64) return 0;
    if (x != x) return (sign ? ~0ull : 1ull) << (bits - 1);
    x = round_whole(x, r);
    const double lo = sign ? -std::ldexp(1.0, bits - 1) : 0.0, hi = std::ldexp(1.0, sign ? bits - 1 : bits);
    if (x <= lo) return sign ? u64(~0ull << (bits - 1)) : 0;
    if (x >= hi) return sign ? (1ull << (bits - 1)) - 1 : bits == 64 ? ~0ull : (1ull << bits) - 1;
    return sign ? u64(i64(x)) : u64(x);
}
inline u64 float_bits(double x, i32 t, Round r, i32 flags) {
    if (flags & SAT) x = x > 1 ? 1.0 : x > 0 ? x : 0.0;
    if (flags & RELU) x = x != x ? x : x > 0 ? x : 0.0;
    switch (t) {
        case C_F16: return encode(F16, x, r, false);
        case C_BF16: return encode(BF16, x, r, false);
        case C_F32: {
            if (x != x) return 0x7fffffffu;
            float f = r == RN ? float(x) : bits_as<float>(encode(FP32, x, r, false));
            if (flags & FTZ) f = flush(f);
            return bits_as<u32>(f);
        }
        default: return bits_as<u64>(x);
    }
}
inline u64 int_to_float(i64 v, u64 raw, bool sign, i32 t, Round r, i32 flags) {
    const bool neg = sign && v < 0;
    const u64 mag = neg ? u64(0) - u64(v) : sign ? u64(v) : raw;
    // Round to odd at 62 bits of slack: the double keeps 53, the sticky bit makes the second rounding exact.
    const int lz = mag ? __builtin_clzll(mag) : 64;
    if (t == C_F64 || 64 - lz <= 53) {
        double d;
        if (64 - lz <= 53) d = double(mag);
        else {
            const int drop = 11 - lz;
            const u64 low = mag & ((1ull << drop) - 1), half = 1ull << (drop - 1);
            u64 top = mag >> drop;
            const Round dir = r == RM ? (neg ? RP : RZ) : r == RP ? (neg ? RZ : RP) : r;
            if (dir == RN ? low > half || (low == half && (top & 1)) : dir == RP && low) ++top;
            d = std::ldexp(double(top), drop);
        }
        if (neg) d = -d;
        return float_bits(d, t, r, flags);
    }
    const int drop = 11 - lz;
    u64 top = mag >> drop;
    if (mag & ((1ull << drop) - 1)) top |= 1;
    const double d = std::ldexp(double(top), drop);
    return float_bits(neg ? -d : d, t, r, flags);
}
inline u64 int_to_int(i64 v, u64 raw, bool sign, i32 t, bool sat) {
    const bool dsign = t >= C_S8;
    const int bits = cvt_bytes(t) * 8;
    if (sat) {
        const __int128 x = sign ? __int128(v) : __int128(raw);
        const __int128 lo = dsign ? -(__int128(1) << (bits - 1)) : 0, hi = (__int128(1) << (dsign ? bits - 1 : bits)) - 1;
        return u64(x < lo ? lo : x > hi ? hi : x);
    }
    u64 x = u64(v);
    if (bits < 64) { x &= (1ull << bits) - 1; if (dsign && x >> (bits - 1) & 1) x |= ~0ull << bits; }
    return x;
}
inline void op_cvt(Warp& w, const Instr& i, u32 exec, i32 DT, i32 ST) {
    const i32 ds = i.p[4], ss = i.p[5], flags = i.p[0];
    const Round r = Round(i.p[1]);
    const u8* a = row<u8>(w, i.ops[1]); u8* d = row<u8>(w, i.ops[0]);
    const i32 src = i.ops[1];
    const u32 bad = w.bad[src] & exec;
    u8 out[32];
    for (u32 m = bad; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        const u32 x = invalid_bytes(w, src, l) & lane_bytes_mask(cvt_bytes(ST));
        if (is_float(DT) || is_float(ST) || (flags & SAT)) { out[l] = x ? 0xff : 0; continue; }
        u32 y = x & lane_bytes_mask(cvt_bytes(DT));  // copied bytes; the extension depends on the sign byte alone
        const int from = std::min(cvt_bytes(ST), cvt_bytes(DT));
        if (ST >= C_S8 && (x >> (cvt_bytes(ST) - 1) & 1)) y |= 0xffu << from;
        out[l] = u8(y);
    }
    for (u32 m = exec; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        u64 result;
        if (is_float(ST)) {
            double x = read_float(a, ss, l, ST);
            if ((flags & FTZ) && ST == C_F32) x = flush(float(x));
            if (!is_float(DT)) result = float_to_int(x, DT, ST, r);
            else if (i.p[2]) result = float_bits(x != x ? x : std::copysign(round_whole(x, r), x), DT, RN, flags);
            else result = float_bits(x, DT, r, flags);
        } else {
            u64 raw; const i64 v = read_int(a, ss, l, ST, raw);
            result = is_float(DT) ? int_to_float(v, raw, ST >= C_S8, DT, r, flags) : int_to_int(v, raw, ST >= C_S8, DT, flags & SAT);
        }
        store_lane(d, ds, l, result);
    }
    settle_exact(w, i.ops[0], exec, bad, ds, [&](int l) { return u32(out[l]); });
}
// The conversions that fill inner loops, over whole rows.
template <class D, class S, class F> inline void cvt_fast(Warp& w, const Instr& i, u32 exec, F f) {
    const S* a = row<S>(w, i.ops[1]);
    each(exec, row<D>(w, i.ops[0]), [=](int l) { return D(f(a[l])); });
    settle(w, i.ops[0], exec, w.bad[i.ops[1]]);
}
VG_ON("cvt.fast.s64.s32", { if (w.bad[i.ops[1]] & exec) op_cvt(w, i, exec, C_S64, C_S32); else cvt_fast<i64, i32>(w, i, exec, [](i32 x) { return x; }); })
VG_ON("cvt.fast.u64.u32", { if (w.bad[i.ops[1]] & exec) op_cvt(w, i, exec, C_U64, C_U32); else cvt_fast<u64, u32>(w, i, exec, [](u32 x) { return x; }); })
VG_ON("cvt.fast.u32.u64", { if (w.bad[i.ops[1]] & exec) op_cvt(w, i, exec, C_U32, C_U64); else cvt_fast<u32, u64>(w, i, exec, [](u64 x) { return x; }); })
VG_ON("cvt.fast.f32.bf16", (cvt_fast<float, u16>(w, i, exec, [](u16 x) { return bf16_to_f32(x); }));)
VG_ON("cvt.fast.f32.f16", (cvt_fast<float, u16>(w, i, exec, [](u16 x) { return f16_to_f32(x); }));)
VG_ON("cvt.fast.bf16.f32", (cvt_fast<u16, float>(w, i, exec, [](float x) { return f32_to_bf16(x); }));)
VG_ON("cvt.fast.f16.f32", (cvt_fast<u16, float>(w, i, exec, [](float x) { return f32_to_f16(x); }));)
VG_ON("cvt.fast.f32.s32", (cvt_fast<float, i32>(w, i, exec, [](i32 x) { return float(x); }));)

VG_ON("cvt", op_cvt(w, i, exec, i.p[6], i.p[7]);)

// Packed: d = {a, b}, a in the upper half. p0 flags, p1 rounding, p3 = saturate to finite.
inline u32 encode_packed(const Format& f, float x, const Instr& i) {
    if (i.p[0] & RELU) x = x != x ? x : x > 0 ? x : 0.0f;
    return encode(f, x, Round(i.p[1]), i.p[3] != 0);
}
template <class D> inline void op_pack2(Warp& w, const Instr& i, u32 exec, const Format& f) {
    const float *a = row<float>(w, i.ops[1]), *b = row<float>(w, i.ops[2]);
    const int bits = f.bits;
    const i32 sa = i.ops[1], sb = i.ops[2];
    const u32 bad = (w.bad[sa] | w.bad[sb]) & exec;
    const u32 half = bits == 16 ? 3 : 1, up = bits == 16 ? 2 : 1;
    u8 out[32];
    for (u32 m = bad; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        out[l] = u8((invalid_bytes(w, sb, l) ? half : 0) | (invalid_bytes(w, sa, l) ? half << up : 0));
    }
    const bool plain = !i.p[0] && !i.p[1] && !i.p[3];
    if (plain && f.man == BF16.man) each(exec, row<D>(w, i.ops[0]), [=](int l) { return D(u32(f32_to_bf16(a[l])) << 16 | f32_to_bf16(b[l])); });
    else if (plain && f.man == F16.man) each(exec, row<D>(w, i.ops[0]), [=](int l) { return D(u32(f32_to_f16(a[l])) << 16 | f32_to_f16(b[l])); });
    else for (u32 m = exec; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        row<D>(w, i.ops[0])[l] = D(encode_packed(f, a[l], i) << bits | encode_packed(f, b[l], i));
    }
    settle_exact(w, i.ops[0], exec, bad, sizeof(D), [&](int l) { return u32(out[l]); });
}
VG_ON("cvt.f16x2.f32", op_pack2<u32>(w, i, exec, F16);)
VG_ON("cvt.bf16x2.f32", op_pack2<u32>(w, i, exec, BF16);)
VG_ON("cvt.e4m3x2.f32", op_pack2<u16>(w, i, exec, E4M3);)
VG_ON("cvt.e5m2x2.f32", op_pack2<u16>(w, i, exec, E5M2);)

template <class G> inline void op_narrow2(Warp& w, const Instr& i, u32 exec, const Format& f, G get) {  // 16x2 -> 8x2
    const u32* a = row<u32>(w, i.ops[1]);
    const i32 s = i.ops[1];
    const u32 bad = w.bad[s] & exec;
    u8 out[32];
    for (u32 m = bad; m; m &= m - 1) {
        const int l = __builtin_ctz(m); const u32 x = invalid_bytes(w, s, l);
        out[l] = u8((x & 3 ? 1 : 0) | (x & 12 ? 2 : 0));
    }
    for (u32 m = exec; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        row<u16>(w, i.ops[0])[l] = u16(encode_packed(f, get(u16(a[l] >> 16)), i) << 8 | encode_packed(f, get(u16(a[l])), i));
    }
    settle_exact(w, i.ops[0], exec, bad, 2, [&](int l) { return u32(out[l]); });
}
VG_ON("cvt.e4m3x2.f16x2", op_narrow2(w, i, exec, E4M3, f16_to_f32);)
VG_ON("cvt.e5m2x2.f16x2", op_narrow2(w, i, exec, E5M2, f16_to_f32);)
VG_ON("cvt.e4m3x2.bf16x2", op_narrow2(w, i, exec, E4M3, bf16_to_f32);)
VG_ON("cvt.e5m2x2.bf16x2", op_narrow2(w, i, exec, E5M2, bf16_to_f32);)

template <class G, class P> inline void op_widen2(Warp& w, const Instr& i, u32 exec, G get, P put) {  // 8x2 -> 16x2
    const u16* a = row<u16>(w, i.ops[1]);
    const i32 s = i.ops[1];
    const u32 bad = w.bad[s] & exec;
    u8 out[32];
    for (u32 m = bad; m; m &= m - 1) {
        const int l = __builtin_ctz(m); const u32 x = invalid_bytes(w, s, l);
        out[l] = u8((x & 1 ? 3 : 0) | (x & 2 ? 12 : 0));
    }
    const i32 relu = i.p[0] & RELU;
    for (u32 m = exec; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        float lo = get(u8(a[l])), hi = get(u8(a[l] >> 8));
        if (relu) { lo = lo <= 0 ? 0.0f : lo; hi = hi <= 0 ? 0.0f : hi; }
        row<u32>(w, i.ops[0])[l] = u32(put(hi)) << 16 | put(lo);
    }
    settle_exact(w, i.ops[0], exec, bad, 4, [&](int l) { return u32(out[l]); });
}
VG_ON("cvt.f16x2.e4m3x2", op_widen2(w, i, exec, e4m3_to_f32, f32_to_f16);)
VG_ON("cvt.f16x2.e5m2x2", op_widen2(w, i, exec, e5m2_to_f32, f32_to_f16);)
VG_ON("cvt.bf16x2.e4m3x2", op_widen2(w, i, exec, e4m3_to_f32, f32_to_bf16);)
VG_ON("cvt.bf16x2.e5m2x2", op_widen2(w, i, exec, e5m2_to_f32, f32_to_bf16);)
VG_ON("cvt.tf32.f32", {
    const float* a = row<float>(w, i.ops[1]);
    const Round r = Round(i.p[1]);
    const bool relu = i.p[0] & RELU, sat = i.p[3];
    each(exec, row<u32>(w, i.ops[0]), [=](int l) {
        float x = a[l];
        if (relu && x <= 0) x = 0.0f;
        return x != x ? 0x7fffffffu : encode(TF32, x, r, sat) << 13;
    });
    settle(w, i.ops[0], exec, w.bad[i.ops[1]]);
})

}  // namespace vgpu
