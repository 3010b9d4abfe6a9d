"""The corners of a config space: few configs in which every two tunables have each pair of their extremes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from pagedtune.kernels.variant import Config

# The smallest covering arrays of two-valued columns with six rows (Kleitman and Spencer, 1973): the first row is all
# low, and each column is high in three of the other five, a choice of its own. So any two columns differ both ways, are
# both high somewhere (two threes of five overlap) and both low in the first row. That serves ten tunables.
_HIGH_ROWS = tuple(combinations(range(1, 6), 3))
NUM_CORNERS = 8  # the default config, the six rows, and the middle of every tunable


def corner_config(accepted: Sequence[Config], corner: int) -> Config:
    """The accepted config that comes closest to a corner of the space.

    Args:
        accepted: configs of one variant, not empty.
        corner: from 1; 1 to 6 are the corners, `NUM_CORNERS` - 1 the middle (0 is the variant's default config, which
            need not be in its space).

    Raises:
        ValueError: another number, or more tunables than the array has columns.
    """
    if not 0 < corner < NUM_CORNERS:
        raise ValueError(f"corner={corner} must be from 1 to {NUM_CORNERS - 1}")
    positions = [_positions([config.as_dict()[name] for config in accepted]) for name in accepted[0].as_dict()]
    varied = [column for column in positions if max(column) > 0]
    if len(varied) > len(_HIGH_ROWS):
        raise ValueError(f"{len(varied)} tunables vary, the corners are made for {len(_HIGH_ROWS)} at most")
    targets = [
        0.5 if corner == NUM_CORNERS - 1 else float(corner - 1 in rows)
        for rows, _ in zip(_HIGH_ROWS, varied, strict=False)
    ]
    distances = [
        sum(abs(column[index] - target) for column, target in zip(varied, targets, strict=True))
        for index in range(len(accepted))
    ]
    return accepted[distances.index(min(distances))]


def _positions(values: Sequence[Any]) -> list[float]:
    """Where each value stands between the least (0) and the greatest (1); names stand in the order of appearance."""
    distinct = list(dict.fromkeys(values))
    if all(isinstance(value, int | float) for value in distinct):
        distinct.sort()
    last = max(1, len(distinct) - 1)
    return [distinct.index(value) / last for value in values]
