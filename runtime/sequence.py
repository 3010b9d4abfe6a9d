"""What a caller asks for and what it gets back."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from .arrays import IntArray
from .errors import InvalidRequest
from .sampling import SamplingParams
from .validation import token_ids, whole_number

MAX_STOP_TOKENS = 8  # columns of the stop table: it is compared with every sampled token at once


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # it sampled one of its stop tokens, which is the last of its output
    LENGTH = "length"  # it reached `max_new_tokens`
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    Args:
        request_id: the caller's name for it, unique among live requests.
        prompt: token ids, at least one: a sequence, or a one-dimensional array or tensor of integers.
        max_new_tokens: most tokens to generate, at least 1.
        sampling: how to choose them.
        stop_token_ids: tokens that end the output, at most 8.

    Raises:
        InvalidRequest: empty prompt, a count below 1, a negative token, too many stop tokens, or a value of another
            type.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        who = f"request {self.request_id!r}"
        if not isinstance(self.request_id, str):
            raise InvalidRequest(f"{who} has an id of type {type(self.request_id).__name__}: expected a str")
        if not isinstance(self.sampling, SamplingParams):
            raise InvalidRequest(f"{who} has sampling={self.sampling!r}: expected SamplingParams")
        for name in ("prompt", "stop_token_ids"):
            object.__setattr__(self, name, token_ids(who, name, getattr(self, name)))
        most = whole_number(f"{who} has max_new_tokens", self.max_new_tokens, 1, "most tokens to generate")
        object.__setattr__(self, "max_new_tokens", most)
        if not self.prompt:
            raise InvalidRequest(f"{who} has an empty prompt: give at least one token, such as the model's BOS")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequest(f"{who} has {len(self.stop_token_ids)} stop tokens: at most {MAX_STOP_TOKENS}")

    @property
    def max_total_tokens(self) -> int:
        """Prompt and longest output."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def max_stored_tokens(self) -> int:
        """Most tokens whose K and V are ever stored: the last sampled token is not fed back."""
        return self.max_total_tokens - 1

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest if a prompt or stop token is outside the vocabulary."""
        for name, tokens in (("prompt", self.prompt), ("stop_token_ids", self.stop_token_ids)):
            if tokens and max(tokens) >= vocab_size:
                raise InvalidRequest(
                    f"request {self.request_id!r} has token {max(tokens)} in {name}: the vocabulary has ids "
                    f"0 to {vocab_size - 1}"
                )


@dataclass(eq=False)
class Sequence:
    """A live request. While it runs its tokens are in a row; while it waits they are here.

    Args:
        request: what was asked.
        seed: seed of its random numbers: the request's own, or one drawn when it was added.
        tokens: prompt and output so far, as of the last time it left a row.
        row: its row while it runs, else -1.
        num_preemptions: times that it lost its row.
    """

    request: Request
    seed: int
    tokens: IntArray
    row: int = -1
    num_preemptions: int = 0

    @classmethod
    def of(cls, request: Request) -> Sequence:
        """A new sequence, not yet running."""
        seed = request.sampling.seed
        return cls(request, secrets.randbits(63) if seed is None else seed, np.array(request.prompt, np.int64))


@dataclass(frozen=True)
class Finished:
    """A request that ended.

    Args:
        request_id: the caller's name.
        tokens: output, without the prompt; after `STOP` the last one is the stop token.
        reason: why it ended.
        num_preemptions: times that it was computed anew because the pool was full.
    """

    request_id: str
    tokens: tuple[int, ...]
    reason: FinishReason
    num_preemptions: int
