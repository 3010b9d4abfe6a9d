"""Replay of request traces through scheduler and allocator, without a model: how full the pool is, who has to leave it.

Steps take the time of a stated formula, not a measured one; everything counted here (blocks, tokens, preemptions, hits)
is exact for the schedule that results, and nothing here is a statement about throughput.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from time import perf_counter, perf_counter_ns

import numpy as np

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.arrays import blocks_for
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.errors import PagedRuntimeError
from pagedtune.runtime.plan import StepPlan
from pagedtune.runtime.prefix_cache import PrefixCache
from pagedtune.runtime.scheduler import Scheduler
from pagedtune.runtime.scheduler_config import SchedulerConfig
from pagedtune.runtime.sequence import Request

from .traces import Trace

SAMPLED = 1  # what every step samples: no trace tells the tokens of its outputs
OnStep = Callable[[int, int], None]  # requests finished, requests in all


class Arrivals(StrEnum):
    """When requests come."""

    TRACE = "trace"  # as in the trace
    SATURATED = "saturated"  # all at the start: as many run as the pool holds


class NoProgress(PagedRuntimeError):
    """Requests are live, no step is in flight, and none can be planned."""


@dataclass(frozen=True)
class ReplaySettings:
    """How to replay.

    Args:
        num_blocks: the pool; None: room for `default_concurrency` average requests.
        block_size: tokens of one block.
        max_num_seqs: most sequences that run at once.
        token_budget: most query tokens of one step.
        prefix_cache: keep blocks for later requests with the same prefix.
        arrivals: when requests come.
        steps_in_flight: 1 or 2.
        step_s, token_s, context_token_s: simulated seconds of a step: a constant, for each query token, and for each
            token of context that attention reads. An assumption of the order of an 8B model on a data-centre GPU.
        check_every: steps between two proofs of every invariant; 0: only at the end.
    """

    num_blocks: int | None = None
    block_size: int = 16
    max_num_seqs: int = 256
    token_budget: int = 4096
    prefix_cache: bool = True
    arrivals: Arrivals = Arrivals.TRACE
    steps_in_flight: int = 1
    step_s: float = 8e-3
    token_s: float = 20e-6
    context_token_s: float = 40e-9
    check_every: int = 0


@dataclass(frozen=True)
class ReplayResult:
    """What came of it. Means are over steps.

    Args:
        trace: its name.
        settings: with the pool's size filled in.
        requests: finished.
        steps: run.
        simulated_s: by the formula of the settings, until the last request ended.
        wall_s: that the replay took here.
        step_us: median wall time of one step's bookkeeping (schedule and commit) here, in microseconds.
        concurrency, peak_concurrency: running sequences, mean and most.
        pool_use: mean share of the pool's blocks that sequences name.
        utilisation: mean share of the slots of those blocks that hold a token; what sequences share counts for each.
        preemptions: sequences that lost their blocks.
        recomputed_tokens: query tokens run beyond those that each request needs once.
        hit_rate: share of the tokens of admitted sequences that the prefix cache had; preempted ones ask again.
        evicted_blocks: that the prefix cache gave up.
    """

    trace: str
    settings: ReplaySettings
    requests: int
    steps: int
    simulated_s: float
    wall_s: float
    step_us: float
    concurrency: float
    peak_concurrency: int
    pool_use: float
    utilisation: float
    preemptions: int
    recomputed_tokens: int
    hit_rate: float
    evicted_blocks: int


def smallest_pool(trace: Trace, block_size: int) -> int:
    """Blocks with which the longest request of the trace fits, alone."""
    return max(blocks_for(r.total_len - 1, block_size) for r in trace.requests)


def default_pool(trace: Trace, block_size: int, concurrency: int = 64) -> int:
    """Blocks for `concurrency` average requests, and at least for the longest one."""
    mean = sum(blocks_for(r.total_len, block_size) for r in trace.requests) / len(trace.requests)
    return max(round(mean * concurrency), smallest_pool(trace, block_size))


def replay(trace: Trace, settings: ReplaySettings | None = None, on_step: OnStep | None = None) -> ReplayResult:
    """Runs a trace to its end.

    Args:
        trace: requests.
        settings: how.
        on_step: told after each step how many requests have finished, and how many there are.

    Raises:
        RequestTooLarge: the pool does not hold the longest request.
        NoProgress: the scheduler is stuck, which it must never be.
        InvariantViolation: its books are wrong.
    """
    settings = settings or ReplaySettings()
    if settings.num_blocks is None:
        settings = replace(settings, num_blocks=default_pool(trace, settings.block_size))
    return _Replay(trace, settings, on_step or (lambda done, total: None)).run()


class _Replay:
    def __init__(self, trace: Trace, settings: ReplaySettings, on_step: OnStep) -> None:
        assert settings.num_blocks is not None
        self.trace, self.settings, self.on_step = trace, settings, on_step
        self.allocator = BlockAllocator(settings.num_blocks)
        columns = blocks_for(trace.longest, settings.block_size)
        # The meta device has shapes and no memory: nobody reads the tables that a model would. Only a check does.
        device = "cpu" if settings.check_every else "meta"
        tables = BlockTables(settings.max_num_seqs, columns, settings.block_size, device)
        self.cache = PrefixCache(self.allocator, settings.block_size) if settings.prefix_cache else None
        config = SchedulerConfig(settings.token_budget, debug=settings.check_every > 0)
        self.scheduler = Scheduler(self.allocator, tables, config, prefix_cache=self.cache)
        self.template = Request("template", (0,), 1)
        self.now = 0.0
        self.next_arrival = self.finished = self.steps = self.tokens = 0
        self.step_ns: list[int] = []
        self.running: list[int] = []
        self.named: list[float] = []
        self.filled: list[float] = []

    def run(self) -> ReplayResult:
        start, flight = perf_counter(), list[StepPlan]()
        total = len(self.trace.requests)
        while self.finished < total:
            self._arrive()
            plan, took = self._schedule() if len(flight) < self.settings.steps_in_flight else (None, 0)
            if plan is not None:
                flight.append(plan)
                self._measure(plan)
            if flight and (plan is None or len(flight) == self.settings.steps_in_flight):
                took += self._commit(flight.pop(0))
                self.on_step(self.finished, total)
            elif not flight:
                self._idle()
            self.step_ns.append(took)
        self._check_end()
        return self._result(perf_counter() - start)

    def _arrive(self) -> None:
        requests, at_once = self.trace.requests, self.settings.arrivals is Arrivals.SATURATED
        # A saturated queue is kept short: the rest of it would only hold memory.
        while self.next_arrival < len(requests) and (
            len(self.scheduler.roster.waiting) < 16 if at_once else requests[self.next_arrival].arrival_s <= self.now
        ):
            request, number = requests[self.next_arrival], self.next_arrival
            prompt = tuple(request.prompt(number).tolist())
            # Copies of one request are not validated token by token, which would take longer than all the rest.
            changes = {"request_id": str(number), "prompt": prompt, "max_new_tokens": request.output_len}
            self.scheduler.add(self.template.with_changes(**changes))
            self.next_arrival += 1

    def _schedule(self) -> tuple[StepPlan | None, int]:
        start = perf_counter_ns()
        plan = self.scheduler.schedule()
        return plan, perf_counter_ns() - start

    def _commit(self, plan: StepPlan) -> int:
        sampled = np.full(plan.sampling.seed.size, SAMPLED)
        start = perf_counter_ns()
        output = self.scheduler.commit(plan, sampled)
        took = perf_counter_ns() - start
        self.finished += len(output.finished)
        self.steps += 1
        if self.settings.check_every and self.steps % self.settings.check_every == 0:
            self.scheduler.check()
        return took

    def _measure(self, plan: StepPlan) -> None:
        """Notes what the step uses, and lets the time pass that it takes."""
        settings, allocator = self.settings, self.allocator
        stored = int(self.scheduler.ledger.stored.sum())
        named = allocator.num_referenced - (self.cache.num_evictable if self.cache else 0)
        self.tokens += plan.num_tokens
        self.running.append(self.scheduler.roster.running.size)
        self.named.append(named / allocator.num_blocks)
        self.filled.append(stored / (named * settings.block_size))
        self.now += settings.step_s + settings.token_s * plan.num_tokens + settings.context_token_s * stored

    def _idle(self) -> None:
        """Nothing runs: the time of the next arrival comes.

        Raises:
            NoProgress: something is waiting all the same.
        """
        if self.scheduler.has_work:
            raise NoProgress(
                f"{len(self.scheduler.roster.live)} requests are live after {self.steps} steps and none can be run: "
                f"{self.scheduler.snapshot()}"
            )
        self.now = max(self.now, self.trace.requests[self.next_arrival].arrival_s)

    def _check_end(self) -> None:
        """Every invariant holds, and every block is free again once the cache is emptied."""
        if self.settings.check_every:
            self.scheduler.check()
        if self.cache is not None:
            self.cache.check()
            self.cache.evict(self.cache.num_cached)
        self.allocator.check(np.zeros(self.allocator.num_blocks, np.int64))
        if self.allocator.num_free != self.allocator.num_blocks:
            raise PagedRuntimeError(f"blocks were lost: {self.scheduler.snapshot()}")

    def _result(self, wall_s: float) -> ReplayResult:
        statistics = self.cache.statistics if self.cache else None
        hit_tokens = statistics.hit_tokens if statistics else 0
        once = sum(r.total_len - 1 for r in self.trace.requests)
        return ReplayResult(
            trace=self.trace.name,
            settings=self.settings,
            requests=self.finished,
            steps=self.steps,
            simulated_s=self.now,
            wall_s=wall_s,
            step_us=float(np.median(self.step_ns)) / 1e3,
            concurrency=float(np.mean(self.running)),
            peak_concurrency=max(self.running),
            pool_use=float(np.mean(self.named)),
            utilisation=float(np.mean(self.filled)),
            preemptions=self.scheduler.roster.num_preemptions,
            recomputed_tokens=self.tokens + hit_tokens - once,
            hit_rate=statistics.hit_rate if statistics else 0.0,
            evicted_blocks=statistics.evicted_blocks if statistics else 0,
        )
