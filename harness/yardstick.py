"""What a variant's declared precision must cost: attention emulated in exactly that precision, against the oracle.

Two honest ways of the same numerics are run, a whole-row softmax and an online one over splits, because they round
at different places; the yardstick takes the larger error of the two. Where the output is fp32, and shows it, the online
way also adds up each score term by term, which costs several times what a library's blocked sum does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.variant import Numerics

from .inputs import AttentionData
from .oracle import Answer, gather

SPLIT_TOKENS = 32  # of the online emulation: short, so that the merge and the order of sums count


@dataclass(frozen=True)
class Yardstick:
    """Errors of the declared numerics, in absolute terms.

    Args:
        out: [num_tokens, num_q_heads, head_dim_v], after rounding to the output dtype.
        partial: the same before that rounding: what merged partials must keep to.
        lse: [num_tokens, num_q_heads].
        scale: [num_tokens, num_q_heads], signed: by how much the emulation is too large along the exact output.
        score_step: like `out`: at most what one rounding step of each score, in the dtype of the sums, does to the
            output. Where two keys compete, the emulation may round them luckily and the kernel not.
        lse_step: like `lse`: one such rounding step of the row's largest score (or sum on the way to one), cap aside.
    """

    out: np.ndarray
    partial: np.ndarray
    lse: np.ndarray
    scale: np.ndarray
    score_step: np.ndarray
    lse_step: np.ndarray


def measure(data: AttentionData, numerics: Numerics, answer: Answer) -> Yardstick:
    """Errors of the emulation against the oracle's `answer`."""
    emulation = _Emulation(data, numerics)
    with np.errstate(invalid="ignore"):
        errors = [_errors(data, answer, *emulated) for emulated in emulation.results]
        step = emulation.score_step.double().numpy()
        scales = [scale_error(out.to(data.problem.q_dtype.torch), answer.out) for out, _ in emulation.results]
    out, partial, lse = (np.fmax(a, b) for a, b in zip(*errors, strict=True))
    scale = np.where(np.abs(scales[0]) >= np.abs(scales[1]), *scales)
    lse_step = emulation.lse_step.double().numpy()
    return Yardstick(out, partial, lse, scale, np.nan_to_num(step, nan=0.0), np.nan_to_num(lse_step, nan=0.0))


def scale_error(got: torch.Tensor, expected: np.ndarray) -> np.ndarray:
    """<got, expected> / <expected, expected> - 1 of each row, 0 where that is not a number."""
    values = got.double().numpy()
    live = np.isfinite(expected) & np.isfinite(values)
    wanted = np.where(live, expected, 0.0)
    norm = np.square(wanted).sum(axis=-1)
    along = (np.where(live, values, 0.0) * wanted).sum(axis=-1)
    return np.asarray(np.divide(along, norm, out=np.ones_like(norm), where=norm > 0) - 1)


