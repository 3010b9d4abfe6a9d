"""The scheduler over random operations, with a device that stores tokens instead of K and V.

The device runs a plan when it is launched and reads it again when its step ends: whatever was recycled, misplaced or
lost in between shows as a wrong token. Tokens are unique to request and position, so outputs are known beforehand.
`test_scheduler_machine.py` drives this by Hypothesis, `soak.py` by the million.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.arrays import IntArray
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.errors import InvalidRequest, RequestFinished, RequestTooLarge
from pagedtune.runtime.fences import MAX_STEPS_IN_FLIGHT
from pagedtune.runtime.plan import StepPlan
from pagedtune.runtime.planner import Planner
from pagedtune.runtime.scheduler import Scheduler
from pagedtune.runtime.scheduler_config import SchedulerConfig
from pagedtune.runtime.sequence import Finished, FinishReason, Request
from pagedtune.runtime.staging import Staging
from pagedtune.runtime.swap import Preemption, SwapPolicy, SwapSpace

NUM_BLOCKS, NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE, HOST_BLOCKS = 10, 4, 9, 4, 8
LONGEST = MAX_BLOCKS * BLOCK_SIZE
MOST_LIVE = 7  # more than there are rows, so that some wait
UNDEFINED = -7
STRIDE = 1000  # more than any sequence is long


@dataclass
class Expected:
    """A sequence and the tokens that it must have, position by position."""

    tokens: list[int]
    prompt_len: int
    output: tuple[int, ...]
    reason: FinishReason

    @classmethod
    def of(cls, tokens: list[int], prompt_len: int, max_new_tokens: int, stop: int | None) -> Expected:
        """`tokens`, cut after the stop token or the longest output."""
        output = tokens[prompt_len : prompt_len + max_new_tokens]
        if stop in output:
            return cls(tokens, prompt_len, tuple(output[: output.index(stop) + 1]), FinishReason.STOP)
        return cls(tokens, prompt_len, tuple(output), FinishReason.LENGTH)


class Device:
    """Slots that hold tokens, here and on the host, and the last token that each row sampled; a `BlockMover`."""

    block_bytes = 1

    def __init__(self) -> None:
        self.slots: npt.NDArray[np.int64] = np.full((NUM_BLOCKS, BLOCK_SIZE), -1)
        self.host = np.full((HOST_BLOCKS, BLOCK_SIZE), -1)
        self.last: npt.NDArray[np.int64] = np.full(NUM_ROWS, -1)

    def save(self, blocks: IntArray, host_blocks: IntArray) -> None:
        self.host[host_blocks] = self.slots[blocks]

    def load(self, host_blocks: IntArray, blocks: IntArray) -> None:
        self.slots[blocks] = self.host[host_blocks]

    def run(self, plan: StepPlan) -> npt.NDArray[np.int64]:
        """Makes the step's copies, writes its tokens and samples: the token after t is t + 1."""
        if plan.copies is not None:
            copies = plan.copies.numpy()
            self.slots[copies[:, 1]] = self.slots[copies[:, 0]]
        inputs = plan.input_ids.numpy().copy()
        unknown = inputs < 0
        inputs[unknown] = self.last[np.repeat(plan.rows, plan.query_lens)[unknown]]
        self.slots.reshape(-1)[plan.slot_mapping.numpy()] = inputs
        sampled = inputs[plan.sample_index.numpy()] + 1
        counts = plan.samples.astype(int) if plan.num_samples is None else plan.num_samples
        ends = np.cumsum(counts)[plan.samples] - 1
        self.last[plan.rows[plan.samples]] = sampled[ends]
        return np.asarray(sampled, np.int64)


@dataclass
class Flight:
    """A step in flight."""

    plan: StepPlan
    sampled: npt.NDArray[np.int64]
    tables: list[list[int]]
    context_lens: list[int]
    first_seen: list[int]
    spoiled: set[str] = field(default_factory=set)  # sequences whose content an earlier, failed step left undefined


