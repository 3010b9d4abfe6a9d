"""What calibration asks of torch to time a graph on a GPU, which is not here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pagedtune.runtime.exported.gpu_timing import GraphSampler


class Recorded:
    """Stands in for torch's graph and events: says in which order they are used."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def __getattr__(self, what: str) -> object:
        return lambda *_: self._log.append(f"{self._name} {what}")

    def elapsed_time(self, end: Recorded) -> float:
        return 0.030


def test_the_gpu_is_busy_while_a_timed_replay_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the host's way from the first event to the replay would be part of the time."""
    log: list[str] = []
    events = iter(("start", "end"))

    @contextmanager
    def capture(_: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Recorded(log, "graph"))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Recorded(log, next(events)))
    sampler = GraphSampler([lambda: None] * 3)
    assert sampler.sample_us() == pytest.approx(10)
    assert log == ["graph replay", "start record", "graph replay", "end record", "end synchronize"]
