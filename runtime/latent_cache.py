"""The cache of multi-head latent attention: one latent a token and layer, which all heads read."""

from __future__ import annotations

import torch

from ..kernels.problem import require_positive
from .block_memory import BlockMemory


class LatentCache(BlockMemory):
    """One pool for each layer, [num_blocks, block_size, latent_dim + rope_dim], for keys and values at once.

    A token's compressed latent comes first, its rotated key part behind it. Allocator, tables, forks and swap are those
    of any other cache.

    Args:
        latent_dim: elements of the compressed latent (`kv_lora_rank`).
        rope_dim: elements of the part with rotary embedding (`qk_rope_head_dim`); may be 0.
        dtype: of the elements.
        block_size: tokens of one block.
        num_layers, num_blocks, device, debug, null_block: see `KVCache`.

    Raises:
        ValueError: a count below 1.
    """

    def __init__(
        self,
        latent_dim: int,
        rope_dim: int,
        dtype: torch.dtype,
        block_size: int,
        num_layers: int,
        num_blocks: int,
        device: torch.device | str = "cpu",
        debug: bool = False,
        null_block: bool = False,
    ) -> None:
        super().__init__(num_layers, num_blocks, block_size, device, debug, null_block)
        require_positive("latent_dim", latent_dim)
        if rope_dim < 0:
            raise ValueError(f"rope_dim={rope_dim} must not be negative")
        self.latent_dim, self.rope_dim = latent_dim, rope_dim
        shape = (self.physical_blocks, block_size, latent_dim + rope_dim)
        self._latent = self._allocate("latent", shape, dtype, slot_axis=1)

    def latent_cache(self, layer: int) -> torch.Tensor:
        """Pool of a layer, [num_blocks, block_size, latent_dim + rope_dim], the null block behind if there is one: a
        view, to read and to write."""
        return self._layer(self._latent, layer)
