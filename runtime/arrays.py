"""Array types and the arithmetic of block edges."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]  # what the host computes with: indexing by int64 needs no conversion
BoolArray = npt.NDArray[np.bool_]
INT64 = np.dtype(np.int64)
ONE = np.array(1)  # where it matters: numpy takes longer to convert a number of Python's than to add it to a row
RowIndex = slice | IntArray  # rows 0, 1, 2, ... as a slice are views and cost no gather

Count = TypeVar("Count", int, IntArray)


def blocks_for(num_tokens: Count, block_size: int) -> Count:
    """Blocks that hold `num_tokens` tokens: the last may be partly filled, none is empty."""
    return -(-num_tokens // block_size)


def as_ints(values: Any) -> IntArray:
    """`values` as a one-dimensional int64 array, without a copy where it already is one.

    Raises:
        TypeError: they are no integers, such as 1.5, which numpy would cut to 1.
    """
    if type(values) is np.ndarray and values.dtype is INT64 and values.ndim == 1:
        return values
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{values!r} must be integers below 2^63, not {array.dtype}: give whole numbers")
    return np.atleast_1d(array.astype(np.int64, copy=False))


def true_at(mask: BoolArray) -> IntArray:
    """Where a one-dimensional mask is true: `np.flatnonzero` without its wrappers, which cost more than the search."""
    indices: IntArray = mask.nonzero()[0]
    return indices


def ragged_arange(counts: IntArray) -> IntArray:
    """0..counts[0]-1, then 0..counts[1]-1, and so on, in one array."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total) - np.repeat(ends - counts, counts)


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`values` as a tensor on `device`; on the CPU it shares their memory.

    From pageable memory the copy to another device has read its source when this returns: no later write to
    `values` can reach a step in flight.
    """
    return torch.from_numpy(values).to(device)
