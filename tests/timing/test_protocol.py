"""The timing protocol on a made-up device with a clock of its own: nothing here measures time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pagedtune.harness.timing import (
    FINAL,
    SCREEN,
    Sample,
    final,
    screen,
)

Time = Callable[[float], float]  # now in seconds -> time of a launch in microseconds


@dataclass
class FakeSampler:
    """Candidates whose time is a function of the clock; each sample takes 1 ms."""

    times: list[Time]
    share: Callable[[float], float] = lambda now_s: 0.0
    disturbed: Callable[[int, float], bool] = lambda candidate, now_s: False
    min_block_s: float = 0.25
    max_foreign_share: float = 0.06
    clock_s: float = 0.0
    order: list[int] = field(default_factory=list)
    block_start_s: float = 0.0

    def now_s(self) -> float:
        return self.clock_s

    def sample(self, candidate: int) -> Sample:
        self.clock_s += 1e-3
        self.order.append(candidate)
        return Sample(self.times[candidate](self.clock_s), self.disturbed(candidate, self.clock_s))

    def start_block(self) -> None:
        self.block_start_s = self.clock_s

    def foreign_share(self) -> float:
        return self.share(self.block_start_s)


def steady(time_us: float) -> Time:
    return lambda now_s: time_us


def noisy(time_us: float, relative: float, seed: int = 0) -> Time:
    rng = random.Random(seed)
    return lambda now_s: time_us * (1 + rng.uniform(-relative, relative))


def test_a_screen_takes_equally_many_samples_of_close_candidates() -> None:
    sampler = FakeSampler([steady(10), steady(11), steady(12)])
    results = screen(sampler, 3, budget_s=10, seed=0)
    assert [r.times_us[0] for r in results] == [10, 11, 12]
    counts = {len(r.times_us) for r in results}
    assert len(counts) == 1
    assert counts.pop() >= SCREEN.max_rounds
    assert all(r.ratios == () and r.notes == () and r.rejected == 0 for r in results)


def test_a_clear_loser_is_timed_no_further_and_says_so() -> None:
    sampler = FakeSampler([steady(10), steady(10), steady(20)], min_block_s=0.0)
    results = screen(sampler, 3, budget_s=10, seed=0)
    assert len(results[2].times_us) == SCREEN.loser_rounds
    assert results[2].notes == ("timed no further: 2.00 times the fastest",)
    assert len(results[1].times_us) == SCREEN.max_rounds


def test_the_incumbent_is_never_retired() -> None:
    sampler = FakeSampler([steady(30), noisy(10, 0.002)], min_block_s=0.0)
    slow, fast = final(sampler, 2, budget_s=10, seed=0)
    assert len(slow.times_us) == len(fast.times_us)
    assert set(fast.ratios) <= {r for r in fast.ratios if 0.3 < r < 0.4}


def test_finals_end_when_every_interval_is_narrow() -> None:
    sampler = FakeSampler([noisy(100, 0.05, 1), noisy(98, 0.05, 2)])
    incumbent, other = final(sampler, 2, budget_s=1000, seed=0)
    assert incumbent.ratios == ()
    assert len(other.ratios) == len(incumbent.times_us) < FINAL.max_rounds
    assert not incumbent.notes
    assert not other.notes


def test_finals_say_what_they_reached_when_the_budget_ends() -> None:
    sampler = FakeSampler([noisy(100, 0.4, 1), noisy(98, 0.4, 2)])
    incumbent, other = final(sampler, 2, budget_s=0.3, seed=0)
    assert incumbent.notes[-1].startswith("stopped at ± ")
    assert "short of ± 0.5%" in other.notes[-1]


def test_pairing_removes_the_drift_of_the_machine() -> None:
    """Both candidates get 2 % slower every 100 ms; their true ratio is 0.9."""
    drift: Callable[[float], Time] = lambda base: lambda now_s: base * (1 + 0.2 * now_s)  # noqa: E731
    _, other = final(FakeSampler([drift(100), drift(90)]), 2, budget_s=1, seed=3)
    assert len(other.ratios) > 100
    assert sum(other.ratios) / len(other.ratios) == pytest.approx(0.9, rel=2e-3)


def test_a_retired_finalist_keeps_a_prefix_of_the_rounds() -> None:
    sampler = FakeSampler([noisy(10, 0.3), steady(40)], min_block_s=0.0)
    incumbent, loser = final(sampler, 2, budget_s=0.2, seed=0)
    assert len(loser.times_us) == len(loser.ratios) == FINAL.loser_rounds
    assert loser.ratios == tuple(40 / t for t in incumbent.times_us[: FINAL.loser_rounds])


def test_the_order_within_rounds_is_shuffled_and_seeded() -> None:
    orders = []
    for seed in (0, 0, 1):
        sampler = FakeSampler([steady(10)] * 4)
        screen(sampler, 4, budget_s=10, seed=seed)
        orders.append(sampler.order)
    assert orders[0] == orders[1] != orders[2]
    rounds = {tuple(orders[0][i : i + 4]) for i in range(0, len(orders[0]), 4)}
    assert all(sorted(r) == [0, 1, 2, 3] for r in rounds)
    assert len(rounds) > 1


def test_a_disturbed_sample_is_taken_again() -> None:
    calls = {"n": 0}

    def every_fifth(candidate: int, now_s: float) -> bool:
        calls["n"] += 1
        return calls["n"] % 5 == 0

    results = screen(FakeSampler([steady(10), steady(11)], disturbed=every_fifth), 2, budget_s=10, seed=0)
    assert sum(r.rejected for r in results) == calls["n"] // 5
    assert all(not r.notes for r in results)


def test_a_block_in_which_others_used_the_cores_does_not_count() -> None:
    """The first half second is busy and everything is twice as slow in it; enough quiet time follows."""
    slow_then_fast: Time = lambda now_s: 20.0 if now_s < 0.5 else 10.0  # noqa: E731
    sampler = FakeSampler([slow_then_fast], share=lambda start_s: 0.5 if start_s < 0.5 else 0.0)
    (result,) = screen(sampler, 1, budget_s=10, seed=0)
    assert set(result.times_us) == {10.0}
    assert result.rejected >= 400
    assert not result.notes


def test_disturbed_data_are_kept_with_a_note_when_there_is_nothing_else() -> None:
    sampler = FakeSampler([steady(10), steady(11)], share=lambda start_s: 0.4)
    results = final(sampler, 2, budget_s=1, seed=0)
    assert all(r.times_us for r in results)
    assert "others used the cores (up to 40%)" in results[0].notes[0]


@pytest.mark.parametrize("stage", [screen, final])
def test_a_budget_of_nothing_still_gives_three_samples(stage: Callable[..., list[object]]) -> None:
    sampler = FakeSampler([steady(10), steady(11)])
    results = stage(sampler, 2, budget_s=0, seed=0)
    assert [len(r.times_us) for r in results] == [3, 3]  # type: ignore[attr-defined]


def test_disturbed_rounds_drop_out_for_all_candidates_so_that_pairs_stay_pairs() -> None:
    def sometimes(candidate: int, now_s: float) -> bool:
        return candidate == 1 and int(now_s * 100) % 7 == 0

    sampler = FakeSampler([noisy(10, 0.2, 1), noisy(10, 0.2, 2), noisy(10, 0.2, 3)], disturbed=sometimes)
    results = final(sampler, 3, budget_s=2, seed=0)
    assert len({len(r.times_us) for r in results}) == 1
    assert results[1].ratios == tuple(b / a for a, b in zip(results[0].times_us, results[1].times_us, strict=True))
