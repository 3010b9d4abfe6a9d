"""Pairwise covering arrays under constraints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any

Spans = Mapping[str, Sequence[Any]]
Possible = Callable[[Mapping[str, Any]], bool]
Pair = tuple[str, int, str, int]  # two dimensions, in the order of the spans, and an index of a value in each


def covering_rows(spans: Spans, possible: Possible) -> list[dict[str, Any]]:
    """Rows in which every pair of values that can occur together does, in an order that only depends on the spans.

    Greedy: each row starts from the first pair that is missing and takes, dimension by dimension, the value that covers
    most of the missing ones. (Measured against allpairspy: fewer rows, and no pair given up under constraints.)

    Args:
        spans: values of each dimension.
        possible: whether a row, which may lack dimensions, is allowed.
    """
    names = sorted(spans, key=lambda name: -len(spans[name]))  # the largest first: fewer rows
    ordered = {name: spans[name] for name in names}

    def allowed(indices: Mapping[str, int]) -> bool:
        return possible({name: ordered[name][i] for name, i in indices.items()})

    rows: list[dict[str, int]] = []
    missing = _wanted(ordered, allowed)
    for pair in sorted(missing):
        if pair in missing:
            completed = _complete({pair[0]: pair[1], pair[2]: pair[3]}, ordered, allowed, missing)
            if completed is not None:
                rows.append(completed)
                missing -= set(_pairs(completed))
    return [{name: ordered[name][row[name]] for name in names} for row in rows]


def _wanted(spans: Spans, allowed: Callable[[Mapping[str, int]], bool]) -> set[Pair]:
    viable = _viable(spans, allowed)
    return {
        (a, i, b, j) for a, b in combinations(spans, 2) for i in viable[a] for j in viable[b] if allowed({a: i, b: j})
    }


def _viable(spans: Spans, allowed: Callable[[Mapping[str, int]], bool]) -> dict[str, set[int]]:
    """Values that go with some value of every other dimension: without the others no search ends."""
    viable = {name: set(range(len(values))) for name, values in spans.items()}
    changed = True
    while changed:
        changed = False
        for a, b in permutations(spans, 2):
            lost = {i for i in viable[a] if not any(allowed({a: i, b: j}) for j in viable[b])}
            viable[a] -= lost
            changed |= bool(lost)
    return viable


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
