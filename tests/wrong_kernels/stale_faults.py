"""Kernels that remember what they must read anew: right at the first launch, wrong when a bound plan is used again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.eager import Eager, attend
from pagedtune.kernels.launch import CallStep, LaunchPlan, Tensors
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.slots import attention_slots, batch_limits
from pagedtune.kernels.variant import Config, Properties

Run = Callable[[Problem, PoolFormat, dict[str, torch.Tensor], Tensors], None]


class Stale(Eager):
    """`eager` with a memory of its own per plan."""

    name = "stale"
    properties = Properties(deterministic=True)

    def __init__(self, fault: str, run: Run) -> None:
        self.fault, self.run = fault, run

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """One host call."""
        step = CallStep(partial(self.run, problem, pool_format, {}))
        return LaunchPlan((step,), attention_slots(problem, pool_format), limits=batch_limits(bounds))


def keep(slot: str) -> Run:
    """Copies a slot at the first launch on its memory, and reads the copy from then on."""

    def run(problem: Problem, pool_format: PoolFormat, kept: dict[str, torch.Tensor], tensors: Tensors) -> None:
        copy = kept.setdefault(str(tensors[slot].data_ptr()), tensors[slot].clone())
        attend(problem, pool_format, {**tensors, slot: copy})

    return run


def keep_result(problem: Problem, pool_format: PoolFormat, kept: dict[str, torch.Tensor], tensors: Tensors) -> None:
    """Returns the last result while memory and lengths are the same."""
    key = f"{tensors['q'].data_ptr()} {tensors['out'].data_ptr()} {tensors['context_lens'].tolist()}"
    if key not in kept:
        attend(problem, pool_format, tensors)
        kept[key] = tensors["out"].clone()
        if "lse" in tensors:
            kept[f"lse {key}"] = tensors["lse"].clone()
    tensors["out"].copy_(kept[key])
    if "lse" in tensors:
        tensors["lse"].copy_(kept[f"lse {key}"])


def wrong_beyond(num_seqs: int, context_len: int) -> Run:
    """Another path for large launches, which is wrong."""

    def run(problem: Problem, pool_format: PoolFormat, kept: dict[str, torch.Tensor], tensors: Tensors) -> None:
        attend(problem, pool_format, tensors)
        lens = tensors["context_lens"]
        if len(lens) > num_seqs or int(lens.max()) > context_len:
            tensors["out"].mul_(2)

    return run


STALE_FAULTS = (
    Stale("block table copied once per plan", keep("block_table")),
    Stale("query copied once per plan", keep("q")),
    Stale("result kept while pointers and lengths stay", keep_result),
    Stale("another path for over 32 sequences is wrong", wrong_beyond(32, 1 << 30)),
    Stale("another path for contexts over 4096 is wrong", wrong_beyond(1 << 30, 4096)),
)
