"""Medians, intervals and their properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedtune.harness.statistics import bootstrap_ci, lower_quartile, median, relative_half_width

TIMES = st.lists(st.floats(0.1, 1e6, allow_nan=False), min_size=1, max_size=60)


def test_median_of_known_samples() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([1.0, 2.0, 3.0, 10.0]) == 2.5
    assert lower_quartile([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0


def test_no_sample_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        bootstrap_ci([])


def test_few_samples_give_their_range() -> None:
    assert bootstrap_ci([5.0, 1.0, 3.0]) == (1.0, 5.0)


def test_equal_samples_give_a_point() -> None:
    assert bootstrap_ci([2.0] * 50) == (2.0, 2.0)
    assert relative_half_width((2.0, 2.0)) == 0.0


def test_half_width_is_relative_to_the_centre() -> None:
    assert relative_half_width((99.5, 100.5)) == pytest.approx(0.005)
    assert relative_half_width((0.0, 0.0)) == 0.0


@given(samples=TIMES, seed=st.integers(0, 10))
@settings(max_examples=40, deadline=None)
def test_the_interval_holds_the_median_and_lies_within_the_samples(samples: list[float], seed: int) -> None:
    low, high = bootstrap_ci(samples, seed)
    assert min(samples) <= low <= median(samples) <= high <= max(samples)


@given(samples=TIMES, power=st.integers(-3, 3))
@settings(max_examples=30, deadline=None)
def test_the_interval_scales_with_the_samples(samples: list[float], power: int) -> None:
    factor = 2.0**power  # exact in floating point
    low, high = bootstrap_ci(samples)
    assert bootstrap_ci([factor * s for s in samples]) == (factor * low, factor * high)


@given(samples=st.lists(st.floats(1.0, 2.0), min_size=6, max_size=40), seed=st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_the_same_samples_give_the_same_interval(samples: list[float], seed: int) -> None:
    assert bootstrap_ci(samples, seed) == bootstrap_ci(list(samples), seed)


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    """200 draws of 25 samples from a skewed distribution with median ln 2; 95 % nominal, 5 standard errors of slack."""
    rng = np.random.default_rng(7)
    hits = 0
    for seed in range(200):
        low, high = bootstrap_ci(rng.exponential(1.0, 25).tolist(), seed)
        hits += low <= math.log(2) <= high
    assert 0.87 <= hits / 200 <= 1.0


def test_more_samples_narrow_the_interval() -> None:
    rng = np.random.default_rng(1)
    few, many = rng.normal(100, 5, 20).tolist(), rng.normal(100, 5, 2000).tolist()
    assert relative_half_width(bootstrap_ci(many)) < relative_half_width(bootstrap_ci(few)) / 3