class SchedulerModel:
    """See the module. Each operation takes a source of choices; `check` follows each."""

    def __init__(
        self,
        window: int | None = None,
        preemption: Preemption | None = None,
        is_staged: bool = False,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self.window, self.device = window, Device()
        self.most_stored = min(num_blocks, MAX_BLOCKS) * BLOCK_SIZE
        swap = None if preemption is None else SwapSpace(HOST_BLOCKS, self.device, SwapPolicy(preemption))
        self.scheduler = Scheduler(
            BlockAllocator(num_blocks),
            BlockTables(NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE),
            SchedulerConfig(token_budget=10, debug=True, window=window),
            swap,
        )
        if is_staged:  # as on a GPU: packed arrays and table differences go through staging
            staging = Staging(torch.device("cpu"), copies=True)
            self.scheduler._planner = Planner(self.scheduler.rows, self.scheduler.ledger, True, staging)
        self.expected: dict[str, Expected] = {}
        self.done: set[str] = set()
        self.flight: list[Flight] = []
        self.number = 0

    def operations(self) -> list[Callable[[random.Random], None]]:
        """All of them; the commoner ones several times."""
        return [
            self.add, self.add, self.add_samples, self.schedule, self.schedule, self.schedule, self.schedule,
            self.commit, self.commit, self.commit, self.abort, self.cancel, self.preempt, self.fork, self.fork,
            self.cancel_all, self.speculate, self.speculate,
        ]  # fmt: skip

    def live(self) -> list[str]:
        return [name for name in self.expected if name not in self.done]

    def add(self, choose: random.Random, n: int = 1) -> None:
        if len(self.live()) + n > MOST_LIVE:
            return
        self.number += 1
        longest = self.most_stored - 6  # so that most of them fit
        prompt_len, most = choose.choice((1, 4, 5, *[choose.randint(1, longest)] * 5)), choose.randint(1, 20)
        tokens = [self.number * STRIDE + position for position in range(2 * LONGEST)]
        stop = tokens[prompt_len + choose.randint(0, 29)] if choose.random() < 0.5 else None
        stops = () if stop is None else (stop,)
        request = Request(str(self.number), tuple(tokens[:prompt_len]), most, stop_token_ids=stops, n=n)
        if prompt_len + most - 1 > self.most_stored:
            with pytest.raises(RequestTooLarge):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        for name in request.sample_ids:
            self.expected[name] = Expected.of(tokens, prompt_len, most, stop)

    def add_samples(self, choose: random.Random) -> None:
        self.add(choose, choose.randint(2, 4))

    def fork(self, choose: random.Random) -> None:
        live = self.live()
        if not live or len(live) >= MOST_LIVE:
            return
        self.number += 1
        source, name = choose.choice(live), f"f{self.number}"
        known = self.scheduler.roster.tokens_of(self.scheduler.roster.find(source)).tolist()
        position = choose.choice([len(known), choose.randint(1, len(known))])
        prompt_len = min(position, self.expected[source].prompt_len)
        more = [self.number * STRIDE + position + i for i in range(choose.randint(0, 3))]
        tokens = (known[:position] + more)[:]
        tokens += [tokens[-1] + 1 + i for i in range(2 * LONGEST)]
        most = choose.randint(1, 20)
        if position + len(more) >= prompt_len + most:
            with pytest.raises(InvalidRequest, match="nothing is left"):
                self.scheduler.fork(source, name, position, more, max_new_tokens=most)
            return
        if prompt_len + most - 1 > self.most_stored:
            with pytest.raises(RequestTooLarge):
                self.scheduler.fork(source, name, position, more, max_new_tokens=most)
            return
        self.scheduler.fork(source, name, position, more, max_new_tokens=most)
        stops = self.scheduler.roster.find(name).request.stop_token_ids
        begun = position + len(more) - prompt_len
        expected = Expected.of(tokens, prompt_len, most, None)
        later = list(expected.output[begun:])
        if stops and stops[0] in later:
            cut = begun + later.index(stops[0]) + 1
            expected = Expected(tokens, prompt_len, expected.output[:cut], FinishReason.STOP)
        self.expected[name] = expected

    def speculate(self, choose: random.Random) -> None:
        """Right for a while, then wrong."""
        for name in self.live():
            if choose.random() < 0.5:
                known = self.scheduler.roster.tokens_of(self.scheduler.roster.find(name)).size
                right = self.expected[name].tokens[known : known + choose.randint(0, 4)]
                self.scheduler.speculate(name, right + [5] * choose.randint(0, 2))

    def schedule(self, choose: random.Random) -> None:
        if len(self.flight) == MAX_STEPS_IN_FLIGHT:
            return
        plan = self.scheduler.schedule()
        if plan is None:
            return
        starts = plan.ends - plan.query_lens
        first = np.zeros_like(starts) if self.window is None else np.maximum(starts - self.window + 1, 0)
        sampled = self.device.run(plan)
        self.flight.append(Flight(plan, sampled, plan.block_table.tolist(), plan.context_lens.tolist(), first.tolist()))
        assert self.flight[-1].context_lens == plan.ends.tolist()
        for flight in self.flight:
            self.read(flight)

    def read(self, flight: Flight) -> None:
        """What a step reads must be the tokens of its sequences for as long as it is in flight."""
        for i, name in enumerate(flight.plan.request_ids):
            if name in flight.spoiled:
                continue
            first, table, counts = flight.first_seen[i], flight.tables[i], flight.plan.num_samples
            end = flight.context_lens[i] - (0 if counts is None else max(int(counts[i]) - 1, 0))  # drafts may be wrong
            found = [int(self.device.slots[table[p // BLOCK_SIZE], p % BLOCK_SIZE]) for p in range(first, end)]
            assert found == self.expected[name].tokens[first:end], f"{name} in step {flight.plan.step}"

    def commit(self, choose: random.Random) -> None:
        if not self.flight:
            return
        self.read(self.flight[0])
        flight = self.flight.pop(0)
        for finished in self.scheduler.commit(flight.plan, flight.sampled).finished:
            self.ended(finished)
            expected = self.expected[finished.request_id]
            assert (finished.tokens, finished.reason) == (expected.output, expected.reason), finished.request_id

    def abort(self, choose: random.Random) -> None:
        """The device fails: what the step was to write and to copy is anything."""
        if not self.flight:
            return
        plan = self.flight.pop(0).plan
        self.device.slots.reshape(-1)[plan.slot_mapping.numpy()] = UNDEFINED
        if plan.copies is not None:
            self.device.slots[plan.copies.numpy()[:, 1]] = UNDEFINED
        for flight in self.flight:
            flight.spoiled |= set(plan.request_ids)
        self.scheduler.abort(plan)

    def cancel(self, choose: random.Random) -> None:
        if not self.expected:
            return
        name = choose.choice(sorted(self.expected))
        if name in self.done:
            with pytest.raises(RequestFinished):
                self.scheduler.cancel(name)
            return
        self.cancelled(self.scheduler.cancel(name))

    def cancelled(self, finished: Finished) -> None:
        self.ended(finished)
        assert finished.reason is FinishReason.CANCELLED
        assert finished.tokens == self.expected[finished.request_id].output[: len(finished.tokens)]

    def cancel_all(self, choose: random.Random) -> None:
        if choose.random() < 0.3 and (live := self.live()):
            for finished in self.scheduler.cancel_all(choose.choice(live)):
                self.cancelled(finished)

    def preempt(self, choose: random.Random) -> None:
        if live := self.live():
            self.scheduler.preempt(choose.choice(live))

    def ended(self, finished: Finished) -> None:
        assert finished.request_id not in self.done
        self.done.add(finished.request_id)
        if len(self.done) > 500:  # the memory of a soak is bounded; steps in flight may name the latest ones
            for name in [name for name in list(self.expected)[:100] if name in self.done]:
                del self.expected[name]
                self.done.discard(name)

    def check(self) -> None:
        self.scheduler.check()
        roster = self.scheduler.roster
        assert roster.running.size + len(roster.waiting) == len(self.live())

    def finish(self) -> None:
        """Everything ends, within a bounded number of steps, and nothing is left behind."""
        choose, steps = random.Random(0), 0
        while self.scheduler.has_work or self.flight:
            for _ in range(MAX_STEPS_IN_FLIGHT):
                self.schedule(choose)
            self.commit(choose)
            steps += 1
            assert steps < 1000 + 100 * len(self.expected), "no progress"
        self.check()
        assert self.scheduler.allocator.num_free == self.scheduler.allocator.num_blocks
        swap = self.scheduler.roster.swap
        assert swap is None or swap.allocator.num_free == HOST_BLOCKS
