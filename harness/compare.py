"""Error bounds: at most twice what the declared numerics cost, plus one rounding step. No quota of misses.

The yardstick's error at one element is luck, so it is pooled: relative to each row's largest value, then the worst
row of the sequence (of the case, where a sequence has few rows). A row is one (token, head).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from pagedtune.kernels.dtypes import DType

from .inputs import AttentionData
from .memory import Poison, bits, canary_bits
from .oracle import Answer
from .verdicts import Check, Fault
from .yardstick import Yardstick, scale_error

FACTOR = 2.0
LSE_STEP = 2.0**-20  # eight fp32 rounding steps
SCALE_SIGMAS = 4.0  # of the mean of independent rows
MIN_ROWS = 8  # fewer rows than this tell nothing of the mean scale error
MIN_POOL_ROWS = 16  # nor of the worst error of the yardstick; rows of zeros do not count


# Roundings that any fp32 kernel may do between its sums and its output: a common factor of the weights that is not
# quite 1 (score * scale - maximum, contracted to one rounding), the division, the merge. A 16-bit output hides them.
FP32_STEPS = 4


@dataclass(frozen=True)
class Bound:
    """What a case's output is held to.

    Args:
        answer: expected values.
        element: bound of each element of `out`.
        row: bound of the L2 norm of each row's error.
        partial: bound of each element of merged partials.
        lse: bound of each LSE.
        scale: bound of the mean scale error over all rows; infinite where they are too few.
        exact: whether `out` must be the oracle's value, rounded once (in fp32, within `FP32_STEPS`).
    """

    answer: Answer
    element: np.ndarray
    row: np.ndarray
    partial: np.ndarray
    lse: np.ndarray
    scale: float
    exact: bool


def make_bound(data: AttentionData, answer: Answer, yardstick: Yardstick) -> Bound:
    """The bounds of a case.

    The LSE is held to 2^-20, or to what is more of twice the yardstick's error (coarser scores, if declared, are wrong
    in the LSE itself) and twice the rounding step of the row's largest score (a capped LSE is small where scores of
    several hundred are rounded).
    """
    pools = _pools(data, answer)
    dtype = data.problem.q_dtype
    with np.errstate(invalid="ignore", over="ignore"):
        size, norm = _largest(answer.out), _norm(answer.out)
        element = FACTOR * _pooled(_largest(yardstick.out), size, pools)[..., None] + rounding_step(answer.out, dtype)
        element = element + yardstick.score_step + FP32_STEPS * rounding_step(answer.out, DType.FP32)
        partial = FACTOR * _pooled(_largest(yardstick.partial), size, pools)[..., None]
        # A merge of fp32 partials rounds a few times; of coarser ones, the yardstick has rounded as often.
        partial = (
            partial
            + yardstick.score_step
            + FP32_STEPS * rounding_step(np.broadcast_to(size[..., None], answer.out.shape), DType.FP32)
        )
        uniform_rounding = rounding_step(answer.out, dtype) / math.sqrt(12)
        row = FACTOR * _pooled(_norm(yardstick.out), norm, pools) + _norm(uniform_rounding)
        row = row + _norm(yardstick.score_step)
        errors = np.nan_to_num(yardstick.lse, nan=0.0, posinf=0.0)
        errors = FACTOR * _pooled(errors, np.ones_like(errors), pools)
        lse = np.maximum(lse_step(answer.lse), np.maximum(errors, FACTOR * yardstick.lse_step))
    return Bound(answer, element, row, partial, lse, _scale_bound(yardstick, dtype), data.exact)


def _scale_bound(yardstick: Yardstick, dtype: DType) -> float:
    """Rounding errors of many rows cancel in the mean, a wrong factor does not: this finds 1 % where coarse declared
    numerics allow each single element more. Half a rounding step on top lets a kernel truncate its output."""
    rows = yardstick.scale.size
    if rows < MIN_ROWS:
        return math.inf
    spread = float(np.sqrt(np.square(yardstick.scale).mean() / rows))
    score_step = 4 * DType.FP32.epsilon
    return FACTOR * abs(float(yardstick.scale.mean())) + SCALE_SIGMAS * spread + dtype.epsilon / 2 + score_step


def lse_step(lse: np.ndarray) -> np.ndarray:
    """2^-20 of each LSE, of 1 where it is smaller or infinite."""
    return np.asarray(LSE_STEP * np.maximum(1.0, np.abs(np.where(np.isfinite(lse), lse, 0.0))))


def rounding_step(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Spacing of `dtype` at each value, that of its smallest normal number at least."""
    info = torch.finfo(dtype.torch)
    magnitude = np.maximum(np.abs(np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)), info.smallest_normal)
    return np.asarray(info.eps * 2.0 ** np.floor(np.log2(magnitude)))


def check_written(name: str, tensor: torch.Tensor, poison: Poison) -> None:
    """Raises Fault if an element still holds the canary's bits."""
    untouched = (bits(tensor) == canary_bits(tensor.dtype, poison)).nonzero()
    if len(untouched):
        where = tuple(untouched[0].tolist())
        raise Fault(Check.WRITTEN, f"{name}{list(where)} was not written ({len(untouched)} of {tensor.numel()})")


