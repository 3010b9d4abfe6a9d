"""What the host knows before a launch, and the one function that sorts it into buckets."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import require_positive

MIN_CONTEXT_BUCKET = 128  # below this a launch costs more than the attention, on every device


@dataclass(frozen=True, order=True)
class Bounds:
    """Upper limits of one launch: all that may be known before a graph replay.

    Args:
        max_num_seqs: most sequences in the batch.
        max_context_len: longest context, in tokens, query tokens included.
        max_query_len: most query tokens of one sequence (1 is decode).
    """

    max_num_seqs: int
    max_context_len: int
    max_query_len: int = 1

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_context_len", "max_query_len"):
            require_positive(name, getattr(self, name))

    @property
    def max_num_tokens(self) -> int:
        """Most query tokens in the batch."""
        return self.max_num_seqs * self.max_query_len


@dataclass(frozen=True, order=True)
class Bucket:
    """A class of bounds that share a winner. Its fields are the largest bounds that fall into it."""

    max_num_seqs: int
    max_context_len: int
    max_query_len: int = 1

    @property
    def bounds(self) -> Bounds:
        """The largest bounds of this bucket: those a winner is tuned at."""
        return Bounds(self.max_num_seqs, self.max_context_len, self.max_query_len)

    @property
    def key(self) -> str:
        """Canonical identity, e.g. `n8-c4096`; query length follows where it is above 1."""
        query = f"-q{self.max_query_len}" if self.max_query_len > 1 else ""
        return f"n{self.max_num_seqs}-c{self.max_context_len}{query}"


def bucket_of(bounds: Bounds) -> Bucket:
    """The bucket of `bounds`: each limit rounded up to a power of two, context to at least 128.

    The only function that does so: tuning and run-time dispatch both call it. It is idempotent on a
    bucket's own bounds, and monotonic in each limit.
    """
    return Bucket(
        max_num_seqs=_next_power_of_two(bounds.max_num_seqs),
        max_context_len=max(MIN_CONTEXT_BUCKET, _next_power_of_two(bounds.max_context_len)),
        max_query_len=_next_power_of_two(bounds.max_query_len),
    )


def _next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
