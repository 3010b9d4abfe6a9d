"""Cases of the cache operations: their tensors, and what must be in memory afterwards, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.launch import LaunchPlan, SlotSpec
from pagedtune.kernels.pool_format import Layout
from pagedtune.kernels.slots import (
    copy_blocks_slots,
    gather_kv_slots,
    kv_write_slots,
    pack_blocks_slots,
    unpack_blocks_slots,
)
from pagedtune.kernels.variant import Op

from .case import SWAPS, Case, Family, Hazard
from .content import coded_values, make_scales, store
from .inputs import Inputs, make_table, make_workspaces
from .memory import Carved, Poison, bits, carve
from .placement import place
from .pools import make_pools, make_token_scales, offset_of, unit_of
from .stored_values import own_scale, stored
from .swap_inputs import SwapInputs, expected_moves

EXTRA_ROWS = 2  # of the gather outputs, past the last sequence: must stay as they are


class CacheInputs:
    """Makes the tensors of a case of a cache operation as often as they are needed, with the same numbers."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(case.seed)
        self._case = case
        self._placement = place(case, rng)
        shape = (self._placement.num_blocks, case.pool_format.block_size, case.problem.num_kv_heads)
        self._scales = make_scales(case, self._placement.num_blocks, rng)
        dims = (case.problem.head_dim, case.problem.head_dim_v)
        numbers = [self._numbers((*shape, dim), rng) for dim in dims]
        numbers[0] = -1 - numbers[0]  # coded K must not equal coded V
        self._pools = [store(values, None, case.pool_format.kv_dtype) for values in numbers]
        rows = (case.workload.num_tokens, case.problem.num_kv_heads)
        self._rows = [self._new_rows((*rows, dim), rng) for dim in dims]
        self._slots = self._slot_mapping(rng)
        self._pairs = self._block_pairs(rng)
        self._swap = SwapInputs(case, self._placement, rng)

    def make(self, plan: LaunchPlan, poison: Poison, sequences: Sequence[int] | None = None) -> Inputs:
        """Fresh tensors for a plan. The batch is always whole: `sequences` belongs to attention."""
        case = self._case
        specs = _SLOTS[case.op](case.problem, case.pool_format)
        slots = make_pools(case, plan, self._placement, self._pools[0], self._pools[1], poison)
        slots |= make_token_scales(case, plan, self._placement, self._scales, poison)
        match case.op:
            case Op.KV_WRITE:
                slots |= self._write_slots(plan, poison)
            case Op.COPY_BLOCKS:
                slots["block_pairs"] = self._copy(self._pairs, poison)
            case Op.PACK_BLOCKS | Op.UNPACK_BLOCKS:
                slots["block_ids"] = self._copy(self._swap.block_ids, poison)
                slots["staging"] = self._swap.staging(plan, poison)
            case _:
                slots |= self._gather_slots(plan, poison)
        for name, scale in zip(("k_scale", "v_scale"), self._scales, strict=True):
            if scale is not None and name in specs and name not in slots:
                slots[name] = self._copy(scale, poison)
        access = {name: specs[name].access for name in slots}
        first_block, block_slots = self._placement.window_start, case.pool_format.block_slots
        whole = case.op in (Op.COPY_BLOCKS, *SWAPS)
        return Inputs(slots, make_workspaces(plan, poison), access, poison, first_block, block_slots, whole)

    def _numbers(self, shape: tuple[int, int, int, int], rng: np.random.Generator) -> np.ndarray:
        if self._case.family is Family.CODED:
            return coded_values(shape[:3], shape[3], self._case.pool_format.kv_dtype)
        return rng.standard_normal(shape) * (50 if self._case.pool_format.kv_dtype is DType.INT8 else 1)

    def _new_rows(self, shape: tuple[int, int, int], rng: np.random.Generator) -> torch.Tensor:
        """New keys or values. For a quantised pool they reach past its range, and coded ones meet ties: quarters."""
        values = rng.standard_normal(shape)
        if self._case.pool_format.kv_dtype in (DType.FP8_E4M3, DType.INT8):
            if self._case.family is Family.CODED:
                values = rng.integers(-255, 256, shape) / 4
            values = values * rng.choice([1, 16, 1024], shape, p=[0.6, 0.3, 0.1])
        if self._case.pool_format.has_token_scales:
            _plant_odd_rows(values, rng)
        return torch.from_numpy(values).to(self._case.problem.q_dtype.torch)

    def _slot_mapping(self, rng: np.random.Generator) -> torch.Tensor:
        """Slots of the query tokens, int64 [num_tokens], in shuffled order; skipped ones are -1 and their rows NaN."""
        case, size = self._case, self._case.pool_format.block_size
        slots = []
        for seq, (context_len, query_len) in enumerate(
            zip(case.workload.context_lens, case.workload.query_lens, strict=True)
        ):
            for token in range(context_len - query_len, context_len):
                # A padded row of an empty sequence has no slot.
                block, slot = self._placement.slot_of(seq, token, size) if token >= 0 else (0, 0)
                start = (self._placement.window_start + block) * size
                slots.append(start + slot if token >= 0 else -1)
        mapping = torch.tensor(slots, dtype=torch.int64)[rng.permutation(len(slots))]
        if Hazard.SKIPPED_TOKENS in case.hazards:
            mapping[::3] = -1
        for rows in self._rows:
            rows[mapping < 0] = torch.nan
        return mapping

    def _block_pairs(self, rng: np.random.Generator) -> torch.Tensor:
        """(source, destination) int64 [num_pairs, 2]: live blocks to a third of all others, one source twice."""
        live = np.flatnonzero(self._placement.live.any(axis=1))
        num_sources = len(live) // 2
        sources = rng.permutation(live)[:num_sources]
        others = rng.permutation(np.setdiff1d(np.arange(self._placement.num_blocks), sources))
        count = min(len(others), max(1, 2 * num_sources // 3) + 1) if num_sources else 0
        chosen = np.resize(sources, count) if count else sources
        pairs = np.stack([chosen, others[:count]], axis=1) + self._placement.window_start
        if Hazard.SKIPPED_TOKENS in self._case.hazards:
            pairs[::3, 0], pairs[1::3, 1] = -1, -1
        return torch.from_numpy(pairs.astype(np.int64).reshape(-1, 2))

    def _write_slots(self, plan: LaunchPlan, poison: Poison) -> dict[str, Carved]:
        slots = {"slot_mapping": self._copy(self._slots, poison)}
        for name, rows in zip(("k", "v"), self._rows, strict=True):
            unit = unit_of(plan, name)
            pad = (2, 1, -(-8 // unit) * unit) if Hazard.STRIDED in self._case.hazards else ()
            slots[name] = self._copy(rows, poison, pad, unit)
        return slots

    def _gather_slots(self, plan: LaunchPlan, poison: Poison) -> dict[str, Carved]:
        case = self._case
        lens = case.workload.context_lens
        slots = {"block_table": make_table(case, self._placement, range(len(lens)), poison)}
        slots["context_lens"] = self._copy(torch.tensor(lens, dtype=torch.int32), poison)
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lens)]).astype(np.int32))
        slots["out_start"] = self._copy(starts, poison)
        rows = case.workload.total_context + EXTRA_ROWS
        heads = case.problem.num_kv_heads
        for name, dim in (("k_out", case.problem.head_dim), ("v_out", case.problem.head_dim_v)):
            shape = (rows, heads, dim)
            offset = offset_of(case, unit_of(plan, name))
            slots[name] = carve(shape, case.pool_format.kv_dtype.torch, poison, offset=offset, canary=True)
        if case.pool_format.has_token_scales:
            for name in ("k_scale_out", "v_scale_out"):
                slots[name] = carve((rows, heads), torch.float32, poison, offset=offset_of(case, 1), canary=True)
        return slots

    def _copy(self, values: torch.Tensor, poison: Poison, pad: Sequence[int] = (), unit: int = 1) -> Carved:
        carved = carve(values.shape, values.dtype, poison, pad, offset_of(self._case, unit))
        bits(carved.view).copy_(bits(values.contiguous()))
        return carved


