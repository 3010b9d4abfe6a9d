"""Times prepared launches on the CPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle

import torch

from pagedtune.harness.contention import MAX_FOREIGN_SHARE, MIN_BLOCK_S, CpuUse, WaitMeter, waited_too_long
from pagedtune.harness.timing import Sample
from pagedtune.harness.timing_sets import TimingSets
from pagedtune.kernels.launch import CallStep, LaunchPlan
from pagedtune.kernels.native import NativeExecutor

Launch = Callable[[], None]

WARM_UP_S = 0.3
# Launches shorter than the first are timed in batches of about the second: the clock and its call cost 0.1 us.
BATCH_BELOW_US, BATCH_US = 50.0, 200.0
# A launch this short is preceded by an untimed one, which wakes the threads; a longer one hides their wake-up.
PRIME_BELOW_US = 5_000.0
# The OpenMP threads of torch spin for some milliseconds after a call and would steal a core from the next candidate.
SETTLE_AFTER_TORCH_S = 0.01


@dataclass
class CpuCandidate:
    """A built and planned candidate with its own workspaces and outputs.

    Args:
        plan: its launch plan.
        executor: loaded with its artifacts.
        sets: what launches rotate over.
        outputs: [num_sets, ...], NaN where nothing has been written.
    """

    plan: LaunchPlan
    executor: NativeExecutor
    sets: TimingSets
    outputs: torch.Tensor
    workspaces: dict[str, torch.Tensor] = field(default_factory=dict)
    launches: dict[int, Launch] = field(default_factory=dict)
    estimate_us: float = 0.0

    @property
    def uses_torch(self) -> bool:
        """Whether a step is a host call, which leaves torch's threads spinning."""
        return any(isinstance(step, CallStep) for step in self.plan.steps)

    @property
    def batch(self) -> int:
        """Launches in one sample."""
        return 1 if self.estimate_us >= BATCH_BELOW_US else max(1, round(BATCH_US / max(self.estimate_us, 0.1)))

    def launch(self, index: int) -> Launch:
        """The prepared launch on set `index`."""
        if index not in self.launches:
            tensors = self.sets.tensors(index) | {"out": self.outputs[index]} | self.workspaces
            self.launches[index] = self.executor.prepare(self.plan.bind(tensors))
        return self.launches[index]


class CpuSampler:
    """A `Sampler` of candidates that rotate over the same sets: no two timed launches in a row read the same KV."""

    min_block_s = MIN_BLOCK_S
    max_foreign_share = MAX_FOREIGN_SHARE

    def __init__(self, candidates: Sequence[CpuCandidate], num_cores: int) -> None:
        self._candidates, self._num_cores = candidates, num_cores
        self._sets: Iterator[int] = cycle(range(candidates[0].sets.extent.num_sets))
        self._waits = WaitMeter()
        self._block = CpuUse.now()
        self._last: CpuCandidate | None = None

    def now_s(self) -> float:
        """See `Sampler`."""
        return time.perf_counter()

    def start_block(self) -> None:
        """See `Sampler`."""
        self._waits.refresh()
        self._block = CpuUse.now()

    def foreign_share(self) -> float:
        """See `Sampler`."""
        return self._block.foreign_share(CpuUse.now(), self._num_cores)

    def warm_up(self) -> None:
        """Runs all candidates in turn for `WARM_UP_S` and twice each at least, and notes how long a launch takes."""
        end = time.perf_counter() + WARM_UP_S
        for number, candidate in enumerate(cycle(self._candidates)):
            first = number < len(self._candidates)  # pays for threads, pages and code that later launches find
            if number >= 2 * len(self._candidates) and time.perf_counter() >= end:
                break
            elapsed_us = self._time([candidate.launch(next(self._sets))])
            if not first:
                candidate.estimate_us = min(elapsed_us, candidate.estimate_us or elapsed_us)

    def sample(self, candidate: int) -> Sample:
        """See `Sampler`."""
        chosen = self._candidates[candidate]
        launches = [chosen.launch(next(self._sets)) for _ in range(chosen.batch)]
        self._settle(chosen)
        if chosen.estimate_us < PRIME_BELOW_US:
            chosen.launch(next(self._sets))()
        before = self._waits.read_ns()
        total_us = self._time(launches)
        waited_ns = self._waits.read_ns() - before
        return Sample(total_us / len(launches), waited_too_long(waited_ns, int(total_us * 1e3)))

    def _settle(self, chosen: CpuCandidate) -> None:
        if self._last is not None and self._last is not chosen and self._last.uses_torch:
            time.sleep(SETTLE_AFTER_TORCH_S)
        self._last = chosen

    @staticmethod
    def _time(launches: Sequence[Launch]) -> float:
        """Microseconds of all launches together, without what the loop itself costs."""
        elapsed_ns = _run(launches)
        if len(launches) > 1:
            elapsed_ns -= _run([_nothing] * len(launches))
        return max(elapsed_ns, 1) / 1e3

    def close(self) -> None:
        """Gives open files back."""
        self._waits.close()


def _nothing() -> None:
    """What the cost of the timing loop is measured with."""


def _run(launches: Sequence[Launch]) -> int:
    start = time.perf_counter_ns()
    for launch in launches:
        launch()
    return time.perf_counter_ns() - start


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keeps the collector from running in the middle of a sample."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
