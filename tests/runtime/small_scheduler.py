"""A small scheduler, and its steps with every invariant checked after each."""

from __future__ import annotations

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.plan import StepPlan
from pagedtune.runtime.scheduler import Scheduler
from pagedtune.runtime.scheduler_config import SchedulerConfig
from pagedtune.runtime.sequence import FinishReason, Request

BLOCK_SIZE = 4


def make(num_blocks: int = 16, rows: int = 4, budget: int = 32, watermark: int = 0) -> Scheduler:
    tables = BlockTables(rows, max_blocks=12, block_size=BLOCK_SIZE)
    config = SchedulerConfig(budget, watermark, vocab_size=100, debug=True)
    return Scheduler(BlockAllocator(num_blocks), tables, config)


def request(name: str, prompt_len: int, max_new_tokens: int = 8, **more: object) -> Request:
    return Request(name, tuple(range(prompt_len)), max_new_tokens, **more)  # type: ignore[arg-type]


def next_plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.check()
    return plan


def commit(scheduler: Scheduler, plan: StepPlan, token: int = 9) -> dict[str, FinishReason]:
    output = scheduler.commit(plan, [token] * int(plan.samples.sum()))
    scheduler.check()
    return {finished.request_id: finished.reason for finished in output.finished}


def shape(plan: StepPlan) -> dict[str, int]:
    return dict(zip(plan.request_ids.tolist(), plan.query_lens.tolist(), strict=True))
