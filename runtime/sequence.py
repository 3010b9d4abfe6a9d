"""What a caller asks for and what it gets back."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import IntArray
from .errors import InvalidRequest
from .prefix_events import DEFAULT_NAMESPACE, Namespace
from .prefix_lease import Lease
from .sampling import SamplingParams
from .validation import INT64_MAX, require_tokens, token_ids, whole_number

MAX_STOP_TOKENS = 8  # columns of the stop table: it is compared with every sampled token at once

MAX_SAMPLES = 1 << 14  # each is live from the start: a count out of a stray number must not fill the host's memory


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
        n: samples to draw, at most 16384, which share the prompt's blocks. The first has this request's id, the
            others `id#1`, `id#2` and so on, with seeds one, two and so on above its own.
        logprobs: whether to return the log probability of each token under the model, temperature aside.
        namespace: within which a prefix cache shares its blocks; None shares nothing.

    Raises:
        InvalidRequest: empty id or prompt, a count below 1, a negative token, too many stop tokens or samples, a
            namespace that cannot be looked up, or a value of another type.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: bool = False
    namespace: Namespace | None = DEFAULT_NAMESPACE

    def __post_init__(self) -> None:
        who = f"request {self.request_id!r}"
        if not isinstance(self.request_id, str):
            raise InvalidRequest(f"{who} has an id of type {type(self.request_id).__name__}: expected a str")
        if not self.request_id:
            raise InvalidRequest(f"{who} has an empty id: give a name that is unique among live requests")
        if not isinstance(self.logprobs, (bool, np.bool_)):
            raise InvalidRequest(f"{who} has logprobs={self.logprobs!r}: expected True or False")
        _require_namespace(who, self.namespace)
        if not isinstance(self.sampling, SamplingParams):
            raise InvalidRequest(f"{who} has sampling={self.sampling!r}: expected SamplingParams")
        for name in ("prompt", "stop_token_ids"):
            object.__setattr__(self, name, token_ids(who, name, getattr(self, name)))
        most = whole_number(f"{who} has max_new_tokens", self.max_new_tokens, 1, "most tokens to generate")
        object.__setattr__(self, "max_new_tokens", most)
        object.__setattr__(self, "n", whole_number(f"{who} has n", self.n, 1, "samples to draw"))
        if self.n > MAX_SAMPLES:
            raise InvalidRequest(f"{who} has n={self.n}: at most {MAX_SAMPLES} samples; add it several times")
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

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """Ids of its samples."""
        return tuple(map(self._sample_id, range(self.n)))

    def _sample_id(self, number: int) -> str:
        return f"{self.request_id}#{number}" if number else self.request_id

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest if a prompt or stop token is outside the vocabulary."""
        for name, tokens in (("prompt", self.prompt), ("stop_token_ids", self.stop_token_ids)):
            require_tokens(self.request_id, name, tokens, vocab_size)

    def sample(self, number: int, seed: int | None) -> Request:
        """The request for one of its samples."""
        params = self.sampling
        if seed is not None and params.temperature > 0:
            params = replace(params, seed=(seed + number) & INT64_MAX)
        return self.with_changes(request_id=self._sample_id(number), sampling=params, n=1)

    def with_changes(self, **changes: Any) -> Request:
        """A copy with other values, which must be valid: tokens are not looked at again, one by one."""
        other = copy(self)
        for name, value in changes.items():
            object.__setattr__(other, name, value)
        return other


def _require_namespace(who: str, namespace: Any) -> None:
    """Raises InvalidRequest unless a prefix cache can look `namespace` up."""
    try:
        hash(namespace)  # a Namespace is as hashable as what is in it
        usable = namespace is None or isinstance(namespace, Namespace)
    except TypeError:
        usable = False
    if not usable:
        raise InvalidRequest(f"{who} has namespace={namespace!r}: expected a Namespace of two strings, or None")


class Family:
    """Sequences that descend from one request, and so may share blocks: samples, forks, beams.

    Attributes:
        members: the live ones.
    """

    def __init__(self) -> None:
        self.members: list[Sequence] = []


