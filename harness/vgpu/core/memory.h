// Addresses, bounds, initialised bytes; loads and stores in every space.
#pragma once
#include "counters.h"

namespace vgpu {

// ---- bitmaps: bit k of byte k/8 stands for byte k of the allocation
inline u64 bits_at(const u8* map, u64 offset, i32 n) {
    u64 x = 0;
    if (!((offset | u64(n)) & 7)) {
        if (n == 16) { u16 y; std::memcpy(&y, map + (offset >> 3), 2); return y; }
        if (n == 8) return map[offset >> 3];
    } else if (n == 4 && !(offset & 3)) return map[offset >> 3] >> (offset & 4) & 15;
    const u64 first = offset >> 3, last = (offset + u64(n) - 1) >> 3;
    std::memcpy(&x, map + first, size_t(last - first + 1));
    return (x >> (offset & 7)) & (n >= 64 ? ~0ull : (1ull << n) - 1);
}
inline void change_bits(u8* map, u64 offset, i32 n, u64 set, u64 clear) {
    for (i32 k = 0; k < n;) {
        const i32 shift = i32((offset + u64(k)) & 7), take = std::min(8 - shift, n - k);
        const u64 part = (1ull << take) - 1;
        const u8 on = u8((set >> k & part) << shift), off = u8((clear >> k & part) << shift);
        u8* at = map + ((offset + u64(k)) >> 3);
        if (on && (__atomic_load_n(at, __ATOMIC_RELAXED) & on) != on) __atomic_fetch_or(at, on, __ATOMIC_RELAXED);
        if (off && (__atomic_load_n(at, __ATOMIC_RELAXED) & off)) __atomic_fetch_and(at, u8(~off), __ATOMIC_RELAXED);
        k += take;
    }
}
// memcpy and memcmp of the sizes that accesses have, without a call.
inline void copy_bytes(void* to, const void* from, i32 n) {
    switch (n) {
        case 1: std::memcpy(to, from, 1); return;
        case 2: std::memcpy(to, from, 2); return;
        case 4: std::memcpy(to, from, 4); return;
        case 8: std::memcpy(to, from, 8); return;
        case 16: std::memcpy(to, from, 16); return;
        default: std::memcpy(to, from, size_t(n));
    }
}
inline bool same_bytes(const void* a, const void* b, i32 n) {
    u64 x[2] = {}, y[2] = {};
    if (n > 16) return !std::memcmp(a, b, size_t(n));
    copy_bytes(x, a, n); copy_bytes(y, b, n);
    return x[0] == y[0] && x[1] == y[1];
}
inline u64 all_ones(i32 n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }

// ---- where an address leads
struct Place { u8* data; Alloc* alloc; u64 offset; u8* state; u32 stride; };  // `state`: one byte per byte, shared and local

inline Alloc* find_alloc(Ctx& c, u64 address) {
    Alloc *lo = c.launch.args.allocs, *hi = lo + c.launch.args.num_allocs;
    Alloc* it = std::upper_bound(lo, hi, address, [](u64 a, const Alloc& x) { return a < x.base; });
    return it == lo ? nullptr : it - 1;
}
inline i32 nearest_index(Ctx& c, u64 address) {  // the allocation that the address lies in or next to
    Alloc *lo = c.launch.args.allocs, *hi = lo + c.launch.args.num_allocs, *best = nullptr;
    u64 distance = ~0ull;
    for (Alloc* a = lo; a < hi; ++a) {
        const u64 d = address < a->base ? a->base - address : address >= a->base + a->size ? address - (a->base + a->size) + 1 : 0;
        if (d < distance) { distance = d; best = a; }
    }
    return best ? best->index : -1;
}
inline bool fault_at(Ctx& c, Warp& w, i32 kind, const Instr& i, i32 lane, u64 address, i32 size, i32 space, i32 alloc = -1) {
    report(c, kind, pc_of(c, i), thread_of(w, lane), address, alloc, size, space);
    fatal(c, w);
    return false;
}
inline bool locate(Ctx& c, Warp& w, const Instr& i, i32 lane, u64 address, i32 size, i32 align, i32 space, Place& out) {
    if (space == GENERIC) {
        if (address - SHARED_WINDOW < WINDOW_BYTES) { space = SHARED; address -= SHARED_WINDOW; }
        else if (address - LOCAL_WINDOW < WINDOW_BYTES) { space = LOCAL; address -= LOCAL_WINDOW; }
        else space = GLOBAL;
    }
    if (address & u64(align - 1)) return fault_at(c, w, MISALIGNED, i, lane, address, size, space, space == GLOBAL ? nearest_index(c, address) : -1);
    if (space == GLOBAL) {
        i32& cached = c.worker.site_alloc[size_t(pc_of(c, i))];
        Alloc* a = cached >= 0 ? c.launch.args.allocs + cached : nullptr;
        if (!a || address - a->base >= a->size) a = find_alloc(c, address);
        if (!a || address - a->base >= a->size || address - a->base + u64(size) > a->size)
            return fault_at(c, w, OUT_OF_BOUNDS, i, lane, address, size, space, nearest_index(c, address));
        if (a->freed) return fault_at(c, w, USE_AFTER_FREE, i, lane, address, size, space, a->index);
        const u64 offset = address - a->base;
        if (a->gaps && bits_at(a->gaps, offset, size)) return fault_at(c, w, OUT_OF_BOUNDS, i, lane, address, size, space, a->index);
        if (a->pending_written && !(w.waited >> lane & 1) && bits_at(a->pending_written, offset, size))
            return fault_at(c, w, PROGRAMMATIC_ORDER, i, lane, address, size, space, a->index);
        cached = i32(a - c.launch.args.allocs);
        out = {a->host + offset, a, offset, nullptr, 0};
        return true;
    }
    Cta& cta = c.cta;
    if (space == SHARED) {
        const u64 offset = address - SHARED_START;
        if (address < SHARED_START || offset + u64(size) > cta.shared.size()) return fault_at(c, w, OUT_OF_BOUNDS, i, lane, address, size, space);
        out = {cta.shared.data() + offset, nullptr, offset, cta.shared_state.data() + offset, 0};
        return true;
    }
    const u64 offset = address - LOCAL_START, frame = u64(c.launch.args.local_bytes);
    if (address < LOCAL_START || offset + u64(size) > frame) return fault_at(c, w, OUT_OF_BOUNDS, i, lane, address, size, space);
    const u64 at = u64(thread_of(w, lane)) * frame + offset;
    out = {cta.local.data() + at, nullptr, at, cta.local_state.data() + at, 1};
    return true;
}
// `locate` for the two usual spaces without its error paths; false sends the lane through them.
inline bool locate_quick(Ctx& c, i32 site_alloc, u64 address, i32 size, i32 space, Place& out) {
    if (address & u64(size - 1)) return false;
    if (space == SHARED) {
        const u64 offset = address - SHARED_START;
        if (address < SHARED_START || offset + u64(size) > c.cta.shared.size()) return false;
        out = {c.cta.shared.data() + offset, nullptr, offset, c.cta.shared_state.data() + offset, 0};
        return true;
    }
    if (space != GLOBAL || site_alloc < 0) return false;
    Alloc& a = c.launch.args.allocs[site_alloc];
    const u64 offset = address - a.base;
    if (offset >= a.size || offset + u64(size) > a.size || a.freed || a.gaps || a.pending_written) return false;
    out = {a.host + offset, &a, offset, nullptr, 0};
    return true;
}
inline bool is_shared(const Place& p) { return !p.alloc && p.stride == 0; }

// Addresses of all lanes; false after a fault. p1 of memory instructions = bytes of the base register.
inline bool addresses(Ctx& c, Warp& w, const Instr& i, u32 exec, i32 op, i32 width, i64 offset, u64* out) {
    if (w.bad[op] & exec) {
        report(c, UNINIT_ADDRESS, pc_of(c, i), thread_of(w, first_lane(w.bad[op] & exec)));
        fatal(c, w);
        return false;
    }
    if (width == 8) { const u64* a = row<u64>(w, op); for (int l = 0; l < 32; ++l) out[l] = a[l] + u64(offset); }
    else { const u32* a = row<u32>(w, op); for (int l = 0; l < 32; ++l) out[l] = u32(a[l] + u32(offset)); }
    return true;
}

// Invalid bytes of memory, as a mask; a byte that an asynchronous copy has yet to fill is a fault.
inline bool check_state(Ctx& c, Warp& w, const Instr& i, i32 lane, u64 address, i32 size, const Place& p, u64& invalid) {
    invalid = 0;
    if (p.state && size >= 4) {
        u64 x = 0x0101010101010101ull, y = x;
        if (size == 16) { std::memcpy(&x, p.state, 8); std::memcpy(&y, p.state + 8, 8); }
        else if (size == 8) std::memcpy(&x, p.state, 8);
        else if (size == 4) std::memcpy(&x, p.state, 4);
        else x = 0;
        if (x == 0x0101010101010101ull && y == x) return true;
    }
    if (p.alloc) {
        if (p.alloc->init) invalid = ~bits_at(p.alloc->init, p.offset, size) & all_ones(size);
        return true;
    }
    for (i32 k = 0; k < size; ++k) {
        if (p.state[k] & 2) return fault_at(c, w, ASYNC_UNWAITED, i, lane, address + u64(k), size, SHARED);
        if (!(p.state[k] & 1)) invalid |= 1ull << k;
    }
    return true;
}
inline void note_read(const Place& p, i32 size) {
    if (size == 16 && p.alloc && p.alloc->read && !(p.offset & 15)) {  // whole bytes of the map: no read-modify-write
        u16* at = reinterpret_cast<u16*>(p.alloc->read + (p.offset >> 3));
        if (__atomic_load_n(at, __ATOMIC_RELAXED) != 0xffff) __atomic_store_n(at, u16(0xffff), __ATOMIC_RELAXED);
        return;
    }
    if (p.alloc && p.alloc->read && bits_at(p.alloc->read, p.offset, size) != all_ones(size)) change_bits(p.alloc->read, p.offset, size, all_ones(size), 0);
}

// `race_shared` of 16 aligned bytes that are no atomic's, without the call where nothing is in doubt.
inline void race_shared16(Ctx& c, Warp& w, i32 lane, u32 offset, bool write, i32 pc) {
    if (!c.launch.args.options.check_races) return;
    WordRecord& record = c.cta.chunks[offset / 16];
    if (!race_word_quick(w, lane, record, c.cta.time, write, pc)) race_shared(c, w, lane, SHARED_START + offset, 16, write, false, pc);
}
// Offsets into shared memory where all lanes of `exec` touch 16 aligned bytes there, as a generic or shared address.
inline bool shared_rows(const Ctx& c, u32 exec, i32 space, const u64* address, u32* offset) {
    const u64 base = space == SHARED ? 0 : SHARED_WINDOW, size = c.cta.shared.size();
    if ((space != SHARED && space != GENERIC) || size < 16) return false;
    u64 worst = 0, low = 0;
    for (u32 m = exec; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        const u64 at = address[l] - base - SHARED_START;
        worst = std::max(worst, at); low |= at;
        offset[l] = u32(at);
    }
    return worst <= size - 16 && !(low & 15);
}
// Whether 16 bytes of state say: initialised, and no asynchronous copy on its way.
inline bool settled16(const u8* state) {
    u64 x, y;
    std::memcpy(&x, state, 8); std::memcpy(&y, state + 8, 8);
    return x == 0x0101010101010101ull && y == x;
}

// What orders accesses is a variable of shared or global memory, by its address there; local memory orders nothing.
inline bool sync_variable(u64& address, i32 space) {
    if (space == LOCAL || (space == GENERIC && address - LOCAL_WINDOW < WINDOW_BYTES)) return false;
    if (space == GENERIC && address - SHARED_WINDOW < WINDOW_BYTES) address -= SHARED_WINDOW;
    return true;
}
// A strong store or atomic, before it writes; a strong load or atomic, after it has read. Both under the atomics' lock.
inline void release_at(Ctx& c, Warp& w, u64 address, i32 space, i32 flags) {
    if (!sync_variable(address, space)) return;
    release_in_cta(c, w, address, flags & RELEASE);
    if (address >= WINDOW_BYTES && !(flags & CTA_SCOPE)) release_to(c, w, address, flags & RELEASE);
}
inline void acquire_at(Ctx& c, Warp& w, u64 address, i32 space, i32 flags) {
    if (!sync_variable(address, space)) return;
    if (!(flags & ACQUIRE)) return observe(w, address);
    acquire_in_cta(c, w, address);
    if (address >= WINDOW_BYTES && !(flags & CTA_SCOPE)) acquire_from(c, w, address);
}

// ld: ops = d0.. dn-1, base. p: 0 space, 1 base bytes, 2 element bytes, 3 count, 4 register bytes, 5 signed, 6 MemFlags.
inline void op_ld(Ctx& c, Warp& w, const Instr& i, u32 exec) {
    const i32 eb = i.p[2], n = i.p[3], size = eb * n, rb = i.p[4];
    u64 at[32];
    if (!addresses(c, w, i, exec, i.ops[n], i.p[1], i.imm, at)) return;
    Place place[32];
    u64 invalid[32], any = 0;
    bool shared = false, global = false;
    const bool strong = i.p[6] & STRONG;
    if (strong) polled(w);
    for (u32 m = exec; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        Place& p = place[l];
        if (!locate_quick(c, c.worker.site_alloc[size_t(pc_of(c, i))], at[l], size, i.p[0], p) &&
            !locate(c, w, i, l, at[l], size, size, i.p[0], p)) return;
        if (p.alloc) {
            global = true;
            invalid[l] = p.alloc->init ? ~bits_at(p.alloc->init, p.offset, size) & all_ones(size) : 0;
            note_read(p, size);
            if (p.alloc->access != IN) race_global(c, w, l, *p.alloc, p.offset, size, false, i.p[6], pc_of(c, i));
        } else {
            if (!check_state(c, w, i, l, at[l], size, p, invalid[l])) return;
            if (is_shared(p)) { shared = true; race_shared(c, w, l, SHARED_START + u32(p.offset), size, false, strong, pc_of(c, i)); }
        }
        any |= invalid[l];
    }
    if (strong) {
        SpinLock lock(c.launch.atomics);
        for (u32 m = exec; m; m &= m - 1) acquire_at(c, w, at[first_lane(m)], i.p[0], i.p[6]);
    }
    for (i32 e = 0; e < n; ++e) {
        const i32 d = i.ops[e];
        u8* out = row<u8>(w, d);
        if (eb == 4 && rb == 4) for (u32 m = exec; m; m &= m - 1) {
            const int l = __builtin_ctz(m);
            std::memcpy(out + l * 4, place[l].data + e * 4, 4);
        } else for (u32 m = exec; m; m &= m - 1) {
            const int l = __builtin_ctz(m);
            u64 v = 0;
            copy_bytes(&v, place[l].data + e * eb, eb);
            if (i.p[5] && eb < rb && v >> (eb * 8 - 1) & 1) v |= ~0ull << (eb * 8);
            copy_bytes(out + l * rb, &v, rb);
        }
        w.bad[d] &= ~exec;
        if (any) for (u32 m = exec; m; m &= m - 1) {
            const int l = __builtin_ctz(m);
            u32 x = u32(invalid[l] >> e * eb) & lane_bytes_mask(eb);
            if (i.p[5] && (x >> (eb - 1) & 1)) x |= 0xffu << eb;
            if (x) set_invalid(w, d, l, x, rb);
        }
    }
    if (shared) count_shared(c, i, exec, at, size);
    if (global) start_load(c, w, pc_of(c, i), 32 * count_global(c, i, exec, at, size));
}
VG_ON("ld", op_ld(c, w, i, exec);)

// Writes `size` bytes with their invalid ones; false after a fault.
inline bool write_bytes(Ctx& c, Warp& w, const Instr& i, i32 lane, u64 address, const Place& p, const u8* data, i32 size, u64 invalid, i32 mem) {
    if (p.alloc) {
        Alloc& a = *p.alloc;
        if (a.access == IN || a.access == CONSTANT) return fault_at(c, w, MUTATED_INPUT, i, lane, address, size, GLOBAL, a.index);
        if (a.pending_read && !(w.waited >> lane & 1) && bits_at(a.pending_read, p.offset, size))
            return fault_at(c, w, PROGRAMMATIC_ORDER, i, lane, address, size, GLOBAL, a.index);
        if (invalid && a.access != WORKSPACE) report(c, UNINIT_OUTPUT, pc_of(c, i), thread_of(w, lane), address, a.index, size, GLOBAL);
        race_global(c, w, lane, a, p.offset, size, true, mem, pc_of(c, i), same_bytes(p.data, data, size));
        copy_bytes(p.data, data, size);
        if (a.init) change_bits(a.init, p.offset, size, ~invalid & all_ones(size), invalid);
        if (a.written) change_bits(a.written, p.offset, size, all_ones(size), 0);
        return true;
    }
    for (i32 k = 0; k < size; ++k)
        if (p.state[k] & 2) return fault_at(c, w, ASYNC_UNWAITED, i, lane, address + u64(k), size, SHARED);
    if (is_shared(p)) race_shared(c, w, lane, SHARED_START + u32(p.offset), size, true, mem & STRONG, pc_of(c, i), same_bytes(p.data, data, size));
    copy_bytes(p.data, data, size);
    if (!invalid) std::memset(p.state, 1, size_t(size));
    else for (i32 k = 0; k < size; ++k) p.state[k] = invalid >> k & 1 ? 0 : 1;
    return true;
}

// st: ops = base, s0 .. sn-1. p as for ld.
inline void op_st(Ctx& c, Warp& w, const Instr& i, u32 exec) {
    const i32 eb = i.p[2], n = i.p[3], size = eb * n, rb = i.p[4];
    u64 at[32];
    if (!addresses(c, w, i, exec, i.ops[0], i.p[1], i.imm, at)) return;
    u32 bad = 0;
    for (i32 e = 0; e < n; ++e) bad |= w.bad[i.ops[1 + e]];
    bool shared = false, global = false;
    const bool strong = i.p[6] & STRONG;
    if (strong) {
        SpinLock lock(c.launch.atomics);
        for (u32 m = exec; m; m &= m - 1) release_at(c, w, at[first_lane(m)], i.p[0], i.p[6]);
    }
    for (u32 m = exec; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        Place p;
        if (!locate_quick(c, c.worker.site_alloc[size_t(pc_of(c, i))], at[l], size, i.p[0], p) &&
            !locate(c, w, i, l, at[l], size, size, i.p[0], p)) return;
        (p.alloc ? global : shared) |= p.alloc || is_shared(p);
        u8 data[64];
        u64 invalid = 0;
        for (i32 e = 0; e < n; ++e) {
            if (eb == 4 && rb == 4) std::memcpy(data + e * 4, row<u32>(w, i.ops[1 + e]) + l, 4);
            else copy_bytes(data + e * eb, row<u8>(w, i.ops[1 + e]) + l * rb, eb);
            if (bad >> l & 1) invalid |= u64(invalid_bytes(w, i.ops[1 + e], l) & lane_bytes_mask(eb)) << e * eb;
        }
        if (!write_bytes(c, w, i, l, at[l], p, data, size, invalid, i.p[6])) return;
    }
    if (shared) count_shared(c, i, exec, at, size);
    if (global) count_global(c, i, exec, at, size);
}
VG_ON("st", op_st(c, w, i, exec);)

// ld.param of an entry: p2 element bytes, p3 count, p4 register bytes, p5 signed; imm = offset into the parameters.
VG_ON("ld.param", {
    const i32 eb = i.p[2], rb = i.p[4];
    for (i32 e = 0; e < i.p[3]; ++e) {
        u64 v = 0;
        std::memcpy(&v, c.launch.args.params + i.imm + e * eb, size_t(eb));
        if (i.p[5] && eb < rb && v >> (eb * 8 - 1) & 1) v |= ~0ull << (eb * 8);
        u8* out = row<u8>(w, i.ops[e]);
        for (u32 m = exec; m; m &= m - 1) copy_bytes(out + first_lane(m) * rb, &v, rb);
        w.bad[i.ops[e]] &= ~exec;
    }
})

// cvta: p0 = space, p1 = 1 to the space, 0 to generic; both registers have 8 bytes
VG_ON("cvta", {
    const u64 window = i.p[0] == SHARED ? SHARED_WINDOW : i.p[0] == LOCAL ? LOCAL_WINDOW : 0;
    const bool to = i.p[1];
    alu1<u64, u64>(w, i, exec, [=](u64 a) { return to ? a - window : a + window; });
})
// isspacep: p0 = space
VG_ON("isspacep", {
    const u64* a = row<u64>(w, i.ops[1]);
    const i32 space = i.p[0];
    set_pred(w, i.ops[0], exec, mask_of(exec, [=](int l) {
        const bool sh = a[l] - SHARED_WINDOW < WINDOW_BYTES, lo = a[l] - LOCAL_WINDOW < WINDOW_BYTES;
        return space == SHARED ? sh : space == LOCAL ? lo : !sh && !lo;
    }), w.bad[i.ops[1]]);
})

}  // namespace vgpu
