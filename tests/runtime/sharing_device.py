"""A device that stores tokens instead of K and V, for a scheduler with a prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedtune.runtime.plan import StepPlan

NUM_BLOCKS, NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE, VOCAB = 14, 4, 9, 4, 3
NUM_HOST_BLOCKS = 12


def next_token(stored: npt.NDArray[np.int64]) -> int:
    """The token that follows what is stored."""
    value = 7
    for token in stored.tolist():
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


def continuation(prompt: tuple[int, ...], length: int, salt: int = 0) -> tuple[int, ...]:
    """What a sequence alone gets."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(np.array(tokens) + salt))
    return tuple(tokens[len(prompt) :])


class Device:
    """Slots that hold tokens, and the last token that each row sampled. Its log probability is minus its position."""

    def __init__(self, catch_up: Callable[[], None], salts: dict[str, int]) -> None:
        self.catch_up, self.salts = catch_up, salts
        self.blocks: npt.NDArray[np.int64] = np.full((NUM_BLOCKS, BLOCK_SIZE), -1)
        self.host: npt.NDArray[np.int64] = np.full((NUM_HOST_BLOCKS, BLOCK_SIZE), -1)
        self.last: npt.NDArray[np.int64] = np.full(NUM_ROWS, -1)

    def run(self, plan: StepPlan) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Copies blocks, writes the step's tokens, and samples."""
        if plan.copies is not None:
            source, destination = plan.copies.numpy().T
            self.blocks[destination] = self.blocks[source]
        inputs = plan.input_ids.numpy().copy()
        inputs[inputs < 0] = self.last[np.repeat(plan.rows, plan.query_lens)[inputs < 0]]
        salts = np.array([self.salts[name] for name in plan.request_ids])
        self.blocks.reshape(-1)[plan.slot_mapping.numpy()] = inputs + np.repeat(salts, plan.query_lens)
        positions = plan.positions.numpy()[plan.sample_index.numpy()]
        counts = plan.samples.astype(int) if plan.num_samples is None else plan.num_samples
        tables = np.repeat(plan.block_table.numpy(), counts, axis=0)
        ends = zip(tables, (positions + 1).tolist(), strict=True)
        sampled = np.array([next_token(self.read(table, end)) for table, end in ends], np.int64)
        self.last[plan.rows[plan.samples]] = sampled[np.cumsum(counts)[plan.samples] - 1]
        return sampled, -(positions + 1).astype(np.float32)

    def reads(self, plan: StepPlan) -> list[npt.NDArray[np.int64]]:
        """What the sequences of a step read, drafts aside, which may be wrong."""
        drafts = np.zeros_like(plan.ends) if plan.num_samples is None else np.maximum(plan.num_samples - 1, 0)
        ends = (plan.ends - drafts).tolist()
        return [self.read(table, end) for table, end in zip(plan.block_table.numpy(), ends, strict=True)]

    block_bytes = 1

    def save(self, blocks: Any, host_blocks: Any) -> None:
        self.catch_up()  # moves are behind the steps launched before, as on one stream
        self.host[host_blocks] = self.blocks[blocks]

    def load(self, host_blocks: Any, blocks: Any) -> None:
        self.catch_up()
        self.blocks[blocks] = self.host[host_blocks]

    def read(self, table: npt.NDArray[Any], context_len: int) -> npt.NDArray[np.int64]:
        """What is stored of a sequence."""
        stored: npt.NDArray[np.int64] = self.blocks[table[: -(-context_len // BLOCK_SIZE)]].reshape(-1)[:context_len]
        return stored
