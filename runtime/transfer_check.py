"""Which blocks a transfer between pool and host memory may name: checked before a byte has moved."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import IntArray, as_ints


def checked_transfer(blocks: Any, host_blocks: Any, num_blocks: int, num_host_blocks: int) -> tuple[IntArray, IntArray]:
    """Both as arrays, int64 [n].

    Args:
        blocks, host_blocks: ids in the pool and in host memory, pair by pair.
        num_blocks, num_host_blocks: how many there are of each.

    Raises:
        TypeError: ids that are no integers.
        ValueError: an id outside the pool or host memory, a host block named twice, or unequal numbers of both.
    """
    blocks, host_blocks = as_ints(blocks), as_ints(host_blocks)
    if blocks.shape != host_blocks.shape:
        raise ValueError(
            f"blocks has shape {blocks.shape} and host_blocks {host_blocks.shape}: they go pair by pair, so give as "
            "many of each"
        )
    _require_inside("blocks", blocks, num_blocks)
    _require_inside("host_blocks", host_blocks, num_host_blocks)
    require_distinct("host_blocks", host_blocks)
    return blocks, host_blocks


def require_distinct(name: str, ids: IntArray) -> None:
    """Raises ValueError if a block is named twice."""
    ordered = np.sort(ids)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    if again.size:
        raise ValueError(f"{name} names block {again[0]} twice: name each once, or one copy overwrites the other")


def _require_inside(name: str, ids: IntArray, count: int) -> None:
    outside = ids[(ids < 0) | (ids >= count)]
    if outside.size:
        raise ValueError(f"{name} names block {outside[0]}: ids are 0 to {count - 1}")
