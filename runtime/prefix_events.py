"""What a prefix cache tells about itself: counters, and events from which a router can follow its content."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .arrays import IntArray

NO_BLOCK = -1


@dataclass(frozen=True)
class Namespace:
    """Prefixes are shared within a namespace only.

    Args:
        tenant: a salt that keeps tenants apart: nobody learns from timing what another one asked.
        adapter: what else the K and V depend on beside the tokens: a LoRA adapter, the digest of an image.
    """

    tenant: str = ""
    adapter: str = ""


DEFAULT_NAMESPACE = Namespace()


@dataclass(frozen=True, eq=False)
class Stored:
    """Blocks entered the cache, behind `parent` (-1: at the start). `tokens` are theirs, int32 packed.

    The namespace is None for those of a sequence that ran when its own was invalidated: nobody finds them.
    """

    namespace: Namespace | None
    parent: int
    blocks: IntArray
    tokens: bytes


@dataclass(frozen=True, eq=False)
class Evicted:
    """Blocks left the cache; each was the last of its chain when it left."""

    blocks: IntArray


@dataclass(frozen=True)
class Hit:
    """A sequence took `num_tokens` of its `num_queried` tokens from the cache."""

    namespace: Namespace
    num_tokens: int
    num_queried: int


@dataclass(frozen=True)
class Invalidated:
    """Nothing stored in the namespace so far is found any more; its blocks leave later, as others do."""

    namespace: Namespace


Event = Stored | Evicted | Hit | Invalidated


@dataclass
class PrefixStatistics:
    """Counts since the start.

    Args:
        queries: sequences that looked for a prefix and were admitted.
        queried_tokens: their tokens.
        hit_tokens: those that came from the cache, copied ones included.
        copied_tokens: those of them that came by copying a block of which only a part fits.
        stored_blocks, evicted_blocks: blocks that entered and left.
        duplicate_blocks: blocks that a sequence computed although the cache had them, as two sequences computed
            the same at one time; the sequence is given the cache's.
    """

    queries: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    copied_tokens: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    duplicate_blocks: int = 0

    def count_query(self, queried: int, hit: int, copied: int) -> None:
        """Counts a sequence of `queried` tokens; none for one that brings its own K and V."""
        self.queries += queried > 0
        self.queried_tokens += queried
        self.hit_tokens += hit
        self.copied_tokens += copied

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that came from the cache; 0 before the first query."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


class EventLog:
    """Keeps the newest events until somebody takes them.

    Args:
        capacity: most events kept; 0 records nothing.
    """

    def __init__(self, capacity: int) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._capacity = capacity
        self._lost = 0

    def __bool__(self) -> bool:
        return self._capacity > 0

    def add(self, event: Event) -> None:
        """Records an event; the oldest gives way."""
        self._lost += len(self._events) == self._capacity
        self._events.append(event)

    def take(self) -> tuple[tuple[Event, ...], int]:
        """The events since the last call, and how many older ones were lost: after a loss, read the cache anew."""
        events, lost = tuple(self._events), self._lost
        self._events.clear()
        self._lost = 0
        return events, lost
