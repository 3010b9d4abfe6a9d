"""What attention a model asks for on one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .dtypes import DType


@dataclass(frozen=True, order=True)
class Problem:
    """Attention of one layer on one rank, with everything that a model fixes and a workload does not.

    A query token at position `i` of its sequence sees key `j` iff `j <= i` and, with a window `w`,
    `i - j < w`. Its score is `q·k * scale * k_scale`, then `soft_cap * tanh(score / soft_cap)`, then
    plus `alibi_slope * (j - i)`; a sink adds `exp(sink)` to the softmax denominator once and no value.
    The output has the dtype of the query. LSE is the natural logarithm of that denominator, sink included:
    a row without keys has O = 0 and LSE = -inf, or LSE = sink.

    Args:
        num_q_heads: query heads on this rank.
        num_kv_heads: KV heads on this rank (after tensor parallelism; at least 1).
        head_dim: elements of one query or key head.
        head_dim_v: elements of one value head (0: as `head_dim`).
        q_dtype: dtype of query and output.
        window: keys that a query sees, itself included; None is no limit.
        soft_cap: cap on the scores; None is no cap.
        sinks: whether each query head has a learned sink logit.
        alibi: whether each query head has an ALiBi slope.
        scale: softmax scale; None is `head_dim ** -0.5`.
        max_query_len: most query tokens of one sequence in one launch (1 is plain decode).

    Raises:
        ValueError: a shape that no model can have; the message names the field, its value and the rule.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int = 0
    q_dtype: DType = DType.BF16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    scale: float | None = None
    max_query_len: int = 1

    def __post_init__(self) -> None:
        if self.head_dim_v == 0:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "head_dim_v", "max_query_len"):
            require_positive(name, getattr(self, name))
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads={self.num_q_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                "each KV head must serve the same number of query heads"
            )
        if self.q_dtype not in (DType.FP32, DType.BF16, DType.FP16):
            raise ValueError(f"q_dtype={self.q_dtype} is not supported: use fp32, bf16 or fp16")
        if self.window is not None:
            require_positive("window", self.window)
        for name in ("soft_cap", "scale"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be a finite number above 0, or absent")

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        """Factor on q·k before the softmax."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def key(self) -> str:
        """Canonical one-line identity, e.g. `32/8x128-bf16`; features follow only where present."""
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}v{self.head_dim_v}"
        parts = [f"{self.num_q_heads}/{self.num_kv_heads}x{dims}", self.q_dtype.value]
        features = {
            "w": self.window,
            "cap": self.soft_cap,
            "sinks": self.sinks or None,
            "alibi": self.alibi or None,
            "scale": self.scale,
            "q": self.max_query_len if self.max_query_len > 1 else None,
        }
        parts += [name if value is True else f"{name}{value}" for name, value in features.items() if value is not None]
        return "-".join(parts)


def require_positive(name: str, value: int) -> None:
    """Raises ValueError unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1")
