"""Requests like those of a public trace, from its quantiles and a seed, without the trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .traces import MOONCAKE_BLOCK, Trace, TraceRequest
from .traces_fit import (
    DISTANCE_BINS,
    DISTANCE_LEVELS,
    LEVELS,
    OUTPUT_BINS,
    OUTPUT_LEVELS,
    LengthTables,
    SharingTables,
    TraceTables,
)

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
NEAR = 1 / 8  # of a distance: how far from it a request may be that is gone on from


def generate_trace(tables: TraceTables, count: int | None = None, seed: int = 0) -> Trace:
    """`count` requests (default: as many as the trace has) that look like the first ones of the trace.

    Each length is the inverse of a distribution function at a random level, read between the quantiles of its
    period; an output is drawn from those of the prompts about as long as its own.

    Args:
        tables: quantiles of the trace.
        count: requests; they come as fast as those of the trace, so a part of them takes a part of its time.
        seed: equal seeds give equal requests.
    """
    rng = np.random.default_rng(seed)
    size = tables.num_requests if count is None else count
    level = np.arange(size) / max(size, tables.num_requests)
    period = (level * len(tables.periods)).astype(np.int64)
    arrivals = _arrivals(rng, level, tables)
    prompts = np.empty(size, np.int64)
    goes_on = np.empty(size, np.bool_)
    for number, each in enumerate(tables.periods):
        chosen = np.flatnonzero(period == number)
        prompts[chosen] = _draw(rng, chosen.size, LEVELS, each.prompts)
        goes_on[chosen] = _even(rng, chosen.size) < each.share
    ids: list[tuple[int, ...]] = [()] * size
    if tables.sharing is not None:
        ids, prompts = _Sharing(rng, tables.sharing, prompts, goes_on).draw()
    outputs = np.empty_like(prompts)
    for number, each in enumerate(tables.periods):
        chosen = period == number
        outputs[chosen] = _outputs(rng, prompts[chosen], each)
    rows = zip((arrivals - arrivals[0]).tolist(), prompts.tolist(), outputs.tolist(), ids, strict=True)
    return Trace(f"{tables.name} (generated, seed {seed})", tuple(TraceRequest(*row) for row in rows))


def _draw(rng: np.random.Generator, size: int, levels: Sequence[float], quantiles: Sequence[float]) -> IntArray:
    return np.maximum(1, _inverse(_even(rng, size), quantiles, levels))


def _even(rng: np.random.Generator, size: int) -> FloatArray:
    """Levels in random order, one in each of `size` equal parts of 0 to 1: the mean varies less than that of as many
    independent ones, which matters where one request in a hundred holds a tenth of the tokens."""
    levels: FloatArray = (rng.permutation(size) + rng.random(size)) / size
    return levels


def _inverse(level: FloatArray, quantiles: Sequence[float], levels: Sequence[float] = LEVELS) -> IntArray:
    """Values at these levels. Between two quantiles the logarithm is interpolated: chords of a tail lie too high."""
    found: IntArray = np.rint(np.expm1(np.interp(level, levels, np.log1p(quantiles)))).astype(np.int64)
    return found


def _arrivals(rng: np.random.Generator, level: FloatArray, tables: TraceTables) -> FloatArray:
    """Seconds: each part of the trace takes its time, divided by one pause and gaps as uneven as the trace's."""
    starts = np.asarray(tables.arrivals)
    parts = starts.size - 1
    part = np.minimum((level * parts).astype(np.int64), parts - 1)
    if tables.tick_s:
        times = np.sort(starts[part] + rng.random(level.size) * np.diff(starts)[part])
        return np.floor(times / tables.tick_s) * tables.tick_s
    times = np.empty(level.size)
    for number in range(parts):
        chosen = np.flatnonzero(part == number)
        if chosen.size:
            span = starts[number + 1] - starts[number]
            times[chosen] = starts[number] + _gaps(rng, chosen.size, span, tables.pauses[number], tables.gaps)
    return times


