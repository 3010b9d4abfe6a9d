"""Requests as they came in somewhere: their times, lengths and, where known, which of their prefixes are equal."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .errors import UsageError

MOONCAKE_BLOCK = 512  # tokens that one hash id of the Mooncake trace stands for
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True)
class TraceRequest:
    """One request.

    Args:
        arrival_s: seconds since the first one.
        prompt_len, output_len: tokens, at least 1 each.
        hash_ids: for each 512 tokens of the prompt, the last ones included, a number that equal prefixes share;
            empty where unknown: the prompt then shares nothing.
        hash_tokens: what a hash id stands for, if not 512.
    """

    arrival_s: float
    prompt_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    hash_tokens: int = MOONCAKE_BLOCK

    @property
    def total_len(self) -> int:
        """Tokens of prompt and output."""
        return self.prompt_len + self.output_len

    def prompt(self, number: int) -> npt.NDArray[np.int64]:
        """Token ids, [prompt_len]: equal where hash ids are equal, and nowhere else.

        Args:
            number: of the request, below 2^31 / 2^17: makes a prompt without hash ids unlike all others.
        """
        if self.hash_ids:
            ids = np.asarray(self.hash_ids, np.int64)
            return (ids[:, None] * self.hash_tokens + np.arange(self.hash_tokens)).ravel()[: self.prompt_len]
        tokens = np.arange(self.prompt_len, dtype=np.int64)
        tokens[0] = number
        return tokens


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival.

    Args:
        name: of the trace, for people.
        requests: at least one.
    """

    name: str
    requests: tuple[TraceRequest, ...]

    def first(self, count: int | None) -> Trace:
        """The first `count` requests; all with None."""
        return self if count is None else Trace(self.name, self.requests[:count])

    def scaled(self, factor: int) -> Trace:
        """All lengths divided by `factor`, a divisor of 512, and rounded up: the same shape for a quick replay."""
        scaled = (
            TraceRequest(
                r.arrival_s, -(-r.prompt_len // factor), -(-r.output_len // factor), r.hash_ids, r.hash_tokens // factor
            )
            for r in self.requests
        )
        return Trace(f"{self.name} / {factor}", tuple(scaled))

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and output."""
        return max(request.total_len for request in self.requests)

    @property
    def unlimited_hit_rate(self) -> float:
        """Share of all 512-token blocks of prompts that an earlier prompt had before, in a cache without limit."""
        seen: set[int] = set()
        hits = total = 0
        for request in self.requests:
            hits += next((i for i, h in enumerate(request.hash_ids) if h not in seen), len(request.hash_ids))
            total += len(request.hash_ids)
            seen.update(request.hash_ids)
        return hits / total if total else 0.0


def load_trace(path: Path) -> Trace:
    """Reads an Azure 2023 trace (`.csv`) or a Mooncake trace (`.jsonl`).

    Raises:
        UsageError: no such file, or a line that is not of the format that its name says.
    """
    readers = {".csv": _azure_row, ".jsonl": _mooncake_row}
    reader = readers.get(path.suffix)
    if reader is None:
        raise UsageError(f"{path}: a trace is an Azure .csv or a Mooncake .jsonl file")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the trace {path}: {error.strerror}") from error
    rows: Sequence[object] = list(csv.DictReader(text.splitlines())) if path.suffix == ".csv" else text.splitlines()
    requests = []
    for number, row in enumerate(rows, 1):
        try:
            requests.append(reader(row))
        except (KeyError, TypeError, ValueError) as error:
            wanted = ", ".join(_AZURE_COLUMNS if path.suffix == ".csv" else _MOONCAKE_KEYS)
            raise UsageError(f"{path}: entry {number} is no request with {wanted}: {error!r}") from error
    if not requests:
        raise UsageError(f"{path} has no requests")
    requests.sort(key=lambda request: request.arrival_s)
    start = requests[0].arrival_s
    shifted = (TraceRequest(r.arrival_s - start, r.prompt_len, r.output_len, r.hash_ids) for r in requests)
    return Trace(path.stem, tuple(shifted))


def _azure_row(row: object) -> TraceRequest:
    time, prompt, output = (row[name] for name in _AZURE_COLUMNS)  # type: ignore[index]
    arrival = datetime.fromisoformat(time[:26]).timestamp()  # Python reads six of the seven digits
    return _request(arrival, int(prompt), int(output), ())


def _mooncake_row(row: object) -> TraceRequest:
    entry = json.loads(str(row))
    time, prompt, output, ids = (entry[name] for name in _MOONCAKE_KEYS)
    if len(ids) != -(-prompt // MOONCAKE_BLOCK):
        raise ValueError(f"{len(ids)} hash ids for {prompt} tokens")
    return _request(time / 1e3, int(prompt), int(output), tuple(int(each) for each in ids))


def _request(arrival_s: float, prompt: int, output: int, ids: tuple[int, ...]) -> TraceRequest:
    if prompt < 1 or output < 1:
        raise ValueError(f"a prompt of {prompt} and an output of {output} tokens")
    return TraceRequest(arrival_s, prompt, output, ids)
