"""Promises of a variant that can be tested: only those that it declares are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagedtune.kernels.launch import CallStep, LaunchPlan

from .memory import Poison, bits
from .runs import Run, Runner
from .verdicts import Check, Fault


def check_graph_safe(plan: LaunchPlan) -> None:
    """Raises Fault if the plan calls back into the host: nothing that does can be captured."""
    if any(isinstance(step, CallStep) for step in plan.steps):
        raise Fault(Check.GRAPH_SAFE, "the variant declares graph_safe, but its plan holds a host call")


def check_poison(run: Run, other: Run) -> None:
    """Raises Fault unless two runs gave the same bits although different poison filled dead memory.

    Slots that keep part of their old contents differ there by right; their comparison is exact already.
    """
    _check_same(Check.POISON, run, other, _outputs(run))


def check_deterministic(runs: Sequence[Run]) -> None:
    """Raises Fault unless all runs gave the same bits."""
    for other in runs[1:]:
        _check_same(Check.DETERMINISTIC, runs[0], other, list(runs[0].results))


def repeats(runner: Runner, run: Run) -> list[Run]:
    """More launches on the tensors of `run`, as many as tell something on the machine."""
    return [runner.again(run) for _ in range(runner.machine.repeats)]


def check_batch_invariant(runner: Runner, run: Run) -> None:
    """Raises Fault unless a sequence alone, at the same plan, gives the bits that it gave in the batch.

    The longest and the last sequence with a query token are tried.
    """
    query_lens, context_lens = runner.case.workload.query_lens, runner.case.workload.context_lens
    candidates = [s for s, n in enumerate(query_lens) if n > 0]
    if len(query_lens) < 2 or not candidates:
        return
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    for seq in {max(candidates, key=lambda s: context_lens[s]), candidates[-1]}:
        alone = runner.first(Poison.NAN, [seq])
        rows = slice(int(starts[seq]), int(starts[seq + 1]))
        for name in _outputs(run):
            _compare(Check.BATCH_INVARIANT, name, run.results[name][rows], alone.results[name], f"[{alone.label}] ")


def _outputs(run: Run) -> list[str]:
    return [name for name in run.results if name in ("out", "lse")]


def _check_same(check: Check, run: Run, other: Run, names: Sequence[str]) -> None:
    for name in names:
        _compare(check, name, run.results[name], other.results[name], f"[{run.label}] against [{other.label}]: ")


def _compare(check: Check, name: str, a: torch.Tensor, b: torch.Tensor, where: str) -> None:
    differ = bits(a) != bits(b)
    if a.is_floating_point():
        differ &= ~(a.isnan() & b.isnan())
    found = differ.nonzero()
    if len(found):
        at = tuple(found[0].tolist())
        raise Fault(
            check,
            f"{where}{name}{list(at)} is {_shown(a, at)} and {_shown(b, at)} ({len(found)} of {a.numel()} differ)",
        )


def _shown(tensor: torch.Tensor, at: tuple[int, ...]) -> str:
    return f"{float(tensor[at]):.9g}"
