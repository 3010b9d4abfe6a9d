"""A second oracle, built the other way round: everything scattered into dense padded tensors, one masked softmax.

It serves only to check the first one; the gate compares kernels with `oracle`.
"""

from __future__ import annotations

import torch

from pagedtune.kernels.pool_format import KVAxes, PoolFormat

from .inputs import AttentionData


def attention(data: AttentionData) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [num_tokens, num_q_heads, head_dim_v] and LSE [num_tokens, num_q_heads] in float64.

    Uses memory in proportion to num_seqs x max_query_len x num_q_heads x max_context_len.
    """
    problem, tensors = data.problem, data.tensors
    lens = tensors["context_lens"].long()
    query_lens = tensors["query_start_loc"].long().diff()
    max_context, max_query = max(1, int(lens.max())), max(1, int(query_lens.max()))
    key_position = torch.arange(max_context)  # [max_context]
    # Row i of a sequence's padded queries is its query token i; positions count from the end of the context.
    query_position = (lens - query_lens)[:, None] + torch.arange(max_query)  # [num_seqs, max_query]
    distance = key_position - query_position[..., None]  # [num_seqs, max_query, max_context]
    visible = (distance <= 0) & (key_position < lens[:, None, None])
    if problem.window is not None:
        visible &= distance > -problem.window
    # A key that no query of its sequence sees may be gone from the pool.
    is_query = torch.arange(max_query) < query_lens[:, None]  # [num_seqs, max_query]
    needed = (visible & is_query[..., None]).any(dim=1)  # [num_seqs, max_context]
    keys = _dense(data, "k_cache", data.pool_format.k_axes, needed).repeat_interleave(problem.gqa_ratio, dim=2)
    values = _dense(data, "v_cache", data.pool_format.v_axes, needed).repeat_interleave(problem.gqa_ratio, dim=2)
    queries = torch.zeros(len(lens), max_query, problem.num_q_heads, problem.head_dim, dtype=torch.float64)
    queries[is_query] = tensors["q"].double()
    scores = torch.einsum("sqhd,skhd->shqk", queries, keys) * problem.softmax_scale
    if problem.soft_cap is not None:
        scores = (scores / problem.soft_cap).tanh() * problem.soft_cap
    if problem.alibi:
        scores = scores + tensors["alibi_slopes"].double().view(-1, 1, 1) * distance[:, None]
    scores = torch.where(visible[:, None], scores, -torch.inf)
    sink = torch.full((problem.num_q_heads,), -torch.inf, dtype=torch.float64)
    if problem.sinks:
        sink = tensors["sinks"].double()
    # The sink is one more key, whose value is zero.
    scores = torch.cat((scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    lse = scores.logsumexp(dim=-1)  # [num_seqs, num_q_heads, max_query]
    weights = (scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()[..., :-1]
    out = torch.einsum("shqk,skhd->sqhd", weights, values)
    return out[is_query], lse.transpose(1, 2)[is_query]


def _dense(data: AttentionData, name: str, axes: KVAxes, needed: torch.Tensor) -> torch.Tensor:
    """Dequantised K or V as [num_seqs, max_context, num_kv_heads, head_dim], zero where not needed."""
    pool = _slot_major(data.tensors[name].double(), axes, data.pool_format)
    seqs, positions = needed.nonzero(as_tuple=True)
    size = data.pool_format.block_size
    blocks = data.tensors["block_table"].long()[seqs, positions // size] - data.first_block
    places = blocks * size + positions % size
    dense = torch.zeros(*needed.shape, *pool.shape[1:], dtype=torch.float64)
    dense[seqs, positions] = pool[places]
    scale = data.tensors.get(name.replace("cache", "scale"))
    if scale is None:
        return dense
    if scale.dim() == 3:  # [num_blocks, num_kv_heads, block_size]
        dense[seqs, positions] *= scale.double().transpose(1, 2).flatten(0, 1)[places][..., None]
        return dense
    return dense * scale.double().view(1, 1, -1, 1)


def _slot_major(pool: torch.Tensor, axes: KVAxes, pool_format: PoolFormat) -> torch.Tensor:
    """[num_blocks x block_size, num_kv_heads, head_dim]."""
    order = [axes.block, axes.slot, axes.head, axes.dim] + ([] if axes.pack is None else [axes.pack])
    ordered = pool.permute(order)
    return ordered.reshape(ordered.shape[0] * pool_format.block_size, ordered.shape[2], -1)
