"""Scheduler, tables and allocator over random operations, with a device that stores tokens instead of K and V.

The device runs a plan when it is launched and reads it again when its step ends: whatever was recycled, misplaced or
lost in between shows as a wrong token. Tokens are unique to request and position, so outputs are known beforehand.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.errors import InvariantViolation, RequestFinished, RequestTooLarge
from pagedtune.runtime.fences import MAX_STEPS_IN_FLIGHT
from pagedtune.runtime.plan import StepPlan
from pagedtune.runtime.rows import RunningRows
from pagedtune.runtime.scheduler import Scheduler, SchedulerConfig
from pagedtune.runtime.sequence import Finished, FinishReason, Request

SHARDS = 2  # so that a slow machine stays within the time limit of a test
# A half of all; test_allocator_machine.py has the other.
OPERATIONS = int(os.environ.get("PAGEDTUNE_STATEFUL_OPS", "50000")) // 2
STEPS_PER_RUN = 100
NUM_BLOCKS, NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE = 10, 4, 9, 4
MOST_STORED = MAX_BLOCKS * BLOCK_SIZE
MOST_LIVE = 6  # more rows than there are, so that some wait
STRIDE = 1000  # more than any sequence is long


class Expected:
    """A request and the tokens that it must have, position by position."""

    def __init__(self, number: int, prompt_len: int, max_new_tokens: int, stop_after: int) -> None:
        self.tokens = [number * STRIDE + position for position in range(prompt_len + max_new_tokens)]
        self.stops = stop_after <= max_new_tokens
        stop = (self.tokens[prompt_len + stop_after - 1],) if self.stops else ()
        self.output = tuple(self.tokens[prompt_len:][: stop_after if self.stops else None])
        self.request = Request(str(number), tuple(self.tokens[:prompt_len]), max_new_tokens, stop_token_ids=stop)
        self.reason = FinishReason.STOP if self.stops else FinishReason.LENGTH


class Device:
    """Slots that hold tokens, and the last token that each row sampled."""

    def __init__(self) -> None:
        self.slots: npt.NDArray[np.int64] = np.full(NUM_BLOCKS * BLOCK_SIZE, -1)
        self.last: npt.NDArray[np.int64] = np.full(NUM_ROWS, -1)

    def run(self, plan: StepPlan) -> npt.NDArray[np.int64]:
        """Writes the step's tokens and samples: the token after t is t + 1."""
        inputs = plan.input_ids.numpy().copy()
        unknown = inputs < 0
        inputs[unknown] = self.last[np.repeat(plan.rows, plan.query_lens)[unknown]]
        self.slots[plan.slot_mapping.numpy()] = inputs
        sampled = inputs[plan.sample_index.numpy()] + 1
        self.last[plan.rows[plan.samples]] = sampled
        return np.asarray(sampled, np.int64)

    def read(self, table: list[int], context_len: int) -> list[int]:
        """The tokens of a sequence."""
        slots = [block * BLOCK_SIZE + slot for block in table for slot in range(BLOCK_SIZE)]
        return [int(token) for token in self.slots[slots[:context_len]]]


