"""How a scheduler batches."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import RequestTooLarge
from .sequence import Request
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
        max_context_len: most tokens of one sequence, prompt and output, forks included; None asks for blocks alone.

    Raises:
        ValueError: a budget, vocabulary, window or length below 1, or a negative watermark.
    """

    token_budget: int = 2048
    watermark_blocks: int = 0
    vocab_size: int | None = None
    debug: bool = False
    window: int | None = None
    max_context_len: int | None = None

    def __post_init__(self) -> None:
        count_of("token_budget", self.token_budget, 1)
        count_of("watermark_blocks", self.watermark_blocks)
        for name in ("vocab_size", "window", "max_context_len"):
            if getattr(self, name) is not None:
                count_of(name, getattr(self, name), 1)

    def require_short(self, request: Request) -> None:
        """Raises RequestTooLarge if a request may grow beyond `max_context_len`."""
        longest = self.max_context_len
        if longest is not None and request.max_total_tokens > longest:
            raise RequestTooLarge(
                f"request {request.request_id!r}: {len(request.prompt)} prompt and up to {request.max_new_tokens} new "
                f"tokens exceed max_context_len={longest}: shorten it, or raise the limit"
            )
