// atom, red, fences.
#pragma once
#include "memory.h"

namespace vgpu {

enum AtomOp : i32 { A_ADD, A_MIN, A_MAX, A_INC, A_DEC, A_AND, A_OR, A_XOR, A_EXCH, A_CAS };
enum AtomType : i32 { T_U32, T_S32, T_U64, T_S64, T_F32, T_F64, T_F16, T_BF16, T_F16X2, T_BF16X2, T_B16 };
inline i32 atom_bytes(i32 t) { return t == T_F16 || t == T_BF16 || t == T_B16 ? 2 : t == T_U64 || t == T_S64 || t == T_F64 ? 8 : 4; }

template <class T> inline T atom_int(i32 op, T old, T b, T c) {
    switch (op) {
        case A_ADD: return T(std::make_unsigned_t<T>(old) + std::make_unsigned_t<T>(b));
        case A_MIN: return std::min(old, b);
        case A_MAX: return std::max(old, b);
        case A_INC: return old >= b ? T(0) : T(old + 1);
        case A_DEC: return old == 0 || old > b ? b : T(old - 1);
        case A_AND: return old & b;
        case A_OR: return old | b;
        case A_XOR: return old ^ b;
        case A_EXCH: return b;
        default: return old == b ? c : old;
    }
}
template <class T> inline T atom_float(i32 op, T old, T b) { return op == A_ADD ? old + b : op == A_MIN ? min_value(old, b) : op == A_MAX ? max_value(old, b) : b; }
template <class H> inline u16 atom_half(i32 op, u16 old, u16 b) { return H::put(atom_float(op, H::get(old), H::get(b))); }

inline u64 atom_apply(i32 op, i32 type, u64 old, u64 b, u64 c) {
    if (op == A_EXCH) return b;
    if (op == A_CAS) return old == b ? c : old;
    switch (type) {
        case T_U32: return atom_int<u32>(op, u32(old), u32(b), u32(c));
        case T_S32: return u32(atom_int<i32>(op, i32(old), i32(b), i32(c)));
        case T_U64: return atom_int<u64>(op, old, b, c);
        case T_S64: return u64(atom_int<i64>(op, i64(old), i64(b), i64(c)));
        case T_F32: return bits_as<u32>(atom_float(op, bits_as<float>(u32(old)), bits_as<float>(u32(b))));
        case T_F64: return bits_as<u64>(atom_float(op, bits_as<double>(old), bits_as<double>(b)));
        case T_F16: return atom_half<H16>(op, u16(old), u16(b));
        case T_BF16: return atom_half<B16>(op, u16(old), u16(b));
        case T_F16X2: return atom_half<H16>(op, u16(old), u16(b)) | u32(atom_half<H16>(op, u16(old >> 16), u16(b >> 16))) << 16;
        default: return atom_half<B16>(op, u16(old), u16(b)) | u32(atom_half<B16>(op, u16(old >> 16), u16(b >> 16))) << 16;
    }
}

// ops: [d x count], base, [b x count], [c]. p: 0 space, 1 base bytes, 2 operation, 3 type, 4 has d, 5 has c, 6 MemFlags,
// 7 count (of a vector red or atom).
inline void op_atom(Ctx& c, Warp& w, const Instr& i, u32 exec) {
    const i32 eb = atom_bytes(i.p[3]), count = i.p[7], size = eb * count, base = i.p[4] ? count : 0;
    u64 at[32];
    if (!addresses(c, w, i, exec, i.ops[base], i.p[1], i.imm, at)) return;
    bool shared = false, global = false;
    polled(w);
    SpinLock lock(c.launch.atomics);
    for (u32 m = exec; m; m &= m - 1) release_at(c, w, at[first_lane(m)], i.p[0], i.p[6]);
    for (u32 m = exec; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        Place p;
        if (!locate(c, w, i, l, at[l], size, size, i.p[0], p)) return;
        u64 was_invalid;
        if (!check_state(c, w, i, l, at[l], size, p, was_invalid)) return;
        note_read(p, size);
        u8 data[16]; u64 invalid = 0;
        for (i32 e = 0; e < count; ++e) {
            u64 old = 0, b = 0, x = 0;
            std::memcpy(&old, p.data + e * eb, size_t(eb));
            std::memcpy(&b, row<u8>(w, i.ops[base + 1 + e]) + l * std::max(eb, 2), size_t(eb));
            if (i.p[5]) std::memcpy(&x, row<u8>(w, i.ops[base + 2]) + l * std::max(eb, 2), size_t(eb));
            u64 result;
            if (p.alloc && i.p[3] == T_F32 && i.p[2] == A_ADD)  // in global memory, sums of f32 flush subnormals
                result = bits_as<u32>(flush(flush(bits_as<float>(u32(old))) + flush(bits_as<float>(u32(b)))));
            else result = atom_apply(i.p[2], i.p[3], old, b, x);
            std::memcpy(data + e * eb, &result, size_t(eb));
            u32 inv = u32(was_invalid >> e * eb) & lane_bytes_mask(eb);
            if (i.p[4]) {
                const i32 d = i.ops[e];
                std::memcpy(row<u8>(w, d) + l * std::max(eb, 2), &old, size_t(eb));
                set_invalid(w, d, l, inv, eb);
            }
            u32 fresh = invalid_bytes(w, i.ops[base + 1 + e], l);
            if (i.p[5]) fresh |= invalid_bytes(w, i.ops[base + 2], l);
            if (i.p[2] != A_EXCH) fresh |= inv;
            if (fresh) invalid |= u64(lane_bytes_mask(eb)) << e * eb;
        }
        if (!write_bytes(c, w, i, l, at[l], p, data, size, invalid, i.p[6])) return;
        if (p.alloc) global = true; else shared = is_shared(p);
    }
    for (u32 m = exec; m; m &= m - 1) acquire_at(c, w, at[first_lane(m)], i.p[0], i.p[6]);
    if (global) count_global(c, i, exec, at, size);
    if (shared) site(c, i).bytes += u64(__builtin_popcount(exec)) * u64(size);
}
VG_ON("atom", op_atom(c, w, i, exec);)

// What was observed is acquired, what follows may release what came before: within the CTA, with p0 = 1 on the device.
VG_ON("fence", {
    (void)exec;
    fence_cta(c, w);
    if (i.p[0]) {
        SpinLock lock(c.launch.atomics);
        fence_device(c, w);
    } else w.observed.clear();
})

}  // namespace vgpu
