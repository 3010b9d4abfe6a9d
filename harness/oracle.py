"""The oracle: attention in float64 with numpy, token by token through the block table.

It shares no code with any kernel. `dense_oracle` computes the same along another way; tests hold the two together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagedtune.kernels.pool_format import Layout, ScaleKind

from .inputs import AttentionData


@dataclass(frozen=True)
class Answer:
    """The exact result.

    Args:
        out: float64 [num_tokens, num_q_heads, head_dim_v].
        lse: float64 [num_tokens, num_q_heads], sink included.
        lse_without_sink: the same over keys alone.
    """

    out: np.ndarray
    lse: np.ndarray
    lse_without_sink: np.ndarray


def attention(data: AttentionData) -> Answer:
    """Paged attention as `Problem` specifies it."""
    problem = data.problem
    starts = data.tensors["query_start_loc"].tolist()
    queries = _double(data.tensors["q"])
    num_tokens = queries.shape[0]
    out = np.full((num_tokens, problem.num_q_heads, problem.head_dim_v), np.nan)
    lse = np.full((num_tokens, problem.num_q_heads), np.nan)
    bare = lse.copy()
    for seq, context_len in enumerate(data.tensors["context_lens"].tolist()):
        query_len = starts[seq + 1] - starts[seq]
        if query_len == 0:
            continue
        first = _first_needed(context_len, query_len, problem.window)
        keys, values = gather(data, seq, first, context_len)
        for index in range(query_len):
            row, position = starts[seq] + index, context_len - query_len + index
            low = first if problem.window is None else max(first, position - problem.window + 1)
            visible = slice(low - first, max(low, position + 1) - first)
            distance = np.arange(low, max(low, position + 1)) - position
            out[row], lse[row], bare[row] = _one_token(data, queries[row], keys[visible], values[visible], distance)
    return Answer(out, lse, bare)


def _one_token(
    data: AttentionData, q: np.ndarray, keys: np.ndarray, values: np.ndarray, distance: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output, LSE and LSE without sink of one query token, for its visible keys [n, num_kv_heads, head_dim]."""
    problem = data.problem
    grouped = q.reshape(problem.num_kv_heads, problem.gqa_ratio, problem.head_dim)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        scores = np.matmul(grouped, keys.transpose(1, 2, 0)).reshape(problem.num_q_heads, len(keys))
        scores = scores * problem.softmax_scale
        if problem.soft_cap is not None:
            scores = problem.soft_cap * np.tanh(scores / problem.soft_cap)
        if problem.alibi:
            scores = scores + _double(data.tensors["alibi_slopes"])[:, None] * distance[None, :]
        no_sink = np.full(problem.num_q_heads, -np.inf)
        sink = _double(data.tensors["sinks"]) if problem.sinks else no_sink
        lse, bare = _log_sum(scores, sink), _log_sum(scores, no_sink)
        weights = np.exp(scores - np.where(np.isneginf(lse), 0.0, lse)[:, None])  # [num_q_heads, n]
        grouped_weights = weights.reshape(problem.num_kv_heads, problem.gqa_ratio, len(keys))
        out = np.matmul(grouped_weights, values.transpose(1, 0, 2))
    return out.reshape(problem.num_q_heads, problem.head_dim_v), lse, bare


def _log_sum(scores: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """log(sum exp) over keys and sink; -inf without any term, inf with an infinite one."""
    terms = np.concatenate([scores, sink[:, None]], axis=1)
    top = terms.max(axis=1)
    shift = np.where(np.isfinite(top), top, 0.0)
    total = np.exp(terms - shift[:, None]).sum(axis=1)
    return np.asarray(shift + np.log(total))


def _first_needed(context_len: int, query_len: int, window: int | None) -> int:
    """First token that the earliest query sees: what lies before may be gone from the pool."""
    return 0 if window is None else min(context_len, max(0, context_len - query_len - window + 1))


def gather(data: AttentionData, seq: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Dequantised float64 K [last - first, num_kv_heads, head_dim] and V of tokens `first` to `last` - 1."""
    problem, size = data.problem, data.pool_format.block_size
    keys = np.empty((last - first, problem.num_kv_heads, problem.head_dim))
    values = np.empty((last - first, problem.num_kv_heads, problem.head_dim_v))
    table = data.tensors["block_table"][seq].tolist()
    for logical in range(first // size, -(-last // size)):
        block = table[logical] - data.first_block
        k_block, v_block = _double(data.tensors["k_cache"][block]), _double(data.tensors["v_cache"][block])
        for token in range(max(first, logical * size), min(last, (logical + 1) * size)):
            keys[token - first] = _token(k_block, token % size, data.pool_format.layout, problem.head_dim)
            values[token - first] = _token(v_block, token % size, data.pool_format.layout, problem.head_dim_v)
            if data.pool_format.scale_kind is ScaleKind.PER_TOKEN_HEAD:
                keys[token - first] *= _double(data.tensors["k_scale"][block, :, token % size])[:, None]
                values[token - first] *= _double(data.tensors["v_scale"][block, :, token % size])[:, None]
    if data.pool_format.scale_kind in (ScaleKind.PER_TENSOR, ScaleKind.PER_HEAD):
        for head in range(problem.num_kv_heads):
            keys[:, head] *= _scale(data, "k_scale", head)
            values[:, head] *= _scale(data, "v_scale", head)
    return keys, values


def _token(block: np.ndarray, slot: int, layout: Layout, head_dim: int) -> np.ndarray:
    """[num_kv_heads, head_dim] of one slot of one block."""
    if layout is Layout.NHD:
        return np.asarray(block[slot])
    if layout is Layout.HND:
        return np.asarray(block[:, slot])
    if block.ndim == 3:  # x-packed V: [num_kv_heads, head_dim, block_size]
        return np.asarray(block[:, :, slot])
    packed = block[:, :, slot]  # x-packed K: [num_kv_heads, head_dim / x, x] of one slot
    return np.asarray(packed.reshape(packed.shape[0], head_dim))


def _scale(data: AttentionData, name: str, head: int) -> float:
    scales = data.tensors[name]
    return float(scales[head if data.pool_format.scale_kind is ScaleKind.PER_HEAD else 0])


def _double(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(tensor.to(torch.float64).numpy())
