"""Tokens of some requests, kept until somebody takes them, whoever ran the steps that made them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .plan import StepOutput
from .sequence import Sequence


class TokenStream:
    """What one caller of `DecodeLoop.stream` has still to see.

    Steps serve everybody, so another stream, or `DecodeLoop.run`, may run the ones that make these tokens. A request
    is known by its sequence and not by its id, which is free for another request as soon as this one has ended.

    Args:
        sequences: live ones.

    Attributes:
        tokens: (request id, token) not yet taken, oldest first.
    """

    def __init__(self, sequences: Iterable[Sequence]) -> None:
        self.tokens: deque[tuple[str, int]] = deque()
        self._sequences = {sequence.request_id: sequence for sequence in sequences}

    @property
    def is_live(self) -> bool:
        """Whether more tokens may come."""
        return any(sequence.finished is None for sequence in self._sequences.values())

    def take(self, output: StepOutput) -> None:
        """Keeps what a step made for these requests; to be told of every step."""
        mine, last = self._sequences, {id(finished) for finished in output.finished}
        for request_id, token in zip(output.request_ids.tolist(), output.tokens.tolist(), strict=True):
            sequence = mine.get(request_id)
            if sequence is not None and (sequence.finished is None or id(sequence.finished) in last):
                self.tokens.append((request_id, token))
