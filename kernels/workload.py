"""What varies at run time: the lengths in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .bounds import Bounds


@dataclass(frozen=True)
class Workload:
    """The lengths of one batch.

    Args:
        context_lens: tokens of each sequence, its query tokens included; 0 is a padded row.
        query_lens: query tokens of each sequence (empty: one each, none for a sequence of length 0
            has no meaning, so a length-0 sequence still has its one query row, with no visible key).
        name: how it was made, e.g. `uniform`, `ragged`.

    Raises:
        ValueError: no sequence, a negative length, or more query tokens than context.
    """

    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...] = ()
    name: str = "explicit"

    def __post_init__(self) -> None:
        if not self.query_lens:
            object.__setattr__(self, "query_lens", (1,) * len(self.context_lens))
        if not self.context_lens or len(self.context_lens) != len(self.query_lens):
            raise ValueError(
                f"a workload needs as many query lengths as context lengths and at least one sequence: "
                f"{len(self.query_lens)} and {len(self.context_lens)} given"
            )
        for context_len, query_len in zip(self.context_lens, self.query_lens, strict=True):
            if context_len < 0 or query_len < 0 or query_len > max(context_len, 1):
                raise ValueError(
                    f"context_len={context_len} with query_len={query_len}: lengths must not be negative, and "
                    "the query tokens are part of the context"
                )

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        """Query tokens in the batch."""
        return sum(self.query_lens)

    @property
    def total_context(self) -> int:
        """Sum of the context lengths, in tokens."""
        return sum(self.context_lens)

    @property
    def bounds(self) -> Bounds:
        """The tightest bounds of this batch."""
        return Bounds(self.num_seqs, max(1, *self.context_lens), max(1, *self.query_lens))

    def num_blocks(self, block_size: int) -> int:
        """Blocks that hold the contexts, without sharing."""
        return sum(-(-n // block_size) for n in self.context_lens)

    @classmethod
    def uniform(cls, num_seqs: int, context_len: int) -> Workload:
        """`num_seqs` sequences of `context_len` tokens each."""
        return cls((context_len,) * num_seqs, name="uniform")

    @classmethod
    def ragged(cls, num_seqs: int, max_context_len: int, seed: int = 0) -> Workload:
        """Lengths log-uniform in [max/16, max], the first one the maximum: what a serving batch looks like."""
        rng = np.random.default_rng(seed)
        low = max(1.0, max_context_len / 16)
        lens = np.exp(rng.uniform(np.log(low), np.log(max_context_len), num_seqs)).astype(int)
        lens[0] = max_context_len
        return cls(tuple(int(n) for n in lens), name="ragged")

    @classmethod
    def one_long(cls, num_seqs: int, max_context_len: int) -> Workload:
        """One sequence of the maximal length among ones of a sixteenth: the worst load balance."""
        short = max(1, max_context_len // 16)
        return cls((max_context_len, *(short,) * (num_seqs - 1)), name="one_long")

    @classmethod
    def named(cls, name: str, num_seqs: int, max_context_len: int, seed: int = 0) -> Workload:
        """The distribution called `name`: `uniform`, `ragged` or `one_long`.

        Raises:
            ValueError: another name.
        """
        if name == "ragged":
            return cls.ragged(num_seqs, max_context_len, seed)
        makers = {"uniform": cls.uniform, "one_long": cls.one_long}
        if name not in makers:
            raise ValueError(f"unknown workload {name!r}: use one of uniform, ragged, one_long")
        return makers[name](num_seqs, max_context_len)

    @classmethod
    def from_trace(cls, lengths: Sequence[int], num_seqs: int, max_context_len: int, seed: int = 0) -> Workload:
        """`num_seqs` lengths drawn from `lengths` (tokens, e.g. of a request trace), cut at the maximum."""
        if not lengths:
            raise ValueError("the trace holds no lengths: give at least one")
        drawn = np.random.default_rng(seed).choice(np.asarray(lengths), num_seqs)
        return cls(tuple(int(min(max(n, 1), max_context_len)) for n in drawn), name="trace")
