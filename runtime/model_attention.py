"""Attention of all layers of a model on one KV cache: writes new K and V, attends, and reuses every binding."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

import torch

from ..kernels.bounds import Bounds, bucket_of
from ..kernels.variant import Op
from .attention import PagedOp, Workspaces
from .dispatch import Dispatch, NoKernel
from .kv_cache import KVCache
from .launch_group import LaunchGroup, LayerAttention, Run, pool_tensors
from .limits import BatchLimits
from .plan import StepPlan
from .swap import copy_blocks


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
        self._decode = LaunchGroup(cache, layers, limits, rows)
        self._prefill = LaunchGroup(cache, layers, limits, tokens)
        dtype, heads = problem.q_dtype.torch, problem.num_kv_heads
        self._k = torch.zeros((tokens, heads, problem.head_dim), dtype=dtype, device=cache.device)
        self._v = torch.zeros((tokens, heads, problem.head_dim_v), dtype=dtype, device=cache.device)
        self._slot_mapping = torch.full((tokens,), -1, dtype=torch.int64, device=cache.device)
        self._writer = PagedOp(Op.KV_WRITE, problem, cache.pool_format, dispatch, workspaces)
        self._copier = _copier(PagedOp(Op.COPY_BLOCKS, problem, cache.pool_format, dispatch, workspaces), rows)
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
        """Takes over a step: its copies, tables, lengths and slots. Call it before the layers of the step."""
        start = perf_counter_ns()
        if plan.copies is not None:
            self._copy_blocks(plan.copies)
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

    def _copy_blocks(self, pairs: torch.Tensor) -> None:
        """Gives forked sequences their own copies of blocks that they are about to write to, in every layer."""
        if self._copier is None:
            copy_blocks(self.cache, pairs)
            return
        copier = self._copier.plan(Bounds(len(pairs), 1))
        for layer in range(self.cache.num_layers):
            copier.bind({"block_pairs": pairs, **pool_tensors(self.cache, layer)})()

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


def _copier(op: PagedOp, rows: int) -> PagedOp | None:
    """What copies blocks, planned for one of each of `rows` sequences; None where no kernel does, and torch has to."""
    try:
        for pairs in (1 << i for i in range(rows.bit_length())):
            op.plan(Bounds(pairs, 1))
    except NoKernel:
        return None
    return op
