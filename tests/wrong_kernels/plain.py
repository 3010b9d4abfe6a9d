"""What a common test suite would say of a kernel: one launch on friendly inputs, allclose with 1e-2.

Friendly: four equal lengths that are a multiple of the block size, table in pool order, unused memory zero, normal
numbers. This is the yardstick that the gate's worth is measured by.
"""

from __future__ import annotations

import torch

from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.inputs import AttentionInputs
from pagedtune.harness.memory import Poison
from pagedtune.harness.oracle import attention
from pagedtune.kernels.device import Device
from pagedtune.kernels.native import NativeExecutor
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