def _errors(
    data: AttentionData, answer: Answer, out: torch.Tensor, lse: torch.Tensor
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rounded = out.to(data.problem.q_dtype.torch)
    return (
        np.abs(rounded.double().numpy() - answer.out),
        np.abs(out.double().numpy() - answer.out),
        np.abs(lse.double().numpy() - answer.lse),
    )


@dataclass(frozen=True)
class _Values:
    """V as the second product takes it.

    Args:
        numbers: fp32 [num_kv_heads, 1, n, head_dim_v]: dequantised, or as stored where there is a `scale`.
        scale: fp32 [num_kv_heads, 1, 1, n] of the tokens, which the weights are multiplied with before they are
            rounded; None for other pools. Relative to `unit`, a power of two, so that the range of the weights' dtype
            does not count.
        unit: fp32 [num_kv_heads, 1, 1, 1].
    """

    numbers: torch.Tensor
    scale: torch.Tensor | None = None
    unit: torch.Tensor | None = None

    def part(self, tokens: slice) -> _Values:
        """Some of the tokens."""
        scale = None if self.scale is None else self.scale[..., tokens]
        return _Values(self.numbers[..., tokens, :], scale, self.unit)

    def sizes(self) -> _Values:
        """The magnitudes of V."""
        return _Values(self.numbers.abs(), self.scale, self.unit)


class _Emulation:
    """Output in fp32 and LSE of the whole-row and of the online way, and the step of the scores."""

    def __init__(self, data: AttentionData, numerics: Numerics) -> None:
        problem = data.problem
        shape = (data.tensors["q"].shape[0], problem.num_q_heads)
        self.results = [(torch.zeros(*shape, problem.head_dim_v), torch.full(shape, -torch.inf)) for _ in range(2)]
        self.score_step = torch.zeros(*shape, problem.head_dim_v)
        self.lse_step = torch.zeros(shape)
        self._data, self._numerics = data, numerics
        starts = data.tensors["query_start_loc"].tolist()
        for seq, context_len in enumerate(data.tensors["context_lens"].tolist()):
            rows = slice(starts[seq], starts[seq + 1])
            if rows.start != rows.stop:
                self._sequence(seq, rows, context_len)

    def _sequence(self, seq: int, rows: slice, context_len: int) -> None:
        problem = self._data.problem
        blocked, in_sequence, values, size = _scores(self._data, seq, rows, context_len, self._numerics)
        sink = torch.full((problem.num_q_heads,), -torch.inf)
        if problem.sinks:
            sink = self._data.tensors["sinks"]
        sink = sink.view(problem.num_kv_heads, problem.gqa_ratio, 1, 1).expand(*blocked.shape[:3], 1)
        for result, (method, scores) in zip(self.results, ((_whole, blocked), (_online, in_sequence)), strict=True):
            out, lse = method(scores, values, sink, self._numerics)
            result[0][rows] = _by_token(out)
            result[1][rows] = _by_token(lse).squeeze(-1)
        out, lse = _whole(blocked, values.sizes(), sink, Numerics())
        step = self._numerics.accumulate.epsilon * size
        self.lse_step[rows] = _by_token(step).squeeze(-1)
        self.score_step[rows] = _by_token(step * out) + _by_token(step) * self.results[0][0][rows].abs()


def _by_token(tensor: torch.Tensor) -> torch.Tensor:
    """[num_kv_heads, ratio, query_len, d] as [query_len, num_q_heads, d]."""
    return tensor.permute(2, 0, 1, 3).flatten(1, 2)


def _scores(
    data: AttentionData, seq: int, rows: slice, context_len: int, numerics: Numerics
) -> tuple[torch.Tensor, torch.Tensor, _Values, torch.Tensor]:
    """fp32 scores [num_kv_heads, ratio, query_len, n], -inf where not visible, summed in blocks and in sequence; V; and
    the largest magnitude of a score in each row, cap aside. All of the n tokens that some query of the sequence sees.

    Where the terms of a score cancel, its sum is still rounded in steps of what it passed through: about the norm of
    its terms, which then counts as its magnitude.
    """
    problem, query_len = data.problem, rows.stop - rows.start
    first = 0
    if problem.window is not None:
        first = min(context_len, max(0, context_len - query_len - problem.window + 1))
    keys, values = (torch.from_numpy(x).float() for x in gather(data, seq, first, context_len))
    accumulate = numerics.accumulate.torch
    q = data.tensors["q"][rows].to(accumulate)
    grouped = q.reshape(query_len, problem.num_kv_heads, problem.gqa_ratio, -1).permute(1, 2, 0, 3)
    columns = keys.to(accumulate).permute(1, 2, 0)[:, None]
    raw = torch.matmul(grouped, columns)
    sums = (raw, _summed_in_sequence(grouped, columns) if problem.q_dtype is DType.FP32 else raw)
    scores, other = (_rounded(x, numerics.scores).float() * problem.softmax_scale for x in sums)
    squares = torch.matmul(grouped.square(), columns.square())
    passed = squares.float().sqrt() * abs(problem.softmax_scale)
    size = torch.cat((scores.abs(), passed, torch.ones(*scores.shape[:3], 1)), dim=-1).amax(dim=-1, keepdim=True)
    position = torch.arange(context_len - query_len, context_len)
    distance = torch.arange(first, context_len)[None, :] - position[:, None]  # [query_len, n]
    found = _values(data, seq, first, values.permute(1, 0, 2)[:, None])
    return _seen(scores, distance, data), _seen(other, distance, data), found, size


def _summed_in_sequence(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`rows` @ `columns`, each sum taken term by term."""
    total = torch.zeros(*rows.shape[:-1], columns.shape[-1], dtype=rows.dtype)
    for i in range(rows.shape[-1]):
        total.addcmul_(rows[..., i : i + 1], columns[..., i : i + 1, :])
    return total


def _seen(scores: torch.Tensor, distance: torch.Tensor, data: AttentionData) -> torch.Tensor:
    """`scores` with cap and slopes, -inf where a query does not see a token `distance` [query_len, n] away."""
    problem = data.problem
    if problem.soft_cap is not None:
        scores = problem.soft_cap * torch.tanh(scores / problem.soft_cap)
    if problem.alibi:
        slopes = data.tensors["alibi_slopes"].view(problem.num_kv_heads, problem.gqa_ratio, 1, 1)
        scores = scores + slopes * distance
    hidden = distance > 0
    if problem.window is not None:
        hidden = hidden | (distance <= -problem.window)
    return scores.masked_fill(hidden, -torch.inf)


def _values(data: AttentionData, seq: int, first: int, values: torch.Tensor) -> _Values:
    """V of the tokens from `first` on, whose dequantised numbers are given."""
    if not data.pool_format.has_token_scales or not values.shape[2]:
        return _Values(values)
    positions = torch.arange(first, first + values.shape[2])
    blocks = data.tensors["block_table"][seq].long()[positions // data.pool_format.block_size] - data.first_block
    scale = data.tensors["v_scale"][blocks, :, positions % data.pool_format.block_size].float().T[:, None, None]
    unit = torch.exp2(torch.floor(torch.log2(scale.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30))))
    numbers = values / scale.transpose(2, 3)
    return _Values(numbers.masked_fill(scale.transpose(2, 3) == 0, 0.0), scale / unit, unit)


def _whole(
    scores: torch.Tensor, values: _Values, sink: torch.Tensor, numerics: Numerics
) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax over the row; P is rounded after normalisation."""
    lse = torch.logsumexp(torch.cat((scores, sink), dim=-1), dim=-1, keepdim=True)
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0))
    return _product(p, values, numerics).float(), lse


