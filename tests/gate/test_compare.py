"""The bound of the LSE where the terms of a score cancel: any honest order of an fp32 sum is within it, tf32 is not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pagedtune.harness import oracle, yardstick
from pagedtune.harness.compare import make_bound
from pagedtune.harness.inputs import AttentionData
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
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


def _tf32(values: np.ndarray) -> np.ndarray:
    """The 10 bits of the mantissa that a tensor core keeps."""
    return (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
