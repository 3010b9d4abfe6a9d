"""Bounds: any honest order of an fp32 sum is within them, tf32 is not; and rows of zeros are no sample of errors."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pagedtune.harness import oracle, yardstick
from pagedtune.harness.compare import FACTOR, check_out, make_bound
from pagedtune.harness.inputs import AttentionData
from pagedtune.harness.verdicts import Fault
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Numerics

DIM, CAP = 192, 1.0


def one_key(seed: int) -> AttentionData:
    """One sequence of one token: its LSE is its capped score, whose 192 terms of size 100 sum to about 1."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal(DIM) * 100, rng.standard_normal(DIM)
    k[0] += (1.5 * math.sqrt(DIM) - q @ k) / q[0]  # a score of about 1.5 after scaling
    tensors = {
        "q": torch.tensor(q, dtype=torch.float32).view(1, 1, DIM),
        "k_cache": torch.tensor(k, dtype=torch.float32).view(1, 1, 1, DIM),
        "v_cache": torch.ones(1, 1, 1, DIM),
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "context_lens": torch.ones(1, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
    }
    return AttentionData(Problem(1, 1, DIM, q_dtype=DType.FP32, soft_cap=CAP), PoolFormat(1, DType.FP32), tensors)


def lse_of(data: AttentionData, products: np.ndarray, lanes: int) -> float:
    """The LSE from an fp32 sum of the products: lane by lane in order, then over the lanes."""
    sums = np.zeros(lanes, dtype=np.float32)
    for start in range(0, DIM, lanes):
        sums += products[start : start + lanes]
    score = np.add.accumulate(sums)[-1] * np.float32(data.problem.softmax_scale)
    return CAP * math.tanh(float(score) / CAP)


def bound_of(data: AttentionData) -> tuple[float, float]:
    """The exact LSE, and the error that fp32 sums may have."""
    answer = oracle.attention(data)
    bound = make_bound(data, answer, yardstick.measure(data, Numerics(), answer))
    return float(answer.lse[0, 0]), float(bound.lse[0, 0])


@pytest.mark.parametrize("seed", range(20))
def test_honest_orders_of_a_sum_pass(seed: int) -> None:
    data = one_key(seed)
    exact, most = bound_of(data)
    q, k = (data.tensors[name].numpy().reshape(-1) for name in ("q", "k_cache"))
    for lanes in (1, 4, 32):
        for products in (q * k, (q * k)[::-1]):
            assert abs(lse_of(data, products, lanes) - exact) <= most, lanes


def test_tf32_does_not() -> None:
    found = 0
    for seed in range(20):
        data = one_key(seed)
        exact, most = bound_of(data)
        q, k = (_tf32(data.tensors[name].numpy().reshape(-1)) for name in ("q", "k_cache"))
        found += abs(lse_of(data, q * k, 32) - exact) > most
    assert found >= 18  # some errors cancel by luck


HEADS, WIDE, TOKENS = 64, 256, 16


def many_heads(seed: int) -> AttentionData:
    """One sequence of 16 tokens, 64 query heads over one KV head, head dim 256, all fp32."""
    rng = np.random.default_rng(seed)
    tensors = {
        "q": torch.tensor(rng.standard_normal((1, HEADS, WIDE)) * 3, dtype=torch.float32),
        "k_cache": torch.tensor(rng.standard_normal((1, TOKENS, 1, WIDE)), dtype=torch.float32),
        "v_cache": torch.tensor(rng.standard_normal((1, TOKENS, 1, WIDE)), dtype=torch.float32),
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "context_lens": torch.tensor([TOKENS], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
    }
    return AttentionData(Problem(HEADS, 1, WIDE, q_dtype=DType.FP32), PoolFormat(TOKENS, DType.FP32), tensors)


def kernel_in_sequence(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> torch.Tensor:
    """An fp32 kernel that adds up each score term by term, last dim first, as one thread may; exact otherwise."""
    scores = np.zeros((HEADS, TOKENS), np.float32)
    for dim in reversed(range(WIDE)):
        scores += q[:, dim : dim + 1] * k[:, dim]
    weights = np.exp((scores - scores.max(axis=1, keepdims=True)).astype(np.float64) * scale)
    out = (weights / weights.sum(axis=1, keepdims=True)) @ v.astype(np.float64)
    return torch.tensor(out, dtype=torch.float32)[None]


def wide_case(seed: int, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Runs that kernel on what `change` makes of q and k; raises Fault where its error is out of bounds."""
    data = many_heads(seed)
    answer = oracle.attention(data)
    bound = make_bound(data, answer, yardstick.measure(data, Numerics(), answer))
    q, k, v = (data.tensors[name].numpy().reshape(-1, WIDE) for name in ("q", "k_cache", "v_cache"))
    check_out(kernel_in_sequence(change(q), change(k), v, data.problem.softmax_scale), bound)


@pytest.mark.parametrize("seed", range(40))
def test_scores_summed_term_by_term_pass(seed: int) -> None:
    wide_case(seed, lambda values: values)


@pytest.mark.parametrize("seed", range(5))
def test_scores_of_tf32_operands_do_not(seed: int) -> None:
    with pytest.raises(Fault):
        wide_case(seed, _tf32)


def test_rows_of_zeros_are_no_sample_of_errors() -> None:
    """Nine heads of which sinks leave four: as few as in a short sequence, so the worst of the case counts."""
    rng, heads = np.random.default_rng(0), 9
    sinks = torch.tensor([1e4, -1e4] * 4 + [1e4])
    tensors = {
        "q": torch.tensor(rng.standard_normal((2, heads, 8)), dtype=torch.float32),
        "k_cache": torch.tensor(rng.standard_normal((2, 4, 1, 8)), dtype=torch.float32),
        "v_cache": torch.tensor(rng.standard_normal((2, 4, 1, 8)), dtype=torch.float32),
        "block_table": torch.tensor([[0], [1]], dtype=torch.int32),
        "context_lens": torch.tensor([4, 4], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32),
        "sinks": sinks,
    }
    data = AttentionData(Problem(heads, 1, 8, q_dtype=DType.FP32, sinks=True), PoolFormat(4, DType.FP32), tensors)
    answer = oracle.attention(data)
    live = np.abs(answer.out).max(axis=-1)
    assert (live[:, ::2] == 0).all()
    assert (live[:, 1::2] > 0).all()
    measured = yardstick.measure(data, Numerics(), answer)
    measured.out[1, 1, 0] = 0.5 * live[1, 1]  # the yardstick's worst, in the other sequence
    bound = make_bound(data, answer, measured)
    assert (bound.element[0, 1::2, 0] >= FACTOR * 0.5 * live[0, 1::2]).all()


def _tf32(values: np.ndarray) -> np.ndarray:
    """The 10 bits of the mantissa that a tensor core keeps."""
    return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_unit_of_weights_is_a_size_whatever_the_sign_of_their_scales(sign: float) -> None:
    """A token's scale goes into P, which is fp16 here: in units of the largest scale, of either sign, it fits."""
    data = one_key(0)
    scale = torch.full((1, 1, 1), 3e5)
    tensors = {**data.tensors, "k_scale": torch.ones_like(scale), "v_scale": sign * scale}
    pool_format = PoolFormat(1, DType.FP32, scale_kind=ScaleKind.PER_TOKEN_HEAD)  # no kernel's, but an oracle's
    scaled = AttentionData(data.problem, pool_format, tensors)
    errors = yardstick.measure(scaled, Numerics(p=DType.FP16), oracle.attention(scaled))
    assert errors.out.max() <= 3e5 * 2.0**-10
