"""Baseline and fallback for every op and device: plain torch, in the kernel's own precision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from .artifact import Artifact
from .bounds import Bounds
from .device import Device, DeviceKind
from .dtypes import DType
from .launch import CallStep, LaunchPlan, Tensors
from .pool_format import Layout, PoolFormat, ScaleKind
from .problem import Problem
from .slots import attention_slots, batch_limits
from .variant import Config, Numerics, Properties, Variant

_FLOATS = (DType.FP32, DType.BF16, DType.FP16)


@dataclass(frozen=True)
class EagerConfig(Config):
    """No tunables."""


class Eager(Variant):
    """Gathers each sequence's K and V through its table and runs softmax attention on them with torch ops."""

    name = "eager"
    summary = "torch gather + softmax, one sequence at a time: baseline and fallback"
    device_kind = DeviceKind.CPU
    config_type = EagerConfig
    properties = Properties(deterministic=True, batch_invariant=True, graph_safe=False)

    def numerics(self, problem: Problem, pool_format: PoolFormat) -> Numerics:
        """Scores and P are rounded to the compute dtype; sums are fp32 inside torch's matmul."""
        dtype = compute_dtype(problem, pool_format)
        return Numerics(scores=dtype, p=dtype)

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Quantised pools are refused."""
        if pool_format.kv_dtype not in _FLOATS:
            return f"eager reads fp32, bf16 and fp16 pools, not {pool_format.kv_dtype}"
        return pool_format.reject(problem)

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """Nothing to build."""
        return ()

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """One host call."""
        step = CallStep(partial(attend, problem, pool_format))
        return LaunchPlan((step,), attention_slots(problem, pool_format), limits=batch_limits(bounds))


def attend(problem: Problem, pool_format: PoolFormat, tensors: Tensors) -> None:
    """Paged attention over the slots of `attention_slots`, into `out` and, if there, `lse`."""
    starts = tensors["query_start_loc"].tolist()
    for seq, context_len in enumerate(tensors["context_lens"].tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        if rows.start == rows.stop:
            continue
        # Blocks that lie wholly before every query's window may have been freed.
        size, first = pool_format.block_size, 0
        if problem.window is not None:
            first = max(0, context_len - (rows.stop - rows.start) - problem.window + 1) // size
        blocks = tensors["block_table"][seq, first : -(-context_len // size)].long()
        k, v = gather_sequence(problem, pool_format, tensors, blocks, context_len - first * size)
        out, lse = _attend_sequence(problem, tensors, tensors["q"][rows].to(k.dtype), k, v)
        tensors["out"][rows] = out
        if "lse" in tensors:
            tensors["lse"][rows] = lse


def compute_dtype(problem: Problem, pool_format: PoolFormat) -> DType:
    """The query's dtype where the pool stores just that, else fp32: K and V are not rounded a second time."""
    plain = pool_format.kv_dtype is problem.q_dtype and pool_format.scale_kind is ScaleKind.NONE
    return problem.q_dtype if plain else DType.FP32


def gather_sequence(
    problem: Problem, pool_format: PoolFormat, tensors: Tensors, blocks: torch.Tensor, context_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K [context_len, num_kv_heads, head_dim] and V of `blocks`' first tokens, dequantised, in the compute dtype."""
    k_blocks, v_blocks = tensors["k_cache"][blocks], tensors["v_cache"][blocks]
    if pool_format.layout is Layout.HND:
        k_blocks, v_blocks = k_blocks.transpose(1, 2), v_blocks.transpose(1, 2)
    elif pool_format.layout is Layout.XPACKED:
        k_blocks = k_blocks.permute(0, 3, 1, 2, 4)  # [blocks, block_size, num_kv_heads, head_dim / x, x]
        v_blocks = v_blocks.permute(0, 3, 1, 2)
    heads, dtype = problem.num_kv_heads, compute_dtype(problem, pool_format).torch
    k = k_blocks.reshape(-1, heads, problem.head_dim)[:context_len].float()
    v = v_blocks.reshape(-1, heads, problem.head_dim_v)[:context_len].float()
    if "k_scale" in tensors:
        k, v = k * tensors["k_scale"].view(1, -1, 1), v * tensors["v_scale"].view(1, -1, 1)
    return k.to(dtype), v.to(dtype)


def _attend_sequence(
    problem: Problem, tensors: Tensors, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [query_len, num_q_heads, head_dim_v] and LSE [query_len, num_q_heads] of one sequence."""
    query_len, context_len = q.shape[0], k.shape[0]
    grouped = q.reshape(
        query_len, problem.num_kv_heads, problem.gqa_ratio, -1
    )  # [query_len, kv heads, ratio, head_dim]
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k).float() * problem.softmax_scale
    if problem.soft_cap is not None:
        scores = problem.soft_cap * torch.tanh(scores / problem.soft_cap)
    distance = torch.arange(context_len)[None, :] - torch.arange(context_len - query_len, context_len)[:, None]
    if problem.alibi:
        slopes = tensors["alibi_slopes"].view(problem.num_kv_heads, problem.gqa_ratio, 1, 1)
        scores = scores + slopes * distance
    hidden = distance > 0
    if problem.window is not None:
        hidden |= distance <= -problem.window
    scores = scores.masked_fill(hidden, -torch.inf)
    sink = tensors["sinks"].view(problem.num_kv_heads, problem.gqa_ratio, 1, 1) if problem.sinks else None
    lse = _logsumexp(scores, sink)  # [kv heads, ratio, query_len, 1]
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)).to(q.dtype)
    out = torch.einsum("hgqk,khd->qhgd", p, v)
    return out.flatten(1, 2), lse.squeeze(-1).permute(2, 0, 1).flatten(1, 2)


def _logsumexp(scores: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Natural-log denominator over the last dimension, kept; the sink counts once; -inf without any term."""
    if sink is not None:
        scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), dim=-1)
    if scores.shape[-1] == 0:
        return scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    return torch.logsumexp(scores, dim=-1, keepdim=True)
