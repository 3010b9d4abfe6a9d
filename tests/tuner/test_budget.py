"""Dividing the seconds of a run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagedtune.tuner.budget import GRACE_S, RESERVE_S, Budget, Pace


class FakeClock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@given(st.floats(10, 1000), st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_cells_that_keep_to_their_slice_keep_the_budget(total_s: float, shares: list[float]) -> None:
    clock = FakeClock()
    budget = Budget(total_s, clock)
    for index, share in enumerate(shares):
        piece = budget.slice_of(len(shares) - index)
        assert piece.left_s >= (total_s - RESERVE_S) / len(shares) * 0.999  # what others left over is inherited
        clock.now_s += share * piece.left_s
    assert budget.elapsed_s <= total_s


def test_slice_ends_proving_in_time_for_timing() -> None:
    clock = FakeClock()
    piece = Budget(102.0, clock).slice_of(10)
    assert piece.may_prove
    clock.now_s += 4.9
    assert piece.may_prove
    clock.now_s += 0.2
    assert not piece.may_prove
    assert 0 < piece.screen_s < piece.left_s < 5


def test_spent_budget_has_nothing_left() -> None:
    clock = FakeClock()
    budget = Budget(10.0, clock)
    clock.now_s += 11.0
    assert budget.left_s == 0
    assert budget.slice_of(3).left_s == 0
    assert not budget.slice_of(3).may_prove


def test_job_may_outlast_the_budget_by_the_grace_only() -> None:
    clock = FakeClock()
    piece = Budget(100.0 + RESERVE_S, clock).slice_of(10)
    assert piece.job_limit_s(30.0) == 30.0
    clock.now_s += 95.0  # beyond its slice, within the budget
    assert piece.in_budget
    assert piece.job_limit_s(30.0) == 5.0 + GRACE_S
    clock.now_s += 50.0
    assert not piece.in_budget
    assert piece.job_limit_s(30.0) == GRACE_S


def test_pace_takes_off_what_jobs_were_seen_to_take_beyond_their_seconds() -> None:
    pace = Pace()
    assert pace.sampling_s("final", 5.0) == 5.0
    pace.learn("final", 5.0, 7.0)
    assert pace.sampling_s("final", 5.0) == 3.0
    assert pace.sampling_s("screen", 5.0) == 5.0
    pace.learn("final", 3.0, 3.0)
    assert pace.sampling_s("final", 5.0) == 4.0
    assert 0 < pace.sampling_s("final", 0.1) <= 0.5
