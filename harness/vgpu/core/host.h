// What the host can do; the first include of every translation unit, as the target must be known before all else.
#pragma once
#if defined(VGPU_AVX2) && VGPU_AVX2 && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,popcnt,lzcnt")
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif
