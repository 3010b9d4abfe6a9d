"""The numbers of a case, before they are laid out in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import ScaleKind

from .case import Case, Family, Hazard
from .extremes import make_extreme
from .placement import Placement, first_visible

RANDOM_SCORE_STD = 1.5  # a softmax over a few dozen keys, neither flat nor one-hot
SATURATED_SCORE_STD = 150.0  # times soft cap: most |score / soft_cap| lie above 88
NEEDLE_SCORE = 16.0  # over 30 000 keys of head dim 64 the target still has 97 % of the weight
ONE_HOT_GAP = 120.0  # exp(-120) is 0 in fp32: every other weight vanishes exactly
_EXACT_INTEGERS = {DType.FP32: 251, DType.BF16: 251, DType.FP16: 251, DType.INT8: 127, DType.FP8_E4M3: 13}


@dataclass
class Content:
    """What the tensors of a case hold, in canonical order.

    Args:
        q: [num_tokens, num_q_heads, head_dim] in the query dtype.
        k, v: stored values [window blocks, block_size, num_kv_heads, head_dim(_v)] in the pool's dtype; slots that
            are not live mean nothing.
        k_scale, v_scale: fp32 in the format's shape, or None.
        sinks, alibi_slopes: fp32 [num_q_heads], or None.
        exact: whether every softmax is one-hot, so that the output is exact in any order of sums.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    exact: bool = False


def make_content(case: Case, placement: Placement, rng: np.random.Generator) -> Content:
    """The numbers of an attention case."""
    problem, kv_dtype = case.problem, case.pool_format.kv_dtype
    shape = (placement.num_blocks, case.pool_format.block_size, problem.num_kv_heads)
    k_scale, v_scale = make_scales(case, placement.num_blocks, rng)
    if case.family is Family.CODED:
        k_values = np.where(rng.integers(0, 2, (*shape, problem.head_dim)) == 1, 1.0, -1.0)
        v_values = coded_values(shape, problem.head_dim_v, kv_dtype)
        k, v = store(k_values, None, kv_dtype), store(v_values, None, kv_dtype)
    else:
        k = store(rng.standard_normal((*shape, problem.head_dim), np.float32), k_scale, kv_dtype)
        v_values = 2 * rng.standard_normal((*shape, problem.head_dim_v), np.float32)
        if v_scale is not None and case.pool_format.has_token_scales:
            sizes = _sizes(case, v_scale.shape, rng)
            v_scale, v_values = v_scale * sizes, v_values * by_row(sizes).numpy()
        v = store(v_values, v_scale, kv_dtype)
    if Hazard.LIVE_NAN in case.hazards:
        _plant_nan(case, placement, v, rng)
    slopes = _slopes(case, rng)
    q, exact = _queries(case, placement, k, k_scale, slopes, rng)
    make_extreme(case, placement, q, k, v, k_scale, v_scale)
    return Content(q, k, v, k_scale, v_scale, _sinks(case, rng), slopes, exact)


def _sizes(case: Case, shape: Sequence[int], rng: np.random.Generator) -> torch.Tensor:
    """How large each token's V is: a thousandfold apart, about a size that no half holds, or one where it has few bits
    left, so that it matters where a kernel brings scales and weights together."""
    least, most = (-18, 4) if case.problem.q_dtype is DType.FP16 else (-24, 16)  # the output must stay in range
    typical = float(rng.choice((least, 0, most)))
    return torch.from_numpy(2.0 ** (typical + rng.uniform(-5, 5, shape))).float()


def by_row(scale: torch.Tensor) -> torch.Tensor:
    """Scales so that they broadcast over rows [num_blocks, block_size, num_kv_heads, head_dim]."""
    return scale.transpose(1, 2)[..., None] if scale.dim() == 3 else scale.view(-1, 1)


