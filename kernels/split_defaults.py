"""How many splits an untuned split-K decode kernel takes: one rule behind the default configs of all of them.

First the device must be busy: nearly every multiprocessor has a block, and enough bytes are on their way to hide the
latency of the memory (Little's law). Only then may more splits hide the beginning and the end of one block behind
another, as long as what they add to the traffic stays a small share of the keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .bounds import Bounds
from .device import Device
from .pool_format import PoolFormat
from .problem import Problem

FLIGHT_BYTES = (
    25 << 10
)  # of a multiprocessor: an H200's 4.8 TB/s x 700 ns / 132, the most of any device in configs/gpus
BUSY = 7 / 8  # share of the multiprocessors with a block that counts as all of them
EXTRA_SHARE = 1 / 64  # of the bytes of keys and values that splits for the sake of a second block may add


@dataclass(frozen=True)
class SplitShape:
    """What the rule must know of a kernel.

    Args:
        blocks: of the grid without splits.
        block_flight: bytes that one block has on their way.
        resident: blocks of a multiprocessor that are worth having, at most; 1 where no second one fits.
    """

    blocks: int
    block_flight: int
    resident: int = 2


def default_splits(
    problem: Problem, pool_format: PoolFormat, bounds: Bounds, device: Device, shape: SplitShape, choices: Sequence[int]
) -> int:
    """The least of `choices` (ascending) that fills the device, or more of them that fit `EXTRA_SHARE`."""
    blocks = max(1, shape.blocks)
    needed = max(1.0, FLIGHT_BYTES / shape.block_flight)
    filled = next((s for s in choices if blocks * s >= BUSY * needed * device.num_units), choices[-1])
    worth = [s for s in choices if s > filled and extra_share(problem, pool_format, bounds, s) <= EXTRA_SHARE]
    wanted = BUSY * max(needed, shape.resident) * device.num_units
    while worth and blocks * filled < wanted:
        filled = worth.pop(0)
    return filled


def extra_share(problem: Problem, pool_format: PoolFormat, bounds: Bounds, splits: int) -> float:
    """Bytes of partials, written and read, and of queries over those of keys and values, with `splits` splits.

    A partial is the output of a row and its LSE in fp32; per sequence and KV head there are GQA ratio x query tokens.
    A block's warps read the same query rows: once from memory.
    """
    rows = problem.gqa_ratio * bounds.max_query_len
    keys = bounds.max_context_len
    if problem.window is not None:
        keys = min(keys, problem.window + bounds.max_query_len - 1)
    partials = 2 * 4 * rows * (problem.head_dim_v + 1)
    queries = rows * problem.head_dim * problem.q_dtype.itemsize
    one = (problem.head_dim + problem.head_dim_v) * pool_format.kv_dtype.itemsize
    return splits * (partials + queries) / (keys * one)
