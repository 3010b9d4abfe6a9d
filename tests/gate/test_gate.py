"""The gate on kernels that are right, and on kernels that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.gate import first_failure, run_case
from pagedtune.harness.verdicts import CaseResult, Check
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.eager import Eager
from pagedtune.kernels.launch import Tensors
from pagedtune.kernels.record import Status
from pagedtune.kernels.variant import Config, Numerics, Op, Properties

from .toy import CPU, Changed, Run, TorchSplit, make_case

Tensor = torch.Tensor


def judge(variant: Eager, case: Case) -> CaseResult:
    """Runs one case."""
    return run_case(variant, variant.config_type(), case, CPU)


def on_result(edit: Callable[[Tensors], None]) -> Changed:
    """`eager` whose result is edited."""

    def change(run: Run, tensors: dict[str, Tensor]) -> None:
        run(tensors)
        edit(tensors)

    return Changed(change)


def on_inputs(**edits: Callable[[Tensor], Tensor]) -> Changed:
    """`eager` that sees edited inputs."""

    def change(run: Run, tensors: dict[str, Tensor]) -> None:
        run({name: edits[name](t) if name in edits else t for name, t in tensors.items()})

    return Changed(change)


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.FP16])
@pytest.mark.parametrize("variant", [Eager(), TorchSplit()])
def test_right_kernels_pass_well_below_the_bound(variant: Eager, dtype: DType, family: Family) -> None:
    result = judge(variant, make_case((300, 0, 17, 1), family, Hazard.TAIL_FOREIGN, q_dtype=dtype))
    assert result.status is Status.PASSED, result.reason
    assert result.error_ratio < 0.7
    assert {Check.INPUTS, Check.GUARDS, Check.WRITTEN, Check.ELEMENT, Check.ROW, Check.LSE, Check.POISON} <= set(
        result.checks
    )


def scale_by(factor: float) -> Changed:
    return on_result(lambda t: t["out"].mul_(factor))


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.FP16])
def test_a_scale_fault_of_one_percent_is_caught_in_every_dtype(dtype: DType) -> None:
    exact = Numerics()
    variant = on_inputs(q=lambda q: q)
    variant._numerics = exact  # the tightest declaration
    case = make_case((300, 40, 17, 5), q_dtype=dtype, kv_dtype=DType.FP32)
    assert judge(variant, case).passed
    wrong = scale_by(1.01)
    wrong._numerics = exact
    result = judge(wrong, case)
    assert result.failed in (Check.ELEMENT, Check.ROW)
    assert result.error_ratio > 1.2
    # eager's own declaration, scores and P in the query's dtype, is looser but not that loose.
    result = judge(scale_by(1.01), make_case((300, 40, 17, 5), q_dtype=dtype))
    assert result.failed in (Check.ELEMENT, Check.ROW, Check.SCALE)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_one_dropped_token_of_a_long_context_is_caught_by_the_needle(dtype: DType) -> None:
    short = on_inputs(context_lens=lambda n: n - 1)
    result = judge(short, make_case((8192,), Family.NEEDLE, q_dtype=dtype))
    assert result.failed == Check.ELEMENT
    assert result.error_ratio > 20


def first_kv_head(t: Tensor) -> Tensor:
    return t[:, :, :1].expand_as(t)


WRONG: list[tuple[str, Changed, dict[str, Any], Check]] = [
    ("unwritten row", on_result(lambda t: t["out"][-1].copy_(t["out"].new_full((), torch.nan))), {}, Check.NONFINITE),
    ("constant output", on_result(lambda t: t["out"].zero_()), {}, Check.ELEMENT),
    ("lse in base 2", on_result(lambda t: t["lse"].mul_(1.4427)), {}, Check.LSE),
    ("lse +inf for no keys", on_result(lambda t: t["lse"][1].fill_(torch.inf)), {}, Check.LSE),
    ("input changed", on_result(lambda t: t["q"][0, 0, :1].add_(1)), {}, Check.INPUTS),
    ("table changed", on_result(lambda t: t["block_table"][0, -1:].fill_(7)), {}, Check.INPUTS),
    (
        "write past the output",
        on_result(lambda t: t["out"].as_strided((1,), (1,), t["out"].storage_offset() + t["out"].numel()).zero_()),
        {},
        Check.GUARDS,
    ),
    (
        "write before the lse",
        on_result(lambda t: t["lse"].as_strided((1,), (1,), t["lse"].storage_offset() - 1).zero_()),
        {},
        Check.GUARDS,
    ),
    ("wrong GQA map", on_inputs(v_cache=first_kv_head), {"family": Family.CODED}, Check.EXACT),
    ("v scale dropped", on_inputs(v_scale=torch.ones_like), {"scale_kind": "per_tensor"}, Check.ELEMENT),
    (
        "one k scale for all heads",
        on_inputs(k_scale=lambda s: s[:1].expand_as(s)),
        {"scale_kind": "per_head"},
        Check.LSE,
    ),
    ("sink ignored", on_inputs(sinks=lambda s: s - 1e9), {"sinks": True}, Check.ELEMENT),
]


@pytest.mark.parametrize(("name", "variant", "settings", "check"), WRONG, ids=[w[0] for w in WRONG])
def test_wrong_kernels(name: str, variant: Changed, settings: dict[str, Any], check: Check) -> None:
    settings = {"lens": (33, 0, 16, 5), **settings}
    if "scale_kind" in settings:
        from pagedtune.kernels.pool_format import ScaleKind

        settings["scale_kind"] = ScaleKind(settings["scale_kind"])
    result = judge(variant, make_case(**settings))
    expected = {check, Check.NONFINITE} if check is Check.LSE and "inf" in name else {check}
    if check in (Check.ELEMENT, Check.LSE):
        expected |= {Check.ROW, Check.ELEMENT}
    assert result.failed in expected, result.reason
    assert result.status is (Status.CORRUPTED if check in (Check.INPUTS, Check.GUARDS) else Status.WRONG)
    assert result.reason.startswith(f"{result.failed}: [nan poison")


def test_an_output_that_was_not_written_is_named() -> None:
    def skip_last(run: Run, tensors: dict[str, Tensor]) -> None:
        scratch = tensors["out"].clone()
        run({**tensors, "out": scratch})
        tensors["out"][:-1] = scratch[:-1]

    result = judge(Changed(skip_last), make_case((33, 5)))
    assert result.failed == Check.WRITTEN
    assert "out[1, 0, 0] was not written (256 of 512)" in result.reason


def test_a_read_of_dead_memory_shows_as_nan() -> None:
    longer = on_inputs(context_lens=lambda n: n + 1)
    result = judge(longer, make_case((33,)))
    assert result.failed == Check.NONFINITE


def test_a_read_that_hides_nan_shows_as_a_difference_between_poisons() -> None:
    def leaky(run: Run, tensors: dict[str, Tensor]) -> None:
        run(tensors)
        dead = tensors["k_cache"].float()[tensors["k_cache"].float().abs() > 1e3]
        tensors["lse"].add_(1e-6 * float(dead.numel() > 0))  # within the LSE's bound

    assert judge(Changed(leaky), make_case((33,))).failed == Check.POISON


def test_a_kernel_whose_bits_change_is_not_deterministic() -> None:
    calls = [0]

    def drift(run: Run, tensors: dict[str, Tensor]) -> None:
        run(tensors)
        calls[0] += 1
        if calls[0] == 4:
            tensors["lse"][0, 0] = torch.nextafter(tensors["lse"][0, 0], torch.tensor(9e9))

    case = make_case((33, 5))
    assert judge(Changed(drift), case).failed == Check.DETERMINISTIC
    calls[0] = 0
    assert judge(Changed(drift, properties=Properties(deterministic=False)), case).passed


def test_a_kernel_that_remembers_the_first_launch_fails_the_replay() -> None:
    seen: list[Tensor] = []

    def stale(run: Run, tensors: dict[str, Tensor]) -> None:
        seen.append(tensors["context_lens"].clone())
        run({**tensors, "context_lens": seen[0]})

    assert not judge(Changed(stale), make_case((33,), Family.RANDOM, Hazard.REPLAY)).passed


def test_batch_dependence_is_caught_where_invariance_is_declared() -> None:
    def by_batch(run: Run, tensors: dict[str, Tensor]) -> None:
        run(tensors)
        tensors["lse"].add_(1e-6 * len(tensors["context_lens"]))

    case = make_case((33, 5))
    assert judge(Changed(by_batch), case).failed == Check.BATCH_INVARIANT
    assert judge(Changed(by_batch, properties=Properties()), case).passed


def test_graph_safe_excludes_host_calls() -> None:
    honest = Changed(lambda run, tensors: run(tensors), properties=Properties(graph_safe=True))
    assert judge(honest, make_case((5,))).failed == Check.GRAPH_SAFE


def test_coarser_arithmetic_than_declared_is_caught() -> None:
    """eager in bf16 rounds scores and P to bf16; declared as fp32 throughout, it must not pass."""
    honest = Changed(lambda run, tensors: run(tensors))
    boastful = Changed(lambda run, tensors: run(tensors), numerics=Numerics())
    case = make_case((300, 40))
    assert judge(honest, case).passed
    assert not judge(boastful, case).passed


def test_rejection_and_wrong_op() -> None:
    result = judge(Eager(), make_case((5,), kv_dtype=DType.INT8))
    assert result.status is Status.REJECTED
    assert "int8" in result.reason
    with pytest.raises(ValueError, match="computes attention"):
        run_case(Eager(), Config(), make_case((5,), op=Op.GATHER_KV), CPU)


def test_first_failure_stops_there_and_leaves_rejections_out() -> None:
    cases = [make_case((5,), kv_dtype=DType.INT8), make_case((5,)), make_case((0,))]
    assert first_failure(Eager(), Config(), cases, CPU) is None
    failure = first_failure(on_result(lambda t: t["out"].neg_()), Config(), cases, CPU)
    assert failure is not None
    assert failure.case_key == cases[1].key


def test_what_a_variant_raises_comes_through() -> None:
    def broken(run: Run, tensors: dict[str, Tensor]) -> None:
        raise KeyError("kernel")

    with pytest.raises(KeyError, match="kernel"):
        judge(Changed(broken), make_case((5,)))
