// What both translation units share: reading of launch parameters, status texts, the instruction sets of this CPU.
#pragma once

#include <cstring>

#include "pagedtune_cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace pagedtune {

// Reads launch parameters in order; params[i] points at the value of argument i.
class Params {
public:
    explicit Params(void* const* params) : next_(params) {}
    template <class... T>
    void pointers(T&... to) {
        (read(to), ...);
    }
    template <class... T>
    void integers(T&... to) {
        (read(to), ...);
    }
    template <class... T>
    void floats(T&... to) {
        (read(to), ...);
    }

private:
    template <class T>
    void read(T& to) {
        std::memcpy(&to, *next_++, sizeof(T));
    }
    void* const* next_;
};

#if defined(__x86_64__)
// Read from the processor: __builtin_cpu_supports needs run-time support that not every compiler ships.
inline int32_t probe_isa() {
    constexpr unsigned FMA = 1u << 12, OSXSAVE = 1u << 27, AVX = 1u << 28, F16C = 1u << 29;  // leaf 1, ecx
    constexpr unsigned AVX2 = 1u << 5, AVX512_F_DQ_BW_VL = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // leaf 7, ebx
    constexpr unsigned YMM_STATE = 0x6, ZMM_STATE = 0xe6;  // register files the operating system saves
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0) return PT_ISA_PORTABLE;
    const unsigned needed = FMA | OSXSAVE | AVX | F16C;
    if ((c & needed) != needed) return PT_ISA_PORTABLE;
    unsigned saved = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return PT_ISA_PORTABLE;
    if ((b & AVX2) == 0 || (saved & YMM_STATE) != YMM_STATE) return PT_ISA_PORTABLE;
    const bool wide = (b & AVX512_F_DQ_BW_VL) == AVX512_F_DQ_BW_VL && (saved & ZMM_STATE) == ZMM_STATE;
    return wide ? PT_ISA_AVX512 : PT_ISA_AVX2;
}
#endif

inline int32_t best_isa() {
#if defined(__x86_64__)
    static const int32_t best = probe_isa();
    return best;
#else
    return PT_ISA_PORTABLE;
#endif
}

}  // namespace pagedtune

extern "C" __attribute__((weak, used, visibility("default"))) const char* pagedtune_error(int32_t status) {
    switch (status) {
        case PT_OK: return "ok";
        case PT_BAD_ARGUMENT: return "an argument is null, not positive or out of range";
        case PT_BAD_ISA: return "the forced instruction set is not in this library or not on this CPU";
        case PT_BAD_SLOT: return "the slot mapping names a slot past the end of the pool";
        case PT_BAD_BLOCK: return "a block id lies outside the pool";
        case PT_BAD_PAIRS: return "block pairs depend on each other: a destination is written twice or also read";
        case PT_BAD_IDS: return "a block is listed twice: it would be written twice";
        case PT_BAD_DTYPE: return "the dtype code or the combination of dtypes is not supported";
        case PT_NO_MEMORY: return "out of memory";
        default: return "unknown status";
    }
}

extern "C" __attribute__((weak, used, visibility("default"))) const char* pagedtune_isa_name(int32_t isa) {
    switch (isa) {
        case PT_ISA_PORTABLE: return "portable";
        case PT_ISA_AVX2: return "avx2";
        case PT_ISA_AVX512: return "avx512";
        case PT_ISA_TEST_WIDE: return "test-wide";
        default: return "unknown";
    }
}
