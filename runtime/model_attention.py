"""Attention of all layers of a model on one KV cache: writes new K and V, attends, and reuses every binding."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

import torch

from ..kernels.bounds import Bounds, Bucket, bucket_of
from ..kernels.problem import require_positive
from ..kernels.variant import Op
from .attention import PagedAttention, PagedOp, Workspaces
from .dispatch import Dispatch
from .kv_cache import KVCache
from .plan import StepPlan

KEPT_BUCKETS = 64  # of each group of launches; decode meets about ten, prefill as many as there are chunk sizes
Run = Callable[[], None]


@dataclass(frozen=True)
class BatchLimits:
    """The largest step that buffers are made for.

    Args:
        max_num_seqs: sequences that run at once.
        max_context_len: tokens of one sequence, prompt and output.
        token_budget: query tokens of one step; longer prompts run in chunks. At least `max_num_seqs`.

    Raises:
        ValueError: a limit below 1, or a budget in which not every sequence could decode.
    """

    max_num_seqs: int = 16
    max_context_len: int = 2048
    token_budget: int = 512

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_context_len", "token_budget"):
            require_positive(name, getattr(self, name))
        if self.token_budget < self.max_num_seqs:
            raise ValueError(
                f"token_budget={self.token_budget} is below max_num_seqs={self.max_num_seqs}: raise it, or some "
                "sequences would starve"
            )


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention.

    Args:
        attention: shared by layers of the same problem.
        constants: tensors that only this layer has: `sinks`, `alibi_slopes`.
    """

    attention: PagedAttention
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)


class _Group:
    """Launches over adjacent sequences of a step: those that decode, or those with more than one query token.

    Everything that a launch reads lies in buffers of this group, at the same addresses for its life, so that each
    layer is bound once for each bucket. What a step does not fill of a bucket is padding: sequences without query
    token and context.
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


class ModelAttention:
    """What a model's attention layers call in each step, on persistent buffers.

    Sequences with one query token and those with more are launched apart, so that each gets the kernel of its own
    bounds. A decode step allocates nothing here.

    Args:
        cache: pools of all layers.
        layers: one for each layer of the cache.
        dispatch: for writing K and V.
        limits: largest step.
        workspaces: those that the layers' attention shares.

    Attributes:
        kernel_ns: time inside kernels since the start, in nanoseconds.
        overhead_ns: time in this class outside kernels, in nanoseconds.

    Raises:
        ValueError: another number of layers than the cache has.
    """

    def __init__(
        self,
        cache: KVCache,
        layers: Sequence[LayerAttention],
        dispatch: Dispatch,
        limits: BatchLimits,
        workspaces: Workspaces | None = None,
    ) -> None:
        if len(layers) != cache.num_layers:
            raise ValueError(f"{len(layers)} layers of attention on a cache of {cache.num_layers}: one each is needed")
        problem = cache.problem
        self.cache, self.layers, self.limits = cache, tuple(layers), limits
        self.kernel_ns = self.overhead_ns = 0
        # As many as a bucket of the budget has, so that a launch over any part of it finds its padding.
        tokens = bucket_of(Bounds(limits.token_budget, 1)).max_num_seqs
        rows = bucket_of(Bounds(limits.max_num_seqs, 1)).max_num_seqs
        self._decode = _Group(cache, layers, limits, rows)
        self._prefill = _Group(cache, layers, limits, tokens)
        dtype, heads = problem.q_dtype.torch, problem.num_kv_heads
        self._k = torch.zeros((tokens, heads, problem.head_dim), dtype=dtype, device=cache.device)
        self._v = torch.zeros((tokens, heads, problem.head_dim_v), dtype=dtype, device=cache.device)
        self._slot_mapping = torch.full((tokens,), -1, dtype=torch.int64, device=cache.device)
        self._writer = PagedOp(Op.KV_WRITE, problem, cache.pool_format, dispatch, workspaces)
        self._bound_writes: dict[int, list[Run]] = {}
        self._writes: list[Run] = []
        self._num_decodes = self._num_tokens = 0
        self._plan_ahead(rows, tokens)

    def _plan_ahead(self, rows: int, tokens: int) -> None:
        """Plans every kind of launch, so that libraries are built, loaded or found missing now and not amid a step."""
        longest = bucket_of(Bounds(1, self.limits.max_context_len)).max_context_len
        contexts = [1 << i for i in range(longest.bit_length())]
        decodes = [Bounds(1 << i, context) for i in range(rows.bit_length()) for context in contexts]
        prefills = [Bounds(seqs, longest, 2 << i) for i in range(tokens.bit_length() - 1) for seqs in (1, rows)]
        for attention in dict.fromkeys(layer.attention for layer in self.layers):
            for bounds in (*decodes, *prefills):
                attention.plan(bounds)
        for padded in (1 << i for i in range(tokens.bit_length())):
            self._writer.plan(Bounds(padded, 1))

    def begin(self, plan: StepPlan) -> None:
        """Takes over a step: its tables, lengths and slots. Call it before the layers of the step."""
        start = perf_counter_ns()
        tokens, decodes, seqs = plan.num_tokens, plan.num_decodes, len(plan.query_lens)
        self._num_decodes, self._num_tokens = decodes, tokens
        padded = bucket_of(Bounds(tokens, 1)).max_num_seqs
        self._slot_mapping[:tokens].copy_(plan.slot_mapping)
        self._slot_mapping[tokens:padded].fill_(-1)
        self._writes = self._bind_writes(padded)
        self._decode.begin(plan, 0, decodes, slice(0, decodes))
        self._prefill.begin(plan, decodes, seqs, slice(decodes, tokens))
        self.overhead_ns += perf_counter_ns() - start

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores the new K and V of one layer and attends.

        Args:
            layer: 0 to layers - 1.
            q: [num_tokens, num_q_heads, head_dim], any strides; tokens in the order of the step.
            k, v: [num_tokens, num_kv_heads, head_dim(_v)], any strides.

        Returns:
            [num_tokens, num_q_heads, head_dim_v]; valid until the next call.
        """
        start = perf_counter_ns()
        tokens, decodes = self._num_tokens, self._num_decodes
        self._k[:tokens].copy_(k)
        self._v[:tokens].copy_(v)
        decode, prefill = self._decode, self._prefill
        if decodes:
            decode.q[:decodes].copy_(q[:decodes])
        if tokens > decodes:
            prefill.q[: tokens - decodes].copy_(q[decodes:])
        launched = perf_counter_ns()
        self._writes[layer]()
        if decodes:
            decode.run(layer)
        if tokens > decodes:
            prefill.run(layer)
        ended = perf_counter_ns()
        out = self._output()
        self.kernel_ns += ended - launched
        self.overhead_ns += launched - start + perf_counter_ns() - ended
        return out

    def _output(self) -> torch.Tensor:
        if self._num_decodes == self._num_tokens:
            return self._decode.out[: self._num_tokens]
        prefill = self._prefill.out[: self._num_tokens - self._num_decodes]
        if self._num_decodes == 0:
            return prefill
        return torch.cat((self._decode.out[: self._num_decodes], prefill))

    def _bind_writes(self, padded: int) -> list[Run]:
        runs = self._bound_writes.get(padded)
        if runs is None:
            planned = self._writer.plan(Bounds(padded, 1))
            tensors = {"k": self._k[:padded], "v": self._v[:padded], "slot_mapping": self._slot_mapping[:padded]}
            runs = [planned.bind({**tensors, **pool_tensors(self.cache, i)}) for i in range(self.cache.num_layers)]
            self._bound_writes[padded] = runs
        return runs
