"""The scheduler over random operations: see scheduler_model.py. Faults planted into it: test_public_bugs.py."""

from __future__ import annotations

import os
from functools import partial

import pytest

from pagedtune.runtime.swap import Preemption

from .machine import run
from .scheduler_model import SchedulerModel

MODELS = [
    partial(SchedulerModel, window, preemption, is_staged, num_blocks)
    for window in (None, 2, 7)
    for preemption, is_staged in ((None, False), (Preemption.SWAP, False), (Preemption.AUTO, True))
    for num_blocks in (3, 6, 10, 10)
]
SHARDS = 2  # so that a slow machine stays within the time limit of a test
OPERATIONS = int(os.environ.get("PAGEDTUNE_STATEFUL_OPS", "100000")) * 2 // 5  # the rest: the other machines


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_outputs_are_exact_and_every_invariant_holds_after_every_operation(shard: int) -> None:
    run(MODELS, OPERATIONS // SHARDS, shard * 1000)
