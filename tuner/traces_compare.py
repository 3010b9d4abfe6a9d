"""Whether a generated trace stands in for the public one: the same figures of a replay, side by side."""

from __future__ import annotations

from dataclasses import dataclass

from .replay import ReplayResult

TOLERANCE = 0.10  # relative
PREEMPTION_FLOOR = 0.005  # a request: where fewer than that change, their number is chance
HIT_RATE_FLOOR = 0.005  # Azure prompts share nothing: what hits there is a preempted sequence that finds itself again


@dataclass(frozen=True)
class Figure:
    """One figure of two replays.

    Args:
        name: of the figure.
        file, generated: its values.
        floor: differences up to this are no difference, whatever they are relative to.
    """

    name: str
    file: float
    generated: float
    floor: float = 0.0

    @property
    def difference(self) -> float:
        """Of the generated one, relative to the file's; 0 where both are equal."""
        if self.file == self.generated:
            return 0.0
        return (self.generated - self.file) / self.file if self.file else float("inf")

    @property
    def is_absolute(self) -> bool:
        """Whether the floor alone makes them agree."""
        return abs(self.difference) > TOLERANCE and abs(self.generated - self.file) <= self.floor

    @property
    def agrees(self) -> bool:
        """Whether they are within `TOLERANCE` of the file's, or within the floor."""
        return abs(self.difference) <= TOLERANCE or self.is_absolute


def compare(file: ReplayResult, generated: ReplayResult) -> tuple[Figure, ...]:
    """The figures that a generated trace is to give as the file does.

    Args:
        file, generated: replays with the same settings.

    Raises:
        ValueError: with others.
    """
    if file.settings != generated.settings:
        raise ValueError(f"replays with different settings: {file.settings} and {generated.settings}")
    return (
        Figure("concurrency", file.concurrency, generated.concurrency),
        Figure("pool use", file.pool_use, generated.pool_use),
        Figure("filled", file.utilisation, generated.utilisation),
        Figure("preempted", _preemption_rate(file), _preemption_rate(generated), PREEMPTION_FLOOR),
        Figure("hit rate", file.hit_rate, generated.hit_rate, HIT_RATE_FLOOR),
    )


def _preemption_rate(result: ReplayResult) -> float:
    """Preemptions for each request."""
    return result.preemptions / result.requests
