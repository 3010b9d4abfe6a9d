"""Cache operations, bit for bit: right kernels pass, and every element that should stay is watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagedtune.harness.cache_inputs import EXTRA_ROWS, expected
from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.gate import run_case
from pagedtune.harness.stored_values import e4m3_bits
from pagedtune.harness.verdicts import Check
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.catalogue import VARIANTS
from pagedtune.kernels.device import DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.eager_cache import EagerCopyBlocks, EagerGatherKV, EagerKVWrite
from pagedtune.kernels.launch import CallStep, LaunchPlan, Tensors
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Config, Op, Variant

from .toy import CPU, make_case

BASES: dict[Op, type[Variant]] = {
    Op.KV_WRITE: EagerKVWrite,
    Op.COPY_BLOCKS: EagerCopyBlocks,
    Op.GATHER_KV: EagerGatherKV,
}
Edit = Callable[[Tensors], None]


def edited(op: Op, edit: Edit, before: bool = False) -> Variant:
    """The torch variant of an op, with an edit of its tensors after (or before) the call."""
    base = BASES[op]

    class Edited(base):  # type: ignore[misc, valid-type]
        def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
            plan = super().plan(problem, pool_format, config, bounds)
            right = plan.steps[0]

            def call(tensors: Tensors) -> None:
                for action in (edit, right.function) if before else (right.function, edit):
                    action(tensors)

            return LaunchPlan((CallStep(call),), plan.slots, plan.workspaces, plan.limits)

    variant: Variant = Edited()
    return variant


CASES = [
    make_case((33, 0, 16, 5), Family.CODED, op=Op.GATHER_KV, layout=Layout.XPACKED),
    make_case((33, 16), Family.RANDOM, Hazard.SHARED_BLOCKS, Hazard.TAIL_INT_MAX, op=Op.GATHER_KV),
    make_case((33, 16), Family.RANDOM, Hazard.HIGH_POOL, op=Op.GATHER_KV, kv_dtype=DType.FP16),
    make_case((70, 33), Family.CODED, op=Op.COPY_BLOCKS, layout=Layout.HND),
    make_case((70, 33), Family.RANDOM, Hazard.HIGH_POOL, op=Op.COPY_BLOCKS),
    make_case((0,), op=Op.COPY_BLOCKS),
    make_case((70, 33), Family.RANDOM, Hazard.SKIPPED_TOKENS, op=Op.COPY_BLOCKS),
    make_case((40, 5), Family.RANDOM, Hazard.SKIPPED_TOKENS, op=Op.KV_WRITE, query_lens=(7, 5)),
    make_case(
        (40, 0), op=Op.KV_WRITE, query_lens=(3, 1), q_dtype=DType.FP32, kv_dtype=DType.BF16, layout=Layout.XPACKED
    ),
    make_case((40,), op=Op.KV_WRITE, query_lens=(9,), kv_dtype=DType.FP16, scale_kind=ScaleKind.PER_HEAD),
    make_case((40,), Family.RANDOM, Hazard.HIGH_POOL, op=Op.KV_WRITE, query_lens=(9,), layout=Layout.HND),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_right_kernels_pass(case: Case) -> None:
    variants = [v for v in VARIANTS if v.op is case.op and v.device_kind is DeviceKind.CPU]
    assert variants
    for variant in variants:
        result = run_case(variant, variant.config_type(), case, CPU)
        assert result.passed, f"{variant.name}: {result.reason}"
        assert Check.EXACT in result.checks


def bump(name: str, *at: int) -> Edit:
    """Changes the last bit of one element."""

    def edit(tensors: Tensors) -> None:
        tensors[name].view(torch.int16)[at] ^= 1

    return edit


GATHER, WRITE, COPY = CASES[0], CASES[6], CASES[3]
WRONG: list[tuple[str, Case, Edit, bool, Check]] = [
    ("gather: one bit", GATHER, bump("k_out", 3, 1, 5), False, Check.EXACT),
    ("gather: row past the end written", GATHER, lambda t: t["v_out"][-1].zero_(), False, Check.EXACT),
    ("gather: pool changed", GATHER, bump("k_cache", 0, 0, 0, 0, 0), False, Check.INPUTS),
    ("gather: tables reversed", GATHER, lambda t: t["block_table"].copy_(t["block_table"].flip(0)), True, Check.INPUTS),
    ("gather: V from K", GATHER, lambda t: t["v_out"].copy_(t["k_out"]), False, Check.EXACT),
    ("write: neighbour changed", WRITE, bump("v_cache", 0, 0, 0, 0), False, Check.EXACT),
    ("write: one row not written", WRITE, lambda t: t["k_cache"].zero_(), False, Check.EXACT),
    ("copy: destination's last row", COPY, lambda t: t["v_cache"][:, -1, -1].zero_(), False, Check.EXACT),
    ("copy: pairs swapped", COPY, lambda t: t["block_pairs"].copy_(t["block_pairs"].flip(1)), True, Check.INPUTS),
    (
        "copy: past the pool",
        COPY,
        lambda t: t["k_cache"].as_strided((1,), (1,), t["k_cache"].storage_offset() - 1).zero_(),
        False,
        Check.GUARDS,
    ),
]


@pytest.mark.parametrize(("name", "case", "edit", "first", "check"), WRONG, ids=[w[0] for w in WRONG])
def test_wrong_kernels(name: str, case: Case, edit: Edit, first: bool, check: Check) -> None:
    variant = edited(case.op, edit, first)
    result = run_case(variant, variant.config_type(), case, CPU)
    assert result.failed == check, result.reason


def run_expected(case: Case, before: dict[str, Any]) -> dict[str, torch.Tensor]:
    return expected(case, {name: torch.as_tensor(value) for name, value in before.items()}, 0)


def test_expected_write_rounds_to_nearest_even_after_division() -> None:
    case = make_case(
        (2,),
        op=Op.KV_WRITE,
        query_lens=(2,),
        heads=(1, 1, 1, 1),
        q_dtype=DType.FP32,
        kv_dtype=DType.BF16,
        block_size=2,
        scale_kind=ScaleKind.PER_TENSOR,
    )
    tie_down, tie_up = 1 + 2**-8, 1 + 3 * 2**-8  # half-way between two bf16 numbers
    after = run_expected(
        case,
        {
            "k": torch.tensor([2 * tie_down, 2 * tie_up]).view(2, 1, 1),
            "v": torch.tensor([7.0, 9.0]).view(2, 1, 1),
            "slot_mapping": torch.tensor([3, -1]),
            "k_cache": torch.zeros(2, 2, 1, 1, dtype=torch.bfloat16),
            "v_cache": torch.zeros(2, 2, 1, 1, dtype=torch.bfloat16),
            "k_scale": torch.tensor([2.0]),
            "v_scale": torch.tensor([0.5]),
        },
    )
    assert after["k_cache"].flatten().tolist() == [0, 0, 0, 1.0]  # ties go to the even mantissa
    assert after["v_cache"].flatten().tolist() == [0, 0, 0, 14.0]


def test_expected_gather_leaves_the_rows_past_the_end() -> None:
    case = make_case((3,), op=Op.GATHER_KV, heads=(1, 1, 1, 1), q_dtype=DType.FP32, block_size=2)
    pool = torch.arange(8.0).view(4, 2, 1, 1)
    after = run_expected(
        case,
        {
            "k_cache": pool,
            "v_cache": -pool,
            "block_table": torch.tensor([[3, 1, -1]], dtype=torch.int32),
            "context_lens": torch.tensor([3], dtype=torch.int32),
            "out_start": torch.tensor([0, 3], dtype=torch.int32),
            "k_out": torch.full((3 + EXTRA_ROWS, 1, 1), 99.0),
            "v_out": torch.full((3 + EXTRA_ROWS, 1, 1), 99.0),
        },
    )
    assert after["k_out"].flatten().tolist() == [6, 7, 2, 99, 99]
    assert after["v_out"].flatten().tolist() == [-6, -7, -2, 99, 99]


def test_expected_copy_is_of_the_old_contents() -> None:
    case = make_case((2,), op=Op.COPY_BLOCKS, heads=(1, 1, 1, 1), q_dtype=DType.FP32, block_size=1)
    pool = torch.arange(4.0).view(4, 1, 1, 1)
    pairs = torch.tensor([[0, 2], [0, 3]])
    after = run_expected(case, {"k_cache": pool, "v_cache": pool + 10, "block_pairs": pairs})
    assert after["k_cache"].flatten().tolist() == [0, 1, 0, 0]
    assert after["v_cache"].flatten().tolist() == [10, 11, 10, 10]


@pytest.mark.parametrize(
    ("kv_dtype", "given", "stored"),
    [
        # Spacing is 2^-9 below 2^-6 and 32 from 256 on: half-way numbers go to the even code, all above 448 to 448.
        (
            DType.FP8_E4M3,
            [2.0**-10, 3 * 2.0**-10, 272, 304, 448, 1e9, -1e9],
            [0, 2 * 2.0**-9, 256, 320, 448, 448, -448],
        ),
        (DType.INT8, [0.5, 1.5, 2.5, -3.5, 126.6, 1e9, -1e9], [0, 2, 2, -4, 127, 127, -127]),
    ],
)
def test_expected_write_saturates_8_bit_pools(kv_dtype: DType, given: list[float], stored: list[float]) -> None:
    case = make_case((1,), op=Op.KV_WRITE, heads=(1, 1, 7, 7), q_dtype=DType.FP32, kv_dtype=kv_dtype, block_size=1)
    pools = {name: torch.zeros(1, 1, 1, 7).to(kv_dtype.torch) for name in ("k_cache", "v_cache")}
    rows = {"k": torch.tensor(given).view(1, 1, 7), "v": torch.tensor(given).neg().view(1, 1, 7)}
    after = run_expected(case, {**pools, **rows, "slot_mapping": torch.tensor([0])})
    assert after["k_cache"].float().flatten().tolist() == stored
    assert after["v_cache"].float().flatten().tolist() == [-x for x in stored]


@pytest.mark.parametrize(
    ("kv_dtype", "given", "scale", "stored"),
    [
        # 254 / 127 and 896 / 448 are 2; halves of odd numbers are ties.
        (DType.INT8, [254, 1, 3, -5], 2.0, [127, 0, 2, -2]),
        (DType.FP8_E4M3, [-896, 2, 34, 1], 2.0, [-448, 1, 16, 0.5]),  # 17 lies midway between 16 and 18
        (DType.INT8, [0, 0, -0.0, 0], 1.0, [0, 0, 0, 0]),
        # 1e-36 / 127 is below 2^-126.
        (DType.INT8, [1e-36, 0, 0, 0], 1.0, [0, 0, 0, 0]),
        # Infinities and NaNs have no say in the scale; an infinity is the largest number, a NaN of int8 is 0.
        (DType.INT8, [torch.inf, -127, torch.nan, -torch.inf], 1.0, [127, -127, 0, -127]),
        (DType.FP8_E4M3, [torch.inf, 896, 4, -torch.inf], 2.0, [448, 448, 2, -448]),
        (DType.INT8, [torch.inf, torch.nan, 0, 0], 1.0, [127, 0, 0, 0]),
    ],
)
def test_expected_write_works_out_scales_of_tokens(
    kv_dtype: DType, given: list[float], scale: float, stored: list[float]
) -> None:
    case = make_case((1,), op=Op.KV_WRITE, heads=(2, 2, 4, 4), q_dtype=DType.FP32, kv_dtype=kv_dtype, block_size=2,
                     scale_kind=ScaleKind.PER_TOKEN_HEAD)  # fmt: skip
    rows = torch.tensor([given, [64.0 * x for x in given]]).view(1, 2, 4)  # of two heads
    pools = {name: torch.zeros(2, 2, 2, 4).to(kv_dtype.torch) for name in ("k_cache", "v_cache")}
    scales = {name: torch.full((2, 2, 2), 99.0) for name in ("k_scale", "v_scale")}
    after = run_expected(case, {**pools, **scales, "k": rows, "v": -rows, "slot_mapping": torch.tensor([3])})
    assert after["k_cache"][1, 1, 0].float().tolist() == stored
    assert after["v_cache"][1, 1, 0].float().tolist() == [-x for x in stored]
    if max(map(abs, given)) == 0 or scale != 1.0:
        assert after["k_cache"][1, 1, 1].float().tolist() == stored
        wanted = torch.tensor([[[99.0, 99.0]] * 2, [[99.0, scale], [99.0, 64 * scale if scale != 1.0 else 1.0]]])
        assert torch.equal(after["k_scale"], wanted)
        assert torch.equal(after["v_scale"], wanted)
    assert after["k_scale"][1, 0, 1] == scale


def test_expected_copies_and_gathers_take_the_scales_of_tokens_along() -> None:
    copy, gather = (
        make_case(
            (3,), op=op, heads=(2, 2, 4, 4), kv_dtype=DType.INT8, block_size=2, scale_kind=ScaleKind.PER_TOKEN_HEAD
        )
        for op in (Op.COPY_BLOCKS, Op.GATHER_KV)
    )
    pools = {name: torch.zeros(3, 2, 2, 4, dtype=torch.int8) for name in ("k_cache", "v_cache")}
    scales = {"k_scale": torch.arange(12.0).view(3, 2, 2), "v_scale": -torch.arange(12.0).view(3, 2, 2)}
    after = run_expected(copy, {**pools, **scales, "block_pairs": torch.tensor([[2, 0], [-1, 1]])})
    assert after["k_scale"].flatten().tolist() == [8, 9, 10, 11, 4, 5, 6, 7, 8, 9, 10, 11]
    assert torch.equal(after["v_scale"], -after["k_scale"])
    outs = {name: torch.zeros(5, 2, 4, dtype=torch.int8) for name in ("k_out", "v_out")}
    scale_outs = {name: torch.full((5, 2), 99.0) for name in ("k_scale_out", "v_scale_out")}
    table = {"block_table": torch.tensor([[2, 0]], dtype=torch.int32), "out_start": torch.tensor([1, 4])}
    after = run_expected(gather, {**pools, **scales, **outs, **scale_outs, **table, "context_lens": torch.tensor([3])})
    # Of each token the scale of head 0, then that of head 1: a block's scales are [head, slot].
    assert after["k_scale_out"].tolist() == [[99, 99], [8, 10], [9, 11], [0, 2], [99, 99]]
    assert after["v_scale_out"].tolist() == [[99, 99], [-8, -10], [-9, -11], [0, -2], [99, 99]]


def test_e4m3_codes_are_those_of_torch_inside_the_range() -> None:
    """All finite bf16 numbers up to 448: torch rounds to nearest even there, and does not saturate beyond."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    numbers = numbers[numbers.abs() <= 448]
    assert len(numbers) > 30_000
    wanted = numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (e4m3_bits(numbers.numpy()) == wanted).all()
    assert e4m3_bits(torch.tensor([torch.nan, -torch.nan]).numpy()).tolist() == [0x7F, 0x7F]
