// Floating-point arithmetic. p0 = flags of the modifiers.
#pragma once
#include "compare.h"

#undef VG_ON
#define VG_ON VG_REGISTER

namespace vgpu {

enum Flags : i32 { FTZ = 1, SAT = 2, TO_ZERO = 4, TO_MINUS = 8, TO_PLUS = 16, NAN_FLAG = 32, RELU = 64, XORSIGN = 128, ABS_FLAG = 256 };

struct RoundingMode {  // the host's rounding for the scope; only the directed modes cost anything
    const bool directed;
    explicit RoundingMode(i32 flags) : directed(flags & (TO_ZERO | TO_MINUS | TO_PLUS)) {
        if (directed) std::fesetround(flags & TO_ZERO ? FE_TOWARDZERO : flags & TO_MINUS ? FE_DOWNWARD : FE_UPWARD);
    }
    ~RoundingMode() { if (directed) std::fesetround(FE_TONEAREST); }
};
template <class T> inline T opaque(T x) { volatile T y = x; return y; }  // keeps the operation inside the mode

inline float finish(float x, i32 flags) {
    if (flags & FTZ) x = flush(x);
    if (flags & SAT) x = saturate01(x);
    if (flags & RELU) x = x != x ? x : x > 0 ? x : 0.0f;
    return x;
}
template <class F> inline void f32_1(Warp& w, const Instr& i, u32 exec, F f) {
    const float* a = row<float>(w, i.ops[1]);
    const i32 flags = i.p[0];
    if (!flags) each(exec, row<float>(w, i.ops[0]), [=](int l) { return f(a[l]); });
    else {
        RoundingMode mode(flags);
        each(exec, row<float>(w, i.ops[0]), [=](int l) { return finish(opaque(f(opaque(flags & FTZ ? flush(a[l]) : a[l]))), flags); });
    }
    settle(w, i.ops[0], exec, w.bad[i.ops[1]]);
}
template <class F> inline void f32_2(Warp& w, const Instr& i, u32 exec, F f) {
    const float *a = row<float>(w, i.ops[1]), *b = row<float>(w, i.ops[2]);
    const i32 flags = i.p[0];
    if (!flags) each(exec, row<float>(w, i.ops[0]), [=](int l) { return f(a[l], b[l]); });
    else {
        RoundingMode mode(flags);
        const bool z = flags & FTZ;
        each(exec, row<float>(w, i.ops[0]), [=](int l) {
            return finish(opaque(f(opaque(z ? flush(a[l]) : a[l]), opaque(z ? flush(b[l]) : b[l]))), flags);
        });
    }
    settle(w, i.ops[0], exec, w.bad[i.ops[1]] | w.bad[i.ops[2]]);
}
template <class F> inline void f32_3(Warp& w, const Instr& i, u32 exec, F f) {
    const float *a = row<float>(w, i.ops[1]), *b = row<float>(w, i.ops[2]), *c = row<float>(w, i.ops[3]);
    const i32 flags = i.p[0];
    if (!flags) each(exec, row<float>(w, i.ops[0]), [=](int l) { return f(a[l], b[l], c[l]); });
    else {
        RoundingMode mode(flags);
        const bool z = flags & FTZ;
        each(exec, row<float>(w, i.ops[0]), [=](int l) {
            return finish(opaque(f(opaque(z ? flush(a[l]) : a[l]), opaque(z ? flush(b[l]) : b[l]), opaque(z ? flush(c[l]) : c[l]))), flags);
        });
    }
    settle(w, i.ops[0], exec, w.bad[i.ops[1]] | w.bad[i.ops[2]] | w.bad[i.ops[3]]);
}
#define VG_F1(key, expr) VG_ON(key, f32_1(w, i, exec, [](float a) -> float { return expr; });)
#define VG_F2(key, expr) VG_ON(key, f32_2(w, i, exec, [](float a, float b) -> float { return expr; });)

template <class T> inline T min_value(T a, T b) {
    if (a != a) return b;
    if (b != b) return a;
    if (a == 0 && b == 0) return std::signbit(a) ? a : b;
    return a < b ? a : b;
}
template <class T> inline T max_value(T a, T b) {
    if (a != a) return b;
    if (b != b) return a;
    if (a == 0 && b == 0) return std::signbit(a) ? b : a;
    return a > b ? a : b;
}
template <class T> inline T min_max(T a, T b, i32 flags, bool maximum) {
    const bool negative = std::signbit(a) != std::signbit(b);
    if (flags & ABS_FLAG) { a = std::fabs(a); b = std::fabs(b); }
    T r = (flags & NAN_FLAG) && (a != a || b != b) ? std::numeric_limits<T>::quiet_NaN() : maximum ? max_value(a, b) : min_value(a, b);
    if (flags & XORSIGN) r = std::copysign(r, negative ? T(-1) : T(1));
    return r;
}

// Approximate instructions are as wrong as the PTX ISA allows, so that a kernel cannot lean on what no GPU promises: their
// exact results, rounded once to as few bits as the documented bound has room for. Powers of two and order are kept.
// `STORED` mantissa bits: a relative error of up to 2^-(STORED + 1), or 2^(22 - STORED) ulp. Subnormal numbers, infinities
// and NaN pass; what would round up to infinity is cut off, an error within the bound as such a mantissa is almost 2.
template <int STORED> inline float coarse(double x) {
    if (!(std::fabs(x) >= 0x1p-126 && std::fabs(x) <= std::numeric_limits<float>::max())) return float(x);
    const u64 bits = bits_as<u64>(x), dropped = (1ull << (52 - STORED)) - 1;
    const float nearest = float(bits_as<double>((bits + (dropped >> 1) + (bits >> (52 - STORED) & 1)) & ~dropped));
    return std::isinf(nearest) ? float(bits_as<double>(bits & ~dropped)) : nearest;
}
// Multiples of 2^-PLACES: an absolute error of up to 2^-(PLACES + 1). For |x| <= 1.
template <int PLACES> inline float coarse_places(double x) {
    constexpr double STEPS = 1 << PLACES;
    return float(std::nearbyint(x * STEPS) / STEPS);
}
// The bounds, from the PTX ISA's section of floating-point instructions: tanh 2^-11 relative; ex2, div.approx and div.full
// 2 ulp, rcp 1 ulp; sqrt 2^-23 and rsqrt 2^-22.9 relative; sin and cos 2^-20.5 absolute; lg2 2^-22, absolute in (0.5, 2) and
// relative elsewhere.
inline float coarse_lg2(float a) {
    const double r = std::log2(double(a));
    return a > 0.5f && a < 2.0f ? coarse_places<21>(r) : coarse<21>(r);
}

VG_F2("add.f32", a + b) VG_F2("sub.f32", a - b) VG_F2("mul.f32", a * b) VG_F2("div.f32", a / b)
VG_ON("fma.f32", f32_3(w, i, exec, [](float a, float b, float c) -> float { return std::fma(a, b, c); });)
VG_F1("neg.f32", -a) VG_F1("abs.f32", std::fabs(a)) VG_F1("sqrt.f32", std::sqrt(a)) VG_F1("rcp.f32", 1.0f / a)
#define VG_A1(key, expr) VG_ON(key, f32_1(w, i, exec, [](double a) -> float { return expr; });)
VG_ON("div.full.f32", f32_2(w, i, exec, [](double a, double b) -> float { return coarse<21>(a / b); });)
// a times 1/b, which is 0 for |b| above 2^126: so is the result, and NaN for an infinite a.
VG_ON("div.approx.f32", f32_2(w, i, exec, [](double a, double b) -> float {
    return std::fabs(b) > 0x1p126 ? float(a * std::copysign(0.0, b)) : coarse<21>(a / b);
});)
VG_A1("sqrt.approx.f32", coarse<22>(std::sqrt(a))) VG_A1("rcp.approx.f32", coarse<22>(1.0 / a))
VG_A1("rsqrt.f32", coarse<22>(1.0 / std::sqrt(a))) VG_A1("ex2.f32", coarse<21>(std::exp2(a))) VG_F1("lg2.f32", coarse_lg2(a))
VG_A1("sin.f32", coarse_places<20>(std::sin(a))) VG_A1("cos.f32", coarse_places<20>(std::cos(a))) VG_A1("tanh.f32", coarse<10>(std::tanh(a)))
VG_2("copysign.f32", u32, u32, u32, (b & 0x7fffffffu) | (a & 0x80000000u))
VG_2("copysign.f64", u64, u64, u64, (b & ~(1ull << 63)) | (a & 1ull << 63))
VG_ON("min.f32", { const i32 g = i.p[0]; Instr j = i; j.p[0] &= FTZ; f32_2(w, j, exec, [g](float a, float b) { return min_max(a, b, g, false); }); })
VG_ON("max.f32", { const i32 g = i.p[0]; Instr j = i; j.p[0] &= FTZ; f32_2(w, j, exec, [g](float a, float b) { return min_max(a, b, g, true); }); })
VG_ON("min3.f32", { const i32 g = i.p[0]; Instr j = i; j.p[0] &= FTZ; f32_3(w, j, exec, [g](float a, float b, float c) { return min_max(min_max(a, b, g, false), c, g, false); }); })
VG_ON("max3.f32", { const i32 g = i.p[0]; Instr j = i; j.p[0] &= FTZ; f32_3(w, j, exec, [g](float a, float b, float c) { return min_max(min_max(a, b, g, true), c, g, true); }); })

#define VG_D2(key, expr) VG_ON(key, { RoundingMode mode(i.p[0]); alu2<double, double, double>(w, i, exec, [](double a, double b) -> double { a = opaque(a); b = opaque(b); return opaque(expr); }); })
VG_D2("add.f64", a + b) VG_D2("sub.f64", a - b) VG_D2("mul.f64", a * b) VG_D2("div.f64", a / b)
VG_ON("fma.f64", { RoundingMode mode(i.p[0]); alu3<double, double, double, double>(w, i, exec, [](double a, double b, double c) { return std::fma(a, b, c); }); })
VG_1("neg.f64", double, double, -a) VG_1("abs.f64", double, double, std::fabs(a))
#define VG_D1(key, expr) VG_ON(key, { RoundingMode mode(i.p[0]); alu1<double, double>(w, i, exec, [](double a) -> double { a = opaque(a); return opaque(expr); }); })
VG_D1("sqrt.f64", std::sqrt(a)) VG_D1("rcp.f64", 1.0 / a)
VG_2("min.f64", double, double, double, min_value(a, b)) VG_2("max.f64", double, double, double, max_value(a, b))
// The upper half of an approximate reciprocal: relative error 2^-20 is documented, and the lower word is zero.
template <class F> inline void upper_word(Warp& w, const Instr& i, u32 exec, F f) {
    const bool z = i.p[0] & FTZ;
    alu1<u64, double>(w, i, exec, [=](double a) {
        const double r = f(z ? flush64(a) : a);
        return bits_as<u64>(z ? flush64(r) : r) & ~0xffffffffull;
    });
}
VG_ON("rcp.approx.f64", upper_word(w, i, exec, [](double a) { return 1.0 / a; });)
VG_ON("rsqrt.approx.f64", upper_word(w, i, exec, [](double a) { return 1.0 / std::sqrt(a); });)

// ---- 16-bit and packed arithmetic: exact in float or double, then one rounding; ex2 and tanh as coarse as documented
struct H16 {
    static float get(u16 x) { return f16_to_f32(x); }
    static u16 put(float x) { return f32_to_f16(x); }
    static float coarse_ex2(double r) { return coarse<9>(r); }           // 2^-9.9 relative
    static float coarse_tanh(double r) { return coarse_places<10>(r); }  // 2^-10.987 absolute
    static u16 put_fma(float a, float b, float c) { return u16(encode(F16, fma_odd(a, b, c), RN, false)); }
};
struct B16 {
    static float get(u16 x) { return bf16_to_f32(x); }
    static u16 put(float x) { return f32_to_bf16(x); }
    static float coarse_ex2(double r) { return coarse<6>(r); }          // 2^-7 relative
    static float coarse_tanh(double r) { return coarse_places<7>(r); }  // 2^-8 absolute
    static u16 put_fma(float a, float b, float c) { return u16(encode(BF16, fma_odd(a, b, c), RN, false)); }
};
inline float half_flags(float x, i32 flags) {
    if (flags & SAT) x = saturate01(x);
    if (flags & RELU) x = x != x ? x : x > 0 ? x : 0.0f;
    return x;
}
template <class H> inline u16 half_flush(u16 x, i32 flags) {
    const u32 exponent = std::is_same<H, H16>::value ? 0x7c00 : 0x7f80;
    return (flags & FTZ) && !(x & exponent) ? u16(x & 0x8000) : x;
}
template <class H, class F> inline void half_op(Warp& w, const Instr& i, u32 exec, int sources, int count, F f) {
    const i32 flags = i.p[0];
    const bool wide = count == 2;
    u32 bad = 0;
    u32 in[3][32];
    for (int s = 0; s < sources; ++s) {
        bad |= w.bad[i.ops[1 + s]];
        for (int l = 0; l < 32; ++l) in[s][l] = wide ? row<u32>(w, i.ops[1 + s])[l] : row<u16>(w, i.ops[1 + s])[l];
    }
    for (int s = sources; s < 3; ++s) std::memset(in[s], 0, sizeof in[s]);
    for (u32 m = exec; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        u32 out = 0;
        for (int h = 0; h < count; ++h) {
            u16 x[3];
            for (int s = 0; s < 3; ++s) x[s] = half_flush<H>(u16(in[s][l] >> 16 * h), flags);
            out |= u32(half_flush<H>(f(x[0], x[1], x[2], flags), flags)) << 16 * h;
        }
        if (wide) row<u32>(w, i.ops[0])[l] = out; else row<u16>(w, i.ops[0])[l] = u16(out);
    }
    u8 part[32];
    const u32 now = bad & exec;
    for (u32 m = now; m; m &= m - 1) {  // halves stay apart
        const int l = __builtin_ctz(m);
        u32 x = 0;
        for (int s = 0; s < sources; ++s) x |= invalid_bytes(w, i.ops[1 + s], l);
        part[l] = u8((x & 3 ? 3 : 0) | (x & 12 ? 12 : 0));
    }
    settle_exact(w, i.ops[0], exec, now, wide ? 4 : 2, [&](int l) { return u32(part[l]); });
}
#define VG_HALF(H, name, sources, t, body)                                                                             \
    VG_ON(name "." t, half_op<H>(w, i, exec, sources, 1, [](u16 a, u16 b, u16 c, i32 g) -> u16 { (void)b; (void)c; (void)g; return body; });) \
    VG_ON(name "." t "x2", half_op<H>(w, i, exec, sources, 2, [](u16 a, u16 b, u16 c, i32 g) -> u16 { (void)b; (void)c; (void)g; return body; });)
#define VG_HALVES(H, t)                                                                         \
    VG_HALF(H, "add", 2, t, H::put(half_flags(H::get(a) + H::get(b), g)))                       \
    VG_HALF(H, "sub", 2, t, H::put(half_flags(H::get(a) - H::get(b), g)))                       \
    VG_HALF(H, "mul", 2, t, H::put(half_flags(H::get(a) * H::get(b), g)))                       \
    VG_HALF(H, "fma", 3, t, (g & (SAT | RELU)) ? H::put(half_flags(H::get(H::put_fma(H::get(a), H::get(b), H::get(c))), g)) : H::put_fma(H::get(a), H::get(b), H::get(c))) \
    VG_HALF(H, "neg", 1, t, u16(a ^ 0x8000)) VG_HALF(H, "abs", 1, t, u16(a & 0x7fff))           \
    VG_HALF(H, "min", 2, t, H::put(min_max(H::get(a), H::get(b), g, false)))                    \
    VG_HALF(H, "max", 2, t, H::put(min_max(H::get(a), H::get(b), g, true)))                     \
    VG_HALF(H, "ex2", 1, t, H::put(H::coarse_ex2(std::exp2(double(H::get(a))))))                        \
    VG_HALF(H, "tanh", 1, t, H::put(H::coarse_tanh(std::tanh(double(H::get(a))))))
VG_HALVES(H16, "f16")
VG_HALVES(B16, "bf16")

}  // namespace vgpu
