"""Requests like those of a public trace, from its quantiles and a seed, without the trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .traces import MOONCAKE_BLOCK, Trace, TraceRequest
from .traces_fit import LEVELS, OUTPUT_BINS, OUTPUT_LEVELS, SharingTables, TraceTables

SEARCH = 64  # requests among which one is looked for that fits


def generate_trace(tables: TraceTables, count: int | None = None, seed: int = 0) -> Trace:
    """`count` requests (default: as many as the trace has) that look like the first ones of the trace.

    Each length is the inverse of a distribution function at a random level, read between the quantiles; an output
    is drawn from those of the prompts about as long as its own.

    Args:
        tables: quantiles of the trace.
        count: requests; they come as fast as those of the trace, so a part of them takes a part of its time.
        seed: equal seeds give equal requests.
    """
    rng = np.random.default_rng(seed)
    size = tables.num_requests if count is None else count
    span = min(1.0, size / tables.num_requests)
    levels = np.linspace(0, 1, len(tables.arrivals))
    arrivals = np.sort(np.interp(rng.random(size) * span, levels, tables.arrivals))
    prompts = _draw(rng, size, LEVELS, tables.prompts)
    ids: list[tuple[int, ...]] = [()] * size
    if tables.sharing is not None:
        ids, prompts = _share(rng, prompts, tables.sharing)
    outputs = _outputs(rng, prompts, tables)
    rows = zip((arrivals - arrivals[0]).tolist(), prompts.tolist(), outputs.tolist(), ids, strict=True)
    return Trace(f"{tables.name} (generated, seed {seed})", tuple(TraceRequest(*row) for row in rows))


def _draw(
    rng: np.random.Generator, size: int, levels: Sequence[float], quantiles: Sequence[float]
) -> npt.NDArray[np.int64]:
    return np.maximum(1, np.rint(np.interp(rng.random(size), levels, quantiles))).astype(np.int64)


def _outputs(rng: np.random.Generator, prompts: npt.NDArray[np.int64], tables: TraceTables) -> npt.NDArray[np.int64]:
    """An output length for each prompt, from the outputs of its share of the requests by prompt length."""
    outputs = np.empty_like(prompts)
    for chosen, quantiles in zip(
        np.array_split(np.argsort(prompts, kind="stable"), OUTPUT_BINS), tables.outputs, strict=True
    ):
        outputs[chosen] = _draw(rng, chosen.size, OUTPUT_LEVELS, quantiles)
    return outputs


def _share(
    rng: np.random.Generator, fresh: npt.NDArray[np.int64], tables: SharingTables
) -> tuple[list[tuple[int, ...]], npt.NDArray[np.int64]]:
    """Hash ids and lengths of prompts of which some go on from earlier ones; `fresh` are lengths for the others."""
    size = fresh.size
    distance = _draw(rng, size, LEVELS, tables.distance)
    kept, added = (np.interp(rng.random(size), LEVELS, each) for each in (tables.kept, tables.added))
    goes_on, tails = rng.random(size) < tables.share, rng.integers(1, MOONCAKE_BLOCK + 1, size)
    chained, open_ones = rng.random(size) < tables.chained, np.ones(size, np.bool_)
    ids: list[tuple[int, ...]] = []
    lengths = fresh.copy()
    unused = 1  # id 0 begins every prompt
    for number in range(size):
        parent: tuple[int, ...] = (0,)
        known, count = 1, -(-int(fresh[number]) // MOONCAKE_BLOCK)
        if goes_on[number] and number:
            # Requests that came before the first one are as good as any: fold the distance into what there is.
            newest = number - 1 - int(distance[number] - 1) % number
            chosen = _parent(newest, bool(chained[number]), open_ones, goes_on)
            open_ones[chosen] = False
            parent = ids[chosen]
        if len(parent) > 1:
            known = min(len(parent), max(2, round(float(kept[number]) * len(parent))))
            count = known + round(float(added[number]))
            lengths[number] = (count - 1) * MOONCAKE_BLOCK + int(tails[number])
        ids.append((*parent[:known], *range(unused, unused + count - known)))
        unused += count - known
    return ids, lengths


def _parent(newest: int, chained: bool, open_ones: npt.NDArray[np.bool_], goes_on: npt.NDArray[np.bool_]) -> int:
    """The request to go on from: near `newest`, one that nobody went on from yet, and of the kind wanted."""
    start = max(0, newest - SEARCH)
    fits = open_ones[start : newest + 1] & (goes_on[start : newest + 1] == chained)
    found = np.flatnonzero(fits)
    return start + int(found[-1]) if found.size else newest
