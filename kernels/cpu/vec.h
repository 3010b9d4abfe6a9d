// Vector primitives of one code path. Included once per path, inside that path's namespace, with
//     PT_W            fp32 lanes: 4, 8 or 16
//     PT_TARGET_ATTR  the target attribute of the path's functions (may be empty)
//     PT_F16C         1 if the path may use the x86 half-precision conversions (immintrin.h is included then)
// Vectors are GCC/Clang extension types; a "pair" is 2 * PT_W consecutive elements of a row in two registers. Pairs of
// bf16 hold the even elements in `a` and the odd ones in `b`, which needs one load and two integer operations; pairs of
// fp16 and fp32 hold the lower and the upper half.

#define PT_FN static inline __attribute__((always_inline)) PT_TARGET_ATTR

constexpr int W = PT_W;
typedef float F __attribute__((vector_size(4 * PT_W)));
typedef uint32_t U __attribute__((vector_size(4 * PT_W)));
typedef int32_t I __attribute__((vector_size(4 * PT_W)));
typedef uint16_t H __attribute__((vector_size(2 * PT_W)));

template <class T>
PT_FN T load(const void* at) {
    T value;
    __builtin_memcpy(&value, at, sizeof(T));
    return value;
}
template <class T>
PT_FN void store(void* at, T value) {
    __builtin_memcpy(at, &value, sizeof(T));
}
PT_FN F broadcast(float x) { return x - F{}; }  // "+" would have to turn -0 into +0
PT_FN F select(I mask, F yes, F no) { return (F)(((I)yes & mask) | ((I)no & ~mask)); }
PT_FN F maximum(F x, F y) { return x > y ? x : y; }

