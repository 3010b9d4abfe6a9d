"""`python -m pagedtune.tuner.soak`: very many requests through a pool that is always full, watched for leaks.

Requests share prefixes, fork, are cancelled and preempted, at random times and with one or two steps in flight; every
invariant is derived anew now and then, and at the end every block must be free. Memory of the process is sampled all
along: once warm, it must not grow. No model runs.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from time import perf_counter

import numpy as np
import psutil
from rich.progress import Progress

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.errors import PagedRuntimeError
from pagedtune.runtime.plan import StepPlan
from pagedtune.runtime.prefix_cache import PrefixCache
from pagedtune.runtime.scheduler import Scheduler
from pagedtune.runtime.scheduler_config import SchedulerConfig
from pagedtune.runtime.sequence import Request
from pagedtune.runtime.swap import Preemption, SwapPolicy, SwapSpace

from .tables import console_for

VOCAB = 97
WARM_SHARE = 0.25  # of the requests, before memory is expected to stay
MOST_GROWTH = 0.02  # of the resident memory afterwards


@dataclass(frozen=True)
class SoakSettings:
    """What to run.

    Args:
        requests: to add, forks aside.
        num_blocks, block_size, max_num_seqs, token_budget: of the scheduler. The pool holds a few requests only.
        waiting: requests kept in the queue, so that the pool is always wanted.
        cancel, fork, preempt: probability in each step that it happens to some request.
        swap_blocks: host memory for preempted ones; 0 computes them anew.
        check_every: steps between two proofs of every invariant.
        seed: of everything.
    """

    requests: int = 200_000
    num_blocks: int = 64
    block_size: int = 8
    max_num_seqs: int = 16
    token_budget: int = 256
    waiting: int = 8
    cancel: float = 0.05
    fork: float = 0.05
    preempt: float = 0.01
    swap_blocks: int = 64
    check_every: int = 500
    seed: int = 0


@dataclass(frozen=True)
class SoakResult:
    """What came of it.

    Args:
        settings: what was run.
        finished, cancelled, forks, preemptions, swapped: sequences.
        steps: run.
        checks: proofs of every invariant, all passed.
        pool_use: mean share of the blocks that sequences or the cache name.
        hit_rate: of the prefix cache.
        warm_bytes, last_bytes: resident memory when a quarter of the requests were done, and at the end.
        growth: the least-squares slope of the memory in between, as a share of it over the whole stretch.
        wall_s: seconds.
    """

    settings: SoakSettings
    finished: int
    cancelled: int
    forks: int
    preemptions: int
    swapped: int
    steps: int
    checks: int
    pool_use: float
    hit_rate: float
    warm_bytes: int
    last_bytes: int
    growth: float
    wall_s: float

    @property
    def is_flat(self) -> bool:
        """Whether memory stayed."""
        return self.growth <= MOST_GROWTH


def soak(settings: SoakSettings, on_step: Callable[[int], None] = lambda done: None) -> SoakResult:
    """Runs it.

    Args:
        settings: what.
        on_step: told now and then how many requests have been added.

    Raises:
        PagedRuntimeError: blocks were lost, or nothing could be run.
        InvariantViolation: the books are wrong.
    """
    return _Soak(settings).run(on_step)


class _Soak:
    def __init__(self, settings: SoakSettings) -> None:
        self.settings = settings
        self.random = np.random.default_rng(settings.seed)
        self.allocator = BlockAllocator(settings.num_blocks)
        self.cache = PrefixCache(self.allocator, settings.block_size)
        tables = BlockTables(settings.max_num_seqs, settings.num_blocks, settings.block_size)
        swap = None
        if settings.swap_blocks:
            swap = SwapSpace(settings.swap_blocks, policy=SwapPolicy(Preemption.SWAP), block_bytes=1)
        config = SchedulerConfig(settings.token_budget, vocab_size=VOCAB, debug=True)
        self.scheduler = Scheduler(self.allocator, tables, config, swap, self.cache)
        self.longest = settings.num_blocks * settings.block_size // 3
        self.systems = [self.random.integers(0, VOCAB, 40).tolist() for _ in range(20)]
        self.template = Request("template", (0,), 1)
        self.flight: list[StepPlan] = []
        self.added = self.finished = self.cancelled = self.forks = self.steps = self.checks = 0
        self.used = 0.0
        self.memory: list[int] = []

    def run(self, on_step: Callable[[int], None]) -> SoakResult:
        start, process = perf_counter(), psutil.Process()
        every = max(100, self.settings.requests // 500)
        sampled = 0
        while self.added < self.settings.requests or self.scheduler.has_work or self.flight:
            self._add()
            self._disturb()
            self._step()
            if self.added >= sampled + every:
                sampled = self.added
                gc.collect()
                self.memory.append(process.memory_info().rss)
                on_step(self.added)
        self._check_end()
        return self._result(perf_counter() - start)

    def _add(self) -> None:
        while self.added < self.settings.requests and len(self.scheduler.roster.waiting) < self.settings.waiting:
            system = self.systems[int(self.random.integers(len(self.systems)))]
            own = self.random.integers(0, VOCAB, int(self.random.integers(1, self.longest // 2))).tolist()
            prompt = tuple(system[: int(self.random.integers(0, 41))] + own)[: self.longest - 1]
            most = self.longest - len(prompt) if self.random.random() < 0.05 else min(16, self.longest - len(prompt))
            changes = {"prompt": prompt, "max_new_tokens": int(self.random.integers(1, most + 1))}
            samples = 2 if self.random.random() < self.settings.fork else 1
            self.scheduler.add(self.template.with_changes(request_id=str(self.added), n=samples, **changes))
            self.added += 1

    def _some_live(self) -> str:
        live = self.scheduler.roster.live
        wanted = int(self.random.integers(min(len(live), 32)))
        return next(name for i, name in enumerate(live) if i == wanted)

    def _disturb(self) -> None:
        """Cancels, forks and preempts, now and then."""
        settings, scheduler = self.settings, self.scheduler
        if not scheduler.has_work:
            return
        dice = self.random.random(3)
        if dice[0] < settings.fork:
            name, self.forks = self._some_live(), self.forks + 1
            sequence = scheduler.roster.find(name)
            tokens = scheduler.roster.tokens_of(sequence).size
            position = int(self.random.integers(sequence.prompt_len, tokens + 1))
            if position < sequence.max_total_tokens:
                scheduler.fork(name, f"{name}/{self.forks}", position)
        if dice[1] < settings.preempt:
            scheduler.preempt(self._some_live())
        if dice[2] < settings.cancel:
            scheduler.cancel(self._some_live())
            self.cancelled += 1

    def _step(self) -> None:
        """Plans a step and, with one or two in flight, ends the oldest; some fail."""
        scheduler, depth = self.scheduler, 1 + int(self.random.integers(2))
        plan = scheduler.schedule() if len(self.flight) < 2 else None
        if plan is not None:
            self.flight.append(plan)
        if self.flight and (plan is None or len(self.flight) >= depth):
            oldest = self.flight.pop(0)
            if self.random.random() < 0.001:
                scheduler.abort(oldest)
            else:
                tokens = self.random.integers(0, VOCAB, oldest.sampling.seed.size)
                self.finished += len(scheduler.commit(oldest, tokens).finished)
            self.steps += 1
            self.used += self.allocator.num_referenced / self.allocator.num_blocks
            if self.steps % self.settings.check_every == 0:
                scheduler.check()
                self.checks += 1
        elif not self.flight and scheduler.has_work:
            raise PagedRuntimeError(f"requests are live and nothing can be run: {scheduler.snapshot()}")

    def _check_end(self) -> None:
        self.scheduler.check()
        self.checks += 1
        self.cache.evict(self.cache.num_cached)
        if self.allocator.num_free != self.allocator.num_blocks:
            raise PagedRuntimeError(f"blocks were lost: {self.scheduler.snapshot()}")

    def _result(self, wall_s: float) -> SoakResult:
        warm = self.memory[int(len(self.memory) * WARM_SHARE) :] or [0]
        slope = float(np.polyfit(np.arange(len(warm)), warm, 1)[0]) if len(warm) > 1 else 0.0
        roster = self.scheduler.roster
        return SoakResult(
            settings=self.settings,
            finished=self.finished,
            cancelled=self.cancelled,
            forks=self.forks,
            preemptions=roster.num_preemptions,
            swapped=roster.num_swapped,
            steps=self.steps,
            checks=self.checks,
            pool_use=self.used / max(1, self.steps),
            hit_rate=self.cache.statistics.hit_rate,
            warm_bytes=warm[0],
            last_bytes=warm[-1],
            growth=slope * len(warm) / max(1, warm[0]),
            wall_s=wall_s,
        )


def main() -> int:
    """Runs a soak and prints the result as JSON; returns 1 if memory grew."""
    parser = argparse.ArgumentParser(prog="python -m pagedtune.tuner.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=SoakSettings.requests)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    settings = replace(SoakSettings(), requests=arguments.requests, seed=arguments.seed)
    console = console_for(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=settings.requests)
        shown = 0

        def show(done: int) -> None:
            nonlocal shown
            progress.update(task, completed=done)
            if not console.is_terminal and done >= shown + settings.requests // 20:
                shown = done
                console.print(f"{done} of {settings.requests} requests")

        result = soak(settings, show)
    print(json.dumps({**asdict(result), "is_flat": result.is_flat}, indent=1))
    return 0 if result.is_flat else 1


if __name__ == "__main__":
    raise SystemExit(main())
