// Number formats that C++ does not have: conversions between their bits and float or double.
#pragma once
#include "state.h"

namespace vgpu {

enum Round : i32 { RN = 0, RZ = 1, RM = 2, RP = 3, RNA = 4 };

template <class To, class From> inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to; std::memcpy(&to, &from, sizeof to); return to;
}

// A binary format of `man` stored mantissa bits and exponents up to `emax`; subnormals always exist.
struct Format { int man, emin, emax, bias, bits; bool has_inf; };
constexpr Format F16{10, -14, 15, 15, 16, true}, BF16{7, -126, 127, 127, 16, true}, E4M3{3, -6, 8, 7, 8, false},
    E5M2{2, -14, 15, 15, 8, true}, TF32{10, -126, 127, 127, 19, true}, FP32{23, -126, 127, 127, 32, true};

inline double decode(const Format& f, u32 bits) {
    const int ebits = f.bits - 1 - f.man;
    const u32 e = bits >> f.man & ((1u << ebits) - 1), m = bits & ((1u << f.man) - 1);
    const bool neg = bits >> (f.bits - 1) & 1;
    double v;
    if (f.has_inf && e == (1u << ebits) - 1) v = m ? std::nan("") : INFINITY;
    else if (!f.has_inf && e == (1u << ebits) - 1 && m == (1u << f.man) - 1) v = std::nan("");
    else if (e == 0) v = std::ldexp(double(m), f.emin - f.man);
    else v = std::ldexp(double(m + (1u << f.man)), int(e) - f.bias - f.man);
    return neg ? -v : v;
}

inline u32 nan_bits(const Format& f) {
    if (f.bits == 16) return 0x7fff;                     // canonical NaN of f16 and bf16 arithmetic
    return (1u << (f.bits - 1)) - 1;
}
inline u32 max_bits(const Format& f) {
    if (!f.has_inf) return (1u << (f.bits - 1)) - 2;      // e4m3: S.1111.110 = 448
    return (((1u << (f.bits - 1 - f.man)) - 1) << f.man) - 1;
}
inline double round_whole(double x, Round r) {
    switch (r) {
        case RN: return std::nearbyint(x);
        case RZ: return std::trunc(x);
        case RM: return std::floor(x);
        case RP: return std::ceil(x);
        default: return std::round(x);
    }
}

// Bits of `x` rounded to the format. `saturate`: overflow gives the largest finite value (and NaN stays NaN).
inline u32 encode(const Format& f, double x, Round r, bool saturate) {
    const u32 sign = std::signbit(x) ? 1u << (f.bits - 1) : 0;
    if (std::isnan(x)) return nan_bits(f);
    const double a = std::fabs(x);
    const u32 inf = f.has_inf ? ((1u << (f.bits - 1 - f.man)) - 1) << f.man : nan_bits(f);
    if (std::isinf(a)) return sign | (saturate ? max_bits(f) : inf);
    if (a == 0) return sign;
    int e; std::frexp(a, &e); --e;
    if (e < f.emin) e = f.emin;
    const Round directed = r == RM ? (sign ? RP : RZ) : r == RP ? (sign ? RZ : RP) : r;
    double scaled = round_whole(std::ldexp(a, f.man - e), directed);
    if (scaled >= std::ldexp(1.0, f.man + 1)) { scaled /= 2; ++e; }
    const u64 m = u64(scaled);
    u64 bits = m < (1ull << f.man) ? m : (u64(e + f.bias) << f.man) + (m - (1ull << f.man));
    if (bits > max_bits(f)) {
        const bool towards_zero = directed == RZ;
        bits = saturate || towards_zero ? max_bits(f) : inf;
    }
    return sign | u32(bits);
}

inline float f16_to_f32(u16 h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    const u32 sign = u32(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
    if (e == 31) return bits_as<float>(sign | 0x7f800000u | m << 13);
    if (e) return bits_as<float>(sign | (e + 112) << 23 | m << 13);
    const float v = float(m) * 5.9604644775390625e-8f;
    return sign ? -v : v;
#endif
}
inline u16 f32_to_f16(float x) {
#if defined(__F16C__)
    return x != x ? u16(0x7fff) : u16(_cvtss_sh(x, 0));
#else
    return u16(encode(F16, x, RN, false));
#endif
}
inline float bf16_to_f32(u16 h) { return bits_as<float>(u32(h) << 16); }
inline u16 f32_to_bf16(float x) {
    const u32 b = bits_as<u32>(x);
    if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return u16((b + 0x7fffu + (b >> 16 & 1)) >> 16);
}
inline float e4m3_to_f32(u8 b) { return float(decode(E4M3, b)); }
inline float e5m2_to_f32(u8 b) { return f16_to_f32(u16(b << 8)); }

// Nearest of the format to the exact a*b+c: the double sum is rounded to odd first, so that the second rounding is exact.
inline double fma_odd(double a, double b, double c) {
    const double p = a * b;                       // exact: at most 22 significant bits
    const volatile double s = p + c;
    if (!std::isfinite(s)) return s;
    const volatile double bb = s - p;
    const volatile double low = (p - (s - bb)) + (c - bb);
    if (low != 0 && !(bits_as<u64>(double(s)) & 1))
        return bits_as<double>(bits_as<u64>(double(s)) + ((low > 0) == (s > 0) ? 1 : u64(-1)));
    return s;
}
inline double flush64(double x) { return std::fabs(x) < 2.2250738585072014e-308 ? std::copysign(0.0, x) : x; }
inline float flush(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
inline float saturate01(float x) { return x > 1 ? 1.0f : x > 0 ? x : 0.0f; }  // NaN and -0 give +0, in every rounding mode

}  // namespace vgpu
