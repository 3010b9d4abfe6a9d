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

// 2^x, flushed to 0 below the smallest normal number.
__device__ __forceinline__ float exp2_fast(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// Natural-log LSE of a sum `total` of powers of two relative to `top`; no key gives -inf, and a NaN stays one.
__device__ __forceinline__ float lse_of(float top, float total) {
    return total == 0.0f ? -infinity() : (top + log2f(total)) * LN2;
}
__device__ __forceinline__ float reciprocal_or_zero(float total) { return total == 0.0f ? 0.0f : 1.0f / total; }

}  // namespace pt
