// cp.async: the destination belongs to the copy from issue to the wait of its group. Data lands at once or at the wait,
// by the launch option; reading or writing the destination in between is a fault either way.
#pragma once
#include "atomics.h"

namespace vgpu {

inline void land(Ctx& c, const AsyncCopy& k) {
    u8 *data = c.cta.shared.data() + (k.dst - SHARED_START), *state = c.cta.shared_state.data() + (k.dst - SHARED_START);
    std::memcpy(data, k.data, k.size);
    if (k.valid == 0xffff) { std::memset(state, 1, k.size); return; }
    for (int b = 0; b < k.size; ++b) state[b] = u8(k.valid >> b & 1);
}
// The source is read when the data lands: late copies see what other threads wrote in between.
inline void fetch(Ctx& c, AsyncCopy& k) {
    std::memset(k.data, 0, sizeof k.data);
    k.valid = 0xffff;
    if (!k.src_size) return;
    Alloc* a = find_alloc(c, k.src);
    std::memcpy(k.data, a->host + (k.src - a->base), k.src_size);
    if (a->init) k.valid = u16(bits_at(a->init, k.src - a->base, k.src_size) | ~all_ones(k.src_size));
}
// ops: dst, src, [src_size]. p: 0 bytes of dst register, 1 of src register, 2 size, 3 = index of the src_size operand or -1,
// 4 = constant src_size or -1, 5 = predicate operand (ignore-src) or -1, 6 = it is negated; imm = dst offset | src << 32.
inline void op_cp_async(Ctx& c, Warp& w, const Instr& i, u32 exec) {
    u64 dst[32], src[32];
    const i64 dst_offset = i32(u32(i.imm)), src_offset = i.imm >> 32;
    if (!addresses(c, w, i, exec, i.ops[0], i.p[0], dst_offset, dst) || !addresses(c, w, i, exec, i.ops[1], i.p[1], src_offset, src)) return;
    const i32 size = i.p[2];
    u32 ignore = 0;
    if (i.p[5] >= 0) ignore = i.p[6] ? ~pred(w, i.ops[i.p[5]]) : pred(w, i.ops[i.p[5]]);
    const i32 size_op = i.p[3] >= 0 ? i.ops[i.p[3]] : -1, control = size_op >= 0 ? size_op : i.p[5] >= 0 ? i.ops[i.p[5]] : -1;
    if (control >= 0 && (w.bad[control] & exec)) {
        report(c, UNINIT_ADDRESS, pc_of(c, i), thread_of(w, first_lane(w.bad[control] & exec)));
        return fatal(c, w);
    }
    u32 readers = 0, offset[32];
    const bool rows = size == 16 && shared_rows(c, exec, dst[first_lane(exec)] - SHARED_WINDOW < WINDOW_BYTES ? GENERIC : SHARED, dst, offset);
    const bool early = c.launch.args.options.async_early;
    const i32 pc = pc_of(c, i);
    u64 flying = 0;
    for (u32 m = exec; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        const u32 asked = size_op >= 0 ? row<u32>(w, size_op)[l] : i.p[4] >= 0 ? u32(i.p[4]) : u32(size);
        if (asked > u32(size)) { fault_at(c, w, OUT_OF_BOUNDS, i, l, dst[l], i32(asked), SHARED); return; }
        const i32 take = ignore >> l & 1 ? 0 : i32(asked);
        Place from{}, to{};
        if (dst[l] - SHARED_WINDOW < WINDOW_BYTES) dst[l] -= SHARED_WINDOW;
        if (rows) to.state = c.cta.shared_state.data() + offset[l];
        else if (!locate_quick(c, -1, dst[l], size, SHARED, to) && !locate(c, w, i, l, dst[l], size, size, SHARED, to)) return;
        if (take > 0) {
            const bool whole = take == size && locate_quick(c, c.worker.site_alloc[size_t(pc)], src[l], size, GLOBAL, from);
            if (!whole && !locate(c, w, i, l, src[l], take, size, GLOBAL, from)) return;
            note_read(from, take);
            if (from.alloc->access != IN) race_global(c, w, l, *from.alloc, from.offset, take, false, 0, pc);
            readers |= 1u << l;
        }
        for (i32 k = 0; k < size; k += 4) {
            u32 s;
            std::memcpy(&s, to.state + k, 4);
            if (s & 0x02020202u) { fault_at(c, w, ASYNC_UNWAITED, i, l, dst[l] + u64(k), size, SHARED); return; }
        }
        if (rows) race_shared16(c, w, l, offset[l], true, pc);
        else race_shared(c, w, l, u32(dst[l]), size, true, false, pc);
        flying += u64(take);
        w.copies.push_back({u32(dst[l]), u8(size), u8(take), u8(l), pc, src[l], -1, c.cta.clock, {}, 0});
        if (early) { AsyncCopy& k = w.copies.back(); fetch(c, k); land(c, k); }
        for (i32 b = 0; b < size; b += 4) {
            u32 s;
            std::memcpy(&s, to.state + b, 4);
            s |= 0x02020202u;
            std::memcpy(to.state + b, &s, 4);
        }
    }
    take_off(c.cta, flying);
    if (readers) count_global(c, i, readers, src, size);
}
VG_ON("cp.async", op_cp_async(c, w, i, exec);)
VG_ON("cp.async.commit_group", {
    for (AsyncCopy& k : w.copies) if (k.group < 0 && (exec >> k.lane & 1)) k.group = w.groups[k.lane];
    for (u32 m = exec; m; m &= m - 1) ++w.groups[first_lane(m)];
})
inline void complete_copies(Ctx& c, Warp& w, u32 exec, i64 pending, bool uncommitted) {
    size_t kept = 0;
    for (size_t n = 0; n < w.copies.size(); ++n) {
        AsyncCopy& k = w.copies[n];
        const bool due = (exec >> k.lane & 1) && (uncommitted || (k.group >= 0 && k.group < w.groups[k.lane] - pending));
        if (!due) { if (kept != n) w.copies[kept] = k; ++kept; continue; }
        land_copy(c, k);
        // The source may have been read as late as now.
        if (Alloc* a = k.src_size ? find_alloc(c, k.src) : nullptr; a && a->access != IN)
            race_global(c, w, k.lane, *a, k.src - a->base, k.src_size, false, 0, k.pc);
        if (!c.launch.args.options.async_early) fetch(c, k); else
            for (int b = 0; b < k.size; ++b) k.valid = u16((k.valid & ~(1u << b)) | u32(c.cta.shared_state[k.dst - SHARED_START + u32(b)] & 1) << b);
        if (c.launch.args.options.async_early) std::memcpy(k.data, c.cta.shared.data() + (k.dst - SHARED_START), k.size);
        land(c, k);
        restamp_shared(c, w, k.lane, k.dst, k.size, k.pc);  // the write is ordered by this thread's wait
    }
    w.copies.resize(kept);
}
VG_ON("cp.async.wait_group", complete_copies(c, w, exec, i.imm, false);)
VG_ON("cp.async.wait_all", complete_copies(c, w, exec, 0, true);)

}  // namespace vgpu
