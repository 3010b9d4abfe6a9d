"""A model's attention from its config alone, for choosing a pool format before the model is at hand."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.dtypes import DType
from ...kernels.problem import Problem


def problem_of_config(config: Any, dtype: torch.dtype) -> Problem:
    """Heads, head dim and dtype of a decoder's transformers config, without windows and the like.

    What each layer really asks for is found out by `PagedTransformer`; this is the part that shapes the pool.

    Raises:
        ValueError: the config names no heads, or a dtype that no pool or query has.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        raise ValueError(f"{type(config).__name__} has no num_attention_heads: make the Problem by hand")
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Problem(heads, kv_heads, head_dim, q_dtype=DType.of(dtype))
