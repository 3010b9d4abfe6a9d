"""The life cycle that PagedAttention promises, block numbers included (block size 16)."""

from __future__ import annotations

import numpy as np

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.scheduler import Scheduler
from pagedtune.runtime.sequence import FinishReason, Request

BLOCK_SIZE = 16


def test_a_prompt_of_38_tokens_to_its_end() -> None:
    allocator, tables = BlockAllocator(32), BlockTables(4, 8, BLOCK_SIZE)
    # Give the free list the past that makes 7, 3, 12 and 25 its next blocks.
    allocator.free(np.setdiff1d(allocator.allocate(32), [7, 3, 12, 25]))
    allocator.free([7, 3, 12, 25])
    scheduler = Scheduler(allocator, tables)
    scheduler.add(Request("life", tuple(range(38)), max_new_tokens=12))

    plan = scheduler.schedule()
    assert plan is not None
    assert plan.block_table.tolist() == [[7, 3, 12]]
    assert plan.context_lens.tolist() == [38]
    prompt_slots = [*range(112, 128), *range(48, 64), *range(192, 198)]  # 6 tokens in block 12
    assert plan.slot_mapping.tolist() == prompt_slots
    assert scheduler.snapshot().waste_tokens == 10
    scheduler.commit(plan, [100])

    for new in range(10):  # tokens 39 to 48 fill block 12
        plan = scheduler.schedule()
        assert plan is not None
        assert plan.block_table.tolist() == [[7, 3, 12]]
        assert plan.slot_mapping.tolist() == [12 * BLOCK_SIZE + 6 + new]
        assert not scheduler.commit(plan, [101 + new]).finished
    assert scheduler.snapshot().waste_tokens == 0

    plan = scheduler.schedule()  # token 49 needs the next block
    assert plan is not None
    assert plan.block_table.tolist() == [[7, 3, 12, 25]]
    assert plan.slot_mapping.tolist() == [25 * BLOCK_SIZE]
    assert allocator.refcounts([7, 3, 12, 25]).tolist() == [1, 1, 1, 1]

    (finished,) = scheduler.commit(plan, [111]).finished
    assert finished.tokens == tuple(range(100, 112))
    assert finished.reason is FinishReason.LENGTH
    assert allocator.num_free == 32
    assert allocator.refcounts(np.arange(32)).tolist() == [0] * 32
    assert not scheduler.has_work
    scheduler.check()
