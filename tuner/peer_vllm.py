"""Times `cpu_split` beside vLLM's CPU attention op in one process. Runs inside the peer's own environment.

Imports nothing of the tuner's dependencies: the peer's environment has torch, numpy and the peer. One JSON line per
cell goes to the file descriptor named in the arguments; what the peer prints does not disturb it.

Both kernels get the same K and V, in their own layout, and the same tables over scattered blocks. Calls rotate over
table sets that together exceed the last-level cache. A round times each kernel once, in turn, each after one untimed
call of its own: the other library's threads may still spin when it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from pagedtune.harness.statistics import bootstrap_ci, median
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.cpu_facts import usable_cores
from pagedtune.kernels.cpu_split import CpuSplit, CpuSplitConfig
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.memory import huge_empty
from pagedtune.kernels.native import NativeExecutor
from pagedtune.kernels.pool_format import Layout, PoolFormat
from pagedtune.kernels.problem import Problem

BLOCK_SIZE = 32  # vLLM's vector kernel needs a multiple of 32
POOL_BYTES = 1 << 30  # of each of the three pools (the peer's, our K, our V): 3 GiB in all
MAX_SETS = 64
HEADS = ((32, 8, 128), (9, 3, 64))
BATCHES = (1, 8, 32)
CONTEXTS = (128, 1024, 4096)
CONFIGS = tuple(
    CpuSplitConfig(num_splits=splits, split_tokens=128, prefetch_tokens=prefetch)
    for splits in (1, 2, 4)
    for prefetch in (64, 128)
)
MAX_DIFFERENCE = 0.02  # two bf16 results of unit-normal values averaged over 128 keys or more

Call = Callable[[int], None]


@dataclass(frozen=True)
class Pools:
    """The same keys and values twice: in our layout and in the peer's."""

    problem: Problem
    pool_format: PoolFormat
    k: torch.Tensor
    v: torch.Tensor
    peer: torch.Tensor

    @property
    def num_blocks(self) -> int:
        """Blocks of each pool."""
        return self.k.shape[0]


