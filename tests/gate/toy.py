"""Small kernels for the gate's own tests: `eager` with something done to it, and a split-K one with partials."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.eager import Eager, attend, gather_sequence
from pagedtune.kernels.launch import CallStep, LaunchPlan, Tensors, WorkspaceSpec
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.slots import attention_slots, batch_limits
from pagedtune.kernels.variant import Config, Numerics, Op, Properties
from pagedtune.kernels.workload import Workload

CPU = Device("cpu", DeviceKind.CPU, num_units=2)
Run = Callable[[Tensors], None]


def make_case(
    lens: tuple[int, ...] = (33, 0, 16, 1),
    family: Family = Family.RANDOM,
    *hazards: Hazard,
    query_lens: tuple[int, ...] = (),
    heads: tuple[int, int, int, int] = (4, 2, 64, 0),
    q_dtype: DType = DType.BF16,
    kv_dtype: DType | None = None,
    block_size: int = 16,
    layout: Layout = Layout.NHD,
    scale_kind: ScaleKind = ScaleKind.NONE,
    op: Op = Op.ATTENTION,
    seed: int = 1,
    **features: Any,
) -> Case:
    """A case with defaults: 4 query and 2 KV heads of 64, bf16, blocks of 16."""
    problem = Problem(*heads, q_dtype=q_dtype, max_query_len=max(1, *query_lens, 1), **features)
    pool_format = PoolFormat(block_size, kv_dtype or q_dtype, layout, scale_kind)
    return Case(op, problem, pool_format, Workload(lens, query_lens), family, hazards, seed)


class Changed(Eager):
    """`eager`, with its call replaced: `change(run, tensors)` gets the right one."""

    def __init__(
        self,
        change: Callable[[Run, dict[str, torch.Tensor]], None],
        numerics: Numerics | None = None,
        properties: Properties | None = None,
    ) -> None:
        self._change, self._numerics = change, numerics
        self.properties = properties or Eager.properties  # type: ignore[misc]

    def numerics(self, problem: Problem, pool_format: PoolFormat) -> Numerics:
        return self._numerics or super().numerics(problem, pool_format)

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        right = partial(attend, problem, pool_format)

        def call(tensors: Tensors) -> None:
            self._change(right, dict(tensors))

        return LaunchPlan((CallStep(call),), attention_slots(problem, pool_format), limits=batch_limits(bounds))


class TorchSplit(Eager):
    """Split-K decode in fp32 with partials in workspaces; `change(name, tensor)` edits each partial before the merge.

    The sink is counted in the merge. Sequences without keys, and splits without keys, leave their partials unwritten.
    """

    name = "torch_split"

    def __init__(
        self, change: Callable[[str, torch.Tensor], torch.Tensor] | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        self._change, self._dtype = change or (lambda name, tensor: tensor), dtype

    def numerics(self, problem: Problem, pool_format: PoolFormat) -> Numerics:
        return Numerics()

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        shape = (bounds.max_num_tokens, problem.num_q_heads, 3)
        workspaces = {
            "part_out": WorkspaceSpec(self._dtype, (*shape, problem.head_dim_v), partial_of="out"),
            "part_lse": WorkspaceSpec(torch.float32, shape, partial_of="lse"),
        }
        step = CallStep(partial(self._run, problem, pool_format))
        return LaunchPlan((step,), attention_slots(problem, pool_format), workspaces, batch_limits(bounds))

    def _run(self, problem: Problem, pool_format: PoolFormat, tensors: Tensors) -> None:
        for seq, context_len in enumerate(tensors["context_lens"].tolist()):
            blocks = tensors["block_table"][seq, : -(-context_len // pool_format.block_size)].long()
            k, v = gather_sequence(problem, pool_format, tensors, blocks, context_len)
            scores = torch.einsum(
                "hd,nhd->hn", tensors["q"][seq].float(), k.float().repeat_interleave(problem.gqa_ratio, 1)
            )
            self._merge(tensors, seq, scores * problem.softmax_scale, v.float().repeat_interleave(problem.gqa_ratio, 1))

    def _merge(self, tensors: Tensors, row: int, scores: torch.Tensor, v: torch.Tensor) -> None:
        sink = tensors["sinks"] if "sinks" in tensors else torch.full((scores.shape[0],), -torch.inf)
        parts = [(sink, torch.zeros(scores.shape[0], v.shape[-1]))]
        size = max(1, -(-scores.shape[1] // 3))
        for index, start in enumerate(range(0, scores.shape[1], size)):
            split = scores[:, start : start + size]
            out = torch.einsum("hn,nhd->hd", torch.softmax(split, -1), v[start : start + size])
            tensors["part_out"][row, :, index] = self._change("out", out).to(self._dtype)
            tensors["part_lse"][row, :, index] = self._change("lse", torch.logsumexp(split, -1))
            parts.append((tensors["part_lse"][row, :, index], tensors["part_out"][row, :, index].float()))
        lses, outs = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
        lse = torch.logsumexp(lses, 0)
        weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))
        tensors["out"][row] = (weights[..., None] * outs).sum(0)
        if "lse" in tensors:
            tensors["lse"][row] = lse
