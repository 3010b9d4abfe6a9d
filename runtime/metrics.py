"""A snapshot of pool and queue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Snapshot:
    """Where the blocks are and what the queue does; `free + referenced + cached + fenced + reserved = num_blocks`.

    Args:
        num_blocks, block_size: the pool.
        free, referenced, fenced, reserved: blocks in each state.
        cached: blocks that only the prefix cache keeps, for later sequences.
        live_tokens: tokens of running sequences whose K and V are in the pool, or will be when the steps in
            flight have ended.
        running, waiting: requests.
        steps_in_flight: steps begun and not ended.
        preemptions: sequences that have lost their blocks since the start.
        finished: requests that have ended since the start, cancelled ones included.
    """

    num_blocks: int
    block_size: int
    free: int
    referenced: int
    fenced: int
    reserved: int
    cached: int
    live_tokens: int
    running: int
    waiting: int
    steps_in_flight: int
    preemptions: int
    finished: int

    @property
    def waste_tokens(self) -> int:
        """Slots of referenced blocks that hold no token: the unfilled ends of last blocks."""
        return self.referenced * self.block_size - self.live_tokens

    @property
    def utilisation(self) -> float:
        """Share of the slots of referenced blocks that hold a token; 1 where none is referenced."""
        slots = self.referenced * self.block_size
        return self.live_tokens / slots if slots else 1.0