def make_pools(problem: Problem, ops: Any) -> Pools:
    """Pools of normal numbers; the peer's is filled by its own write op."""
    pool_format = PoolFormat(BLOCK_SIZE, DType.BF16, Layout.HND)
    num_blocks = POOL_BYTES // (BLOCK_SIZE * pool_format.bytes_per_token(problem))
    heads, dim = problem.num_kv_heads, problem.head_dim
    k = huge_empty(pool_format.k_shape(num_blocks, problem), torch.bfloat16)
    v = huge_empty(pool_format.v_shape(num_blocks, problem), torch.bfloat16)
    peer = huge_empty((num_blocks, heads, 2 * BLOCK_SIZE, dim), torch.bfloat16)
    k_peer, v_peer = peer.chunk(2, dim=2)
    slots = torch.arange(BLOCK_SIZE)
    step = max(1, (1 << 20) // (BLOCK_SIZE * heads * dim))
    for start in range(0, num_blocks, step):
        for pool in (k, v):
            pool[start : start + step].normal_()
        size = min(step, num_blocks - start)
        tokens = [p[start : start + size].transpose(1, 2).reshape(-1, heads, dim) for p in (k, v)]
        mapping = (torch.arange(start, start + size)[:, None] * BLOCK_SIZE + slots).flatten()
        ops.cpu_attn_reshape_and_cache(*tokens, k_peer, v_peer, mapping, "vec")
    return Pools(problem, pool_format, k, v, peer)


@dataclass(frozen=True)
class Batch:
    """Query, lengths and rotating tables of one cell."""

    q: torch.Tensor
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor
    tables: list[torch.Tensor]


def make_batch(pools: Pools, batch: int, context_len: int, seed: int) -> Batch:
    """Each table set names its own random blocks."""
    generator = torch.Generator().manual_seed(seed)
    columns = context_len // BLOCK_SIZE
    num_sets = max(1, min(MAX_SETS, pools.num_blocks // (batch * columns)))
    tables = [
        torch.randperm(pools.num_blocks, generator=generator)[: batch * columns].view(batch, columns).int()
        for _ in range(num_sets)
    ]
    q = torch.randn(batch, pools.problem.num_q_heads, pools.problem.head_dim, generator=generator).bfloat16()
    lens = torch.full((batch,), context_len, dtype=torch.int32)
    return Batch(q, lens, torch.arange(batch + 1, dtype=torch.int32), tables)


def our_call(pools: Pools, batch: Batch, config: CpuSplitConfig, out: torch.Tensor, device: Device) -> Call:
    """`cpu_split` on table set `i`."""
    variant, problem, pool_format = CpuSplit(), pools.problem, pools.pool_format
    bounds = Bounds(len(batch.context_lens), int(batch.context_lens[0]))
    executor = NativeExecutor(variant.build(problem, pool_format, config, device))
    plan = variant.plan(problem, pool_format, config, bounds)
    fixed = {
        "q": batch.q,
        "k_cache": pools.k,
        "v_cache": pools.v,
        "context_lens": batch.context_lens,
        "query_start_loc": batch.query_start_loc,
        "out": out,
        **plan.allocate_workspaces(),
    }
    launches = [executor.prepare(plan.bind(fixed | {"block_table": table})) for table in batch.tables]
    return lambda i: launches[i % len(launches)]()


def peer_call(pools: Pools, batch: Batch, out: torch.Tensor, ops: Any) -> Call:
    """vLLM's op on table set `i`; its scheduler metadata is made once, as once per step in an engine."""
    problem = pools.problem
    k, v = pools.peer.chunk(2, dim=2)
    lens, starts, scale = batch.context_lens, batch.query_start_loc, problem.softmax_scale
    metadata = ops.cpu_attn_get_scheduler_metadata(
        len(lens), problem.num_q_heads, problem.num_kv_heads, problem.head_dim, lens, torch.bfloat16, starts, True, -1,
        "vec", True,
    )  # fmt: skip

    def call(i: int) -> None:
        table = batch.tables[i % len(batch.tables)]
        ops.cpu_attention_with_kv_cache(
            batch.q, k, v, out, starts, lens, scale, True, None, -1, table, 0.0, metadata, None
        )

    return call


def rounds(calls: list[Call], seconds: float, least: int) -> list[tuple[float, ...]]:
    """Times in microseconds of each call, round by round, the order turning."""
    taken: list[tuple[float, ...]] = []
    numbers: Iterator[int] = count()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken) < least:
        times = [0.0] * len(calls)
        for offset in range(len(calls)):
            index = (len(taken) + offset) % len(calls)
            calls[index](next(numbers))
            set_number = next(numbers)
            start = time.perf_counter_ns()
            calls[index](set_number)
            times[index] = (time.perf_counter_ns() - start) / 1e3
        taken.append(tuple(times))
    return taken


def time_cell(
    pools: Pools, ops: Any, batch_size: int, context_len: int, seconds: float, device: Device
) -> dict[str, Any]:
    """One cell: the configs screened, the best of them against the default and the peer."""
    batch = make_batch(pools, batch_size, context_len, seed=batch_size * context_len)
    ours, theirs = torch.empty_like(batch.q), torch.empty_like(batch.q)
    calls = {config: our_call(pools, batch, config, ours, device) for config in CONFIGS}
    peer = peer_call(pools, batch, theirs, ops)
    screened = rounds(list(calls.values()), seconds / 3, least=3)
    best = CONFIGS[min(range(len(CONFIGS)), key=lambda i: median([r[i] for r in screened]))]
    calls[best](0)
    peer(0)
    difference = float((ours.float() - theirs.float()).abs().max())
    if not difference <= MAX_DIFFERENCE:
        raise RuntimeError(f"the two results differ by {difference:.3g}: they did not compute the same thing")
    taken = rounds([calls[best], peer], seconds, least=7)
    ratios = [theirs_us / ours_us for ours_us, theirs_us in taken]
    problem = pools.problem
    kv_bytes = batch_size * context_len * pools.pool_format.bytes_per_token(problem)
    return {
        "heads": f"{problem.num_q_heads}/{problem.num_kv_heads}/{problem.head_dim}",
        "batch": batch_size,
        "context_len": context_len,
        "config": best.as_dict(),
        "ours_us": median([r[0] for r in taken]),
        "peer_us": median([r[1] for r in taken]),
        "ratio": median(ratios),
        "ratio_ci": bootstrap_ci(ratios),
        "rounds": len(taken),
        "kv_bytes": kv_bytes,
        "max_difference": difference,
    }


def main() -> None:
    """Times all cells; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True, help="of finals per cell")
    parser.add_argument("--fd", type=int, required=True, help="file descriptor that results go to")
    arguments = parser.parse_args()
    from vllm import _custom_ops as ops  # type: ignore[import-not-found, unused-ignore]
    from vllm.platforms import current_platform  # type: ignore[import-not-found, unused-ignore]

    current_platform.import_kernels()
    torch.set_num_threads(usable_cores())
    device = Device("cpu", DeviceKind.CPU, num_units=usable_cores())
    with os.fdopen(arguments.fd, "w") as results:
        for heads in HEADS:
            pools = make_pools(Problem(*heads, q_dtype=DType.BF16), ops)
            for batch_size in BATCHES:
                for context_len in CONTEXTS:
                    cell = time_cell(pools, ops, batch_size, context_len, arguments.seconds, device)
                    results.write(json.dumps(cell) + "\n")
                    results.flush()


if __name__ == "__main__":
    main()
