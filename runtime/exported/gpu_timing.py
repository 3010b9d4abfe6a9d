"""How calibration times launches on a GPU.

A sample is one replay of a CUDA graph that holds a launch on every batch, between two events: no launch from Python is
in the measured time, and no batch is found in the L2 again. An untimed replay goes ahead: while the GPU is busy with
it, events and replay are queued. An idle GPU would record the first event at once, and the host's way to the replay
would be measured too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Run = Callable[[], None]


class GraphSampler:
    """Times launches of one candidate on a GPU."""

    def __init__(self, runs: Sequence[Run]) -> None:
        """`runs` launch on torch's current stream, one batch each."""
        for run in runs[:1]:  # whatever a first launch sets up must not be captured
            run()
        torch.cuda.synchronize()
        self._graph, self._count = torch.cuda.CUDAGraph(), len(runs)
        with torch.cuda.graph(self._graph):
            for run in runs:
                run()
        make_event: Any = torch.cuda.Event  # untyped
        self._events = [make_event(enable_timing=True) for _ in range(2)]

    def sample_us(self) -> float:
        """Microseconds per launch of one replay."""
        start, end = self._events
        self._graph.replay()
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self._count