class SchedulerMachine(RuleBasedStateMachine):
    performed: ClassVar[int] = 0  # operations, each followed by all checks

    def __init__(self) -> None:
        super().__init__()
        type(self).performed -= 1  # the checks before the first operation
        self.scheduler = Scheduler(
            BlockAllocator(NUM_BLOCKS),
            BlockTables(NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE),
            SchedulerConfig(token_budget=10, debug=True),
        )
        self.device = Device()
        self.expected: dict[str, Expected] = {}
        self.done: set[str] = set()
        self.flight: list[tuple[StepPlan, npt.NDArray[np.int64], list[list[int]], list[int]]] = []
        self.number = 0

    @precondition(lambda self: len(self.expected) - len(self.done) < MOST_LIVE)
    @rule(prompt_len=st.integers(1, 30), max_new_tokens=st.integers(1, 20), stop_after=st.integers(1, 30))
    def add(self, prompt_len: int, max_new_tokens: int, stop_after: int) -> None:
        self.number += 1
        expected = Expected(self.number, prompt_len, max_new_tokens, stop_after)
        if prompt_len + max_new_tokens - 1 > MOST_STORED:
            with pytest.raises(RequestTooLarge):
                self.scheduler.add(expected.request)
            return
        self.scheduler.add(expected.request)
        self.expected[expected.request.request_id] = expected

    @rule()
    def schedule(self) -> None:
        if len(self.flight) == MAX_STEPS_IN_FLIGHT:
            return
        plan = self.scheduler.schedule()
        if plan is not None:
            sampled = self.device.run(plan)
            self.flight.append((plan, sampled, plan.block_table.tolist(), plan.context_lens.tolist()))
            self.read_oldest()

    def read_oldest(self) -> None:
        """What a step reads must be the tokens of its sequences for as long as it is in flight."""
        plan, _, tables, context_lens = self.flight[0]
        for i, request_id in enumerate(plan.request_ids):
            expected = self.expected[request_id].tokens[: context_lens[i]]
            assert self.device.read(tables[i], context_lens[i]) == expected, f"{request_id} in step {plan.step}"

    @precondition(lambda self: self.flight)
    @rule()
    def commit(self) -> None:
        self.read_oldest()
        plan, sampled, _, _ = self.flight.pop(0)
        for finished in self.scheduler.commit(plan, sampled).finished:
            self.ended(finished)
            expected = self.expected[finished.request_id]
            assert (finished.tokens, finished.reason) == (expected.output, expected.reason)

    @precondition(lambda self: self.flight)
    @rule()
    def abort(self) -> None:
        self.scheduler.abort(self.flight.pop(0)[0])

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 1 << 16))
    def cancel(self, choice: int) -> None:
        request_id = sorted(self.expected)[choice % len(self.expected)]
        if request_id in self.done:
            with pytest.raises(RequestFinished):
                self.scheduler.cancel(request_id)
            return
        finished = self.scheduler.cancel(request_id)
        self.ended(finished)
        assert finished.reason is FinishReason.CANCELLED
        assert finished.tokens == self.expected[request_id].output[: len(finished.tokens)]

    @precondition(lambda self: len(self.done) < len(self.expected))
    @rule(choice=st.integers(0, 1 << 16))
    def preempt(self, choice: int) -> None:
        live = sorted(set(self.expected) - self.done)
        self.scheduler.preempt(live[choice % len(live)])

    def ended(self, finished: Finished) -> None:
        assert finished.request_id not in self.done
        self.done.add(finished.request_id)

    @invariant()
    def every_invariant_holds(self) -> None:
        type(self).performed += 1
        self.scheduler.check()
        snapshot = self.scheduler.snapshot()
        assert snapshot.running + snapshot.waiting == len(self.expected) - len(self.done)

    def teardown(self) -> None:
        """Everything ends, within a bounded number of steps, and nothing is left behind."""
        steps = 0
        while self.scheduler.has_work or self.flight:
            for _ in range(MAX_STEPS_IN_FLIGHT):
                self.schedule()
            if self.flight:
                self.commit()
            steps += 1
            assert steps < 1000 + 100 * len(self.expected), "no progress"
        self.every_invariant_holds()
        assert self.scheduler.snapshot().free == NUM_BLOCKS


def run(operations: int, number: int = 0) -> None:
    run_state_machine_as_test(
        seed(number)(SchedulerMachine),
        settings=settings(
            max_examples=1 + operations // STEPS_PER_RUN,
            stateful_step_count=STEPS_PER_RUN,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_outputs_are_exact_and_every_invariant_holds_after_every_operation(shard: int) -> None:
    SchedulerMachine.performed = 0
    number = shard
    while (missing := OPERATIONS // SHARDS - SchedulerMachine.performed) > 0:  # Hypothesis ends some runs early
        run(missing, number)
        number += SHARDS


def free_without_fence(self: BlockAllocator, blocks: Any) -> None:
    self._push(blocks)


def one_token_too_many_in_a_block(self: BlockTables, rows: Any, num_tokens: Any) -> Any:
    """A full last block counts as having room for one more."""
    return np.maximum(-(-(num_tokens - 1) // self.block_size) - self.num_blocks[rows], 0)


def a_block_too_early(self: BlockTables, rows: Any, num_tokens: Any) -> Any:
    """The next block is taken when the last one is full, not when the next token needs it."""
    return np.maximum(num_tokens // self.block_size + 1 - self.num_blocks[rows], 0)


def lose_difference(self: BlockTables, index: Any) -> None:
    self._dirty.append(index[1:])


def forget_what_is_pending(self: RunningRows, rows: Any, counts: Any) -> Any:
    scheduled = self.num_scheduled[rows] + counts
    self.num_scheduled[rows] = scheduled
    return scheduled == self.num_tokens[rows]


def vacate_and_keep_ticket(self: RunningRows, sequence: Any) -> None:
    sequence.row = -1


@pytest.mark.parametrize(
    ("owner", "method", "fault"),
    [
        (BlockAllocator, "_retire", free_without_fence),
        (BlockTables, "missing_blocks", one_token_too_many_in_a_block),
        (BlockTables, "missing_blocks", a_block_too_early),
        (BlockTables, "_mark", lose_difference),
        (RunningRows, "schedule", forget_what_is_pending),
        (RunningRows, "vacate", vacate_and_keep_ticket),
    ],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, fault: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, method, fault)
    with pytest.raises((InvariantViolation, AssertionError, ValueError)):
        run(2000)