// ---- shuffles, spelled out for each width
#if PT_W == 4
PT_FN F unpack_low(F x, F y) { return __builtin_shufflevector(x, y, 0, 4, 1, 5); }
PT_FN F unpack_high(F x, F y) { return __builtin_shufflevector(x, y, 2, 6, 3, 7); }
PT_FN F interleave_low(F x, F y) { return __builtin_shufflevector(x, y, 0, 4, 1, 5); }
PT_FN F interleave_high(F x, F y) { return __builtin_shufflevector(x, y, 2, 6, 3, 7); }
PT_FN F even_lanes(F x, F y) { return __builtin_shufflevector(x, y, 0, 2, 4, 6); }
PT_FN F odd_lanes(F x, F y) { return __builtin_shufflevector(x, y, 1, 3, 5, 7); }
PT_FN F sum_blocks(const F* z) { return z[0]; }
#elif PT_W == 8
PT_FN F unpack_low(F x, F y) { return __builtin_shufflevector(x, y, 0, 8, 1, 9, 4, 12, 5, 13); }
PT_FN F unpack_high(F x, F y) { return __builtin_shufflevector(x, y, 2, 10, 3, 11, 6, 14, 7, 15); }
PT_FN F interleave_low(F x, F y) { return __builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11); }
PT_FN F interleave_high(F x, F y) { return __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15); }
PT_FN F even_lanes(F x, F y) { return __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14); }
PT_FN F odd_lanes(F x, F y) { return __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15); }
PT_FN F sum_blocks(const F* z) {
    return __builtin_shufflevector(z[0], z[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(z[0], z[1], 4, 5, 6, 7, 12, 13, 14, 15);
}
#else
PT_FN F unpack_low(F x, F y) {
    return __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
PT_FN F unpack_high(F x, F y) {
    return __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
PT_FN F interleave_low(F x, F y) {
    return __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
PT_FN F interleave_high(F x, F y) {
    return __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
PT_FN F even_lanes(F x, F y) {
    return __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
PT_FN F odd_lanes(F x, F y) {
    return __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
PT_FN F fold_halves(F x, F y) {
    return __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
PT_FN F sum_blocks(const F* z) {
    const F x = fold_halves(z[0], z[1]), y = fold_halves(z[2], z[3]);
    return __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
#endif

// Lane i of the result is the sum of the lanes of x[i].
PT_FN F sum_each(const F* x) {
    F z[W / 4];
    for (int block = 0; block < W / 4; ++block) {
        const F* of = x + 4 * block;
        const F p = unpack_low(of[0], of[2]) + unpack_high(of[0], of[2]);
        const F q = unpack_low(of[1], of[3]) + unpack_high(of[1], of[3]);
        z[block] = unpack_low(p, q) + unpack_high(p, q);
    }
    return sum_blocks(z);
}

// ---- element types: 0 fp32, 1 bf16, 2 fp16
PT_FN F half_to_float(H h) {
#if PT_F16C && PT_W == 8
    return (F)_mm256_cvtph_ps((__m128i)h);
#elif PT_F16C && PT_W == 16
    return (F)_mm512_cvtph_ps((__m256i)h);
#else
    // Exponent and mantissa moved into place and rescaled by 2^112: right for subnormals too; all-ones exponents apart.
    const U bits = __builtin_convertvector(h, U);
    const U rest = (bits & 0x7fffu) << 13;
    const F scaled = (F)rest * 0x1p112f;
    const I special = (I)(rest >= (0x7c00u << 13));
    const U value = ((U)scaled & ~(U)special) | ((rest | 0x7f800000u) & (U)special);
    return (F)(value | ((bits & 0x8000u) << 16));
#endif
}
PT_FN H float_to_half(F x) {
#if PT_F16C && PT_W == 8
    return (H)_mm256_cvtps_ph((__m256)x, 0);
#elif PT_F16C && PT_W == 16
    return (H)_mm512_cvtps_ph((__m512)x, 0);
#else
    const U bits = (U)x, sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    const U normal = (rest + 0xfffu + ((rest >> 13) & 1u) - (112u << 23)) >> 13;
    // Adding 0.5 leaves the subnormal half in the low mantissa bits, rounded to nearest even by the addition.
    const U small = (U)((F)rest + 0.5f) - 0x3f000000u;
    U half = rest < (113u << 23) ? small : normal;
    half = rest >= 0x477ff000u ? U{} + 0x7c00u : half;
    half = rest > 0x7f800000u ? (0x7e00u | ((rest >> 13) & 0x1ffu)) : half;
    return __builtin_convertvector(half | sign, H);
#endif
}
PT_FN H float_to_bf16(F x) {
    const U bits = (U)x;
    const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const U quiet = (bits >> 16) | 0x40u;
    return __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded, H);
}

template <int DTYPE>
struct Element;
template <>
struct Element<0> {
    using Stored = float;
    static constexpr bool INTERLEAVED = false;
    PT_FN void pair(const Stored* at, F& a, F& b) { a = load<F>(at), b = load<F>(at + W); }
    PT_FN F widen(const Stored* at) { return load<F>(at); }
    PT_FN void narrow(Stored* at, F x) { store(at, x); }
};
template <>
struct Element<1> {
    using Stored = uint16_t;
    static constexpr bool INTERLEAVED = true;
    PT_FN void pair(const Stored* at, F& a, F& b) {
        const U both = load<U>(at);
        a = (F)(both << 16), b = (F)(both & 0xffff0000u);
    }
    PT_FN F widen(const Stored* at) { return (F)(__builtin_convertvector(load<H>(at), U) << 16); }
    PT_FN void narrow(Stored* at, F x) { store(at, float_to_bf16(x)); }
};
template <>
struct Element<2> {
    using Stored = uint16_t;
    static constexpr bool INTERLEAVED = false;
    PT_FN void pair(const Stored* at, F& a, F& b) {
        a = half_to_float(load<H>(at)), b = half_to_float(load<H>(at + W));
    }
    PT_FN F widen(const Stored* at) { return half_to_float(load<H>(at)); }
    PT_FN void narrow(Stored* at, F x) { store(at, float_to_half(x)); }
};

// Rows of any length; nothing past `count` elements is read or written.
template <class E>
PT_FN void widen_row(const typename E::Stored* from, int count, float* to) {
    int i = 0;
    for (; i + W <= count; i += W) store(to + i, E::widen(from + i));
    if (i == count) return;
    typename E::Stored rest[W] = {};
    for (int j = 0; j < W && i + j < count; ++j) rest[j] = from[i + j];
    store(to + i, E::widen(rest));
}
template <class E>
PT_FN void narrow_row(const float* from, int count, typename E::Stored* to) {
    int i = 0;
    for (; i + W <= count; i += W) E::narrow(to + i, load<F>(from + i));
    if (i == count) return;
    float rest[W] = {};
    typename E::Stored narrowed[W];
    for (int j = 0; j < W && i + j < count; ++j) rest[j] = from[i + j];
    E::narrow(narrowed, load<F>(rest));
    for (int j = 0; j < W && i + j < count; ++j) to[i + j] = narrowed[j];
}

// ---- functions
// exp(x) for x <= 88: reduction by ln 2 in two parts, polynomial of degree 6 (own fit, relative error 3.1e-9 before
// rounding), 0 below -87; NaN stays NaN.
PT_FN F exponential(F x) {
    const F shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const F n = (x * 1.44269504f + shifter) - shifter;
    const F r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    F p = broadcast(0.0013814599792900187f);
    p = p * r + 0.008368717176798459f;
    p = p * r + 0.04166838804282738f;
    p = p * r + 0.1666652062899558f;
    p = p * r + 0.4999999344774405f;
    p = p * (r * r) + r;
    p = p + 1.0f;
    const F two_n = (F)((__builtin_convertvector(select((I)(n == n), n, F{}), I) + 127) << 23);
    return select((I)(x < -87.0f), F{}, p * two_n);
}
// tanh(x): x * polynomial in x^2 (own fit) below 0.625, else 1 - 2 / (exp(2|x|) + 1) with |x| capped at 10, where the
// result is 1 in fp32.
PT_FN F hyperbolic_tangent(F x) {
    const F magnitude = (F)((U)x & 0x7fffffffu), z = x * x;
    F p = broadcast(-0.005704979383783799f);
    p = p * z + 0.020639080168785847f;
    p = p * z + -0.0537397127988016f;
    p = p * z + 0.1333144216857483f;
    p = p * z + -0.3333328194077941f;
    const F small = x + x * (z * p);
    const F capped = magnitude > 10.0f ? broadcast(10.0f) : magnitude;  // NaN stays
    const F large = 1.0f - 2.0f / (exponential(capped + capped) + 1.0f);
    const F with_sign = (F)((U)large | ((U)x & 0x80000000u));
    return magnitude < 0.625f ? small : with_sign;
}
