"""Both oracles against hand-computed examples of `Problem`'s specification, and against each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedtune.harness import dense_oracle, oracle
from pagedtune.harness.case import Family, Hazard
from pagedtune.harness.inputs import AttentionData, AttentionInputs
from pagedtune.harness.memory import Poison
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.launch import LaunchPlan
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.slots import attention_slots

from .toy import make_case


def both(data: AttentionData) -> list[tuple[np.ndarray, np.ndarray]]:
    """Output and LSE of the two oracles."""
    first = oracle.attention(data)
    second = dense_oracle.attention(data)
    return [(first.out, first.lse), (second[0].numpy(), second[1].numpy())]


def one_head(
    keys: list[float], values: list[float], queries: list[float], lens: tuple[int, int] = (0, 0), **features: object
) -> AttentionData:
    """One sequence, one head of dim 1 in blocks of 2, scale 1: scores are query x key. Block 0 of the pool is NaN."""
    problem = Problem(1, 1, 1, q_dtype=DType.FP32, scale=1.0, max_query_len=len(queries), **features)  # type: ignore[arg-type]
    blocks = -(-len(keys) // 2)
    k, v = (torch.full((blocks + 1, 2, 1, 1), torch.nan) for _ in range(2))
    for token, (key, value) in enumerate(zip(keys, values, strict=True)):
        block = blocks - token // 2  # reversed order
        k[block, token % 2, 0, 0], v[block, token % 2, 0, 0] = key, value
    tensors = {
        "q": torch.tensor(queries).view(-1, 1, 1),
        "k_cache": k,
        "v_cache": v,
        "block_table": torch.tensor([[*range(blocks, 0, -1), -1]], dtype=torch.int32),
        "context_lens": torch.tensor([len(keys)], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, len(queries)], dtype=torch.int32),
        "sinks": torch.tensor([math.log(2.0)]),
        "alibi_slopes": torch.tensor([math.log(2.0)]),
    }
    return AttentionData(problem, PoolFormat(2, DType.FP32), tensors)


PER_TOKEN_HEAD = ScaleKind.PER_TOKEN_HEAD
LN2, LN3 = math.log(2.0), math.log(3.0)


@pytest.mark.parametrize(
    ("data", "out", "lse"),
    [
        # Weights 1 and 3 over values 0 and 8.
        (one_head([0.0, LN3], [0.0, 8.0], [1.0]), [6.0], [math.log(4.0)]),
        # A sink of log 2 adds 2 to the denominator 1 + 3.
        (one_head([0.0, LN3], [0.0, 8.0], [1.0], sinks=True), [4.0], [math.log(6.0)]),
        # ALiBi: slope log 2 at distances -2, -1, 0: weights 1/4, 1/2, 1 over 1, 2, 4.
        (one_head([0.0] * 3, [1.0, 2.0, 4.0], [1.0], alibi=True), [3.0], [math.log(1.75)]),
        # A window of 2 sees the last two keys only; of 1, itself.
        (one_head([0.0] * 3, [100.0, 1.0, 3.0], [1.0], window=2), [2.0], [LN2]),
        (one_head([5.0] * 3, [100.0, 1.0, 3.0], [1.0], window=1), [3.0], [5.0]),
        # Two query tokens: the first does not see the last key.
        (one_head([0.0] * 2, [1.0, 3.0], [1.0, 1.0]), [1.0, 2.0], [0.0, LN2]),
        # cap * tanh(score / cap), with scores far above 88 caps: +cap and -cap.
        (one_head([1e3, -1e3], [1.0, -1.0], [1.0], soft_cap=1.0), [math.tanh(1.0)], [math.log(2 * math.cosh(1.0))]),
        # The cap comes before ALiBi.
        (one_head([1e3, 1e3], [0.0, 3.0], [1.0], soft_cap=1.0, alibi=True), [2.0], [1.0 + math.log(1.5)]),
        # No keys: O = 0 and LSE = -inf, or the sink.
        (one_head([], [], [1.0]), [0.0], [-math.inf]),
        (one_head([], [], [1.0], sinks=True), [0.0], [LN2]),
    ],
)
def test_hand_computed(data: AttentionData, out: list[float], lse: list[float]) -> None:
    for got_out, got_lse in both(data):
        np.testing.assert_allclose(got_out.ravel(), out, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(got_lse.ravel(), lse, rtol=1e-6, atol=1e-7)


def test_infinite_sink_takes_all_weight() -> None:
    data = one_head([0.0, 1.0], [1.0, 2.0], [1.0], sinks=True)
    tensors = {**data.tensors, "sinks": torch.tensor([math.inf])}
    for out, lse in both(AttentionData(data.problem, data.pool_format, tensors)):
        assert out.ravel().tolist() == [0.0]
        assert lse.ravel().tolist() == [math.inf]


def test_scales_multiply_scores_and_values() -> None:
    data = one_head([0.0, 1.0], [1.0, 3.0], [1.0])
    tensors = {**data.tensors, "k_scale": torch.tensor([LN3]), "v_scale": torch.tensor([2.0])}
    scaled = AttentionData(data.problem, PoolFormat(2, DType.FP32, scale_kind=ScaleKind.PER_TENSOR), tensors)
    for out, lse in both(scaled):  # weights 1 and 3 over 2 and 6
        np.testing.assert_allclose(out.ravel(), [5.0], rtol=1e-6)
        np.testing.assert_allclose(lse.ravel(), [math.log(4.0)], rtol=1e-6)


def test_scales_of_tokens_are_found_through_the_table() -> None:
    """Tokens 0 and 1 lie in block 2, token 2 in block 1; weights 1, 3 and 1 over 2, 12 and 20."""
    data = one_head([LN3, 1.0, 0.0], [1.0, 3.0, 5.0], [1.0])
    nan = math.nan
    scales = {
        "k_scale": torch.tensor([[[nan, nan]], [[7.0, nan]], [[0.0, LN3]]]),
        "v_scale": torch.tensor([[[nan, nan]], [[4.0, nan]], [[2.0, 4.0]]]),
    }
    pool_format = PoolFormat(2, DType.FP32, scale_kind=ScaleKind.PER_TOKEN_HEAD)  # no kernel's, but an oracle's
    for out, lse in both(AttentionData(data.problem, pool_format, {**data.tensors, **scales})):
        np.testing.assert_allclose(out.ravel(), [(2 + 3 * 12 + 20) / 5], rtol=1e-6)
        np.testing.assert_allclose(lse.ravel(), [math.log(5.0)], rtol=1e-6)


def test_query_heads_of_a_group_share_their_kv_head() -> None:
    case = make_case((5,), Family.CODED, heads=(6, 2, 64, 64))
    plan = LaunchPlan((), attention_slots(case.problem, case.pool_format))
    made = AttentionInputs(case)
    data = made.data(made.make(plan, Poison.NAN).snapshot())
    # Dims 2, 6, ... of coded V hold the KV head.
    assert oracle.attention(data).out[0, :, 2].round(6).tolist() == [0, 0, 0, 1, 1, 1]


@settings(max_examples=60)
@given(draw=st.data())
def test_oracles_agree(draw: st.DataObject) -> None:
    lens = tuple(draw.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4), "context_lens"))
    query_lens = tuple(draw.draw(st.integers(0, min(4, max(1, n))), "query_len") for n in lens)
    sinks = draw.draw(st.booleans(), "sinks")
    hazards = draw.draw(
        st.sampled_from([(), (Hazard.SHARED_BLOCKS,), (Hazard.TAIL_FOREIGN,), (Hazard.INF_SINKS,), (Hazard.STRIDED,)])
    )
    kv_dtype = draw.draw(st.sampled_from([DType.FP16, DType.FP8_E4M3, DType.INT8, DType.FP32]), "kv_dtype")
    quantised = kv_dtype in (DType.FP8_E4M3, DType.INT8)
    case = make_case(
        lens,
        draw.draw(st.sampled_from(Family), "family"),
        *(h for h in hazards if sinks or h is not Hazard.INF_SINKS),
        query_lens=query_lens,
        heads=draw.draw(st.sampled_from([(4, 2, 64, 64), (3, 3, 16, 24), (7, 1, 32, 8)]), "heads"),
        q_dtype=draw.draw(st.sampled_from([DType.FP32, DType.BF16]), "q_dtype"),
        kv_dtype=kv_dtype,
        block_size=draw.draw(st.integers(1, 9), "block_size"),
        layout=draw.draw(st.sampled_from(Layout), "layout"),
        scale_kind=draw.draw(st.sampled_from([k for k in ScaleKind if quantised or k is not PER_TOKEN_HEAD]), "kind"),
        window=draw.draw(st.none() | st.integers(1, 30), "window"),
        soft_cap=draw.draw(st.none() | st.just(3.0), "soft_cap"),
        alibi=draw.draw(st.booleans(), "alibi"),
        sinks=sinks,
    )
    made = AttentionInputs(case)
    inputs = made.make(LaunchPlan((), attention_slots(case.problem, case.pool_format)), Poison.NAN)
    (out, lse), (other_out, other_lse) = both(made.data(inputs.snapshot()))
    assert not np.isnan(out).any()
    np.testing.assert_allclose(out, other_out, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(lse, other_lse, rtol=1e-9, atol=1e-11)