def _online(
    scores: torch.Tensor, values: _Values, sink: torch.Tensor, numerics: Numerics
) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits with their own maxima, P rounded before normalisation, partials rounded, merged by LSE one by one."""
    lse = sink.clone()
    out = torch.zeros(*scores.shape[:3], values.numbers.shape[-1])
    for start in range(0, scores.shape[-1], SPLIT_TOKENS):
        part = scores[..., start : start + SPLIT_TOKENS]
        top = part.amax(dim=-1, keepdim=True)
        p = torch.exp(part - top.masked_fill(top == -torch.inf, 0.0))
        total = p.sum(dim=-1, keepdim=True)
        product = _product(p, values.part(slice(start, start + SPLIT_TOKENS)), numerics).float()
        partial = _rounded(product / total.clamp_min(1e-30), numerics.partials)
        part_lse = top + total.log()
        merged = torch.logaddexp(lse, part_lse)
        safe = merged.masked_fill(merged == -torch.inf, 0.0)
        out = out * torch.exp(lse - safe) + partial * torch.exp(part_lse - safe)
        # The sink has no value: as the first term it scales a zero.
        lse = merged
    return out, lse


def _product(p: torch.Tensor, values: _Values, numerics: Numerics) -> torch.Tensor:
    accumulate = numerics.accumulate.torch
    weights = p if values.scale is None else p * values.scale
    product = torch.matmul(_rounded(weights, numerics.p).to(accumulate), values.numbers.to(accumulate))
    return product if values.unit is None else product * values.unit


def _rounded(tensor: torch.Tensor, dtype: DType) -> torch.Tensor:
    """`tensor` rounded to `dtype`, still in its own dtype."""
    if dtype.torch.itemsize >= tensor.dtype.itemsize or dtype is DType.INT8:
        return tensor
    return tensor.to(dtype.torch).to(tensor.dtype)
