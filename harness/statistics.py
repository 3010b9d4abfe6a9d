"""Medians with an interval: what a handful of disturbed samples can and cannot say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
# With n samples the range covers the median with probability 1 - 2^(1-n): below 95 % for fewer than six.
MIN_SAMPLES_FOR_INTERVAL = 6
_MAX_RESAMPLED_VALUES = 4_000_000  # bounds the memory of one bootstrap to 32 MB


def median(samples: Sequence[float]) -> float:
    """The median.

    Raises:
        ValueError: there is no sample.
    """
    if not samples:
        raise ValueError("a median needs at least one sample: none given")
    return float(np.median(samples))


def lower_quartile(samples: Sequence[float]) -> float:
    """A quarter of the samples are below it."""
    return float(np.quantile(np.asarray(samples), 0.25))


def bootstrap_ci(samples: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % percentile-bootstrap interval of the median; the range of fewer than six samples.

    Samples count as independent, so slow drift makes the interval of a median too narrow. Ratios taken in pairs are
    free of drift: decisions rest on those. The interval always holds the median, and lies within the samples.

    Raises:
        ValueError: there is no sample.
    """
    centre = median(samples)
    values = np.asarray(samples, dtype=np.float64)
    n = len(values)
    if n < MIN_SAMPLES_FOR_INTERVAL:
        return float(values.min()), float(values.max())
    rng = np.random.default_rng(seed)
    rows = max(200, min(NUM_RESAMPLES, _MAX_RESAMPLED_VALUES // n))
    medians = np.median(values[rng.integers(0, n, (rows, n))], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    return min(float(low), centre), max(float(high), centre)


def relative_half_width(ci: tuple[float, float]) -> float:
    """Half the width of an interval over its centre: 0.005 is ± 0.5 %."""
    low, high = ci
    return (high - low) / (high + low) if high + low > 0 else 0.0
