"""A `Progress` for tests of whole tunes."""

from __future__ import annotations


class Quiet:
    """A `Progress` that remembers its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def phase(self, text: str, total: int, budget_s: float | None = None) -> None: ...

    def step(self, text: str) -> None: ...

    def candidate(self, key: str, state: str) -> None: ...

    def best(self, key: str, time_us: float) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)
