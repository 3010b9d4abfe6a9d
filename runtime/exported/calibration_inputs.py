"""Inputs to time and to compare finalists on: random pools, walked through in random order."""

from __future__ import annotations

import numpy as np
import torch

from ...kernels.device import Device
from ...kernels.launch import Tensors
from ...kernels.memory import huge_empty
from ...kernels.pool_format import PoolFormat
from ...kernels.problem import Problem
from ...kernels.workload import Workload

CACHE_FACTOR = 2  # the sets together are this many times the last-level cache, so that none is found there again
MAX_POOL_BYTES = 1 << 30
DEFAULT_CACHE_BYTES = 32 << 20  # where the system does not say how large the last-level cache is
_TILE_ELEMENTS = 1 << 20


class Inputs:
    """One pool of random K and V, and as many batches over different blocks of it as `num_sets`.

    Args:
        problem, pool_format, workload: of each batch.
        num_sets: batches; each has blocks of its own.
        seed: of values and block order.
        device: where the tensors lie.
    """

    def __init__(
        self,
        problem: Problem,
        pool_format: PoolFormat,
        workload: Workload,
        num_sets: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = pool_format.block_size
        each = workload.num_blocks(size)
        order = np.random.default_rng(seed).permutation(each * num_sets).astype(np.int32)
        shapes = {
            "k_cache": pool_format.k_shape(each * num_sets, problem),
            "v_cache": pool_format.v_shape(each * num_sets, problem),
        }
        pools = {n: _random_pool(shape, pool_format.kv_dtype.torch, generator) for n, shape in shapes.items()}
        starts = np.concatenate(([0], np.cumsum(workload.query_lens)))
        dtype, heads = problem.q_dtype.torch, problem.num_q_heads
        q = torch.randn((workload.num_tokens, heads, problem.head_dim), generator=generator).to(dtype)
        shared = {
            **pools,
            **_constants(problem, pool_format, each * num_sets, generator),
            "q": q,
            "context_lens": torch.tensor(workload.context_lens, dtype=torch.int32),
            "query_start_loc": torch.from_numpy(starts.astype(np.int32)),
        }
        self._shared = {name: tensor.to(device) for name, tensor in shared.items()}
        self._out_shape = (workload.num_tokens, heads, problem.head_dim_v)
        blocks = [-(-n // size) for n in workload.context_lens]
        self._tables = [_table(order[i * each : (i + 1) * each], blocks).to(device) for i in range(num_sets)]

    @property
    def num_sets(self) -> int:
        """Batches."""
        return len(self._tables)

    def tensors(self, index: int) -> dict[str, torch.Tensor]:
        """The slots of batch `index`, with an output of their own."""
        q = self._shared["q"]
        out = torch.zeros(self._out_shape, dtype=q.dtype, device=q.device)
        return {**self._shared, "block_table": self._tables[index], "out": out}


def sets_beyond_cache(problem: Problem, pool_format: PoolFormat, workload: Workload, device: Device) -> int:
    """How many batches exceed the last-level cache together, within a share of the memory."""
    each = workload.num_blocks(pool_format.block_size) * pool_format.block_size * pool_format.bytes_per_token(problem)
    wanted = -(-CACHE_FACTOR * (device.l2_bytes or DEFAULT_CACHE_BYTES) // each) + 1
    limit = min(MAX_POOL_BYTES, (device.memory_bytes or 8 * MAX_POOL_BYTES) // 8)
    return max(1, min(wanted, limit // each, 256))


def launched(tensors: Tensors) -> torch.Tensor:
    """The output of a launch, as fp32."""
    return tensors["out"].float()


def _table(blocks: np.ndarray, counts: list[int]) -> torch.Tensor:
    """Block table [num_seqs, most blocks] with -1 behind each sequence's blocks."""
    table = np.full((len(counts), max(counts)), -1, np.int32)
    table[np.arange(max(counts)) < np.array(counts)[:, None]] = blocks
    return torch.from_numpy(table)


def _random_pool(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A pool of N(0, 1) values, repeated after a million: generating more would take longer than timing."""
    pool = huge_empty(shape, dtype)
    flat, tile = pool.view(-1), torch.randn(_TILE_ELEMENTS, generator=generator).to(dtype)
    for start in range(0, flat.numel(), _TILE_ELEMENTS):
        part = flat[start : start + _TILE_ELEMENTS]
        part.copy_(tile[: part.numel()])
    return pool


def _constants(
    problem: Problem, pool_format: PoolFormat, num_blocks: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    if problem.sinks:
        tensors["sinks"] = torch.randn(problem.num_q_heads, generator=generator)
    if problem.alibi:
        tensors["alibi_slopes"] = torch.rand(problem.num_q_heads, generator=generator) / 8
    scales = pool_format.scale_shape(num_blocks, problem)
    if scales is not None:
        tensors |= {"k_scale": torch.full(scales, 0.5), "v_scale": torch.full(scales, 2.0)}
    return tensors
