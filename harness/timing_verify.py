"""What was timed must also have been right: checks inside the timed set, after the clock has stopped.

The gate proves a kernel on small inputs built to break it. Here the question is another one: did every timed launch do
its whole work? A kernel that skips a launch, remembers the last one, or writes half an output is fast and wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pagedtune.harness.inputs import AttentionData
from pagedtune.harness.oracle import attention
from pagedtune.harness.timing_sets import TimingSets
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem

NUM_REPEATED = 3  # timed sets on which an untimed launch must give the same output again
# Relative L2 error of one sequence. It leaves room for scores rounded to the query's dtype, while a lost or foreign
# block, the faults that only a large pool shows, moves random data by far more. The tight bounds are the gate's.
MAX_RELATIVE_ERROR: Mapping[DType, float] = {DType.FP32: 1e-3, DType.BF16: 5e-2, DType.FP16: 5e-2}
MAX_REPEAT_ERROR = 1e-2  # for a variant that does not promise the same bits


class TimedCandidate(Protocol):
    """What a candidate keeps for the checks: outputs [num_sets, ...] and the launches made, by set."""

    @property
    def outputs(self) -> torch.Tensor:
        """NaN where nothing has been written."""

    @property
    def launches(self) -> Mapping[int, Callable[[], None]]:
        """One launch for each set that was used."""


@dataclass(frozen=True)
class Expected:
    """The oracle's output for one sequence of set 0.

    Args:
        rows: its query tokens, a slice of the output's first dimension.
        out: float64 [query_len, num_q_heads, head_dim_v].
    """

    rows: slice
    out: np.ndarray


def expected_output(problem: Problem, pool_format: PoolFormat, sets: TimingSets) -> Expected:
    """The oracle's answer for the shortest sequence that has keys (or an empty one) of set 0."""
    tensors = sets.tensors(0)
    lens = tensors["context_lens"].tolist()
    sequence = min(range(len(lens)), key=lambda s: (lens[s] == 0, lens[s]))
    starts = tensors["query_start_loc"].tolist()
    rows = slice(starts[sequence], starts[sequence + 1])
    chosen = {
        **tensors,
        "q": tensors["q"][rows],
        "block_table": tensors["block_table"][sequence : sequence + 1],
        "context_lens": tensors["context_lens"][sequence : sequence + 1],
        "query_start_loc": torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
    }
    return Expected(rows, attention(AttentionData(problem, pool_format, chosen)).out)


def find_fault(candidate: TimedCandidate, expected: Expected, q_dtype: DType, deterministic: bool) -> str | None:
    """What is wrong with the outputs that timed launches left, or None."""
    timed = sorted(candidate.launches)
    unwritten = [i for i in timed if not candidate.outputs[i].isfinite().all()]
    if unwritten:
        return f"a timed launch left its output unwritten or not finite (set {unwritten[0]} of {len(timed)})"
    error = relative_error(candidate.outputs[0][expected.rows].double().numpy(), expected.out)
    if error > MAX_RELATIVE_ERROR[q_dtype]:
        return (
            f"the output of a timed launch is off the oracle by {error:.2g} (relative L2 of one sequence), "
            f"more than {MAX_RELATIVE_ERROR[q_dtype]:g}"
        )
    for index in timed[-NUM_REPEATED:]:
        left = candidate.outputs[index].clone()
        candidate.outputs[index].fill_(torch.nan)
        candidate.launches[index]()
        again = candidate.outputs[index]
        same = torch.equal(left, again) if deterministic else _is_close(left, again)
        if not same:
            return f"an untimed launch on set {index} gives another output than the timed one left"
    return None


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """L2 norm of the difference over that of `expected`; that of `found` where nothing is expected."""
    norm = float(np.linalg.norm(expected))
    return float(np.linalg.norm(found - expected)) / (norm or 1.0)


def _is_close(left: torch.Tensor, again: torch.Tensor) -> bool:
    return relative_error(again.double().numpy(), left.double().numpy()) <= MAX_REPEAT_ERROR
