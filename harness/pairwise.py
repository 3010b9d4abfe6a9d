"""Pairwise covering arrays under constraints."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any

Spans = Mapping[str, Sequence[Any]]
Possible = Callable[[Mapping[str, Any]], bool]
Facets = Mapping[str, Callable[[Any], Sequence[Hashable]]]
Allowed = Callable[[Mapping[str, int]], bool]
Row = dict[str, int]  # by dimension, the index of a value
Pair = tuple[str, int, str, int]  # two dimensions, in the order of the spans, and what is to be seen of each


def covering_rows(spans: Spans, possible: Possible, facets: Facets | None = None) -> list[dict[str, Any]]:
    """Rows in which every pair of values that can occur together does, in an order that only depends on the spans.

    Greedy: each row starts from the first pair that is missing and takes, dimension by dimension, the value that covers
    most of the missing ones. Measured against allpairspy: fewer rows, and no pair given up under constraints.

    Args:
        spans: values of each dimension.
        possible: whether a row, which may lack dimensions, is allowed.
        facets: of a dimension whose values are themselves made of several things, what these are: then each of them
            is paired with the other dimensions, and not the value as a whole.
    """
    names = sorted(spans, key=lambda name: -len(spans[name]))  # the largest first: fewer rows
    cover = _Cover({name: spans[name] for name in names}, possible, facets or {})
    return [{name: spans[name][row[name]] for name in names} for row in cover.rows()]


class _Cover:
    def __init__(self, spans: Spans, possible: Possible, facets: Facets) -> None:
        self._spans, self._possible = spans, possible
        self._seen = {name: _numbered(values, facets.get(name)) for name, values in spans.items()}
        self._missing = self._wanted()

    def rows(self) -> Iterator[Row]:
        for pair, start in sorted(self._missing.items()):
            if pair in self._missing:
                row = self._complete(dict(zip((pair[0], pair[2]), start, strict=True)))
                if row is not None:
                    yield row
                    for found in self._pairs(row):
                        self._missing.pop(found, None)

    def _allowed(self, row: Mapping[str, int]) -> bool:
        return self._possible({name: self._spans[name][i] for name, i in row.items()})

    def _wanted(self) -> dict[Pair, tuple[int, int]]:
        """Every pair that can occur, with the first two values that have it."""
        viable = _viable(self._spans, self._allowed)
        wanted: dict[Pair, tuple[int, int]] = {}
        for a, b in combinations(self._spans, 2):
            for i in sorted(viable[a]):
                for j in sorted(viable[b]):
                    if self._allowed({a: i, b: j}):
                        for pair in self._pairs({a: i, b: j}):
                            wanted.setdefault(pair, (i, j))
        return wanted

    def _pairs(self, row: Mapping[str, int]) -> Iterator[Pair]:
        """The pairs that a row shows; its dimensions are in the order of the spans."""
        for a, b in combinations(row, 2):
            for x in self._seen[a][row[a]]:
                for y in self._seen[b][row[b]]:
                    yield a, x, b, y

    def _complete(self, row: Row) -> Row | None:
        """`row` with all dimensions, those values first that cover most missing pairs; None where none is allowed."""
        name = next((n for n in self._spans if n not in row), None)
        if name is None:
            return {n: row[n] for n in self._spans}
        for index in sorted(range(len(self._spans[name])), key=lambda i: -self._gain(row, name, i)):
            extended = {**row, name: index}
            if self._allowed(extended):
                completed = self._complete(extended)
                if completed is not None:
                    return completed
        return None

    def _gain(self, row: Row, name: str, index: int) -> int:
        return sum(
            (other, x, name, y) in self._missing or (name, y, other, x) in self._missing
            for other, value in row.items()
            for x in self._seen[other][value]
            for y in self._seen[name][index]
        )


def _numbered(values: Sequence[Any], facets: Callable[[Any], Sequence[Hashable]] | None) -> list[tuple[int, ...]]:
    """What is to be seen of each value, as numbers: the value itself, or its facets."""
    if facets is None:
        return [(i,) for i in range(len(values))]
    numbers: dict[Hashable, int] = {}
    return [tuple(numbers.setdefault(facet, len(numbers)) for facet in facets(value)) for value in values]


def _viable(spans: Spans, allowed: Allowed) -> dict[str, set[int]]:
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
