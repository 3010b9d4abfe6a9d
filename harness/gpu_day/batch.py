"""A decode batch on the device, in as many pools as it takes to leave the last-level cache cold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from pagedtune.harness.cuda_context import CudaContext
from pagedtune.harness.gpu_day.cells import Candidate, Cell
from pagedtune.harness.gpu_day.device_tensors import DeviceTensors
from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.cuda_executor import CudaExecutor

TILE_ELEMENTS = 1 << 21  # random numbers that the pools repeat: more than any sequence here has in one head
SPARE_BLOCKS = 3
# Of the rounding of the output's dtype, relative to 1 + |value|: an order above what the gate allows, and far below
# what a wrong launch gives. The gate decides about correctness; this says that what was timed computed.
ALLOWED_ROUNDINGS = 4
NUM_CHECKED = 3  # rows per pool


class Batch:
    """The tensors of one cell, with `num_pools` pools and block tables of their own.

    Args:
        cell: what is computed.
        context: on which device.
        num_pools: how many copies.
        seed: of content and tables.
    """

    def __init__(self, cell: Cell, context: CudaContext, num_pools: int, seed: int = 0) -> None:
        self.cell, self._context = cell, context
        self._device = DeviceTensors(context)
        generator = torch.Generator().manual_seed(seed)
        problem, pool_format = cell.problem, cell.pool_format
        self._blocks_per_seq = -(-cell.context_len // pool_format.block_size)
        num_blocks = cell.num_seqs * self._blocks_per_seq + SPARE_BLOCKS
        shape = pool_format.k_shape(num_blocks, problem)
        size = min(TILE_ELEMENTS, math.prod(shape))
        self._tiles = [torch.randn(size, generator=generator).to(pool_format.kv_dtype.torch) for _ in range(2)]
        self._q = torch.randn(cell.num_seqs, problem.num_q_heads, problem.head_dim, generator=generator)
        self._q = self._q.to(problem.q_dtype.torch)
        self._tables = [
            torch.randperm(num_blocks, generator=generator)[: cell.num_seqs * self._blocks_per_seq]
            .view(cell.num_seqs, -1)
            .to(torch.int32)
            for _ in range(num_pools)
        ]
        lens = torch.full((cell.num_seqs,), cell.context_len, dtype=torch.int32)
        starts = torch.arange(cell.num_seqs + 1, dtype=torch.int32)
        out_shape = (cell.num_seqs, problem.num_q_heads, problem.head_dim_v)
        shared = {
            "q": self._device.upload(self._q),
            "context_lens": self._device.upload(lens),
            "query_start_loc": self._device.upload(starts),
            "lse": self._device.empty((cell.num_seqs, problem.num_q_heads), torch.float32),
        }
        self._pools = [
            {
                **shared,
                "k_cache": self._device.tiled(shape, self._tiles[0]),
                "v_cache": self._device.tiled(pool_format.v_shape(num_blocks, problem), self._tiles[1]),
                "block_table": self._device.upload(table),
                "out": self._device.empty(out_shape, problem.q_dtype.torch),
            }
            for table in self._tables
        ]

    def launches(self, candidate: Candidate, artifacts: Sequence[Artifact]) -> list[Callable[[], None]]:
        """One prepared launch for each pool.

        Raises:
            LaunchError, ValueError: see `CudaExecutor`.
        """
        cell = self.cell
        plan = candidate.variant.plan(cell.problem, cell.pool_format, candidate.config, cell.bounds)
        workspaces = {n: self._device.empty(spec.shape, spec.dtype) for n, spec in plan.workspaces.items()}
        executor = CudaExecutor(
            artifacts, self._context.driver, lambda: self._context.stream, pointer_of=self._device.address
        )
        return [executor.prepare(plan.bind({**pool, **workspaces})) for pool in self._pools]

    def forget_outputs(self) -> None:
        """Fills the outputs with what no launch computes."""
        for pool in self._pools:
            self._device.memory(pool["out"]).fill(0xFF)
        self._context.synchronise("filling the outputs")

    def worst_error(self, seed: int = 0) -> float:
        """Largest error of some rows of every pool, as a share of what is allowed; NaN counts as infinite."""
        rng = np.random.default_rng(seed)
        problem = self.cell.problem
        rounding = torch.finfo(problem.q_dtype.torch).eps
        worst = 0.0
        for pool, table in zip(self._pools, self._tables, strict=True):
            got = self._device.fetch(pool["out"]).double().numpy()
            for _ in range(NUM_CHECKED):
                seq, head = int(rng.integers(self.cell.num_seqs)), int(rng.integers(problem.num_q_heads))
                wanted = self._attend(table, seq, head)
                error = np.abs(got[seq, head] - wanted) / (ALLOWED_ROUNDINGS * rounding * (1 + np.abs(wanted)))
                worst = max(worst, float("inf") if np.isnan(error).any() else float(error.max()))
        return worst

    def _attend(self, table: torch.Tensor, seq: int, head: int) -> npt.NDArray[np.float64]:
        problem = self.cell.problem
        group = head // problem.gqa_ratio
        keys, values = (self._rows(tile, table[seq].numpy(), group) for tile in self._tiles)
        scores = keys @ self._q[seq, head].double().numpy() * problem.softmax_scale
        weights = np.exp(scores - scores.max())
        attended: npt.NDArray[np.float64] = weights @ values / weights.sum()
        return attended

    def _rows(self, tile: torch.Tensor, blocks: npt.NDArray[np.int32], group: int) -> npt.NDArray[np.float64]:
        """K or V of a sequence and KV head, [context_len, head_dim], from an NHD pool that repeats `tile`."""
        heads, dim, size = self.cell.problem.num_kv_heads, self.cell.problem.head_dim, self.cell.pool_format.block_size
        tokens = np.arange(self.cell.context_len)
        slots = blocks[tokens // size].astype(np.int64) * size + tokens % size
        index = ((slots * heads + group) * dim)[:, None] + np.arange(dim)
        rows: npt.NDArray[np.float64] = tile.double().numpy()[index % tile.numel()]
        return rows

    def free(self) -> None:
        """Gives the device its memory back."""
        self._device.free()
