"""What a swap space takes, and what is left of a transfer that fails."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.arrays import IntArray
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.scheduler import Scheduler
from pagedtune.runtime.scheduler_config import SchedulerConfig
from pagedtune.runtime.sequence import Request
from pagedtune.runtime.swap import Preemption, SwapPolicy, SwapSpace

SWAP = SwapPolicy(Preemption.SWAP)


class Mover:
    """Moves nothing, and raises when told to."""

    block_bytes = 64

    def __init__(self) -> None:
        self.fails = False

    def save(self, blocks: IntArray, host_blocks: IntArray) -> None:
        if self.fails:
            raise OSError("the bus is gone")

    def load(self, host_blocks: IntArray, blocks: IntArray) -> None:
        self.save(blocks, host_blocks)


class Small(Mover):
    num_blocks = 2


@pytest.mark.parametrize(("way", "swaps"), [("swap", True), ("recompute", False), (Preemption.SWAP, True)])
def test_a_way_may_be_given_by_its_name(way: Any, swaps: bool) -> None:
    policy = SwapPolicy(way)
    assert isinstance(policy.preemption, Preemption)
    # What the rule would choose is the other way.
    assert policy.prefers_swap(1, 1 if swaps else 10**6, 1 << 40 if swaps else 1) is swaps


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"preemption": "bogus"}, "preemption='bogus' must be one of 'auto', 'recompute', 'swap'"),
        ({"preemption": None}, "preemption=None must be one of"),
        ({"bytes_per_second": math.nan}, "bytes_per_second=nan must be a positive number"),
        ({"bytes_per_second": 0}, "bytes_per_second=0 must be"),
        ({"seconds_per_token": math.nan}, "seconds_per_token=nan must be a positive number"),
        ({"seconds_per_token": -1.0}, "seconds_per_token=-1.0 must be"),
        ({"seconds_per_token": "1"}, "seconds_per_token='1' must be"),
        ({"bytes_per_second": True}, "bytes_per_second=True must be"),
    ],
)
def test_policies_that_mean_nothing_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SwapPolicy(**wrong)


@pytest.mark.parametrize("block_bytes", [-1, 0, 1.5])
def test_a_block_has_bytes(block_bytes: Any) -> None:
    with pytest.raises(ValueError, match=f"block_bytes={block_bytes} must be an integer of at least 1"):
        SwapSpace(4, block_bytes=block_bytes)


def test_more_blocks_than_the_mover_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks=3 exceeds the 2 blocks of host memory"):
        SwapSpace(3, Small())
    assert SwapSpace(2, Small()).allocator.num_free == 2
    assert SwapSpace(1, Small()).allocator.num_free == 1
    assert SwapSpace(8, Mover()).allocator.num_free == 8, "a mover that does not tell is taken as it is"


def test_a_copy_that_fails_takes_no_host_block() -> None:
    mover = Mover()
    swap = SwapSpace(4, mover, SWAP)
    mover.fails = True
    with pytest.raises(OSError, match="the bus is gone"):
        swap.try_save(np.arange(3), 12)
    assert (swap.allocator.num_free, swap.num_saved) == (4, 0)


@pytest.mark.parametrize("fails_at", ["save", "load"])
def test_a_request_whose_copy_fails_still_runs_to_its_end(fails_at: str) -> None:
    mover = Mover()
    swap = SwapSpace(4, mover, SWAP)
    scheduler = Scheduler(BlockAllocator(8), BlockTables(2, 4, 4), SchedulerConfig(16, debug=True), swap)
    scheduler.add(Request("a", tuple(range(6)), 3))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, [7])
    if fails_at == "save":
        mover.fails = True
        with pytest.raises(OSError, match="the bus is gone"):
            scheduler.preempt("a")
    else:
        scheduler.preempt("a")
        assert swap.allocator.num_referenced == 2
        mover.fails = True
        with pytest.raises(OSError, match="the bus is gone"):
            scheduler.schedule()
    scheduler.check()
    assert swap.allocator.num_free == 4
    taken = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        taken.append(plan.input_ids.tolist())
        output = scheduler.commit(plan, [8])
    assert output.finished[0].tokens == (7, 8, 8)
    assert taken == [[7], [8]] if fails_at == "save" else [[*range(6), 7], [8]]
    assert scheduler.allocator.num_free == 8
