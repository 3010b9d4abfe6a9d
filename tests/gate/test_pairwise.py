"""Covering arrays: every pair that can occur, in few rows."""

from __future__ import annotations

from itertools import combinations

from pagedtune.harness.pairwise import covering_rows

SPANS = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (10, 20, 30, 40)}


def possible(row: dict[str, object]) -> bool:
    """`a` 3 excludes `b` y, and `c` False with `d` 40 leaves nothing for `a` 1."""
    if row.get("a") == 3 and row.get("b") == "y":
        return False
    return not (row.get("c") is False and row.get("d") == 40 and row.get("a") == 1)


def test_all_pairs_that_can_occur_do() -> None:
    rows = covering_rows(SPANS, possible)  # type: ignore[arg-type]
    assert all(possible(row) for row in rows)
    for first, second in combinations(SPANS, 2):
        for one in SPANS[first]:
            for other in SPANS[second]:
                if possible({first: one, second: other}):
                    assert any(row[first] == one and row[second] == other for row in rows), (first, one, second, other)
    assert len(rows) < 24  # of 48 combinations
