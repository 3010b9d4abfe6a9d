// Comparisons: setp, set, testp, slct.
#pragma once
#include "bits.h"

namespace vgpu {

struct AsF16 { using store = u16; static float get(u16 x) { return f16_to_f32(x); } };
struct AsBF16 { using store = u16; static float get(u16 x) { return bf16_to_f32(x); } };
template <class T> struct AsIs { using store = T; static T get(T x) { return x; } };

enum Compare { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_ };
template <class T> inline bool unordered(T a, T b) { return a != a || b != b; }
template <int C, class T> inline bool compare(T a, T b) {
    switch (C) {
        case EQ: return a == b;
        case NE: return a != b && !unordered(a, b);
        case LT: return a < b;
        case LE: return a <= b;
        case GT: return a > b;
        case GE: return a >= b;
        case EQU: return a == b || unordered(a, b);
        case NEU: return a != b;
        case LTU: return a < b || unordered(a, b);
        case LEU: return a <= b || unordered(a, b);
        case GTU: return a > b || unordered(a, b);
        case GEU: return a >= b || unordered(a, b);
        case NUM: return !unordered(a, b);
        default: return unordered(a, b);
    }
}

// ops: p, q, a, b, c. p0 = bool operation (0 none, 1 and, 2 or, 3 xor), p1 = c negated, p2 = flush subnormals (f32).
inline void finish_setp(Warp& w, const Instr& i, u32 exec, u32 value) {
    u32 p = value, q = ~value, bad = w.bad[i.ops[2]] | w.bad[i.ops[3]], bad_p = bad, bad_q = bad;
    if (i.p[0]) {
        const u32 c = i.p[1] ? ~pred(w, i.ops[4]) : pred(w, i.ops[4]), xc = w.bad[i.ops[4]];
        const auto join = [&](u32 x) { return i.p[0] == 1 ? x & c : i.p[0] == 2 ? x | c : x ^ c; };
        const auto forced = [&](u32 x) {
            return i.p[0] == 1 ? (~bad & ~x) | (~xc & ~c) : i.p[0] == 2 ? (~bad & x) | (~xc & c) : 0u;
        };
        bad_p = (bad | xc) & ~forced(p); bad_q = (bad | xc) & ~forced(q);
        p = join(p); q = join(q);
    }
    set_pred(w, i.ops[0], exec, p, bad_p);
    set_pred(w, i.ops[1], exec, q, bad_q);
}
template <class A, int C> inline void op_setp(Warp& w, const Instr& i, u32 exec) {
    using T = typename A::store;
    const T *a = row<T>(w, i.ops[2]), *b = row<T>(w, i.ops[3]);
    u32 value = 0;
    if (std::is_same<A, AsIs<float>>::value && i.p[2])
        for (int l = 0; l < 32; ++l) value |= u32(compare<C>(flush(float(A::get(a[l]))), flush(float(A::get(b[l]))))) << l;
    else
        for (int l = 0; l < 32; ++l) value |= u32(compare<C>(A::get(a[l]), A::get(b[l]))) << l;
    finish_setp(w, i, exec, value);
}
// set.CMP.dtype.stype: p3 = 1 for an f32 result (1.0f), else all ones
template <class A, int C> inline void op_set(Warp& w, const Instr& i, u32 exec) {
    using T = typename A::store;
    const T *a = row<T>(w, i.ops[1]), *b = row<T>(w, i.ops[2]);
    const u32 yes = i.p[3] ? 0x3f800000u : 0xffffffffu;
    u32 value = 0;
    const bool z = std::is_same<A, AsIs<float>>::value && i.p[2];
    for (int l = 0; l < 32; ++l) {
        const auto x = A::get(a[l]), y = A::get(b[l]);
        value |= u32(z ? compare<C>(flush(float(x)), flush(float(y))) : compare<C>(x, y)) << l;
    }
    each(exec, row<u32>(w, i.ops[0]), [=](int l) { return value >> l & 1 ? yes : 0u; });
    settle(w, i.ops[0], exec, w.bad[i.ops[1]] | w.bad[i.ops[2]]);
}
#define VG_CMP1(A, C, name, type) VG_ON("setp." name "." type, (op_setp<A, C>(w, i, exec));) VG_ON("set." name "." type, (op_set<A, C>(w, i, exec));)
#define VG_CMP_INT(A, type) VG_CMP1(A, EQ, "eq", type) VG_CMP1(A, NE, "ne", type) VG_CMP1(A, LT, "lt", type) \
    VG_CMP1(A, LE, "le", type) VG_CMP1(A, GT, "gt", type) VG_CMP1(A, GE, "ge", type)
#define VG_CMP_FLOAT(A, type) VG_CMP_INT(A, type) VG_CMP1(A, EQU, "equ", type) VG_CMP1(A, NEU, "neu", type) \
    VG_CMP1(A, LTU, "ltu", type) VG_CMP1(A, LEU, "leu", type) VG_CMP1(A, GTU, "gtu", type) VG_CMP1(A, GEU, "geu", type) \
    VG_CMP1(A, NUM, "num", type) VG_CMP1(A, NAN_, "nan", type)
VG_CMP_INT(AsIs<u16>, "u16") VG_CMP_INT(AsIs<i16>, "s16") VG_CMP_INT(AsIs<u32>, "u32") VG_CMP_INT(AsIs<i32>, "s32")
VG_CMP_INT(AsIs<u64>, "u64") VG_CMP_INT(AsIs<i64>, "s64")
VG_CMP_FLOAT(AsIs<float>, "f32") VG_CMP_FLOAT(AsIs<double>, "f64") VG_CMP_FLOAT(AsF16, "f16") VG_CMP_FLOAT(AsBF16, "bf16")

// Packed comparisons give one predicate per half. p4 = comparison.
template <class A> inline bool compare_at(int c, float a, float b) {
    switch (c) {
#define VG_CASE(C) case C: return compare<C>(a, b);
        VG_CASE(EQ) VG_CASE(NE) VG_CASE(LT) VG_CASE(LE) VG_CASE(GT) VG_CASE(GE) VG_CASE(EQU) VG_CASE(NEU) VG_CASE(LTU)
        VG_CASE(LEU) VG_CASE(GTU) VG_CASE(GEU) VG_CASE(NUM)
#undef VG_CASE
        default: return compare<NAN_>(a, b);
    }
}
template <class A> inline void op_setp2(Warp& w, const Instr& i, u32 exec) {
    const u32 *a = row<u32>(w, i.ops[2]), *b = row<u32>(w, i.ops[3]);
    const u32 bad = w.bad[i.ops[2]] | w.bad[i.ops[3]];
    for (int half = 0; half < 2; ++half) {
        u32 value = 0;
        for (int l = 0; l < 32; ++l)
            value |= u32(compare_at<A>(i.p[4], A::get(u16(a[l] >> 16 * half)), A::get(u16(b[l] >> 16 * half)))) << l;
        set_pred(w, i.ops[half], exec, value, bad);
    }
}
// set.CMP.f16x2.f16x2: 1.0 or 0 in each half; p3 = bits of 1.0 (0xffff for an integer result)
template <class A> inline void op_set2(Warp& w, const Instr& i, u32 exec) {
    const u32 *a = row<u32>(w, i.ops[1]), *b = row<u32>(w, i.ops[2]);
    const int cmp = i.p[4]; const u32 yes = u32(i.p[3]);
    each(exec, row<u32>(w, i.ops[0]), [=](int l) {
        u32 r = 0;
        for (int h = 0; h < 2; ++h) if (compare_at<A>(cmp, A::get(u16(a[l] >> 16 * h)), A::get(u16(b[l] >> 16 * h)))) r |= yes << 16 * h;
        return r;
    });
    settle(w, i.ops[0], exec, w.bad[i.ops[1]] | w.bad[i.ops[2]]);
}
VG_ON("setp.f16x2", op_setp2<AsF16>(w, i, exec);) VG_ON("setp.bf16x2", op_setp2<AsBF16>(w, i, exec);)
VG_ON("set.f16x2", op_set2<AsF16>(w, i, exec);) VG_ON("set.bf16x2", op_set2<AsBF16>(w, i, exec);)

template <class T, class F> inline void op_testp(Warp& w, const Instr& i, u32 exec, F f) {
    const T* a = row<T>(w, i.ops[1]);
    set_pred(w, i.ops[0], exec, mask_of(exec, [=](int l) { return f(a[l]); }), w.bad[i.ops[1]]);
}
#define VG_TESTP(T, n)                                                                                 \
    VG_ON("testp.finite." n, op_testp<T>(w, i, exec, [](T x) { return std::isfinite(x); });)           \
    VG_ON("testp.infinite." n, op_testp<T>(w, i, exec, [](T x) { return std::isinf(x); });)            \
    VG_ON("testp.number." n, op_testp<T>(w, i, exec, [](T x) { return x == x; });)                     \
    VG_ON("testp.notanumber." n, op_testp<T>(w, i, exec, [](T x) { return x != x; });)                 \
    VG_ON("testp.normal." n, op_testp<T>(w, i, exec, [](T x) { return std::isnormal(x); });)           \
    VG_ON("testp.subnormal." n, op_testp<T>(w, i, exec, [](T x) { return std::fpclassify(x) == FP_SUBNORMAL; });)
VG_TESTP(float, "f32") VG_TESTP(double, "f64")

#define VG_SLCT(U, n) VG_3("slct.b" n ".s32", U, U, U, i32, c >= 0 ? a : b) VG_3("slct.b" n ".f32", U, U, U, float, c >= 0 ? a : b)
VG_SLCT(u16, "16") VG_SLCT(u32, "32") VG_SLCT(u64, "64")

}  // namespace vgpu
