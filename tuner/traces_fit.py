"""`python -m pagedtune.tuner.traces_fit FILE...`: the tables of `traces_tables.py`, derived from public traces.

Quantiles instead of a fitted family: the output lengths of the Azure conversation trace have two humps, and how long
an output is depends on its prompt's length, neither of which a lognormal says.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .traces import Trace, TraceRequest, load_trace

# Denser at the ends, where a few long requests hold much of the memory.
LEVELS = (0.0, 0.01, 0.03, *(i / 20 for i in range(1, 20)), 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)
OUTPUT_LEVELS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.997, 1.0)
OUTPUT_BINS = 6
DISTANCE_LEVELS = (0.0, 0.0025, 0.005, 0.01, 0.02, *(i / 20 for i in range(1, 20)), 0.98, 0.99, 1.0)
DISTANCE_BINS = 8
ARRIVAL_POINTS = 121  # times by which equal shares of the requests had come
PERIODS = {"azure_llm_2023_conv": 6, "mooncake_conversation": 4}  # of traces whose lengths drift


@dataclass(frozen=True)
class SharingTables:
    """How prompts of later requests repeat those of earlier ones, in units of 512 tokens.

    Args:
        distance: quantiles, at `DISTANCE_LEVELS`, of how many requests ago the newest one came that had the last
            unit kept.
        kept: for each of `DISTANCE_BINS` equal shares by distance, quantiles of the units that are kept.
        added: for each of them, quantiles of the units that come behind.
    """

    distance: tuple[float, ...]
    kept: tuple[tuple[float, ...], ...]
    added: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class LengthTables:
    """Lengths of the requests of one period.

    Args:
        share: of requests that go on from an earlier one, also from one before the first; the rest share only the
            first unit, if any.
        prompts: prompt lengths of that rest.
        outputs: output lengths at `OUTPUT_LEVELS`, for each of `OUTPUT_BINS` equal shares of the requests by
            prompt length, [OUTPUT_BINS][len(OUTPUT_LEVELS)].
    """

    share: float
    prompts: tuple[float, ...]
    outputs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class TraceTables:
    """A trace in quantiles, at `LEVELS` unless said otherwise.

    Args:
        name: of the trace.
        num_requests: of the whole trace.
        arrivals: seconds, by equal shares of the requests, [ARRIVAL_POINTS].
        pauses: seconds, the longest time between two requests in each of these shares, [ARRIVAL_POINTS - 1].
        gaps: quantiles of the other times between two requests, over their mean in each share.
        tick_s: what all times are multiples of; pauses and gaps are then empty. 0 if they are not.
        periods: lengths, by equal shares of the requests in order.
        sharing: None where nothing is known of it.
    """

    name: str
    num_requests: int
    arrivals: tuple[float, ...]
    pauses: tuple[float, ...]
    gaps: tuple[float, ...]
    tick_s: float
    periods: tuple[LengthTables, ...]
    sharing: SharingTables | None = None


def fit(trace: Trace) -> TraceTables:
    """The tables of a trace."""
    requests = trace.requests
    arrivals = np.array([r.arrival_s for r in requests])
    points = np.quantile(arrivals, np.linspace(0, 1, ARRIVAL_POINTS))
    fresh, sharing = np.ones(len(requests), np.bool_), None
    if requests[0].hash_ids:
        sharing, fresh = _fit_sharing(trace)
    tick_s = _tick(arrivals)
    pauses, gaps = ((), ()) if tick_s else _fit_gaps(arrivals)
    parts = np.array_split(np.arange(len(requests)), PERIODS.get(trace.name, 1))
    return TraceTables(
        name=trace.name,
        num_requests=len(requests),
        arrivals=_rounded(points, 2),
        pauses=pauses,
        gaps=gaps,
        tick_s=tick_s,
        periods=tuple(_fit_lengths([requests[i] for i in part], fresh[part], _reach(part, sharing)) for part in parts),
        sharing=sharing,
    )


def _tick(arrivals: npt.NDArray[np.float64]) -> float:
    """Seconds between two times at which requests come, if nine in ten of them are the same to 1 %; else 0."""
    steps = np.diff(np.unique(arrivals))
    tick = float(np.median(steps))
    return round(tick, 2) if np.mean(np.abs(steps - tick) <= 0.01 * tick) > 0.9 else 0.0


def _fit_gaps(arrivals: npt.NDArray[np.float64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The longest gap of each equal share of the requests, and quantiles of the others over their mean there."""
    parts = [np.sort(part) for part in np.array_split(np.diff(arrivals), ARRIVAL_POINTS - 1)]
    others = np.concatenate([part[:-1] / part[:-1].mean() for part in parts])
    return _rounded(np.array([part[-1] for part in parts]), 3), _rounded(np.quantile(others, LEVELS), 4)


