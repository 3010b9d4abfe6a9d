"""Numbers that no draw from a distribution gives: NaN scores, queries beyond the range of a half, scales of 0."""

from __future__ import annotations

import math

import torch

from .case import Case, Hazard
from .placement import Placement

FAR = 40  # octaves: far beyond the largest half (2^16) and below the smallest (2^-24), well within bf16 and fp32

STEEP = 20  # octaves: past the largest half


def make_extreme(
    case: Case,
    placement: Placement,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Changes the numbers of a case in place, as its hazards say. Shapes and dtypes as in `Content`."""
    if Hazard.FAR_QUERIES in case.hazards:
        _move_queries(case, q, k_scale)
    if Hazard.STEEP_SCALES in case.hazards:
        _grow_scales(case, placement, v_scale)
    if Hazard.ZERO_SCALES in case.hazards:
        _clear_sequence(case, placement, (k, v), (k_scale, v_scale))
    if Hazard.NAN_SCORES in case.hazards:
        _plant_nan_scores(case, placement, q, k)


def _move_queries(case: Case, q: torch.Tensor, k_scale: torch.Tensor | None) -> None:
    """Queries of even KV heads 2^40 times as large and of odd ones as small, K's scales the other way: exactly the same
    scores."""
    assert k_scale is not None
    factors = 2.0 ** (FAR * (1 - 2 * (torch.arange(case.problem.num_kv_heads) % 2)).float())
    q *= factors.repeat_interleave(case.problem.gqa_ratio)[:, None].to(q.dtype)
    k_scale /= factors[:, None] if k_scale.dim() == 3 else factors


def _grow_scales(case: Case, placement: Placement, v_scale: torch.Tensor | None) -> None:
    """V's scales grow by `STEEP` every 64 tokens: what a warp works on next outweighs all that it has
    seen, and what digits it drops of that are none of the result's."""
    assert v_scale is not None
    for seq, context_len in enumerate(case.workload.context_lens):
        for token in range(context_len):
            block, slot = placement.slot_of(seq, token, case.pool_format.block_size)
            v_scale[block, :, slot] *= 2.0 ** (token // 64 * STEEP)


def _clear_sequence(
    case: Case,
    placement: Placement,
    values: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    """The last sequence with keys holds nothing but zeros, of scale 0; so does the first token of the one before."""
    seqs = [seq for seq, context_len in enumerate(case.workload.context_lens) if context_len]
    tokens = [(seqs[-1], token) for token in range(case.workload.context_lens[seqs[-1]])]
    for seq, token in [*tokens, *((seq, 0) for seq in seqs[-2:-1])]:
        block, slot = placement.slot_of(seq, token, case.pool_format.block_size)
        for stored in values:
            stored[block, slot] = torch.zeros((), dtype=stored.dtype)
        for scale in scales:
            assert scale is not None
            scale[block, :, slot] = 0.0


def _plant_nan_scores(case: Case, placement: Placement, q: torch.Tensor, k: torch.Tensor) -> None:
    """One element of a query of the first token, and one of the last key of the longest sequence, of another KV head
    where there is one."""
    q[0, 0, -1] = math.nan
    seq = max(range(case.workload.num_seqs), key=lambda s: case.workload.context_lens[s])
    block, slot = placement.slot_of(seq, case.workload.context_lens[seq] - 1, case.pool_format.block_size)
    k[block, slot, -1, 0] = math.nan
