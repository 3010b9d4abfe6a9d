"""`python -m pagedtune.tuner.traces_fit FILE...`: the tables of `traces_tables.py`, derived from public traces.

Quantiles instead of a fitted family: the output lengths of the Azure conversation trace have two humps, and how long
an output is depends on its prompt's length, neither of which a lognormal says.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .traces import Trace, load_trace

# Denser at the ends, where a few long requests hold much of the memory.
LEVELS = (0.0, 0.01, 0.03, *(i / 20 for i in range(1, 20)), 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)
OUTPUT_LEVELS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.997, 1.0)
OUTPUT_BINS = 8
ARRIVAL_POINTS = 121  # times by which equal shares of the requests had come


@dataclass(frozen=True)
class SharingTables:
    """How prompts of later requests repeat those of earlier ones, in units of 512 tokens.

    Args:
        share: of requests that go on from an earlier one; the rest share only the first unit.
        chained: share of those whose earlier one went on itself.
        distance: quantiles of how many requests ago that one came.
        kept: quantiles of the share of its units that are kept.
        added: quantiles of the units that come behind them.
    """

    share: float
    chained: float
    distance: tuple[float, ...]
    kept: tuple[float, ...]
    added: tuple[float, ...]


@dataclass(frozen=True)
class TraceTables:
    """A trace in quantiles, at `LEVELS` unless said otherwise.

    Args:
        name: of the trace.
        num_requests: of the whole trace.
        arrivals: seconds, by equal shares of the requests, [ARRIVAL_POINTS].
        prompts: prompt lengths of the requests that go on from no other.
        outputs: output lengths at `OUTPUT_LEVELS`, for each of `OUTPUT_BINS` equal shares of the requests by
            prompt length, [OUTPUT_BINS][len(OUTPUT_LEVELS)].
        sharing: None where nothing is known of it.
    """

    name: str
    num_requests: int
    arrivals: tuple[float, ...]
    prompts: tuple[float, ...]
    outputs: tuple[tuple[float, ...], ...]
    sharing: SharingTables | None = None


def fit(trace: Trace) -> TraceTables:
    """The tables of a trace."""
    requests = trace.requests
    prompts = np.array([r.prompt_len for r in requests])
    outputs = np.array([r.output_len for r in requests])
    arrivals = np.array([r.arrival_s for r in requests])
    fresh = np.ones(len(requests), np.bool_)
    sharing = None
    if requests[0].hash_ids:
        sharing, fresh = _fit_sharing(trace)
    bins = np.array_split(np.argsort(prompts, kind="stable"), OUTPUT_BINS)
    return TraceTables(
        name=trace.name,
        num_requests=len(requests),
        arrivals=_rounded(np.quantile(arrivals, np.linspace(0, 1, ARRIVAL_POINTS)), 2),
        prompts=_rounded(np.quantile(prompts[fresh], LEVELS), 1),
        outputs=tuple(_rounded(np.quantile(outputs[each], OUTPUT_LEVELS), 1) for each in bins),
        sharing=sharing,
    )


def _fit_sharing(trace: Trace) -> tuple[SharingTables, npt.NDArray[np.bool_]]:
    """How prompts repeat, and which of them go on from no other one."""
    last: dict[int, int] = {}  # by hash id, the newest request that had it
    distance, kept, added, chained = [], [], [], []
    fresh = np.ones(len(trace.requests), np.bool_)
    for number, request in enumerate(trace.requests):
        ids = request.hash_ids
        known = next((i for i, each in enumerate(ids) if each not in last), len(ids))
        if known > 1:
            fresh[number] = False
            parent = last[ids[known - 1]]
            distance.append(number - parent)
            kept.append(known / len(trace.requests[parent].hash_ids))
            added.append(len(ids) - known)
            chained.append(not fresh[parent])
        last |= dict.fromkeys(ids, number)
    quantiles = [np.quantile(values, LEVELS) for values in (distance, kept, added)]
    tables = SharingTables(
        round(len(distance) / len(trace.requests), 4), round(sum(chained) / len(chained), 4),
        _rounded(quantiles[0], 1), _rounded(quantiles[1], 4), _rounded(quantiles[2], 2),
    )  # fmt: skip
    return tables, fresh


def _rounded(values: npt.NDArray[np.float64], digits: int) -> tuple[float, ...]:
    return tuple(round(float(value), digits) for value in values)


def main(arguments: Sequence[str]) -> int:
    """Prints the tables of the files named, as Python."""
    for path in arguments:
        print(fit(load_trace(Path(path))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