def check_out(got: torch.Tensor, bound: Bound) -> dict[str, float]:
    """Worst error over bound of `out` by check.

    Raises:
        Fault: nonfinite, exact, element, row or scale.
    """
    values, expected = got.double().numpy(), bound.answer.out
    _check_nonfinite("out", values, expected)
    if bound.exact:
        _check_exact(got, expected)
    with np.errstate(invalid="ignore"):
        error = np.where(np.isfinite(expected), np.abs(values - expected), 0.0)
    worst_element = _worst(Check.ELEMENT, "out[token, head, dim]", error, bound.element, values, expected)
    worst_row = _worst(Check.ROW, "relative L2 of out[token, head]", _norm(error), bound.row, None, _norm(expected))
    return {Check.ELEMENT: worst_element, Check.ROW: worst_row, Check.SCALE: _check_scale(got, bound)}


def _check_scale(got: torch.Tensor, bound: Bound) -> float:
    mean = float(scale_error(got, bound.answer.out).mean()) if got.numel() else 0.0
    if abs(mean) > bound.scale:
        message = f"out is {mean:+.3%} too large on average over all rows, more than {bound.scale:.3%}"
        raise Fault(Check.SCALE, message, abs(mean) / bound.scale)
    return abs(mean) / bound.scale


def check_lse(got: torch.Tensor, bound: Bound) -> dict[str, float]:
    """Worst error over bound of `lse`.

    Raises:
        Fault: nonfinite or lse.
    """
    values, expected = got.double().numpy(), bound.answer.lse
    _check_nonfinite("lse", values, expected)
    with np.errstate(invalid="ignore"):
        error = np.where(np.isfinite(expected), np.abs(values - expected), 0.0)
    return {Check.LSE: _worst(Check.LSE, "lse[token, head]", error, bound.lse, values, expected)}


def _check_nonfinite(name: str, got: np.ndarray, expected: np.ndarray) -> None:
    same = np.isnan(got) == np.isnan(expected)
    infinite = np.isinf(got) | np.isinf(expected)
    same &= ~infinite | (got == expected)
    if not same.all():
        where = tuple(int(i) for i in np.argwhere(~same)[0])
        message = f"{name}{list(where)} is {got[where]:.6g}, expected {expected[where]:.6g}"
        raise Fault(Check.NONFINITE, f"{message} ({int((~same).sum())} of {same.size} such)", math.inf)


def _check_exact(got: torch.Tensor, expected: np.ndarray) -> None:
    wanted = torch.from_numpy(expected).to(got.dtype)
    if got.dtype is torch.float32:
        wrong = ((got - wanted).abs() > FP32_STEPS * torch.from_numpy(rounding_step(expected, DType.FP32))).nonzero()
    else:
        wrong = (got != wanted).nonzero()
    if len(wrong):
        where = tuple(wrong[0].tolist())
        raise Fault(
            Check.EXACT,
            f"out[token, head, dim]{list(where)} is {float(got[where]):.6g}, expected exactly "
            f"{float(wanted[where]):.6g} ({len(wrong)} of {got.numel()}; V codes block, slot, head, dim in turn)",
            math.inf,
        )


def _worst(
    check: Check, what: str, error: np.ndarray, bound: np.ndarray, got: np.ndarray | None, expected: np.ndarray
) -> float:
    """Largest error over bound.

    Raises:
        Fault: it is above 1.
    """
    if not error.size:
        return 0.0
    ratio = np.nan_to_num(error / bound, nan=math.inf)  # an error that cannot be told is no error within bounds
    where = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    worst = float(ratio[where])
    if worst > 1:
        index = [int(i) for i in where]
        found = "" if got is None else f"is {got[where]:.8g}, "
        raise Fault(
            check,
            f"{what}{index} {found}expected {'norm ' if got is None else ''}{expected[where]:.8g}: error "
            f"{error[where]:.3g} exceeds the bound {bound[where]:.3g} ({int((ratio > 1).sum())} of {ratio.size} do)",
            worst,
        )
    return worst


def _pools(data: AttentionData, answer: Answer) -> np.ndarray:
    """Pool of each token: its sequence, or -1 for all of those with few rows."""
    starts = data.tensors["query_start_loc"].tolist()
    pools = np.full(starts[-1], -1)
    told = _largest(answer.out) > 0
    for seq, (start, end) in enumerate(pairwise(starts)):
        if told[start:end].sum() >= MIN_POOL_ROWS:
            pools[start:end] = seq
    return pools


def _pooled(error: np.ndarray, size: np.ndarray, pools: np.ndarray) -> np.ndarray:
    """Each row's size times the worst error / size of its pool. All but `pools` are [num_tokens, num_q_heads]."""
    relative = np.divide(error, size, out=np.zeros_like(error), where=size > 0)
    result = np.zeros_like(error)
    for pool in np.unique(pools):
        # Rows of a small pool are held to the worst of the case.
        members = pools == pool
        result[members] = (relative if pool < 0 else relative[members]).max() * size[members]
    return result


def _largest(values: np.ndarray) -> np.ndarray:
    """Largest finite magnitude of each row."""
    return np.asarray(np.where(np.isfinite(values), np.abs(values), 0.0).max(axis=-1))


def _norm(values: np.ndarray) -> np.ndarray:
    """L2 norm of the finite part of each row."""
    return np.asarray(np.sqrt(np.square(np.where(np.isfinite(values), values, 0.0)).sum(axis=-1)))
