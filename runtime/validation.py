"""What callers hand in, turned into plain Python values before anything is queued, or refused with its name."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from .errors import InvalidRequest

INT64_MAX = int(np.iinfo(np.int64).max)
MAX_TOKEN_ID = int(np.iinfo(np.int32).max)  # rows keep tokens as int32


def whole_number(name: str, value: Any, lowest: int, hint: str) -> int:
    """`value` as an int from `lowest` to 2^63 - 1; integers of numpy and torch are taken, booleans are not.

    Raises:
        InvalidRequest: it is no integer, or outside that range.
    """
    number = _index(value)
    if number is None or not lowest <= number <= INT64_MAX:
        raise InvalidRequest(f"{name}={value!r} must be an integer from {lowest} to 2^63 - 1 ({hint})")
    return number


def count_of(name: str, value: Any, lowest: int = 0) -> int:
    """`value` as an int of at least `lowest`; integers of numpy and torch are taken, booleans are not.

    Raises:
        ValueError: it is no integer, or below `lowest`.
    """
    number = _index(value)
    if number is None or number < lowest:
        raise ValueError(f"{name}={value!r} must be an integer of at least {lowest}")
    return number


def real_number(name: str, value: Any, hint: str) -> float:
    """`value` as a finite float.

    Raises:
        InvalidRequest: it is no real number, or not finite as a double.
    """
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise InvalidRequest(f"{name}={value!r} must be a finite number ({hint})")


def token_ids(who: str, name: str, values: Any) -> tuple[int, ...]:
    """`values` as a tuple of token ids: a sequence, or a one-dimensional array or tensor, of integers.

    Raises:
        InvalidRequest: text, no iterable, or a token that is no integer from 0 to 2^31 - 1.
    """
    if hasattr(values, "tolist"):
        values = values.tolist()  # one copy, instead of one small tensor for each token
    if isinstance(values, (str, bytes, bytearray, Mapping)) or not hasattr(values, "__iter__"):
        raise InvalidRequest(
            f"{who} has {name} of type {type(values).__name__}: expected a sequence of token ids, such as a tokenizer "
            "makes of text"
        )
    tokens = tuple(values)
    if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) <= MAX_TOKEN_ID:
        return tokens  # the usual case, thirty times as fast as one by one
    return tuple(_token(who, name, value) for value in tokens)


def require_type(name: str, value: Any, kind: type, error: type[Exception] = InvalidRequest) -> None:
    """Raises `error` if `value` is no `kind`."""
    if not isinstance(value, kind):
        raise error(f"{name}={value!r} is of type {type(value).__name__}: expected a {kind.__name__}")


def require_tokens(request_id: str, name: str, tokens: Any, vocab_size: int) -> None:
    """Raises InvalidRequest if one of `tokens` is outside the vocabulary."""
    largest = max(tokens, default=0)
    if largest >= vocab_size:
        raise InvalidRequest(
            f"request {request_id!r} has token {largest} in {name}: the vocabulary has ids 0 to {vocab_size - 1}"
        )


def _token(who: str, name: str, value: Any) -> int:
    number = _index(value)
    if number is None:
        raise InvalidRequest(f"{who} has token {value!r} in {name}: token ids are integers, in one dimension")
    if number < 0:
        raise InvalidRequest(f"{who} has token {number} in {name}: token ids are not negative")
    if number > MAX_TOKEN_ID:
        raise InvalidRequest(f"{who} has token {number} in {name}: token ids are below 2^31")
    return number


def _index(value: Any) -> int | None:
    """`value` as an int, or None if it is none."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError):
        return None
