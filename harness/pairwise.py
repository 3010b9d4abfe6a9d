"""Pairwise covering arrays under constraints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any

Spans = Mapping[str, Sequence[Any]]
Turns = Mapping[str, Sequence[Sequence[Any]]]  # by dimension, groups of values that share a place
Possible = Callable[[Mapping[str, Any]], bool]
Allowed = Callable[[Mapping[str, int]], bool]
Row = dict[str, int]  # by dimension, the index of a value
Pair = tuple[str, int, str, int]  # two dimensions, in the order of the spans, and a value of each


def covering_rows(spans: Spans, possible: Possible) -> list[dict[str, Any]]:
    """Rows in which every pair of values that can occur together does, in an order that only depends on the spans.

    Greedy: each row starts from the first pair that is missing and takes, dimension by dimension, the value that covers
    most of the missing ones. Measured against allpairspy: fewer rows, and no pair given up under constraints.

    Args:
        spans: values of each dimension.
        possible: whether a row, which may lack dimensions, is allowed.
    """
    names = sorted(spans, key=lambda name: -len(spans[name]))  # the largest first: fewer rows
    cover = _Cover({name: spans[name] for name in names}, possible)
    return [{name: spans[name][row[name]] for name in names} for row in cover.rows()]


def covering_in_turn(spans: Spans, possible: Possible, turns: Turns) -> tuple[dict[str, Any], ...]:
    """`covering_rows` over places: one value each, or several that take it in turn, as far as that is possible."""
    groups = {
        name: [present for group in turns.get(name, ()) if len(present := [v for v in group if v in values]) > 1]
        for name, values in spans.items()
    }
    later = {name: [value for group in found for value in group[1:]] for name, found in groups.items()}
    places = {name: tuple(v for v in values if v not in later[name]) for name, values in spans.items()}
    seen: Counter[tuple[str, int]] = Counter()
    return tuple(_in_turn(row, groups, possible, seen) for row in covering_rows(places, possible))


def _in_turn(
    row: dict[str, Any],
    groups: Mapping[str, Sequence[Sequence[Any]]],
    possible: Possible,
    seen: Counter[tuple[str, int]],
) -> dict[str, Any]:
    """The row with the next of each group that it names; `seen` counts how often each was named."""
    for name, found in groups.items():
        for index, group in ((k, group) for k, group in enumerate(found) if row[name] in group):
            turn = seen[name, index] % len(group)
            seen[name, index] += 1
            others = ({**row, name: value} for value in (*group[turn:], *group[:turn]))
            row = next(filter(possible, others), row)
    return row


class _Cover:
    def __init__(self, spans: Spans, possible: Possible) -> None:
        self._spans, self._possible = spans, possible
        self._missing = self._wanted()

    def rows(self) -> Iterator[Row]:
        for pair in sorted(self._missing):
            if pair in self._missing:
                row = self._complete({pair[0]: pair[1], pair[2]: pair[3]})
                if row is not None:
                    yield row
                    self._missing.difference_update(_pairs(row))

    def _allowed(self, row: Mapping[str, int]) -> bool:
        return self._possible({name: self._spans[name][i] for name, i in row.items()})

    def _wanted(self) -> set[Pair]:
        """Every pair that can occur."""
        viable = _viable(self._spans, self._allowed)
        return {
            (a, i, b, j)
            for a, b in combinations(self._spans, 2)
            for i in viable[a]
            for j in viable[b]
            if self._allowed({a: i, b: j})
        }

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
            (other, value, name, index) in self._missing or (name, index, other, value) in self._missing
            for other, value in row.items()
        )


def _pairs(row: Row) -> Iterator[Pair]:
    """The pairs that a row shows; its dimensions are in the order of the spans."""
    for a, b in combinations(row, 2):
        yield a, row[a], b, row[b]


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
