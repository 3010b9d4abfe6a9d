// ldmatrix, stmatrix, movmatrix and mma.sync. Fragment layouts are those of the PTX manual, written as formulas of
// group = lane / 4 and member = lane % 4.
#pragma once
#include "warp_ops.h"

namespace vgpu {

// 8x8 elements of 16 bits: out[row j] = column j of `in`.
inline void transpose_8x8(const u8* in, u8* out) {
#if defined(__x86_64__)
    __m128i r[8], s[8];
    for (int k = 0; k < 8; ++k) r[k] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in) + k);
    for (int k = 0; k < 4; ++k) { s[2 * k] = _mm_unpacklo_epi16(r[2 * k], r[2 * k + 1]); s[2 * k + 1] = _mm_unpackhi_epi16(r[2 * k], r[2 * k + 1]); }
    for (int h = 0; h < 2; ++h) for (int k = 0; k < 2; ++k) {
        r[4 * h + 2 * k] = _mm_unpacklo_epi32(s[4 * h + k], s[4 * h + 2 + k]);
        r[4 * h + 2 * k + 1] = _mm_unpackhi_epi32(s[4 * h + k], s[4 * h + 2 + k]);
    }
    for (int k = 0; k < 4; ++k) { s[2 * k] = _mm_unpacklo_epi64(r[k], r[4 + k]); s[2 * k + 1] = _mm_unpackhi_epi64(r[k], r[4 + k]); }
    for (int k = 0; k < 8; ++k) _mm_storeu_si128(reinterpret_cast<__m128i*>(out) + k, s[k]);
#else
    u16 e[8][8], t[8][8];
    std::memcpy(e, in, 128);
    for (int r = 0; r < 8; ++r) for (int k = 0; k < 8; ++k) t[k][r] = e[r][k];
    std::memcpy(out, t, 128);
#endif
}
// ldmatrix: ops d.., base; p: 0 space, 1 base bytes, 2 count of 8x8 matrices, 3 transposed
VG_ON("ldmatrix", {
    if (!whole_warp(c, w, i, exec)) return;
    const i32 n = i.p[2];
    u64 at[32];
    const u32 rows = n == 4 ? FULL : (1u << 8 * n) - 1;
    if (!addresses(c, w, i, exec & rows, i.ops[n], i.p[1], i.imm, at)) return;
    u8 data[32][16]; u64 invalid[32]; u64 any = 0;
    u32 offset[32];
    const u8* state = c.cta.shared_state.data();
    bool quick = shared_rows(c, rows, i.p[0], at, offset);
    for (u32 m = rows; m && quick; m &= m - 1) quick = settled16(state + offset[__builtin_ctz(m)]);
    for (u32 m = rows; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        Place p;
        if (quick) {
            race_shared16(c, w, l, offset[l], false, pc_of(c, i));
            std::memcpy(data[l], c.cta.shared.data() + offset[l], 16);
        } else if ((!locate_quick(c, -1, at[l], 16, i.p[0], p) && !locate(c, w, i, l, at[l], 16, 16, i.p[0], p)) || !check_state(c, w, i, l, at[l], 16, p, invalid[l])) return;
        else {
            if (is_shared(p)) race_shared(c, w, l, SHARED_START + u32(p.offset), 16, false, false, pc_of(c, i));
            std::memcpy(data[l], p.data, 16);
            any |= invalid[l];
        }
    }
    for (i32 k = 0; k < n; ++k) {
        u32* d = row<u32>(w, i.ops[k]);
        w.bad[i.ops[k]] = 0;
        if (!any && !i.p[3]) { std::memcpy(d, data[8 * k], 128); continue; }  // lane 4 r + m holds word m of row r
        if (!any) { transpose_8x8(data[8 * k], reinterpret_cast<u8*>(d)); continue; }
        for (int l = 0; l < 32; ++l) {
            const int group = l / 4, member = l % 4;
            u32 v = 0, x = 0;
            for (int j = 0; j < 2; ++j) {
                const int r = i.p[3] ? 2 * member + j : group, col = i.p[3] ? group : 2 * member + j;
                u16 e; std::memcpy(&e, data[8 * k + r] + 2 * col, 2);
                v |= u32(e) << 16 * j;
                x |= u32(invalid[8 * k + r] >> 2 * col & 3) << 2 * j;
            }
            d[l] = v;
            if (any && x) set_invalid(w, i.ops[k], l, x, 4);
        }
    }
    count_shared(c, i, rows, at, 16);
})
// stmatrix: ops base, s..; p as above
VG_ON("stmatrix", {
    if (!whole_warp(c, w, i, exec)) return;
    const i32 n = i.p[2];
    u64 at[32];
    const u32 rows = n == 4 ? FULL : (1u << 8 * n) - 1;
    if (!addresses(c, w, i, exec & rows, i.ops[0], i.p[1], i.imm, at)) return;
    u8 data[32][16]; u64 invalid[32] = {};
    for (i32 k = 0; k < n; ++k)
        for (int l = 0; l < 32; ++l) {
            const u32 v = row<u32>(w, i.ops[1 + k])[l], x = invalid_bytes(w, i.ops[1 + k], l);
            for (int j = 0; j < 2; ++j) {
                const int r = i.p[3] ? 2 * (l % 4) + j : l / 4, col = i.p[3] ? l / 4 : 2 * (l % 4) + j;
                const u16 e = u16(v >> 16 * j);
                std::memcpy(data[8 * k + r] + 2 * col, &e, 2);
                invalid[8 * k + r] |= u64(x >> 2 * j & 3) << 2 * col;
            }
        }
    for (u32 m = rows; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        Place p;
        if (!locate(c, w, i, l, at[l], 16, 16, i.p[0], p) || !write_bytes(c, w, i, l, at[l], p, data[l], 16, invalid[l], false)) return;
    }
    count_shared(c, i, rows, at, 16);
})
VG_ON("movmatrix", {  // ops d, a: transpose of one 8x8 matrix of 16-bit elements
    if (!whole_warp(c, w, i, exec)) return;
    u16 e[8][8]; u8 x[8][8];
    for (int l = 0; l < 32; ++l) for (int j = 0; j < 2; ++j) {
        e[l / 4][2 * (l % 4) + j] = u16(row<u32>(w, i.ops[1])[l] >> 16 * j);
        x[l / 4][2 * (l % 4) + j] = u8(invalid_bytes(w, i.ops[1], l) >> 2 * j & 3);
    }
    for (int l = 0; l < 32; ++l) {
        const int r = l / 4, col = 2 * (l % 4);
        row<u32>(w, i.ops[0])[l] = u32(e[col + 1][r]) << 16 | e[col][r];
        set_invalid(w, i.ops[0], l, u32(x[col][r] | x[col + 1][r] << 2), 4);
    }
})

