// Integer arithmetic, logic, shifts and bit operations. Keys are those of `decode_rules.py`.
#pragma once
#include "formats.h"

namespace vgpu {

template <class D, class A, class F> inline void alu1(Warp& w, const Instr& i, u32 exec, F f) {
    const A* a = row<A>(w, i.ops[1]);
    each(exec, row<D>(w, i.ops[0]), [=](int l) { return D(f(a[l])); });
    settle(w, i.ops[0], exec, w.bad[i.ops[1]]);
}
template <class D, class A, class B, class F> inline void alu2(Warp& w, const Instr& i, u32 exec, F f) {
    const A* a = row<A>(w, i.ops[1]); const B* b = row<B>(w, i.ops[2]);
    each(exec, row<D>(w, i.ops[0]), [=](int l) { return D(f(a[l], b[l])); });
    settle(w, i.ops[0], exec, w.bad[i.ops[1]] | w.bad[i.ops[2]]);
}
template <class D, class A, class B, class C, class F> inline void alu3(Warp& w, const Instr& i, u32 exec, F f) {
    const A* a = row<A>(w, i.ops[1]); const B* b = row<B>(w, i.ops[2]); const C* c = row<C>(w, i.ops[3]);
    each(exec, row<D>(w, i.ops[0]), [=](int l) { return D(f(a[l], b[l], c[l])); });
    settle(w, i.ops[0], exec, w.bad[i.ops[1]] | w.bad[i.ops[2]] | w.bad[i.ops[3]]);
}

#define VG_CAT2(a, b) a##b
#define VG_CAT(a, b) VG_CAT2(a, b)
#define VG_REGISTER(key, ...) static Register VG_CAT(reg_, __COUNTER__)(key, [](Ctx& c, Warp& w, const Instr& i, u32 exec) { (void)c; __VA_ARGS__ });
// Up to compare.h, handlers exist in integers.cpp; elsewhere these headers give what the later ones build on.
#ifdef VGPU_INTEGERS
#define VG_ON VG_REGISTER
#else
#define VG_ON(key, ...)
#endif
#define VG_1(key, D, A, ...) VG_ON(key, alu1<D, A>(w, i, exec, [](A a) { return __VA_ARGS__; });)
#define VG_2(key, D, A, B, ...) VG_ON(key, alu2<D, A, B>(w, i, exec, [](A a, B b) { return __VA_ARGS__; });)
#define VG_3(key, D, A, B, C, ...) VG_ON(key, alu3<D, A, B, C>(w, i, exec, [](A a, B b, C c) { return __VA_ARGS__; });)

template <class T> inline T int_div(T a, T b) {
    if (b == 0) return T(~T(0));
    if (std::is_signed<T>::value && b == T(-1)) return T(0 - std::make_unsigned_t<T>(a));
    return a / b;
}
template <class T> inline T int_rem(T a, T b) {
    if (b == 0) return T(~T(0)) ;
    if (std::is_signed<T>::value && b == T(-1)) return 0;
    return a % b;
}
template <class T> inline T shift_left(T a, u32 n) { return n >= sizeof(T) * 8 ? T(0) : T(a << n); }
template <class T> inline T shift_right(T a, u32 n) {
    if (n >= sizeof(T) * 8) return std::is_signed<T>::value && a < 0 ? T(-1) : T(0);
    return T(a >> n);
}
template <class T> inline T saturating(__int128 v) {
    const __int128 lo = std::numeric_limits<T>::min(), hi = std::numeric_limits<T>::max();
    return T(v < lo ? lo : v > hi ? hi : v);
}
template <class T> inline T mul_high(T a, T b) { return T((__int128(a) * __int128(b)) >> (sizeof(T) * 8)); }
template <> inline u64 mul_high(u64 a, u64 b) { return u64((unsigned __int128)(a) * b >> 64); }

#define VG_INT_COMMON(U, S, n)                                                                      \
    VG_2("add.u" n, U, U, U, a + b) VG_2("sub.u" n, U, U, U, a - b) VG_2("mul.lo.u" n, U, U, U, U(u64(a) * u64(b))) \
    VG_3("mad.lo.u" n, U, U, U, U, U(u64(a) * u64(b) + c))                                          \
    VG_2("mul.hi.u" n, U, U, U, mul_high<U>(a, b)) VG_2("mul.hi.s" n, S, S, S, mul_high<S>(a, b))   \
    VG_3("mad.hi.u" n, U, U, U, U, U(mul_high<U>(a, b) + c)) VG_3("mad.hi.s" n, S, S, S, S, S(U(mul_high<S>(a, b)) + U(c))) \
    VG_2("div.u" n, U, U, U, int_div<U>(a, b)) VG_2("div.s" n, S, S, S, int_div<S>(a, b))           \
    VG_2("rem.u" n, U, U, U, int_rem<U>(a, b)) VG_2("rem.s" n, S, S, S, int_rem<S>(a, b))           \
    VG_2("min.u" n, U, U, U, a < b ? a : b) VG_2("min.s" n, S, S, S, a < b ? a : b)                 \
    VG_2("max.u" n, U, U, U, a > b ? a : b) VG_2("max.s" n, S, S, S, a > b ? a : b)                 \
    VG_1("neg.s" n, U, U, U(0) - a) VG_1("abs.s" n, U, S, a < 0 ? U(0) - U(a) : U(a))               \
    VG_1("not.b" n, U, U, ~a) VG_1("cnot.b" n, U, U, a == 0 ? 1 : 0)                                \
    VG_3("sad.u" n, U, U, U, U, U(c + (a < b ? b - a : a - b)))                                     \
    VG_3("sad.s" n, U, S, S, U, U(c + (a < b ? U(b) - U(a) : U(a) - U(b))))

VG_INT_COMMON(u16, i16, "16")
VG_INT_COMMON(u32, i32, "32")
VG_INT_COMMON(u64, i64, "64")

VG_2("add.sat.s32", i32, i32, i32, saturating<i32>(__int128(a) + b))
VG_2("sub.sat.s32", i32, i32, i32, saturating<i32>(__int128(a) - b))
VG_3("mad.hi.sat.s32", i32, i32, i32, i32, saturating<i32>(__int128(mul_high<i32>(a, b)) + c))
VG_2("mul.wide.u16", u32, u16, u16, u32(a) * u32(b))
VG_2("mul.wide.s16", i32, i16, i16, i32(a) * i32(b))
VG_2("mul.wide.u32", u64, u32, u32, u64(a) * u64(b))
VG_2("mul.wide.s32", i64, i32, i32, i64(a) * i64(b))
VG_3("mad.wide.u16", u32, u16, u16, u32, u32(a) * u32(b) + c)
VG_3("mad.wide.s16", u32, i16, i16, u32, u32(i32(a) * i32(b)) + c)
VG_3("mad.wide.u32", u64, u32, u32, u64, u64(a) * u64(b) + c)
VG_3("mad.wide.s32", u64, i32, i32, u64, u64(i64(a) * i64(b)) + c)
VG_2("mul24.lo.u32", u32, u32, u32, (a & 0xffffff) * (b & 0xffffff))
VG_2("mul24.lo.s32", u32, u32, u32, u32((i32(a << 8) >> 8) * (i32(b << 8) >> 8)))

// ---- extended precision
inline void settle_carry(Warp& w, const Instr& i, u32 exec, u32 bad, bool use, bool set) {
    if (use) bad |= w.carry_bad;
    if (set) w.carry_bad = (w.carry_bad & ~exec) | (bad & exec);
    settle(w, i.ops[0], exec, bad);
}
template <class T> inline void add_carry(Warp& w, const Instr& i, u32 exec, bool subtract, bool use, bool set) {
    const T *a = row<T>(w, i.ops[1]), *b = row<T>(w, i.ops[2]);
    T* d = row<T>(w, i.ops[0]);
    for (u32 m = exec; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        const unsigned __int128 in = use ? (w.carry >> l & 1) : 0;
        const unsigned __int128 x = subtract ? (unsigned __int128)(a[l]) - b[l] - in : (unsigned __int128)(a[l]) + b[l] + in;
        d[l] = T(x);
        if (set) w.carry = (w.carry & ~(1u << l)) | (u32(x >> (sizeof(T) * 8)) & 1u) << l;
    }
    settle_carry(w, i, exec, w.bad[i.ops[1]] | w.bad[i.ops[2]], use, set);
}
#define VG_CARRY(T, n)                                                                                     \
    VG_ON("add.cc." n, add_carry<T>(w, i, exec, false, false, true);) VG_ON("addc." n, add_carry<T>(w, i, exec, false, true, false);) \
    VG_ON("addc.cc." n, add_carry<T>(w, i, exec, false, true, true);) VG_ON("sub.cc." n, add_carry<T>(w, i, exec, true, false, true);) \
    VG_ON("subc." n, add_carry<T>(w, i, exec, true, true, false);) VG_ON("subc.cc." n, add_carry<T>(w, i, exec, true, true, true);)
VG_CARRY(u32, "u32")
VG_CARRY(u64, "u64")

template <class T> inline void mad_carry(Warp& w, const Instr& i, u32 exec, bool high, bool use, bool set) {
    const T *a = row<T>(w, i.ops[1]), *b = row<T>(w, i.ops[2]), *c = row<T>(w, i.ops[3]);
    T* d = row<T>(w, i.ops[0]);
    for (u32 m = exec; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        const T part = high ? mul_high<T>(a[l], b[l]) : T(u64(a[l]) * u64(b[l]));
        const unsigned __int128 x = (unsigned __int128)(part) + c[l] + (use ? (w.carry >> l & 1) : 0);
        d[l] = T(x);
        if (set) w.carry = (w.carry & ~(1u << l)) | (u32(x >> (sizeof(T) * 8)) & 1u) << l;
    }
    settle_carry(w, i, exec, w.bad[i.ops[1]] | w.bad[i.ops[2]] | w.bad[i.ops[3]], use, set);
}
#define VG_MAD_CARRY(T, n)                                                                                 \
    VG_ON("mad.lo.cc." n, mad_carry<T>(w, i, exec, false, false, true);) VG_ON("mad.hi.cc." n, mad_carry<T>(w, i, exec, true, false, true);) \
    VG_ON("madc.lo." n, mad_carry<T>(w, i, exec, false, true, false);) VG_ON("madc.hi." n, mad_carry<T>(w, i, exec, true, true, false);) \
    VG_ON("madc.lo.cc." n, mad_carry<T>(w, i, exec, false, true, true);) VG_ON("madc.hi.cc." n, mad_carry<T>(w, i, exec, true, true, true);)
VG_MAD_CARRY(u32, "u32")
VG_MAD_CARRY(u64, "u64")

// ---- counting and fields
template <class T> inline u32 leading_zeros(T a) { return a == 0 ? u32(sizeof(T) * 8) : sizeof(T) == 8 ? u32(__builtin_clzll(a)) : u32(__builtin_clz(u32(a))); }
template <class T> inline u32 find_high(T a, bool shift) {
    if (a == 0) return ~0u;
    const u32 at = u32(sizeof(T) * 8) - 1 - leading_zeros(a);
    return shift ? u32(sizeof(T) * 8) - 1 - at : at;
}
template <class U> inline U reverse_bits(U a) { U r = 0; for (size_t k = 0; k < sizeof(U) * 8; ++k) { r = U(r << 1) | (a & 1); a >>= 1; } return r; }
template <class U> inline U extract(U a, u32 pos, u32 len, bool sign) {
    const u32 size = sizeof(U) * 8;
    pos &= 255; len &= 255;
    if (len == 0) return 0;
    const u32 top = std::min(pos + len - 1, size - 1);
    const bool s = sign && (a >> top & 1);
    U value = pos >= size ? U(0) : U(a >> pos);
    if (len < size) value &= (U(1) << len) - 1;
    if (s) { const u32 from = pos >= size ? 0 : std::min(len, size - pos); if (from < size) value |= ~U(0) << from; }
    return value;
}
template <class U> inline U insert(U a, U b, u32 pos, u32 len) {
    const u32 size = sizeof(U) * 8;
    pos &= 255; len &= 255;
    if (pos >= size || len == 0) return b;
    const U field = (len >= size ? ~U(0) : (U(1) << len) - 1) << pos;
    return (b & ~field) | (U(a << pos) & field);
}
template <class U, class F> inline void bfi_op(Warp& w, const Instr& i, u32 exec, F f) {
    const U *a = row<U>(w, i.ops[1]), *b = row<U>(w, i.ops[2]);
    const u32 *p = row<u32>(w, i.ops[3]), *n = row<u32>(w, i.ops[4]);
    each(exec, row<U>(w, i.ops[0]), [=](int l) { return f(a[l], b[l], p[l], n[l]); });
    settle(w, i.ops[0], exec, w.bad[i.ops[1]] | w.bad[i.ops[2]] | w.bad[i.ops[3]] | w.bad[i.ops[4]]);
}
#define VG_BITS(U, S, n)                                                                                 \
    VG_1("popc.b" n, u32, U, __builtin_popcountll(a)) VG_1("clz.b" n, u32, U, leading_zeros<U>(a))       \
    VG_1("brev.b" n, U, U, reverse_bits<U>(a))                                                           \
    VG_1("bfind.u" n, u32, U, find_high<U>(a, false)) VG_1("bfind.shiftamt.u" n, u32, U, find_high<U>(a, true)) \
    VG_1("bfind.s" n, u32, S, find_high<U>(U(a < 0 ? ~a : a), false)) VG_1("bfind.shiftamt.s" n, u32, S, find_high<U>(U(a < 0 ? ~a : a), true)) \
    VG_3("bfe.u" n, U, U, u32, u32, extract<U>(a, b, c, false)) VG_3("bfe.s" n, U, U, u32, u32, extract<U>(a, b, c, true)) \
    VG_ON("bfi.b" n, bfi_op<U>(w, i, exec, [](U a, U b, u32 p, u32 k) { return insert<U>(a, b, p, k); });)
VG_BITS(u32, i32, "32")
VG_BITS(u64, i64, "64")
VG_2("bmsk.clamp.b32", u32, u32, u32, a >= 32 || b == 0 ? 0u : (b >= 32 ? ~0u : (1u << b) - 1) << a)
VG_2("bmsk.wrap.b32", u32, u32, u32, (b & 31) == 0 ? 0u : ((1u << (b & 31)) - 1) << (a & 31))
VG_2("szext.clamp.s32", u32, u32, u32, b >= 32 ? a : b == 0 ? 0u : u32(i32(a << (32 - b)) >> (32 - b)))
VG_2("szext.clamp.u32", u32, u32, u32, b >= 32 ? a : a & ((1u << b) - 1))
inline u32 find_nth(u32 mask, u32 base, i32 offset) {
    if (offset == 0) return mask >> (base & 31) & 1 ? base : ~0u;
    i32 count = offset > 0 ? offset : -offset; const i32 step = offset > 0 ? 1 : -1;
    for (i32 at = i32(base); at >= 0 && at < 32; at += step) if (mask >> at & 1 && --count == 0) return u32(at);
    return ~0u;
}
VG_3("fns.b32", u32, u32, u32, i32, find_nth(a, b, c))

template <bool SA, bool SB> inline u32 dot4(u32 a, u32 b, u32 c) {
    for (int k = 0; k < 4; ++k) {
        const i32 x = SA ? i32(i8(a >> 8 * k)) : i32(a >> 8 * k & 255), y = SB ? i32(i8(b >> 8 * k)) : i32(b >> 8 * k & 255);
        c += u32(x * y);
    }
    return c;
}
template <bool SA, bool SB> inline u32 dot2(u32 a, u32 b, u32 c, bool high) {
    for (int k = 0; k < 2; ++k) {
        const i32 x = SA ? i32(i16(a >> 16 * k)) : i32(a >> 16 * k & 0xffff), s = 8 * (k + (high ? 2 : 0));
        const i32 y = SB ? i32(i8(b >> s)) : i32(b >> s & 255);
        c += u32(i64(x) * y);
    }
    return c;
}
#define VG_DOT(s, A, B)                                                       \
    VG_3("dp4a." s, u32, u32, u32, u32, (dot4<A, B>(a, b, c)))                 \
    VG_3("dp2a.lo." s, u32, u32, u32, u32, (dot2<A, B>(a, b, c, false)))       \
    VG_3("dp2a.hi." s, u32, u32, u32, u32, (dot2<A, B>(a, b, c, true)))
VG_DOT("s32.s32", true, true) VG_DOT("u32.u32", false, false) VG_DOT("s32.u32", true, false) VG_DOT("u32.s32", false, true)

}  // namespace vgpu
