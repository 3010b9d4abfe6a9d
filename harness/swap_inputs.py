"""Cases of packing and unpacking: the list of blocks, the staging buffer, and what must be in memory afterwards."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from pagedtune.kernels.launch import LaunchPlan
from pagedtune.kernels.slots import block_elements
from pagedtune.kernels.variant import Op

from .case import SWAPS, Case, Hazard
from .memory import HIGH_ELEMENTS, Carved, Poison, bits, canary_bits, carve, reserve_rows
from .placement import Placement
from .pools import offset_of, unit_of


class SwapInputs:
    """Makes the list of blocks of a case, and its staging buffer as often as it is needed.

    Attributes:
        block_ids: int64 [num_listed], in shuffled order. Most live blocks and one that holds no token; to be packed,
            one of them twice. Skipped ones are -1.
    """

    def __init__(self, case: Case, placement: Placement, rng: np.random.Generator) -> None:
        self._case = case
        self.block_ids = torch.empty(0, dtype=torch.int64)
        if case.op not in SWAPS:
            return
        self.block_ids = torch.from_numpy(self._listed(placement, rng) + placement.window_start)
        if Hazard.SKIPPED_TOKENS in case.hazards:
            self.block_ids[::3] = -1
        if Hazard.HIGH_STAGING in case.hazards:
            self.block_ids = torch.tensor([-1, int(self.block_ids[-1])])
        shape = (len(self.block_ids), sum(block_elements(case.problem, case.pool_format)))
        # Any bits, NaNs with any payload among them: not one may change on its way.
        dtype = case.pool_format.kv_dtype
        noise = rng.integers(0, 256, (shape[0], shape[1] * dtype.itemsize), dtype=np.uint8)
        self._rows = torch.from_numpy(noise).view(dtype.torch)

    def _listed(self, placement: Placement, rng: np.random.Generator) -> np.ndarray:
        most = self._case.bounds.max_num_seqs
        live = rng.permutation(np.flatnonzero(placement.live.any(axis=1)))
        dead = np.flatnonzero(~placement.live.any(axis=1))
        listed = rng.permutation(np.concatenate([dead[:1], live[: max(1, 2 * len(live) // 3)]]))[:most]
        if self._case.op is Op.PACK_BLOCKS and len(listed) < most:
            listed = np.concatenate([listed, listed[:1]])
        return listed.astype(np.int64)

    def staging(self, plan: LaunchPlan, poison: Poison) -> Carved:
        """The buffer: rows to unpack, or the canary where blocks are to be packed."""
        rows, length = self._rows.shape
        if Hazard.HIGH_STAGING in self._case.hazards:
            carved = reserve_rows(rows, length, HIGH_ELEMENTS, self._rows.dtype)
            target, source = carved.view[-1:], self._rows[-1:]
        else:
            unit = unit_of(plan, "staging")
            apart = -(-5 // unit) * unit if Hazard.STRIDED in self._case.hazards else 0
            carved = carve((rows, length), self._rows.dtype, poison, (0, apart), offset_of(self._case, unit))
            target, source = carved.view, self._rows
        if self._case.op is Op.PACK_BLOCKS:
            bits(target).fill_(canary_bits(target.dtype, poison))
        else:
            bits(target).copy_(bits(source))
        return carved


def expected_moves(
    op: Op, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], first_block: int
) -> None:
    """Makes `after`, a copy of `before`, what packing or unpacking must leave."""
    for row, block in enumerate(before["block_ids"].tolist()):
        if block < 0:
            continue
        start = 0
        for name in ("k_cache", "v_cache"):
            shape = before[name].shape[1:]
            columns = slice(start, start + shape.numel())
            start += shape.numel()
            if op is Op.PACK_BLOCKS:
                bits(after["staging"])[row, columns] = bits(before[name])[block - first_block].flatten()
            else:
                bits(after[name])[block - first_block] = bits(before["staging"])[row, columns].view(shape)