def _reach(numbers: npt.NDArray[np.int64], sharing: SharingTables | None) -> float:
    """Share of the distances drawn for these requests that go back no farther than the first request of all."""
    return 1.0 if sharing is None else float(np.interp(numbers, sharing.distance, DISTANCE_LEVELS).mean())


def _fit_lengths(requests: Sequence[TraceRequest], fresh: npt.NDArray[np.bool_], reach: float) -> LengthTables:
    prompts = np.array([r.prompt_len for r in requests])
    outputs = np.array([r.output_len for r in requests])
    bins = np.array_split(np.argsort(prompts, kind="stable"), OUTPUT_BINS)
    return LengthTables(
        share=round((1 - float(fresh.mean())) / reach, 4),
        prompts=_rounded(np.quantile(prompts[fresh], LEVELS), 1),
        outputs=tuple(_rounded(np.quantile(outputs[each], OUTPUT_LEVELS), 1) for each in bins),
    )


def _fit_sharing(trace: Trace) -> tuple[SharingTables, npt.NDArray[np.bool_]]:
    """How prompts repeat, and which of them go on from no other one."""
    last: dict[int, int] = {}  # by hash id, the newest request that had it
    found = []
    fresh = np.ones(len(trace.requests), np.bool_)
    for number, request in enumerate(trace.requests):
        ids = request.hash_ids
        known = next((i for i, each in enumerate(ids) if each not in last), len(ids))
        if known > 1:
            fresh[number] = False
            found.append((number - last[ids[known - 1]], known, len(ids) - known))
        last |= dict.fromkeys(ids, number)
    distance, kept, added = np.array(found).T
    bins = np.array_split(np.argsort(distance, kind="stable"), DISTANCE_BINS)
    tables = SharingTables(
        _rounded(np.quantile(distance, DISTANCE_LEVELS), 1),
        *(tuple(_rounded(np.quantile(each[part], LEVELS), 2) for part in bins) for each in (kept, added)),
    )
    return tables, fresh


def _rounded(values: npt.NDArray[np.float64], digits: int) -> tuple[float, ...]:
    return tuple(round(float(value), digits) for value in values)


def as_source(value: object, indent: int = 0) -> str:
    """Tables as Python that makes them again, in lines of at most 120 characters."""
    pad = " " * (indent + 4)
    if is_dataclass(value):
        inner = [f"{field.name}={as_source(getattr(value, field.name), indent + 4)}" for field in fields(value)]
    elif value == ():
        return "()"
    elif isinstance(value, tuple) and not isinstance(value[0], float):
        inner = [as_source(each, indent + 4) for each in value]
    elif isinstance(value, tuple):
        numbers = ", ".join(repr(int(each) if each == int(each) else each) for each in value)
        if len(pad) + len(numbers) + 20 <= 120:  # with a field's name before it
            return f"({numbers})"
        lines = textwrap.wrap(numbers + ",", 120, initial_indent=pad, subsequent_indent=pad)
        return "\n".join(("(", *lines, " " * indent + ")"))
    else:
        return json.dumps(value) if isinstance(value, str) else repr(value)
    start = type(value).__name__ if is_dataclass(value) else ""
    return "\n".join((f"{start}(", *(f"{pad}{each}," for each in inner), " " * indent + ")"))


def main(arguments: Sequence[str]) -> int:
    """Prints the tables of the files named, as Python."""
    for path in arguments:
        print(as_source(fit(load_trace(Path(path)))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