// ---- mma.sync. ops: d.., a.., b.., c..; p: 0 rows of A, 1 columns of B, 2 depth, 3 type of A, 4 type of B, 5 type of C and D,
// 6 = 1 for saturated integers; rows of A and columns of B per 32-bit register follow from the element width.
enum MmaType : i32 { M_F16, M_BF16, M_TF32, M_E4M3, M_E5M2, M_S8, M_U8, M_F32, M_S32, M_F64 };
inline int mma_bits(i32 t) { return t <= M_BF16 ? 16 : t == M_TF32 || t == M_F32 || t == M_S32 ? 32 : t == M_F64 ? 64 : 8; }

struct Element { int row, col; };
// Element j of register r of operand A (per = elements of a register).
inline Element a_element(int rows, int per, int lane, int r, int j) {
    const int group = lane / 4, member = lane % 4;
    if (rows == 8) return {group, member * per + j + r * 4 * per};
    return {group + 8 * (r & 1), member * per + j + (r >> 1) * 4 * per};
}
inline Element b_element(int per, int lane, int r, int j) { return {(lane % 4) * per + j + r * 4 * per, lane / 4}; }
// Element e of the accumulator: two neighbouring columns, then the row 8 further down.
inline Element c_element(int lane, int e) { return {lane / 4 + 8 * (e >> 1), 2 * (lane % 4) + (e & 1)}; }

inline float mma_value(i32 t, u32 v, int j) {
    switch (t) {
        case M_F16: return f16_to_f32(u16(v >> 16 * j));
        case M_BF16: return bf16_to_f32(u16(v >> 16 * j));
        case M_TF32: return bits_as<float>(v & 0xffffe000u);  // the hardware reads 19 bits
        case M_E4M3: return e4m3_to_f32(u8(v >> 8 * j));
        case M_E5M2: return e5m2_to_f32(u8(v >> 8 * j));
        case M_S8: return float(i8(v >> 8 * j));
        default: return float(u8(v >> 8 * j));
    }
}
struct Tile { float a[16][32]; float b[32][8]; double c[16][8]; u32 bad_a, bad_b; u8 bad_c[16]; };