@dataclass(eq=False)
class Sequence:
    """A live request. While it runs its tokens are in a row; while it waits they are here.

    Args:
        request: what was asked.
        seed: seed of its random numbers: the request's own, or one drawn when it was added.
        tokens: prompt and output so far, as of the last time it left a row.
        family: others with which it may share blocks.
        row: its row while it runs, else -1.
        num_preemptions: times that it lost its row.
        logprobs: fp32: log probabilities of the output so far, if asked for.
        parked: where its K and V are in host memory, if they were swapped out.
        finished: how it ended, once it has.
    """

    request: Request
    seed: int
    tokens: IntArray
    family: Family | None = None
    row: int = -1
    num_preemptions: int = 0
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    parked: Parked | None = None
    finished: Finished | None = None

    @classmethod
    def of(cls, request: Request, family: Family | None = None, tokens: IntArray | None = None) -> Sequence:
        """A new sequence, not yet running, with the prompt or with `tokens`."""
        seed = request.sampling.seed
        first = np.array(request.prompt, np.int64) if tokens is None else tokens
        return cls(request, secrets.randbits(63) if seed is None else seed, first, family)

    @property
    def request_id(self) -> str:
        """The caller's name for it."""
        return self.request.request_id

    @property
    def prompt_len(self) -> int:
        """Tokens that it began with."""
        return len(self.request.prompt)

    @property
    def max_total_tokens(self) -> int:
        """Prompt and longest output."""
        return self.request.max_total_tokens


@dataclass(frozen=True, eq=False)
class Parked:
    """K and V of a sequence that waits, in host memory.

    Args:
        host_blocks: int64: where, in the order of its tokens; the first ones may have been behind the window.
        first_block: blocks before them that were given back.
        num_tokens: tokens that they hold.
        lease: on no block, but on the namespace of the prefix cache as it was: what was computed before an
            invalidation is not found after it. None shares nothing.
    """

    host_blocks: IntArray
    first_block: int
    num_tokens: int
    lease: Lease | None = None


@dataclass(frozen=True)
class Finished:
    """A request that ended.

    Args:
        request_id: the caller's name.
        tokens: output, without the prompt; after `STOP` the last one is the stop token.
        reason: why it ended.
        num_preemptions: times that it lost its blocks: the pool was full, a step failed, or `preempt` took them.
        logprobs: log probability of each token, if the request asked; NaN where the engine gave none.
    """

    request_id: str
    tokens: tuple[int, ...]
    reason: FinishReason
    num_preemptions: int
    logprobs: tuple[float, ...] | None = None


def branch(
    source: Sequence,
    known: IntArray,
    new_id: str,
    position: int | None,
    tokens: Iterable[int],
    sampling: SamplingParams | None,
    max_new_tokens: int | None,
) -> Sequence:
    """A new sequence with the first `position` of the `known` tokens of `source`, and `tokens` after them.

    Raises:
        InvalidRequest: see `Scheduler.fork`.
    """
    who = f"fork {new_id!r} of {source.request_id!r}"
    position = known.size if position is None else whole_number(f"{who} has position", position, 1, "tokens to share")
    if position > known.size:
        raise InvalidRequest(f"{who} has position={position}: {known.size} tokens are known")
    more = token_ids(who, "tokens", tokens)
    prompt = source.request.prompt[:position]
    most = source.request.max_new_tokens if max_new_tokens is None else max_new_tokens
    request = Request(
        new_id, prompt, most, source.request.sampling if sampling is None else sampling,
        source.request.stop_token_ids, logprobs=source.request.logprobs, namespace=source.request.namespace,
    )  # fmt: skip
    if position + len(more) >= request.max_total_tokens:
        raise InvalidRequest(
            f"{who} begins with {position + len(more) - len(prompt)} tokens of output and may have "
            f"{request.max_new_tokens}: nothing is left to generate"
        )
    if source.family is None:
        source.family = Family()
        source.family.members.append(source)
    return Sequence.of(request, source.family, np.concatenate((known[:position], np.array(more, np.int64))))