def _plant_odd_rows(values: np.ndarray, rng: np.random.Generator) -> None:
    """Rows [token, head] that a scale of their own must be careful with: zeros, numbers whose scale is no normal fp32
    number, an infinity, a NaN, and nothing but infinities."""
    odd = rng.integers(0, 16, values.shape[:2])
    values[odd == 0] = 0
    values[odd == 1] *= 1e-42
    values[odd == 2, -1] = np.inf
    values[odd == 3, 0] = np.nan
    values[odd == 4] = -np.inf


_SLOTS = {
    Op.KV_WRITE: kv_write_slots,
    Op.COPY_BLOCKS: copy_blocks_slots,
    Op.GATHER_KV: gather_kv_slots,
    Op.PACK_BLOCKS: pack_blocks_slots,
    Op.UNPACK_BLOCKS: unpack_blocks_slots,
}


def slot_specs(case: Case) -> dict[str, SlotSpec]:
    """The slots of a cache operation's case."""
    return _SLOTS[case.op](case.problem, case.pool_format)


def expected(case: Case, before: Mapping[str, torch.Tensor], first_block: int) -> dict[str, torch.Tensor]:
    """What each INOUT slot must hold afterwards, from private copies of what it held before."""
    after = {name: tensor.clone() for name, tensor in before.items()}
    size = case.pool_format.block_size
    if case.op is Op.KV_WRITE:
        for token, slot in enumerate(before["slot_mapping"].tolist()):
            if slot >= 0:
                block, place = slot // size - first_block, slot % size
                for name in ("k", "v"):
                    scale = before.get(f"{name}_scale")
                    if case.pool_format.has_token_scales:
                        scale = own_scale(case, before[name][token])
                        after[f"{name}_scale"][block, :, place] = scale
                    value = stored(case, before[name][token], scale)
                    target = _at(case, after[f"{name}_cache"], block, place)
                    target.copy_(value.view(target.shape))
    elif case.op is Op.COPY_BLOCKS:
        for source, destination in before["block_pairs"].tolist():
            for name in case.pool_format.block_slots if min(source, destination) >= 0 else ():
                bits(after[name])[destination - first_block] = bits(before[name])[source - first_block]
    elif case.op in SWAPS:
        expected_moves(case.op, before, after, first_block)
    else:
        for seq, context_len in enumerate(before["context_lens"].tolist()):
            for token in range(context_len):
                block = int(before["block_table"][seq, token // size]) - first_block
                at = int(before["out_start"][seq]) + token
                for name in ("k", "v"):
                    if case.pool_format.has_token_scales:
                        after[f"{name}_scale_out"][at] = before[f"{name}_scale"][block, :, token % size]
                    row = after[f"{name}_out"][at]
                    source = _at(case, before[f"{name}_cache"], block, token % size)
                    bits(row).view(source.shape).copy_(source)
    return after


def _at(case: Case, pool: torch.Tensor, block: int, slot: int) -> torch.Tensor:
    """The bits of one slot, [num_kv_heads, head_dim] or, of x-packed K, [num_kv_heads, head_dim / x, x]."""
    if case.pool_format.layout is Layout.NHD:
        return bits(pool)[block, slot]
    if case.pool_format.layout is Layout.HND:
        return bits(pool)[block, :, slot]
    return bits(pool)[block, :, :, slot]
