"""Where the time of decode steps goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepTimes:
    """Sums over steps, in nanoseconds.

    Args:
        steps: steps run.
        tokens: query tokens that they put through the model.
        total_ns: from before scheduling to after the last token was taken over.
        model_ns: inside the model, its attention kernels apart.
        kernel_ns: inside attention and cache kernels.
    """

    steps: int = 0
    tokens: int = 0
    total_ns: int = 0
    model_ns: int = 0
    kernel_ns: int = 0

    def add(self, other: StepTimes) -> None:
        """Adds the sums of other steps."""
        self.steps += other.steps
        self.tokens += other.tokens
        self.total_ns += other.total_ns
        self.model_ns += other.model_ns
        self.kernel_ns += other.kernel_ns

    @property
    def outside_ns(self) -> int:
        """Neither in the model nor in a kernel: scheduling, tables, bindings, sampling."""
        return self.total_ns - self.model_ns - self.kernel_ns

    @property
    def outside_share(self) -> float:
        """Share of the total outside model and kernel, in [0, 1]; 0 before the first step."""
        return self.outside_ns / self.total_ns if self.total_ns else 0.0

    def __str__(self) -> str:
        if not self.steps:
            return "no steps"
        each = (f"{name} {ns / self.steps / 1e6:.2f} ms" for name, ns in self._parts())
        return f"{self.steps} steps, mean {', '.join(each)}; outside model and kernel {self.outside_share:.1%}"

    def _parts(self) -> tuple[tuple[str, int], ...]:
        return (
            ("total", self.total_ns),
            ("model", self.model_ns),
            ("kernel", self.kernel_ns),
            ("outside", self.outside_ns),
        )
