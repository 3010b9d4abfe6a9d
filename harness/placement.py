"""Which blocks of the pool hold which tokens of a case."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .case import Case, Hazard
from .memory import HIGH_ELEMENTS

SPARE_BLOCKS = 3  # blocks of the pool that no sequence uses: all poison


@dataclass(frozen=True)
class Placement:
    """Blocks by number within the window, the part of the pool that is touched.

    Args:
        window_start: first block of the window in the pool; above 0 only for a high pool.
        num_blocks: blocks of the window.
        tables: of each sequence, the window block of each logical block; -1 where no query sees any of its tokens.
        live: bool [num_blocks, block_size], slots that hold a token which some query sees.
    """

    window_start: int
    num_blocks: int
    tables: tuple[tuple[int, ...], ...]
    live: np.ndarray

    def slot_of(self, seq: int, token: int, block_size: int) -> tuple[int, int]:
        """Window block and slot in it of a token."""
        return self.tables[seq][token // block_size], token % block_size


def place(case: Case, rng: np.random.Generator) -> Placement:
    """Blocks for every token that some query sees, in random order unless the case says otherwise."""
    block_size, lens = case.pool_format.block_size, case.workload.context_lens
    needed = [
        range(first_visible(case, seq) // block_size, -(-context_len // block_size))
        for seq, context_len in enumerate(lens)
    ]
    owners = _owners(case, needed)
    unique = sorted(set(owners.values()))
    num_blocks = len(unique) + SPARE_BLOCKS
    order = np.arange(num_blocks) if Hazard.IDENTITY_TABLE in case.hazards else rng.permutation(num_blocks)
    block_of = {key: int(order[i]) for i, key in enumerate(unique)}
    tables, live = [], np.zeros((num_blocks, block_size), dtype=bool)
    for seq, context_len in enumerate(lens):
        table = [-1] * -(-context_len // block_size)
        for logical in needed[seq]:
            table[logical] = block_of[owners[seq, logical]]
            live[table[logical], : context_len - logical * block_size] = True
        tables.append(tuple(table))
    return Placement(_window_start(case), num_blocks, tuple(tables), live)


def first_visible(case: Case, seq: int) -> int:
    """First token of a sequence that its earliest query sees (0 without a window)."""
    context_len, query_len = case.workload.context_lens[seq], case.workload.query_lens[seq]
    if case.problem.window is None:
        return 0
    return max(0, context_len - max(query_len, 1) - case.problem.window + 1)


def _owners(case: Case, needed: list[range]) -> dict[tuple[int, int], tuple[int, int]]:
    """The (sequence, logical block) that owns the memory of each one needed: itself, or the first sequence that has
    a full block there if blocks are shared. The last full block of each sequence stays its own."""
    block_size, lens = case.pool_format.block_size, case.workload.context_lens
    owners: dict[tuple[int, int], tuple[int, int]] = {}
    for seq, blocks in enumerate(needed):
        shared = max(1, lens[seq] // block_size - 1) if Hazard.SHARED_BLOCKS in case.hazards else 0
        for logical in blocks:
            owners[seq, logical] = (seq, logical)
            if logical < shared and lens[seq] >= (logical + 1) * block_size:
                earlier = (
                    (s, logical) for s in range(seq) if logical in needed[s] and lens[s] >= (logical + 1) * block_size
                )
                owners[seq, logical] = next(earlier, (seq, logical))
    return owners


def _window_start(case: Case) -> int:
    if Hazard.HIGH_POOL not in case.hazards:
        return 0
    smallest = min(
        math.prod(case.pool_format.k_shape(1, case.problem)), math.prod(case.pool_format.v_shape(1, case.problem))
    )
    return -(-HIGH_ELEMENTS // smallest)
