"""Split partials in a workspace: merged independently, and held to the precision that is declared for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagedtune.harness.case import Family
from pagedtune.harness.gate import run_case
from pagedtune.harness.verdicts import Check

from .toy import CPU, TorchSplit, make_case


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("features", [{}, {"sinks": True}])
def test_right_partials_pass(family: Family, features: dict[str, bool]) -> None:
    variant = TorchSplit()
    result = run_case(variant, variant.config_type(), make_case((300, 0, 2, 16), family, **features), CPU)
    assert result.passed, result.reason
    assert result.checks[Check.PARTIALS] < 0.7


def rounded(dtype: torch.dtype) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Rounds partial outputs and keeps them in fp32."""
    return lambda name, t: t.to(dtype).float() if name == "out" else t


@pytest.mark.parametrize(
    ("variant", "says"),
    [
        (TorchSplit(rounded(torch.bfloat16)), "declared partials"),
        (TorchSplit(rounded(torch.float16)), "declared partials"),
        (TorchSplit(dtype=torch.bfloat16), "is torch.bfloat16"),
        (TorchSplit(lambda name, t: t + 1e-3 if name == "lse" else t), "merged partial"),
        (TorchSplit(lambda name, t: t * 1.001 if name == "out" else t), "merged partials of out"),
    ],
)
@pytest.mark.parametrize("features", [{}, {"sinks": True}])
def test_partials_that_the_output_hides(variant: TorchSplit, says: str, features: dict[str, bool]) -> None:
    """In bf16 none of these moves the output itself past its bound."""
    result = run_case(variant, variant.config_type(), make_case((300, 40), **features), CPU)
    assert result.failed in (Check.PARTIALS, Check.LSE)
    if result.failed == Check.PARTIALS:
        assert says in result.reason


def test_values_that_all_fit_16_bits_are_suspect_only_with_several_keys_per_split() -> None:
    """A split of one key holds a stored bf16 value, by right."""
    variant = TorchSplit()
    result = run_case(variant, variant.config_type(), make_case((3, 2, 1), heads=(8, 8, 64, 64)), CPU)
    assert result.passed, result.reason
