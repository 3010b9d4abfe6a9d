"""Corners of config spaces: every pair of extremes of two tunables."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product

import pytest

from pagedtune.harness.config_corners import NUM_CORNERS, corner_config
from pagedtune.kernels.variant import Config

CORNERS = range(1, NUM_CORNERS - 1)


@dataclass(frozen=True)
class Wide(Config):
    """Seven tunables, of numbers and names."""

    a: int = 1
    b: int = 1
    c: int = 1
    d: int = 1
    e: int = 1
    name: str = "x"
    flag: bool = False


SPACE = [Wide(*numbers, name, flag) for *numbers, name, flag in product(*[(1, 2, 8)] * 5, ("x", "y"), (False, True))]


def test_every_two_tunables_take_all_four_pairs_of_their_extremes() -> None:
    corners = [corner_config(SPACE, corner).as_dict() for corner in CORNERS]
    ends = {name: {config.as_dict()[name] for config in (SPACE[0], SPACE[-1])} for name in SPACE[0].as_dict()}
    for one, other in combinations(ends, 2):
        assert {(c[one], c[other]) for c in corners} == set(product(ends[one], ends[other])), (one, other)


def test_the_last_is_the_middle() -> None:
    middle = corner_config(SPACE, NUM_CORNERS - 1)
    assert {getattr(middle, name) for name in "abcde"} == {2}


def test_where_a_corner_is_not_accepted_the_nearest_config_is_taken() -> None:
    space = [config for config in SPACE if config.a * config.b < 64]
    corners = [corner_config(space, corner) for corner in CORNERS]
    assert all(config in space for config in corners)
    assert {(1, 8), (8, 1), (1, 1)} <= {(c.a, c.b) for c in corners}
    assert any({c.a, c.b} == {2, 8} for c in corners)  # instead of 8 and 8


@pytest.mark.parametrize("corner", [0, NUM_CORNERS, -1])
def test_other_numbers_are_refused(corner: int) -> None:
    with pytest.raises(ValueError, match="must be from 1"):
        corner_config(SPACE, corner)


def test_a_space_of_one_config_has_one_corner() -> None:
    assert {corner_config([Wide()], corner) for corner in CORNERS} == {Wide()}
