// Element types, constants and register packing that the split kernels share.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace pt {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr float LOWEST = -1e30f;  // maximum of no score yet: finite, so that differences of maxima are never NaN
constexpr u32 ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Codes of PT_Q_DTYPE and PT_KV_DTYPE.
constexpr int BF16 = 1, FP16 = 2, E4M3 = 3, INT8 = 4;
template <int DTYPE> struct Type;
template <> struct Type<BF16> { using T = __nv_bfloat16; };
template <> struct Type<FP16> { using T = __half; };
template <> struct Type<E4M3> { using T = u8; };
template <> struct Type<INT8> { using T = u8; };

template <int DTYPE> __device__ __forceinline__ u32 pack(float low, float high) {
    u32 out;
    if constexpr (DTYPE == BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

// Four 8-bit elements, lowest byte first, as two pairs of halves: (0, 1) and (2, 3), or with CROSSED (0, 2) and (1, 3).
// Exact but for a constant factor, FACTOR: what a half is multiplied with to give the element.
template <int DTYPE> struct EightBit {
    static constexpr float FACTOR = 1.0f;
    template <bool CROSSED> __device__ static void widen(u32 x, u32& first, u32& second);  // 16-bit types have none
};
template <> struct EightBit<E4M3> {
#if __CUDA_ARCH__ >= 890
    static constexpr float FACTOR = 1.0f;
    template <bool CROSSED> __device__ static __forceinline__ void widen(u32 x, u32& first, u32& second) {
        if (CROSSED) x = __byte_perm(x, 0, 0x3120);
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
            : "=r"(first), "=r"(second) : "r"(x));
    }
#else
    // Sign, exponent and mantissa moved to their places in a half, whose exponent counts from 8 less. NaN becomes 480.
    static constexpr float FACTOR = 256.0f;
    template <bool CROSSED> __device__ static __forceinline__ void widen(u32 x, u32& first, u32& second) {
        const u32 a = __byte_perm(x, 0, CROSSED ? 0x2404 : 0x1404), b = __byte_perm(x, 0, CROSSED ? 0x3414 : 0x3424);
        first = (a & 0x80008000u) | (a & 0x7f007f00u) >> 1;
        second = (b & 0x80008000u) | (b & 0x7f007f00u) >> 1;
    }
#endif
};
template <> struct EightBit<INT8> {
    static constexpr float FACTOR = 1.0f;
    // 0x64xx is the half 1024 + xx; with the sign bit turned over, xx is the element + 128.
    template <bool CROSSED> __device__ static __forceinline__ void widen(u32 x, u32& first, u32& second) {
        x ^= 0x80808080u;
        const u32 a = __byte_perm(x, 0x64646464u, CROSSED ? 0x4240 : 0x4140), b = __byte_perm(x, 0x64646464u, CROSSED ? 0x4341 : 0x4342);
        const __half2 bias = __half2half2(__ushort_as_half(0x6480));
        const __half2 low = __hsub2(reinterpret_cast<const __half2&>(a), bias), high = __hsub2(reinterpret_cast<const __half2&>(b), bias);
        first = reinterpret_cast<const u32&>(low), second = reinterpret_cast<const u32&>(high);
    }
};

// 2^x, flushed to 0 below the smallest normal number.
__device__ __forceinline__ float exp2_fast(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// A sink's term relative to `top`; an infinite sink takes all weight and leaves none to the values.
__device__ __forceinline__ float sink_term(float sink, float top) { return sink == top ? 1.0f : exp2_fast(sink - top); }

// Natural-log LSE of a sum `total` of powers of two relative to `top`; no key gives -inf, and a NaN stays one.
__device__ __forceinline__ float lse_of(float top, float total) {
    return total == 0.0f ? -infinity() : (top + log2f(total)) * LN2;
}
__device__ __forceinline__ float reciprocal_or_zero(float total) { return total == 0.0f ? 0.0f : 1.0f / total; }

}  // namespace pt