def store(values: np.ndarray, scale: torch.Tensor | None, dtype: DType) -> torch.Tensor:
    """`values` [..., num_kv_heads, dim] as a pool stores them: divided by the scale in fp32, rounded to `dtype`."""
    stored = torch.from_numpy(np.asarray(values, dtype=np.float32))
    if scale is not None:
        stored = stored / by_row(scale)
    if dtype is DType.INT8:
        stored = stored.round().clamp(-127, 127)
    return stored.to(dtype.torch)


def coded_values(shape: tuple[int, int, int], head_dim: int, dtype: DType) -> np.ndarray:
    """V [num_blocks, block_size, num_kv_heads, head_dim]: dimensions hold block, slot, head and dim in turn, modulo a
    number that the dtype holds exactly."""
    modulus = _EXACT_INTEGERS[dtype]
    block, slot, head = np.ogrid[: shape[0], : shape[1], : shape[2]]
    values = np.zeros((*shape, head_dim))
    for start, code in enumerate((block, slot, head)):
        values[..., start::4] = np.broadcast_to(code % modulus, shape)[..., None]
    values[..., 3::4] = np.arange(3, head_dim, 4) % modulus
    return values


def make_scales(
    case: Case, num_blocks: int, rng: np.random.Generator
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """K and V scales of the format: distinct, not 1, and powers of two where the result must be exact. Those of tokens
    are [num_blocks, num_kv_heads, block_size]."""
    if case.pool_format.scale_kind is ScaleKind.NONE:
        return None, None
    shape = case.pool_format.scale_shape(num_blocks, case.problem)
    assert shape is not None
    if case.family is Family.CODED:
        low, high = (-4, 5) if case.pool_format.has_token_scales else (1, 3)
        k, v = 2.0 ** rng.integers(-2, 0, shape), 2.0 ** rng.integers(low, high, shape)
    else:
        k, v = rng.uniform(0.55, 0.9, shape), rng.uniform(1.2, 1.8, shape)
    if case.pool_format.kv_dtype is DType.INT8 and case.family is not Family.CODED:
        k, v = k / 16, v / 16  # else a step of 1 would be coarser than the values
    return torch.from_numpy(k).float(), torch.from_numpy(v).float()


def _plant_nan(case: Case, placement: Placement, v: torch.Tensor, rng: np.random.Generator) -> None:
    seq = int(np.argmax(case.workload.context_lens))
    if case.workload.context_lens[seq]:
        block, slot = placement.slot_of(seq, case.workload.context_lens[seq] - 1, case.pool_format.block_size)
        v[block, slot, int(rng.integers(v.shape[2])), int(rng.integers(v.shape[3]))] = math.nan


def _slopes(case: Case, rng: np.random.Generator) -> torch.Tensor | None:
    if not case.problem.alibi:
        return None
    heads = case.problem.num_q_heads
    if case.family is Family.RANDOM:
        return torch.from_numpy(2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)).float()
    # A steep slope would outweigh a distant target.
    return torch.from_numpy(rng.uniform(1, 3, heads) / max(1, *case.workload.context_lens)).float()


def _sinks(case: Case, rng: np.random.Generator) -> torch.Tensor | None:
    if not case.problem.sinks:
        return None
    signs = np.where(np.arange(case.problem.num_q_heads) % 2 == 0, 1.0, -1.0)
    if Hazard.HUGE_SINKS in case.hazards:
        values = 1e4 * signs
    elif Hazard.INF_SINKS in case.hazards:
        values = math.inf * signs
    else:
        values = rng.uniform(0, 4, case.problem.num_q_heads)
    return torch.from_numpy(values).float()


