"""The timing protocol: which candidate is sampled when, and when enough is known. It touches no device.

A `Sampler` takes one sample of one candidate; the CPU's is in `cpu_sampler.py`. Samples are taken in rounds, one of
every candidate in shuffled order, so that drift of the machine hits all alike. Rounds are grouped into blocks of at
least a quarter second, over which the sampler can say whether others used the machine. Disturbed samples are set aside
and taken again; only where the budget ends first are they used, and the result says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from pagedtune.harness.statistics import bootstrap_ci, median, relative_half_width

TARGET_HALF_WIDTH = 0.005
HARD_MIN_ROUNDS = 3  # however small the budget
LOSER_RATIO = 1.5  # one that was never below this ratio to the fastest in its first rounds is timed no more
MAX_TRIES = 3  # of one disturbed sample


@dataclass(frozen=True)
class Sample:
    """One sample: time per launch in microseconds, and whether something else used the device meanwhile."""

    time_us: float
    disturbed: bool = False


class Sampler(Protocol):
    """Takes samples on one kind of device.

    Args:
        min_block_s: shortest span over which `foreign_share` means something.
        max_foreign_share: above it a block is disturbed.
    """

    min_block_s: float
    max_foreign_share: float

    def now_s(self) -> float:
        """A monotonic clock."""

    def sample(self, candidate: int) -> Sample:
        """Times the candidate once (or one batch of launches)."""

    def start_block(self) -> None:
        """Begins to watch for others."""

    def foreign_share(self) -> float:
        """Share of the device that others used since `start_block`."""


@dataclass(frozen=True)
class Limits:
    """How many rounds a stage takes at least (in its budget) and at most, and when a clear loser is timed no more."""

    min_rounds: int
    max_rounds: int
    loser_rounds: int


SCREEN = Limits(min_rounds=3, max_rounds=12, loser_rounds=3)
FINAL = Limits(min_rounds=12, max_rounds=1000, loser_rounds=6)


@dataclass
class Samples:
    """What was measured of one candidate: its samples by round."""

    by_round: dict[int, Sample] = field(default_factory=dict)
    num_repeated: int = 0  # samples that were disturbed and taken again at once
    notes: list[str] = field(default_factory=list)
    active: bool = True  # whether it is still being timed

    @property
    def times_us(self) -> dict[int, float]:
        """All times in microseconds by round."""
        return {n: s.time_us for n, s in self.by_round.items()}


@dataclass(frozen=True)
class Measured:
    """The times of one candidate that count.

    Args:
        times_us: in the order taken.
        ratios: time ratio to the incumbent in each round that both have; empty for the incumbent and in a screen.
        rejected: samples that were dropped because they were disturbed.
        notes: what the reader must know.
    """

    times_us: tuple[float, ...]
    ratios: tuple[float, ...]
    rejected: int
    notes: tuple[str, ...]


class Rounds:
    """Interleaved rounds over all candidates; the first one is the incumbent."""

    def __init__(self, sampler: Sampler, num_candidates: int, limits: Limits, budget_s: float, seed: int) -> None:
        self._sampler, self._limits = sampler, limits
        self._rng = random.Random(seed)
        self._end_s = sampler.now_s() + budget_s
        self._num_rounds = 0
        self._worst_share = 0.0
        self.results = [Samples() for _ in range(num_candidates)]

    @property
    def clean_rounds(self) -> set[int]:
        """Rounds in which nothing was disturbed."""
        disturbed = {n for r in self.results for n, s in r.by_round.items() if s.disturbed}
        return set(range(self._num_rounds)) - disturbed

    def run(self, settled: Callable[[list[Samples]], bool]) -> None:
        """Takes blocks of rounds until `settled`, the most rounds, or the budget ends (after three rounds)."""
        while not self._is_over(settled):
            self._run_block()
            self._retire_losers()

    def measured(self, paired: bool) -> list[Measured]:
        """The samples that count: those of the undisturbed rounds if there are enough, else of all.

        A round counts for all candidates or for none: two candidates with equally many samples have the same rounds.
        """
        clean = self.clean_rounds
        enough = len(clean) >= min(self._limits.min_rounds, self._num_rounds)
        counted = clean if enough else set(range(self._num_rounds))
        chosen = [{n: s.time_us for n, s in r.by_round.items() if n in counted} or r.times_us for r in self.results]
        return [self._measure(i, chosen, paired) for i in range(len(chosen))]

    def _measure(self, index: int, chosen: list[dict[int, float]], paired: bool) -> Measured:
        result, times = self.results[index], chosen[index]
        disturbed = sum(result.by_round[n].disturbed for n in times)
        notes = list(result.notes)
        if disturbed:
            notes.append(
                f"{disturbed} of {len(times)} samples were taken while others used the cores "
                f"(up to {self._worst_share:.0%}): too few quiet ones in the budget"
            )
        common = sorted(times.keys() & chosen[0].keys()) if paired and index else []
        return Measured(
            times_us=tuple(times[n] for n in sorted(times)),
            ratios=tuple(times[n] / chosen[0][n] for n in common),
            rejected=result.num_repeated + len(result.by_round) - len(times),
            notes=tuple(notes),
        )

    def _is_over(self, settled: Callable[[list[Samples]], bool]) -> bool:
        limits = self._limits
        if self._budget_is_over:
            return self._num_rounds >= HARD_MIN_ROUNDS
        num_clean = len(self.clean_rounds)
        return num_clean >= limits.max_rounds or (num_clean >= limits.min_rounds and settled(self.results))

    @property
    def _budget_is_over(self) -> bool:
        return self._sampler.now_s() >= self._end_s

    def _run_block(self) -> None:
        sampler = self._sampler
        sampler.start_block()
        begin_s, first = sampler.now_s(), self._num_rounds
        while True:
            self._run_round()
            over = self._budget_is_over and self._num_rounds >= HARD_MIN_ROUNDS
            if over or sampler.now_s() - begin_s >= sampler.min_block_s:
                break
        share = sampler.foreign_share()
        if share > sampler.max_foreign_share:
            self._worst_share = max(self._worst_share, share)
            self._mark_disturbed(first)

    def _run_round(self) -> None:
        active = [i for i, r in enumerate(self.results) if r.active]
        self._rng.shuffle(active)
        for index in active:
            self.results[index].by_round[self._num_rounds] = self._take(index)
        self._num_rounds += 1

    def _take(self, index: int) -> Sample:
        """A sample of one candidate; a disturbed one is taken again, twice at most and not beyond the budget."""
        sample = self._sampler.sample(index)
        for _ in range(MAX_TRIES - 1):
            if not sample.disturbed or self._budget_is_over:
                break
            self.results[index].num_repeated += 1
            sample = self._sampler.sample(index)
        return sample

    def _mark_disturbed(self, first: int) -> None:
        for result in self.results:
            for number in [r for r in result.by_round if r >= first]:
                result.by_round[number] = replace(result.by_round[number], disturbed=True)

    def _retire_losers(self) -> None:
        best = min(self.results, key=lambda r: median(list(r.times_us.values()))).times_us
        for result in self.results[1:]:
            times = result.times_us
            ratios = [times[n] / best[n] for n in times.keys() & best.keys()]
            if result.active and len(ratios) >= self._limits.loser_rounds and min(ratios) > LOSER_RATIO:
                result.active = False
                result.notes.append(f"timed no further: {median(ratios):.2f} times the fastest")


def screen(sampler: Sampler, num_candidates: int, budget_s: float, seed: int) -> list[Measured]:
    """A few samples of every candidate: enough to drop the hopeless, not to choose between the good."""
    rounds = Rounds(sampler, num_candidates, SCREEN, budget_s, seed)
    rounds.run(lambda _: False)
    return rounds.measured(paired=False)


def final(sampler: Sampler, num_candidates: int, budget_s: float, seed: int) -> list[Measured]:
    """Rounds until every interval is within ± 0.5 %: of the incumbent's median, and of each median ratio to it.

    A candidate that was at least half as slow again in all of its first rounds is timed no further.
    """
    rounds = Rounds(sampler, num_candidates, FINAL, budget_s, seed)
    next_check = FINAL.min_rounds

    def settled(results: list[Samples]) -> bool:
        nonlocal next_check
        num_clean = len(rounds.clean_rounds)
        if num_clean < next_check:
            return False
        next_check = max(next_check + 1, num_clean * 5 // 4)  # the bootstrap's cost stays a small share
        return all(
            half_width(m) <= TARGET_HALF_WIDTH
            for r, m in zip(results, rounds.measured(paired=True), strict=True)
            if r.active
        )

    rounds.run(settled)
    return [
        replace(m, notes=(*m.notes, *_shortfall(m))) if r.active else m
        for r, m in zip(rounds.results, rounds.measured(paired=True), strict=True)
    ]


def half_width(measured: Measured) -> float:
    """Relative half width of the interval that decides: of the ratio, or of the incumbent's own median."""
    return relative_half_width(bootstrap_ci(measured.ratios or measured.times_us))


def _shortfall(measured: Measured) -> list[str]:
    reached = half_width(measured)
    return [f"stopped at ± {reached:.1%}, short of ± {TARGET_HALF_WIDTH:.1%}"] if reached > TARGET_HALF_WIDTH else []
