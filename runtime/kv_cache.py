"""The memory of the KV pool, allocated once."""

from __future__ import annotations

import torch

from ..kernels.pool_format import PoolFormat
from ..kernels.problem import Problem
from .block_memory import POISON, BlockMemory

__all__ = ["POISON", "KVCache"]


class KVCache(BlockMemory):
    """K and V pools of all layers, allocated when this is built and never again.

    Every layer has `num_blocks` blocks; block b holds the same tokens in each of them. Fresh pools hold
    whatever the memory held: no kernel may let an unwritten slot reach its output.

    Args:
        problem: the model's attention on one rank.
        pool_format: layout of the pool.
        num_layers: layers that keep their own K and V.
        num_blocks: blocks of each layer.
        device: where the pools live.
        debug: adds one guard block before and one behind each layer's pool and poisons everything. Block -1 and
            slot -1, as wrong arithmetic makes them, then meet poison; `check()` finds writes into it.
        null_block: adds a block, number `num_blocks`, that no allocator hands out: whatever a padded row of a
            captured graph writes goes there, and what it reads there is finite.

    Attributes:
        null_block: its number, or None.
        k_scale, v_scale: fp32 dequantisation scales of each layer, or None: [num_layers, ...] of ones, or, of tokens,
            [num_layers, num_blocks, ...] shaped as the format says, with the null block behind if there is one. The
            latter are part of the pool: they move with their blocks, and are as little initialised.

    Raises:
        ValueError: a count below 1, or a problem that the format cannot hold.
    """

    def __init__(
        self,
        problem: Problem,
        pool_format: PoolFormat,
        num_layers: int,
        num_blocks: int,
        device: torch.device | str = "cpu",
        debug: bool = False,
        null_block: bool = False,
    ) -> None:
        super().__init__(num_layers, num_blocks, pool_format.block_size, device, debug, null_block)
        reason = pool_format.reject(problem)
        if reason:
            raise ValueError(f"{pool_format.key} cannot hold {problem.key}: {reason}")
        self.problem, self.pool_format = problem, pool_format
        dtype, physical_blocks = pool_format.kv_dtype.torch, self.physical_blocks
        self._k = self._allocate("K", pool_format.k_shape(physical_blocks, problem), dtype, pool_format.k_axes.slot)
        self._v = self._allocate("V", pool_format.v_shape(physical_blocks, problem), dtype, pool_format.v_axes.slot)
        self.k_scale, self.v_scale = self._scales("K scales"), self._scales("V scales")

    @classmethod
    def from_budget(
        cls,
        problem: Problem,
        pool_format: PoolFormat,
        num_layers: int,
        budget_bytes: int,
        device: torch.device | str = "cpu",
        debug: bool = False,
    ) -> KVCache:
        """The largest pool within `budget_bytes`, guard blocks included.

        Raises:
            ValueError: the budget does not hold one block of every layer.
        """
        block_bytes = num_layers * pool_format.block_size * pool_format.bytes_per_token(problem)
        num_blocks = budget_bytes // block_bytes - (2 if debug else 0)
        if num_blocks < 1:
            raise ValueError(
                f"budget_bytes={budget_bytes} holds no block: one takes {block_bytes} bytes over {num_layers} layers"
                + (", and debug mode takes two for guards" if debug else "")
            )
        return cls(problem, pool_format, num_layers, num_blocks, device, debug)

    def _scales(self, name: str) -> torch.Tensor | None:
        shape = self.pool_format.scale_shape(self.physical_blocks, self.problem)
        if shape is None:
            return None
        if not self.pool_format.has_token_scales:
            return torch.ones((self.num_layers, *shape), device=self.device)
        return self._visible(self._allocate(name, shape, torch.float32, slot_axis=2))

    def k_cache(self, layer: int) -> torch.Tensor:
        """K pool of a layer, shaped `pool_format.k_shape(num_blocks, problem)`, the null block behind if there is one:
        a view, to read and to write."""
        return self._layer(self._k, layer)

    def v_cache(self, layer: int) -> torch.Tensor:
        """V pool of a layer, likewise."""
        return self._layer(self._v, layer)
