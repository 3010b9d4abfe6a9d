"""What the launches of a case are held to: attention within bounds, cache operations bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from pagedtune.kernels.launch import LaunchPlan
from pagedtune.kernels.variant import Numerics

from . import cache_inputs, oracle, yardstick
from .case import Case
from .compare import Bound, check_lse, check_out, make_bound
from .inputs import AttentionData, AttentionInputs, Inputs
from .memory import Poison, first_difference, same_bits
from .partials import check_partials
from .runs import Run, located
from .verdicts import Check, Fault


class Judge(Protocol):
    """Makes a case's tensors and judges what became of them."""

    def make(self, plan: LaunchPlan, poison: Poison, sequences: Sequence[int] | None = None) -> Inputs:
        """See `Source.make`."""
        ...

    def expect(self, before: Mapping[str, torch.Tensor], numerics: Numerics) -> None:
        """Works out the right answer from private copies. Called once, after the candidate ran."""
        ...

    def compare(self, run: Run) -> dict[str, float]:
        """Worst error over bound by check; raises Fault where it is above 1."""
        ...

    def compare_workspaces(self, plan: LaunchPlan, run: Run) -> dict[str, float]:
        """The same for what a launch left in its workspaces."""
        ...


class AttentionJudge:
    """Judges attention."""

    def __init__(self, case: Case) -> None:
        self._case, self._inputs = case, AttentionInputs(case)
        self._expected: tuple[AttentionData, Numerics, Bound] | None = None

    def make(self, plan: LaunchPlan, poison: Poison, sequences: Sequence[int] | None = None) -> Inputs:
        """See `Judge`."""
        return self._inputs.make(plan, poison, sequences)

    def expect(self, before: Mapping[str, torch.Tensor], numerics: Numerics) -> None:
        """See `Judge`."""
        data = self._inputs.data(before)
        answer = oracle.attention(data)
        bound = make_bound(data, answer, yardstick.measure(data, numerics, answer))
        self._expected = data, numerics, bound

    def compare(self, run: Run) -> dict[str, float]:
        """See `Judge`."""
        _, _, bound = self._known()
        with located(run.label):
            ratios = check_out(run.results["out"], bound)
            if "lse" in run.results:
                ratios |= check_lse(run.results["lse"], bound)
        return ratios

    def compare_workspaces(self, plan: LaunchPlan, run: Run) -> dict[str, float]:
        """See `Judge`."""
        data, numerics, bound = self._known()
        with located(run.label):
            return check_partials(plan, run.inputs, data, numerics, bound, self._case.family)

    def _known(self) -> tuple[AttentionData, Numerics, Bound]:
        if self._expected is None:
            raise RuntimeError("Judge.expect was not called")
        return self._expected


class CacheJudge:
    """Judges the cache operations."""

    def __init__(self, case: Case) -> None:
        self._case, self._inputs = case, cache_inputs.CacheInputs(case)

    def make(self, plan: LaunchPlan, poison: Poison, sequences: Sequence[int] | None = None) -> Inputs:
        """See `Judge`."""
        return self._inputs.make(plan, poison, sequences)

    def expect(self, before: Mapping[str, torch.Tensor], numerics: Numerics) -> None:
        """Nothing yet: what must stay depends on the poison, so each run has its own answer."""

    def compare(self, run: Run) -> dict[str, float]:
        """See `Judge`."""
        wanted = cache_inputs.expected(self._case, run.before, run.inputs.first_block)
        for name, got in run.results.items():
            if not same_bits(got, wanted[name]):
                at = first_difference(got, wanted[name])
                stays = same_bits(wanted[name][at], run.before[name][at])
                raise Fault(
                    Check.EXACT,
                    f"[{run.label}] {name}{list(at)} is {float(got[at]):.6g}, expected "
                    f"{'still' if stays else 'exactly'} {float(wanted[name][at]):.6g}",
                )
        return {Check.EXACT: 0.0}

    def compare_workspaces(self, plan: LaunchPlan, run: Run) -> dict[str, float]:
        """Nothing: cache operations have no partial results."""
        return {}