inline void mma_load(Warp& w, const Instr& i, Tile& t, int nd, int na, int nb, int nc) {
    const int rows = i.p[0], per_a = 32 / mma_bits(i.p[3]), per_b = 32 / mma_bits(i.p[4]);
    t.bad_a = t.bad_b = 0;
    std::memset(t.bad_c, 0, sizeof t.bad_c);
    for (int r = 0; r < na; ++r) {
        const i32 op = i.ops[nd + r];
        const u32* v = row<u32>(w, op);
        if (per_a == 2 && rows == 16) for (int l = 0; l < 32; ++l) {
            const Element e = a_element(16, 2, l, r, 0);
            float* at = &t.a[e.row][e.col];
            if (i.p[3] == M_BF16) { at[0] = bf16_to_f32(u16(v[l])); at[1] = bf16_to_f32(u16(v[l] >> 16)); }
            else { at[0] = f16_to_f32(u16(v[l])); at[1] = f16_to_f32(u16(v[l] >> 16)); }
        } else for (int l = 0; l < 32; ++l) for (int j = 0; j < per_a; ++j) {
            const Element e = a_element(rows, per_a, l, r, j);
            t.a[e.row][e.col] = mma_value(i.p[3], v[l], j);
        }
        for (u32 m = w.bad[op]; m; m &= m - 1) t.bad_a |= 1u << a_element(rows, per_a, first_lane(m), r, 0).row;
    }
    for (int r = 0; r < nb; ++r) {
        const i32 op = i.ops[nd + na + r];
        const u32* v = row<u32>(w, op);
        for (int l = 0; l < 32; ++l) for (int j = 0; j < per_b; ++j) {
            const Element e = b_element(per_b, l, r, j);
            t.b[e.row][e.col] = mma_value(i.p[4], v[l], j);
        }
        for (u32 m = w.bad[op]; m; m &= m - 1) t.bad_b |= 1u << first_lane(m) / 4;
    }
    for (int r = 0; r < nc; ++r) {
        const i32 op = i.ops[nd + na + nb + r];
        const u32* v = row<u32>(w, op);
        const bool half = i.p[5] == M_F16;
        for (int l = 0; l < 32; ++l) for (int j = 0; j < (half ? 2 : 1); ++j) {
            const Element e = c_element(l, half ? 2 * r + j : r);
            t.c[e.row][e.col] = half ? f16_to_f32(u16(v[l] >> 16 * j)) : i.p[5] == M_S32 ? double(i32(v[l])) : bits_as<float>(v[l]);
            if (w.bad[op] >> l & 1) t.bad_c[e.row] |= u8(1u << e.col);
        }
    }
}
inline void mma_store(Warp& w, const Instr& i, const Tile& t, int nd) {
    for (int r = 0; r < nd; ++r) {
        u32* d = row<u32>(w, i.ops[r]);
        const bool half = i.p[5] == M_F16;
        u32 bad = 0;
        for (int l = 0; l < 32; ++l) {
            u32 v = 0;
            for (int j = 0; j < (half ? 2 : 1); ++j) {
                const Element e = c_element(l, half ? 2 * r + j : r);
                const double x = t.c[e.row][e.col];
                if (half) v |= u32(f32_to_f16(float(x))) << 16 * j;
                else if (i.p[5] == M_S32) v = i.p[6] ? u32(saturating<i32>(__int128(x))) : u32(u64(i64(x)));
                else v = bits_as<u32>(float(x));
                if (t.bad_a >> e.row & 1 || t.bad_b >> e.col & 1 || t.bad_c[e.row] >> e.col & 1) bad |= 1u << l;
            }
            d[l] = v;
        }
        settle(w, i.ops[r], FULL, bad);
    }
}
// m16n8k16 of 16-bit elements, all of them valid: what fills the time of every attention kernel. A register of A is 8 rows of
// 8 elements, one of B 8 columns of 8. Columns are kept in the order 0 2 4 6 1 3 5 7: halves of a row are then what two
// registers of C hold side by side.
typedef float Float8 __attribute__((vector_size(32)));
template <i32 T> inline float low_half(u32 v) { return T == M_BF16 ? bits_as<float>(v << 16) : f16_to_f32(u16(v)); }
template <i32 T> inline float high_half(u32 v) { return T == M_BF16 ? bits_as<float>(v & 0xffff0000u) : f16_to_f32(u16(v >> 16)); }
template <i32 T> inline void mma_16816(Warp& w, const Instr& i) {
    alignas(32) float a[16][16];
    alignas(32) u32 words[8][8];
    alignas(32) float b[16][8];
    for (int r = 0; r < 4; ++r) {
        const u32* v = row<u32>(w, i.ops[4 + r]);
        for (int g = 0; g < 8; ++g) {
            float* at = &a[g + 8 * (r & 1)][8 * (r >> 1)];
            for (int m = 0; m < 4; ++m) { at[2 * m] = low_half<T>(v[4 * g + m]); at[2 * m + 1] = high_half<T>(v[4 * g + m]); }
        }
    }
    for (int r = 0; r < 2; ++r) {
        const u32* v = row<u32>(w, i.ops[8 + r]);
        for (int n = 0; n < 8; ++n) for (int m = 0; m < 4; ++m) words[4 * r + m][(n & 1) * 4 + n / 2] = v[4 * n + m];
    }
    for (int k = 0; k < 8; ++k) for (int n = 0; n < 8; ++n) { b[2 * k][n] = low_half<T>(words[k][n]); b[2 * k + 1][n] = high_half<T>(words[k][n]); }
    Float8 c[16];
    for (int r = 0; r < 16; ++r) {
        std::memcpy(&c[r], row<float>(w, i.ops[10 + 2 * (r / 8)]) + 4 * (r % 8), 16);
        std::memcpy(reinterpret_cast<u8*>(&c[r]) + 16, row<float>(w, i.ops[11 + 2 * (r / 8)]) + 4 * (r % 8), 16);
    }
    for (int r = 0; r < 16; r += 8) {
        Float8 acc[8] = {};
        for (int k = 0; k < 16; ++k) {
            Float8 column;
            std::memcpy(&column, b[k], 32);
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) acc[j] += a[r + j][k] * column;
        }
        for (int j = 0; j < 8; ++j) c[r + j] += acc[j];
    }
    for (int r = 0; r < 16; ++r) {
        std::memcpy(row<float>(w, i.ops[2 * (r / 8)]) + 4 * (r % 8), &c[r], 16);
        std::memcpy(row<float>(w, i.ops[1 + 2 * (r / 8)]) + 4 * (r % 8), reinterpret_cast<u8*>(&c[r]) + 16, 16);
    }
    for (int e = 0; e < 4; ++e) w.bad[i.ops[e]] = 0;
}
// Products are exact in float for all but tf32 (22 bits, exact too). Sums of one instruction are taken in double and rounded
// once, or in fp32 on the quick path: both at least as precise as the tensor cores' aligned and truncated sums.
VG_ON("mma", {
    if (!whole_warp(c, w, i, exec)) return;
    const int rows = i.p[0], depth = i.p[2], bits = mma_bits(i.p[3]);
    u32 invalid = 0;
    for (int k = 4; k < i.num_ops; ++k) invalid |= w.bad[i.ops[k]];
    if (!invalid && rows == 16 && depth == 16 && i.p[5] == M_F32) {
        if (i.p[3] == M_BF16) return mma_16816<M_BF16>(w, i);
        if (i.p[3] == M_F16) return mma_16816<M_F16>(w, i);
    }
    const int na = rows * depth * bits / 1024, nb = 8 * depth * mma_bits(i.p[4]) / 1024;
    const int nd = i.p[5] == M_F16 ? rows * 8 / 64 : rows * 8 / 32;
    Tile t;
    mma_load(w, i, t, nd, na, nb, nd);
    for (int r = 0; r < rows; ++r) {
        double acc[8];
        for (int n = 0; n < 8; ++n) acc[n] = t.c[r][n];
        for (int k = 0; k < depth; ++k) {
            const double x = t.a[r][k];
            for (int n = 0; n < 8; ++n) acc[n] += x * double(t.b[k][n]);
        }
        for (int n = 0; n < 8; ++n) t.c[r][n] = acc[n];
    }
    mma_store(w, i, t, nd);
})

}  // namespace vgpu
