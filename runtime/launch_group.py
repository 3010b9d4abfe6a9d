"""Launches over a part of a step, bound once to buffers that stay where they are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..kernels.bounds import Bounds, Bucket, bucket_of
from .attention import PagedAttention
from .kv_cache import KVCache
from .limits import BatchLimits
from .plan import StepPlan

KEPT_BUCKETS = 64  # of each group; decode meets about ten, prefill as many as there are chunk sizes
Run = Callable[[], None]


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention.

    Args:
        attention: shared by layers of the same problem.
        constants: tensors that only this layer has: `sinks`, `alibi_slopes`.
    """

    attention: PagedAttention
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)


class LaunchGroup:
    """Launches over adjacent sequences of a step: those that decode, or those with more than one query token.

    Everything that a launch reads lies in buffers of this group, at the same addresses for its life, so that each
    layer is bound once for each bucket. What a step does not fill of a bucket is padding: sequences without query
    token and context.

    Args:
        cache: pools of all layers.
        layers: one for each layer of the cache.
        limits: the largest step.
        max_tokens: most query tokens of this group, a power of two.

    Attributes:
        q: [max_tokens, num_q_heads, head_dim]: queries of the group go here before `run`.
        out: [max_tokens, num_q_heads, head_dim_v]: and this is where the result is after it.
    """

    def __init__(self, cache: KVCache, layers: Sequence[LayerAttention], limits: BatchLimits, max_tokens: int) -> None:
        problem, device = cache.problem, cache.device
        rows = bucket_of(Bounds(limits.max_num_seqs, 1)).max_num_seqs
        max_blocks = -(-limits.max_context_len // cache.block_size)
        dtype = problem.q_dtype.torch
        self._cache, self._layers = cache, layers
        self.q = torch.zeros((max_tokens, problem.num_q_heads, problem.head_dim), dtype=dtype, device=device)
        self.out = torch.zeros((max_tokens, problem.num_q_heads, problem.head_dim_v), dtype=dtype, device=device)
        self._block_table = torch.zeros((rows, max_blocks), dtype=torch.int32, device=device)
        self._context_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._query_start_loc = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._bound: OrderedDict[Bucket, list[Run]] = OrderedDict()
        self._runs: list[Run] = []
        self.num_tokens = 0

    def begin(self, plan: StepPlan, first: int, end: int, tokens: slice) -> None:
        """Takes sequences `first` to `end` of a step, whose query tokens are `tokens`."""
        count, self.num_tokens = end - first, tokens.stop - tokens.start
        if count == 0:
            return
        longest = int(plan.query_lens[first:end].max())
        bucket = bucket_of(Bounds(count, plan.bounds.max_context_len, longest))
        table = plan.block_table[first:end]
        self._block_table[:count, : table.shape[1]].copy_(table)
        self._context_lens[:count].copy_(plan.context_lens[first:end])
        self._context_lens[count:].zero_()
        starts = plan.query_start_loc[first : end + 1]
        torch.sub(starts, tokens.start, out=self._query_start_loc[: count + 1])
        self._query_start_loc[count + 1 :].fill_(self.num_tokens)
        self._runs = self._bind(bucket)

    def run(self, layer: int) -> None:
        """Attends in one layer, from `q` to `out`."""
        self._runs[layer]()

    def _bind(self, bucket: Bucket) -> list[Run]:
        runs = self._bound.get(bucket)
        if runs is None:
            runs = self._bound[bucket] = [self._bind_layer(index, bucket) for index in range(len(self._layers))]
            if len(self._bound) > KEPT_BUCKETS:
                self._bound.popitem(last=False)
        self._bound.move_to_end(bucket)
        return runs

    def _bind_layer(self, index: int, bucket: Bucket) -> Run:
        layer, cache, rows = self._layers[index], self._cache, bucket.max_num_seqs
        tokens = min(bucket.bounds.max_num_tokens, self.q.shape[0])
        tensors = {
            "q": self.q[:tokens],
            "out": self.out[:tokens],
            "block_table": self._block_table[:rows],
            "context_lens": self._context_lens[:rows],
            "query_start_loc": self._query_start_loc[: rows + 1],
            **pool_tensors(cache, index),
            **layer.constants,
        }
        return layer.attention.plan(bucket.bounds).bind(tensors)


def pool_tensors(cache: KVCache, layer: int) -> dict[str, torch.Tensor]:
    """Pools and scales of one layer, by the names of their slots."""
    tensors = {"k_cache": cache.k_cache(layer), "v_cache": cache.v_cache(layer)}
    if cache.k_scale is not None and cache.v_scale is not None:
        tensors |= {"k_scale": cache.k_scale[layer], "v_scale": cache.v_scale[layer]}
    return tensors
