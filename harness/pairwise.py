"""Pairwise covering arrays under constraints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

Spans = Mapping[str, Sequence[Any]]
Possible = Callable[[Mapping[str, Any]], bool]
Pair = tuple[str, int, str, int]  # two dimensions, in the order of the spans, and an index of a value in each


def covering_rows(spans: Spans, possible: Possible) -> list[dict[str, Any]]:
    """Rows in which every pair of values that can occur together does, in an order that only depends on the spans.

    `AllPairs` gives up on pairs that its constraints make hard to place, so its rows are completed one pair at a time.
    On a machine without it all rows come about that way: more of them, and others, but the same pairs.

    Args:
        spans: values of each dimension.
        possible: whether a row, which may lack dimensions, is allowed.
    """
    names = sorted(spans, key=lambda name: -len(spans[name]))  # the largest first: fewer rows
    ordered = {name: spans[name] for name in names}

    def allowed(indices: Mapping[str, int]) -> bool:
        return possible({name: ordered[name][i] for name, i in indices.items()})

    positions = [list(range(len(values))) for values in ordered.values()]
    rows: list[dict[str, int]] = []
    if len(positions) > 1:
        found = _all_pairs(positions, lambda partial: allowed(dict(zip(names, partial, strict=False))))
        rows = [dict(zip(names, row, strict=True)) for row in found]
    missing = _wanted(ordered, allowed)
    for row in rows:
        missing -= set(_pairs(row))
    for pair in sorted(missing):
        if pair in missing:
            completed = _complete({pair[0]: pair[1], pair[2]: pair[3]}, ordered, allowed, missing)
            if completed is not None:
                rows.append(completed)
                missing -= set(_pairs(completed))
    return [{name: ordered[name][row[name]] for name in names} for row in rows]


def _all_pairs(positions: list[list[int]], keep: Callable[[Sequence[int]], bool]) -> Iterable[Sequence[int]]:
    try:
        from allpairspy import AllPairs
    except ModuleNotFoundError:  # `make gpu-day` runs where nothing can be installed
        return ()
    pairs: Iterable[Sequence[int]] = AllPairs(positions, filter_func=keep)
    return pairs


def _wanted(spans: Spans, allowed: Callable[[Mapping[str, int]], bool]) -> set[Pair]:
    return {
        (a, i, b, j)
        for a, b in combinations(spans, 2)
        for i in range(len(spans[a]))
        for j in range(len(spans[b]))
        if allowed({a: i, b: j})
    }


def _pairs(row: Mapping[str, int]) -> Iterator[Pair]:
    for a, b in combinations(row, 2):
        yield a, row[a], b, row[b]


def _complete(
    row: dict[str, int], spans: Spans, allowed: Callable[[Mapping[str, int]], bool], missing: set[Pair]
) -> dict[str, int] | None:
    """`row` with all dimensions, those values first that cover most missing pairs; None where none is allowed."""
    name = next((n for n in spans if n not in row), None)
    if name is None:
        return {n: row[n] for n in spans}

    def gain(index: int) -> int:
        return sum(
            (other, value, name, index) in missing or (name, index, other, value) in missing
            for other, value in row.items()
        )

    for index in sorted(range(len(spans[name])), key=lambda i: -gain(i)):
        extended = {**row, name: index}
        if allowed(extended):
            completed = _complete(extended, spans, allowed, missing)
            if completed is not None:
                return completed
    return None
