"""Divides the seconds of a tune among its cells, and those of a cell among its stages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

GATE_SHARE = 0.5  # of a cell's time: proving takes longer than timing
SCREEN_SHARE = 0.2
MIN_SAMPLING_S = 0.3  # below this a job is all overhead
RESERVE_S = 2.0  # for selection and the table at the end
GRACE_S = 10.0  # a job that is running when the budget ends may take this much longer

Clock = Callable[[], float]


@dataclass(frozen=True)
class Slice:
    """The time of one cell; all in seconds of the budget's clock."""

    start_s: float
    end_s: float
    clock: Clock
    budget_end_s: float  # when the budget of all cells ends

    @property
    def left_s(self) -> float:
        """Seconds until the slice ends, never negative."""
        return max(0.0, self.end_s - self.clock())

    @property
    def in_budget(self) -> bool:
        """Whether the budget of all cells lasts."""
        return self.clock() < self.budget_end_s

    def job_limit_s(self, limit_s: float) -> float:
        """The time limit of a job that starts now and may take `limit_s` where the budget allows it."""
        return min(limit_s, max(0.0, self.budget_end_s - self.clock()) + GRACE_S)

    @property
    def may_prove(self) -> bool:
        """Whether there is time to prove one more candidate."""
        return self.clock() < self.start_s + GATE_SHARE * (self.end_s - self.start_s)

    @property
    def screen_s(self) -> float:
        """Seconds for screening, from now."""
        return self.left_s * SCREEN_SHARE / (1 - GATE_SHARE)


class Pace:
    """Learns what timing jobs take beyond the seconds of sampling that they are given (pools, warm-up)."""

    def __init__(self) -> None:
        self._overhead_s: dict[str, float] = {}

    def sampling_s(self, stage: str, wall_s: float) -> float:
        """Seconds of sampling that fit into `wall_s` seconds, as far as earlier jobs of the stage show."""
        return max(MIN_SAMPLING_S, wall_s - self._overhead_s.get(stage, 0.0))

    def learn(self, stage: str, sampling_s: float, wall_s: float) -> None:
        """Takes in that a job with `sampling_s` took `wall_s`."""
        overhead = max(0.0, wall_s - sampling_s)
        self._overhead_s[stage] = (self._overhead_s.get(stage, overhead) + overhead) / 2


class Budget:
    """Counts down from the first look at it."""

    def __init__(self, total_s: float, clock: Clock = time.monotonic) -> None:
        self.total_s = total_s
        self.clock = clock
        self._start_s = clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._start_s

    @property
    def left_s(self) -> float:
        """Seconds that cells may still use, never negative."""
        return max(0.0, self.total_s - RESERVE_S - self.elapsed_s)

    def slice_of(self, cells_left: float) -> Slice:
        """A share of what is left for the next of `cells_left` cells like it; what one leaves over, the rest inherit.

        The number may be broken: a cell that takes a quarter of the next one's time counts a quarter of it.
        """
        now = self.clock()
        return Slice(now, now + self.left_s / max(1, cells_left), self.clock, now + self.left_s)
