"""The cases beside the coverings hold what they are there for."""

from __future__ import annotations

import pytest
import torch

from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.content import by_row
from pagedtune.harness.inputs import AttentionInputs
from pagedtune.harness.singles import SPLIT_SHAPE, single_cases
from pagedtune.kernels.catalogue import find_variant
from pagedtune.kernels.cuda_split_mma import MAX_SPLITS
from pagedtune.kernels.device import DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat, ScaleKind
from pagedtune.kernels.triton_split import TritonSplitConfig
from pagedtune.kernels.triton_split_shape import dot_dtype
from pagedtune.tuner.configs import Configs

from .toy import make_case

CASES = tuple(single_cases(DeviceKind.CUDA))


@pytest.mark.parametrize("name", ["cuda_split_mma", "cuda_split_simt"])
@pytest.mark.parametrize("gpu", ["h100", "a100", "l40s"])
def test_some_sequence_fills_every_split_that_a_merge_knows(name: str, gpu: str) -> None:
    """A split takes at least `split_tokens` keys, and whole tiles: of 128 at most."""
    device, variant = Configs().gpu(gpu).device(gpu), find_variant(name)
    case = next(case for case in CASES if case.problem.head_dim == SPLIT_SHAPE.head_dim)
    config = variant.default_config(case.problem, case.pool_format, case.bounds, device).as_dict()
    assert config["num_splits"] == MAX_SPLITS
    assert config["split_tokens"] == 128
    share = max(-(-max(case.workload.context_lens) // MAX_SPLITS), 128)
    assert max(case.workload.context_lens) > 96 * (-(-share // 128) * 128)  # more than three words of 32 splits


def test_far_queries_have_the_scores_of_near_ones() -> None:
    far, near = (
        AttentionInputs(
            make_case((33, 7), Family.RANDOM, *hazards, kv_dtype=DType.INT8, scale_kind=ScaleKind.PER_TOKEN_HEAD)
        ).content
        for hazards in ((Hazard.FAR_QUERIES,), ())
    )
    assert far.k_scale is not None
    assert near.k_scale is not None
    assert far.q.abs().max() > torch.finfo(torch.float16).max
    ratio = far.q.shape[1] // far.k.shape[2]
    for head in range(far.q.shape[1]):
        keys = [(c.k.double() * by_row(c.k_scale).double())[..., head // ratio, :] for c in (far, near)]  # type: ignore[arg-type]
        assert torch.equal(keys[0] @ far.q[0, head].double(), keys[1] @ near.q[0, head].double())


def test_zero_scales_belong_to_zeros() -> None:
    content = AttentionInputs(
        make_case((33, 7), Family.RANDOM, Hazard.ZERO_SCALES, kv_dtype=DType.INT8, scale_kind=ScaleKind.PER_TOKEN_HEAD)
    ).content
    assert content.v_scale is not None
    empty = (content.v_scale == 0).transpose(1, 2)  # [block, slot, head]
    assert int(empty.sum()) == (7 + 1) * 2  # the last sequence, and one token of the other; 2 KV heads
    assert not content.k[empty].any()
    assert not content.v[empty].any()


@pytest.mark.parametrize(
    ("hazard", "keywords", "said"),
    [
        (Hazard.FAR_QUERIES, {}, "scales of each head"),
        (Hazard.FAR_QUERIES, {"scale_kind": ScaleKind.PER_HEAD, "q_dtype": DType.FP16}, "more range than fp16"),
        (Hazard.ZERO_SCALES, {"scale_kind": ScaleKind.PER_HEAD}, "scales of tokens"),
        (Hazard.STEEP_SCALES, {"scale_kind": ScaleKind.PER_HEAD}, "scales of tokens"),
        (Hazard.NAN_SCORES, {"kv_dtype": DType.INT8}, "dtype has a NaN"),
    ],
)
def test_extremes_that_no_case_can_have(hazard: Hazard, keywords: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_case((33, 7), Family.RANDOM, hazard, **keywords)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_dtype", [DType.FP32, DType.BF16, DType.FP16, DType.FP8_E4M3])
@pytest.mark.parametrize("q_dtype", [DType.FP32, DType.BF16, DType.FP16])
def test_products_hold_what_query_and_pool_hold(q_dtype: DType, kv_dtype: DType) -> None:
    """All digits, and of the pool the range too; a query's is brought into that of a half by a factor of its row."""
    case: Case = make_case((9,), q_dtype=q_dtype, kv_dtype=kv_dtype)
    if {q_dtype, kv_dtype} == {DType.BF16, DType.FP16}:  # no 16-bit product does
        reason = find_variant("triton_split").reject(
            case.problem, PoolFormat(16, kv_dtype), TritonSplitConfig(), Configs().gpu("h100").device("h100")
        )
        assert reason is not None
        return
    product = dot_dtype(case.problem, PoolFormat(16, kv_dtype)).torch
    for dtype in (q_dtype.torch, kv_dtype.torch):
        assert torch.finfo(product).eps <= torch.finfo(dtype).eps
    for value in (torch.finfo(kv_dtype.torch).max, torch.finfo(kv_dtype.torch).smallest_normal):
        assert torch.tensor(value, dtype=torch.float64).to(product).double() == value
