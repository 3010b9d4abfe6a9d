"""What a common test suite would say of a kernel: one launch on friendly inputs, allclose with 1e-2.

Friendly: four equal lengths that are a multiple of the block size, table in pool order, unused memory zero, normal
numbers. This is the yardstick that the gate's worth is measured by.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.inputs import AttentionInputs
from pagedtune.harness.memory import Poison
from pagedtune.harness.oracle import attention
from pagedtune.kernels.device import Device
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.eager_cache import copy_blocks, gather_kv, write_kv
from pagedtune.kernels.eager_swap import pack_blocks, unpack_blocks
from pagedtune.kernels.launch import Tensors
from pagedtune.kernels.native import NativeExecutor
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Config, Op, Variant
from pagedtune.kernels.workload import Workload

TOLERANCE = 1e-2
DEAD = 1e3  # no live number is larger; the poison is


def passes_allclose(variant: Variant, config: Config, like: Case, device: Device) -> bool:
    """Whether a kernel passes the plain test at the problem and format of a case."""
    block_size = like.pool_format.block_size
    context_len = -(-64 // block_size) * block_size
    queries = (like.problem.max_query_len,) * 4
    workload = Workload((context_len,) * 4, queries, name="plain")
    case = Case(Op.ATTENTION, like.problem, like.pool_format, workload, Family.RANDOM, (Hazard.IDENTITY_TABLE,), 1)
    inputs = AttentionInputs(case)
    plan = variant.plan(case.problem, case.pool_format, config, case.bounds)
    made = inputs.make(plan, Poison.FINITE)
    for carved in made.slots.values():
        if carved.parent.is_floating_point():
            carved.parent[carved.parent.abs() > DEAD] = 0
    before = made.snapshot()
    launch = NativeExecutor(variant.build(case.problem, case.pool_format, config, device)).prepare(
        plan.bind(made.tensors)
    )
    launch()
    expected = torch.from_numpy(attention(inputs.data(before)).out)
    return torch.allclose(made.tensors["out"].double(), expected, atol=TOLERANCE, rtol=TOLERANCE)


def cache_op_passes_allclose(op: Op, function: Callable[[PoolFormat, Tensors], None]) -> bool:
    """The same of a cache operation: fp32, no scales, no skipped slot, whole blocks, inputs not looked at again."""
    problem, pool_format = Problem(4, 2, 64, q_dtype=DType.FP32), PoolFormat(16, DType.FP32)
    generator = torch.Generator().manual_seed(1)

    def tensors() -> dict[str, torch.Tensor]:
        generator.manual_seed(1)
        pools = {n: torch.randn(pool_format.k_shape(8, problem), generator=generator) for n in ("k_cache", "v_cache")}
        rows = {n: torch.randn(64, 2, 64, generator=generator) for n in ("k", "v")}
        return pools | rows | {
            "slot_mapping": torch.arange(64),
            "block_ids": torch.tensor([5, 1, 3]),
            "staging": torch.randn(3, 2 * 16 * 2 * 64, generator=generator),
            "block_pairs": torch.tensor([[0, 4], [1, 5], [2, 6]]),
            "block_table": torch.arange(4, dtype=torch.int32).view(2, 2),
            "context_lens": torch.full((2,), 32, dtype=torch.int32),
            "out_start": torch.tensor([0, 32, 64], dtype=torch.int32),
            "k_out": torch.zeros(64, 2, 64),
            "v_out": torch.zeros(64, 2, 64),
        }  # fmt: skip

    right: dict[Op, Callable[[PoolFormat, Tensors], None]] = {
        Op.KV_WRITE: write_kv,
        Op.COPY_BLOCKS: lambda _, given: copy_blocks(given),
        Op.GATHER_KV: gather_kv,
        Op.PACK_BLOCKS: lambda _, given: pack_blocks(given),
        Op.UNPACK_BLOCKS: lambda _, given: unpack_blocks(given),
    }
    got, expected = tensors(), tensors()
    function(pool_format, got)
    right[op](pool_format, expected)
    written = {Op.GATHER_KV: ("k_out", "v_out"), Op.PACK_BLOCKS: ("staging",)}.get(op, ("k_cache", "v_cache"))
    return all(torch.allclose(got[n], expected[n], atol=TOLERANCE, rtol=TOLERANCE) for n in written)
