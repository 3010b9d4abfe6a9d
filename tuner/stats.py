"""Ratios with their intervals, and what counts as a tie. Deterministic: the same samples give the same numbers."""

from __future__ import annotations

import numpy as np

from pagedtune.harness.statistics import MIN_SAMPLES_FOR_INTERVAL, bootstrap_ci, median

TIE_BAND = 0.01  # a ratio whose interval lies within ± 1 % is a tie
Interval = tuple[float, float, float]  # median, low, high


def ratio_interval(numerator: np.ndarray, denominator: np.ndarray) -> Interval:
    """The ratio of two candidates' times with its 95 % interval.

    Args:
        numerator, denominator: times of the two relative to one incumbent, by round. Equally many are taken in pairs;
            otherwise (one of them was retired early) only the medians are set against each other.
    """
    if numerator.size == denominator.size:
        ratios = (numerator / denominator).tolist()
        return (median(ratios), *bootstrap_ci(ratios))
    scale = float(np.median(denominator))
    low, high = bootstrap_ci(numerator.tolist())
    return float(np.median(numerator)) / scale, low / scale, high / scale


def is_tie(interval: Interval, num_rounds: int) -> bool:
    """Whether a ratio from so many rounds cannot be told from 1 in practice."""
    return num_rounds >= MIN_SAMPLES_FOR_INTERVAL and interval[1] >= 1 - TIE_BAND and interval[2] <= 1 + TIE_BAND
