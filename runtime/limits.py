"""The largest step that buffers, tables and plans are made for."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.problem import require_positive


@dataclass(frozen=True)
class BatchLimits:
    """The largest step that buffers are made for.

    Args:
        max_num_seqs: sequences that run at once.
        max_context_len: tokens of one sequence, prompt and output.
        token_budget: query tokens of one step; longer prompts run in chunks. At least `max_num_seqs`.

    Raises:
        ValueError: a limit below 1, or a budget in which not every sequence could decode.
    """

    max_num_seqs: int = 16
    max_context_len: int = 2048
    token_budget: int = 512

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_context_len", "token_budget"):
            require_positive(name, getattr(self, name))
        if self.token_budget < self.max_num_seqs:
            raise ValueError(
                f"token_budget={self.token_budget} is below max_num_seqs={self.max_num_seqs}: raise it, or some "
                "sequences would starve"
            )