def _gaps(rng: np.random.Generator, size: int, span: float, pause: float, gaps: Sequence[float]) -> FloatArray:
    """Times in a part that takes `span` seconds, one of them after a pause that is its longest."""
    found = np.interp(_even(rng, size), LEVELS, gaps)
    longest = rng.integers(size)
    found[longest] = 0
    found *= max(0.0, span - pause) / max(1e-9, found.sum())
    found[longest] = min(pause, span)
    return np.cumsum(found)


def _outputs(rng: np.random.Generator, prompts: IntArray, tables: LengthTables) -> IntArray:
    """An output length for each prompt, from the outputs of its share of the requests by prompt length."""
    outputs = np.empty_like(prompts)
    for chosen, quantiles in zip(
        np.array_split(np.argsort(prompts, kind="stable"), OUTPUT_BINS), tables.outputs, strict=True
    ):
        outputs[chosen] = _draw(rng, chosen.size, OUTPUT_LEVELS, quantiles)
    return outputs


class _Sharing:
    """Prompts of which some go on from earlier ones, as conversations do.

    Args:
        rng, tables: to draw from.
        fresh: prompt lengths of those that go on from none.
        goes_on: which go on from an earlier one.
    """

    def __init__(self, rng: np.random.Generator, tables: SharingTables, fresh: IntArray, goes_on: BoolArray) -> None:
        self._tables, self._lengths, self._goes_on = tables, fresh.copy(), goes_on
        size = fresh.size
        self._levels = np.empty((3, size))
        for row in self._levels:
            row[goes_on] = _even(rng, int(goes_on.sum()))
        self._tails = rng.integers(1, MOONCAKE_BLOCK + 1, size)
        self._units = np.zeros(size, np.int64)
        self._newest = np.ones(size, np.bool_)  # of their conversations: nobody has gone on from them yet

    def draw(self) -> tuple[list[tuple[int, ...]], IntArray]:
        """Hash ids and lengths of all prompts."""
        ids: list[tuple[int, ...]] = []
        unused = 1
        for number in range(self._goes_on.size):
            kept: tuple[int, ...] = (0,)
            count = -(-int(self._lengths[number]) // MOONCAKE_BLOCK)
            if self._goes_on[number] and (wanted := self._wanted(number))[0] <= number:
                distance, known, added = wanted
                parent = self._parent(number, distance, known)
                if parent >= 0:
                    self._newest[parent] = False
                    kept = ids[parent][:known]
                count = known + added
                self._lengths[number] = (count - 1) * MOONCAKE_BLOCK + int(self._tails[number])
            self._units[number] = count
            ids.append((*kept, *range(unused, unused + count - len(kept))))
            unused += count - len(kept)
        return ids, self._lengths

    def _wanted(self, number: int) -> tuple[int, int, int]:
        """How many requests ago the one came to go on from, and the units to keep of it and to add."""
        tables, levels = self._tables, self._levels[:, number]
        nth = min(int(levels[0] * DISTANCE_BINS), DISTANCE_BINS - 1)
        distance = round(float(np.interp(levels[0], DISTANCE_LEVELS, tables.distance)))
        known, added = _inverse(levels[1:2], tables.kept[nth]), _inverse(levels[2:], tables.added[nth])
        return distance, int(known[0]), int(added[0])

    def _parent(self, number: int, distance: int, known: int) -> int:
        """The earlier request to repeat `known` units of, about `distance` ago: the newest of its conversation.

        Of those that are near, the one that is least longer; else the nearest; -1 if there is none.
        """
        target = max(0, number - distance)
        near = max(8, round(distance * NEAR))
        start, end = max(0, target - near), min(number, target + near + 1)
        fits = self._fitting(start, end, known)
        if fits.size:
            return int(fits[np.argmin(self._units[fits])])
        fits = self._fitting(0, number, known)
        return int(fits[np.argmin(np.abs(fits - target))]) if fits.size else -1

    def _fitting(self, start: int, end: int, known: int) -> IntArray:
        """Requests from `start` to `end` that have `known` units and are the newest ones of their conversations."""
        return start + np.flatnonzero((self._units[start:end] >= known) & self._newest[start:end])
