"""Split-K partials in a variant's workspace, merged once more in float64 and held to the declared precision.

A workspace that names `out` as what it is part of holds, per split, the normalised output over the split's keys; one
that names `lse` holds their log-sum. A split that was not written (its LSE is still the canary) or is empty (LSE -inf)
has no part in the merge. The sink may be in one split's LSE or in none.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.launch import LaunchPlan
from pagedtune.kernels.variant import Numerics

from .case import Family
from .compare import Bound, lse_step
from .inputs import AttentionData, Inputs
from .memory import Poison, bits, canary_bits
from .verdicts import Check, Fault

TOKENS_PER_SPLIT = 4  # a split of one token holds a stored value, which has few bits by right
ROUNDED_SHARE = 0.9  # all values of a kernel that rounds; every other one where each second split is of one token


def check_partials(
    plan: LaunchPlan, inputs: Inputs, data: AttentionData, numerics: Numerics, bound: Bound, family: Family
) -> dict[str, float]:
    """Worst error over bound of the merged partials; empty for a plan without partials.

    Raises:
        Fault: partials; the message says what does not fit.
    """
    names = {spec.partial_of: name for name, spec in plan.workspaces.items() if spec.partial_of}
    if not names:
        return {}
    if set(names) != {"out", "lse"}:
        raise Fault(Check.PARTIALS, f"workspaces declare partials of {', '.join(names)}, expected of out and of lse")
    out, lse = (inputs.workspaces[names[n]].view[: bound.answer.lse.shape[0]] for n in ("out", "lse"))
    _check_shapes(out, lse, bound)
    declared = numerics.partials
    if out.dtype.itemsize < declared.itemsize:
        raise Fault(Check.PARTIALS, f"workspace {names['out']!r} is {out.dtype}, but {declared} partials are declared")
    used = (bits(lse) != canary_bits(lse.dtype, Poison.NAN)) & (lse != -torch.inf)  # [tokens, heads, splits]
    split_rows = used.any(dim=-1).numpy()
    ratio = _check_merge(out, lse, used, split_rows, bound)
    if family is Family.RANDOM and declared is DType.FP32:  # in other cases one weight is 1 and the rest vanish
        _check_mantissas(names["out"], out, used, _visible_tokens(data))
    return {Check.PARTIALS: ratio}


def _check_shapes(out: torch.Tensor, lse: torch.Tensor, bound: Bound) -> None:
    tokens, heads, dim = bound.answer.out.shape
    if out.dim() != 4 or out.shape[:2] != (tokens, heads) or out.shape[3] != dim or lse.shape != out.shape[:3]:
        raise Fault(
            Check.PARTIALS,
            f"partials are {list(out.shape)} with LSE {list(lse.shape)}, expected [{tokens} or more, {heads}, splits, "
            f"{dim}] and the same without the last",
        )


def _check_merge(
    out: torch.Tensor, lse: torch.Tensor, used: torch.Tensor, split_rows: np.ndarray, bound: Bound
) -> float:
    """Merges with the exact LSE as denominator, so that it does not matter where the sink was counted."""
    part_lse = torch.where(used, lse.double(), -torch.inf).numpy()
    part_out = torch.where(used[..., None], out.double(), 0.0).numpy()
    exact = bound.answer
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        shift = np.where(np.isfinite(exact.lse), exact.lse, 0.0)
        weights = np.where(np.isposinf(exact.lse)[..., None], 0.0, np.exp(part_lse - shift[..., None]))
        merged = (weights[..., None] * part_out).sum(axis=2)
        merged_lse = np.logaddexp.reduce(part_lse, axis=2)
        checked = split_rows[..., None] & np.isfinite(exact.out)
        # A merged LSE that is off by its own bound scales the merge by as much.
        limit = bound.partial + bound.lse[..., None] * np.abs(np.nan_to_num(exact.out))
        error = np.where(checked, np.abs(merged - exact.out), 0.0)
        lse_error = np.fmin(np.abs(merged_lse - exact.lse), np.abs(merged_lse - exact.lse_without_sink))
        lse_error = np.where(split_rows & np.isfinite(exact.lse_without_sink), lse_error, 0.0)
        lse_limit = np.maximum(bound.lse, lse_step(exact.lse_without_sink))
    return max(
        _worst("merged partials of out[token, head, dim]", error, limit, merged, exact.out),
        _worst("merged partial LSE[token, head]", lse_error, lse_limit, merged_lse, exact.lse),
    )


def _worst(what: str, error: np.ndarray, limit: np.ndarray, got: np.ndarray, expected: np.ndarray) -> float:
    if not error.size:
        return 0.0
    ratio = np.nan_to_num(error / limit, nan=math.inf)  # an error that cannot be told is no error within bounds
    where = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    if ratio[where] > 1:
        raise Fault(
            Check.PARTIALS,
            f"{what}{[int(i) for i in where]} gives {got[where]:.8g}, expected {expected[where]:.8g}: error "
            f"{error[where]:.3g} exceeds the bound {limit[where]:.3g} of the declared partials",
            float(ratio[where]),
        )
    return float(ratio[where])


def _check_mantissas(name: str, out: torch.Tensor, used: torch.Tensor, visible: torch.Tensor) -> None:
    """fp32 partials whose values all fit a 16-bit type were rounded to it, however small the resulting error."""
    long_enough = visible[:, None] >= TOKENS_PER_SPLIT * used.sum(dim=-1)
    values = out[used & long_enough[..., None]].float()
    values = values[values.isfinite() & (values != 0)]
    for dtype in (torch.bfloat16, torch.float16):
        if values.numel() >= 32:
            share = float((values.to(dtype).float() == values).float().mean())
            if share > ROUNDED_SHARE:
                raise Fault(
                    Check.PARTIALS,
                    f"{share:.0%} of the values in workspace {name!r} fit {dtype}: they were rounded to it, but fp32 "
                    "partials are declared",
                    math.inf,
                )


def _visible_tokens(data: AttentionData) -> torch.Tensor:
    """Tokens that each query token sees, at most."""
    lens = data.tensors["context_lens"].long().repeat_interleave(data.tensors["query_start_loc"].long().diff())
    return lens if data.problem.window is None else lens.clamp_max(data.problem.window)
