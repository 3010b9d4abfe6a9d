"""How a scheduler batches."""

from __future__ import annotations

from dataclasses import dataclass

from .validation import count_of


@dataclass(frozen=True)
class SchedulerConfig:
    """How to batch.

    Args:
        token_budget: most query tokens of one step; longer prompts run in chunks. At least the rows of the tables,
            so that every running sequence can decode in every step.
        watermark_blocks: blocks that admission leaves free for the growth of those that run. Not kept when nothing
            runs, so that it locks nobody out.
        vocab_size: for checking tokens; None checks less.
        debug: records what each step reads, so that `check()` proves that nothing of it was recycled too early.
        window: tokens that the widest layer attends to, the query's own included, if no layer attends to all: blocks
            behind it are given back.

    Raises:
        ValueError: a budget, vocabulary or window below 1, or a negative watermark.
    """

    token_budget: int = 2048
    watermark_blocks: int = 0
    vocab_size: int | None = None
    debug: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        count_of("token_budget", self.token_budget, 1)
        count_of("watermark_blocks", self.watermark_blocks)
        for name in ("vocab_size", "window"):
            if getattr(self, name) is not None:
                count_of(name, getattr(self, name), 1)
