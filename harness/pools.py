"""The pools of a case, scales of tokens among them: laid out as the format says, poison in all that is not live."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pagedtune.kernels.launch import LaunchPlan
from pagedtune.kernels.pool_format import Layout, PoolFormat

from .case import Case, Hazard
from .memory import Carved, Poison, bits, carve, fill, reserve
from .placement import Placement


def unit_of(plan: LaunchPlan, name: str) -> int:
    """Elements that a plan wants the rows of a slot to be aligned to (1: it takes any)."""
    spec = plan.slots.get(name)
    return 1 if spec is None else max(1, spec.align // spec.dtype.itemsize)


def offset_of(case: Case, unit: int) -> int:
    """Elements by which the start of a tensor is off: as little aligned as the plan says that it may be."""
    return unit if Hazard.OFFSET_BASE in case.hazards else 0


def make_pools(
    case: Case, plan: LaunchPlan, placement: Placement, k: torch.Tensor, v: torch.Tensor, poison: Poison
) -> dict[str, Carved]:
    """`k_cache` and `v_cache`, poisoned except for live slots. `k`, `v` as in `Content`."""
    pools = {}
    for name, values, shape_of in (
        ("k_cache", k, case.pool_format.k_shape),
        ("v_cache", v, case.pool_format.v_shape),
    ):
        shape = shape_of(placement.window_start + placement.num_blocks, case.problem)
        if placement.window_start:
            carved = reserve(shape, values.dtype, placement.window_start)
            fill(carved.parent, poison)
        else:
            # K blocks lie twice their size apart, V blocks a row more than theirs.
            apart = shape[1] if name == "k_cache" else 1
            unit = unit_of(plan, name)
            pad = [0, apart if Hazard.STRIDED_POOL in case.hazards else 0, *(0 for _ in shape[2:])]
            if Hazard.GAPPED_POOL in case.hazards:
                pad[2:4] = _gaps(shape, unit)
            carved = carve(shape, values.dtype, poison, pad, offset_of(case, unit))
        target = canonical(carved.view[placement.window_start :], case.pool_format, name == "k_cache")
        live = torch.from_numpy(placement.live)
        bits(target)[live] = bits(values).view(*target.shape)[live]
        pools[name] = carved
    return pools


def _gaps(shape: Sequence[int], unit: int) -> tuple[int, int]:
    """By how much the third and fourth dimension are longer in memory than in the view: no two strides are products of
    sizes then, and all stay multiples of `unit`."""
    inner = math.prod(shape[4:])
    fourth = unit // math.gcd(unit, inner)
    return unit // math.gcd(unit, (shape[3] + fourth) * inner), fourth


def make_token_scales(
    case: Case,
    plan: LaunchPlan,
    placement: Placement,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    poison: Poison,
) -> dict[str, Carved]:
    """`k_scale` and `v_scale` of a pool with scales of tokens, poisoned except for live slots; none for others."""
    found = {}
    for name, values in zip(("k_scale", "v_scale"), scales, strict=True):
        if values is None or not case.pool_format.has_token_scales:
            continue
        heads, size = values.shape[1:]
        shape = (placement.window_start + placement.num_blocks, heads, size)
        if placement.window_start:
            # As far apart as the blocks of a pool: else they would never lie above 2^32.
            apart = min(case.problem.head_dim, case.problem.head_dim_v)
            whole = reserve((shape[0], apart, heads, size), values.dtype, placement.window_start)
            fill(whole.parent, poison)
            carved = Carved(whole.parent, whole.view[:, 0], guarded=False)
        else:
            apart = heads if name == "k_scale" else 1
            pad = (0, apart, 3 if name == "k_scale" else 5) if Hazard.STRIDED_POOL in case.hazards else ()
            carved = carve(shape, values.dtype, poison, pad, offset_of(case, unit_of(plan, name)))
        live = torch.from_numpy(placement.live)
        target = carved.view[placement.window_start :].transpose(1, 2)
        target[live] = values.transpose(1, 2)[live]
        found[name] = carved
    return found


def canonical(pool: torch.Tensor, pool_format: PoolFormat, is_k: bool) -> torch.Tensor:
    """The same memory as [num_blocks, block_size, num_kv_heads, head_dim], x-packed K as [..., head_dim / x, x]."""
    match pool_format.layout:
        case Layout.NHD:
            return pool
        case Layout.HND:
            return pool.permute(0, 2, 1, 3)
        case Layout.XPACKED:
            return pool.permute(0, 3, 1, 2, 4) if is_k else pool.permute(0, 3, 1, 2)