def _queries(
    case: Case,
    placement: Placement,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    slopes: torch.Tensor | None,
    rng: np.random.Generator,
) -> tuple[torch.Tensor, bool]:
    problem = case.problem
    shape = (case.workload.num_tokens, problem.num_q_heads, problem.head_dim)
    q = rng.standard_normal(shape)
    if case.family is Family.RANDOM:
        std = (
            SATURATED_SCORE_STD * (problem.soft_cap or 1.0)
            if Hazard.SATURATED_CAP in case.hazards
            else RANDOM_SCORE_STD
        )
        q *= std / (problem.softmax_scale * math.sqrt(problem.head_dim))
        return torch.from_numpy(q).to(problem.q_dtype.torch), False
    real_k = k.double().numpy()
    if k_scale is not None:
        real_k = real_k * by_row(k_scale).double().numpy()
    aim = _Aim(case, placement, real_k, None if slopes is None else slopes.numpy(), int(rng.integers(1 << 16)))
    row = 0
    for seq, query_len in enumerate(case.workload.query_lens):
        for index in range(query_len):
            aim.point(q[row], seq, case.workload.context_lens[seq] - query_len + index)
            row += 1
    return torch.from_numpy(q).to(problem.q_dtype.torch), aim.exact and problem.soft_cap is None


class _Aim:
    """Points queries at tokens."""

    def __init__(self, case: Case, placement: Placement, k: np.ndarray, slopes: np.ndarray | None, turn: int) -> None:
        self._case, self._placement, self._k, self._slopes, self._turn = case, placement, k, slopes, turn
        self.exact = case.family is Family.CODED

    def point(self, q: np.ndarray, seq: int, position: int) -> None:
        """Writes the queries of one token, [num_q_heads, head_dim]."""
        first = first_visible(self._case, seq)
        window = self._case.problem.window
        if window is not None:
            first = max(first, position - window + 1)
        if position < first:
            return  # a row without keys
        block_size = self._case.pool_format.block_size
        tokens = np.arange(first, position + 1)
        blocks = np.array(self._placement.tables[seq])[tokens // block_size]
        keys = self._k[blocks, tokens % block_size]  # [visible, num_kv_heads, head_dim]
        targets = target_tokens(first, position, block_size)
        for head in range(q.shape[0]):
            target = self._choose(targets, head, q.shape[0])
            slope = 0.0 if self._slopes is None else float(self._slopes[head])
            head_keys = keys[:, head // self._case.problem.gqa_ratio]
            q[head] = self._query(head_keys, target - first, slope)
        self._turn += q.shape[0] + 1

    def _choose(self, targets: list[int], head: int, num_heads: int) -> int:
        """One head of each token aims at the last key and one at the first; the others take turns at the rest."""
        turn, place = self._turn, (self._turn + head) % num_heads
        if num_heads == 1:
            return targets[0] if turn % 2 == 0 else targets[turn // 2 % len(targets)]
        rest = targets[2:] or targets
        return targets[place % len(targets)] if place < 2 else rest[(turn + place) % len(rest)]

    def _query(self, keys: np.ndarray, target: int, slope: float) -> np.ndarray:
        scale, key = self._case.problem.softmax_scale, keys[target]
        handicap = slope * (len(keys) - 1 - target)
        if self._case.family is Family.NEEDLE:
            return np.asarray((NEEDLE_SCORE + handicap) * key / (scale * float(key @ key)))
        # Coded keys are ±k_scale: a power of two times the target's key keeps the query exact.
        dots = keys @ key
        runner_up = max(0.0, dots[dots < dots[target]].max(initial=0.0))  # 0: a sink must lose too
        gap = float(dots[target] - runner_up) * scale
        self.exact &= bool((keys[dots >= dots[target]] == key).all())
        factor = 2.0 ** math.ceil(math.log2((ONE_HOT_GAP + slope * len(keys)) / gap))
        self.exact &= factor * float(np.abs(key).max()) < 2048
        return np.asarray(factor * key)


def target_tokens(first: int, last: int, block_size: int) -> list[int]:
    """Visible tokens that a query is aimed at: last, first, then block edges and the edges of every power-of-two
    split, at the end, the start and in the middle."""
    wanted = [last, first]
    middle = (first + last) // 2
    for size in (block_size, *(1 << p for p in range(4, 15))):
        for near in (last, first + size, middle):
            edge = near // size * size
            wanted += [edge, edge - 1, edge + 1]
    seen: dict[int, None] = dict.fromkeys(t for t in wanted if first <= t <= last)
    return list(seen)
