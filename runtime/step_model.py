"""What the decode loop asks of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from .block_memory import BlockMemory
from .limits import BatchLimits
from .plan import StepPlan


@dataclass(frozen=True, eq=False)
class Forward:
    """What a model made of a step.

    Args:
        logits: [num_sampled, vocab_size], any float dtype: one row for each sequence that samples, in order.
        model_ns: time in the model, attention and cache kernels apart, in nanoseconds.
        kernel_ns: time in those kernels.
    """

    logits: torch.Tensor
    model_ns: int
    kernel_ns: int


class StepModel(Protocol):
    """A model on a paged cache, as the loop needs it.

    Attributes:
        cache: its pools.
        limits: the largest step that it takes.
        vocab_size: token ids are 0 to vocab_size - 1.
    """

    limits: BatchLimits
    vocab_size: int

    @property
    def cache(self) -> BlockMemory:
        """Its pools."""
        ...

    def forward(self, plan: StepPlan) -> Forward:
        """Runs a step: stores K and V of its tokens, attends, and returns the logits of those that are sampled."""
        ...
