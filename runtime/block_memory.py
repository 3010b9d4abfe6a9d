"""Memory in blocks, allocated once: what all kinds of KV cache have in common."""

from __future__ import annotations

import weakref

import numpy as np
import torch

from ..kernels.memory import huge_empty
from ..kernels.problem import require_positive
from .arrays import IntArray
from .errors import CacheInUse, Invariant, InvariantViolation

POISON = 0xFF  # every byte of a guard block: NaN in fp32, bf16, fp16 and fp8_e4m3, -1 in int8


class BlockMemory:
    """One or more pools of blocks for each layer; block b holds the same tokens in each of them.

    Everything that counts blocks (allocator, tables, ledger, swap) works on any of them: what differs between kinds
    of attention is which pools there are, and their shapes.

    Args:
        num_layers: layers that keep their own content.
        num_blocks: blocks of each layer.
        block_size: tokens of one block.
        device: where the pools live.
        debug: see `KVCache`.
        null_block: see `KVCache`.

    Attributes:
        null_block: the number of the null block, or None.
        pool_axes: by name of each pool, in the order of `block_tensors`: along which of its dimensions the slots lie.

    Raises:
        ValueError: a count below 1.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
        debug: bool = False,
        null_block: bool = False,
    ) -> None:
        for name, value in (("num_layers", num_layers), ("num_blocks", num_blocks), ("block_size", block_size)):
            require_positive(name, value)
        self.num_layers, self.num_blocks, self.block_size, self.debug = num_layers, num_blocks, block_size, debug
        self.null_block = num_blocks if null_block else None
        self.device = torch.device(device)
        self._guards = 1 if debug else 0
        self._owner: weakref.ref[object] | None = None
        self._pools: dict[str, torch.Tensor] = {}
        self.pool_axes: dict[str, int] = {}

    @property
    def physical_blocks(self) -> int:
        """Blocks of each pool, guard and null blocks included."""
        return self.num_blocks + int(self.null_block is not None) + 2 * self._guards

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, slot_axis: int) -> torch.Tensor:
        """A pool of this shape, which begins with `physical_blocks`, for each layer; slots lie along `slot_axis`."""
        shape = (self.num_layers, *shape)
        on_cpu = self.device.type == "cpu"
        pool = huge_empty(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype, device=self.device)
        if self.debug:
            pool.view(torch.uint8).fill_(POISON)
        if self.null_block is not None:
            pool[:, self._guards + self.num_blocks].zero_()
        self._pools[name] = pool
        self.pool_axes[name] = slot_axis + 1
        return pool

    def block_tensors(self) -> tuple[torch.Tensor, ...]:
        """Views of everything that belongs to a block and moves with it, each [num_layers, num_blocks, ...]."""
        return tuple(pool[:, self._guards : self._guards + self.num_blocks] for pool in self._pools.values())

    def layers_as_one(self) -> tuple[torch.Tensor, ...]:
        """Views of the pools, each [num_layers * physical_blocks, ...]: the blocks of all layers as those of one, for a
        launch that moves a block in every layer."""
        return tuple(pool.view(-1, *pool.shape[2:]) for pool in self._pools.values())

    def ids_in_layers(self, blocks: IntArray) -> IntArray:
        """Numbers of `blocks` in `layers_as_one`, [len(blocks) * num_layers]: those of a block in every layer, then the
        next one's."""
        layers = self.physical_blocks * np.arange(self.num_layers)
        ids: IntArray = (blocks[:, None] + self._guards + layers).reshape(-1)
        return ids

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and pools."""
        return sum(pool[:, 0].numel() * pool.element_size() for pool in self._pools.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools, guard and null blocks included."""
        return self.physical_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool can hold."""
        return self.num_blocks * self.block_size

    def claim(self, owner: object) -> None:
        """Makes `owner` the only one to hand out this pool's blocks, until `release` or until it is garbage.

        Raises:
            CacheInUse: somebody else is.
        """
        current = None if self._owner is None else self._owner()
        if current is not None and current is not owner:
            raise CacheInUse(
                f"this cache is in use by a {type(current).__name__}, and two would overwrite each other's blocks: "
                "use that one, close() it first, or build another cache"
            )
        self._owner = weakref.ref(owner)

    def release(self, owner: object) -> None:
        """Ends the claim of `owner`; no effect if it has none."""
        if self._owner is not None and self._owner() is owner:
            self._owner = None

    def require_claim(self, owner: object) -> None:
        """Raises CacheInUse unless `owner` has claimed this cache and not released it."""
        if self._owner is None or self._owner() is not owner:
            raise CacheInUse(f"this {type(owner).__name__} is closed and no longer has the cache: build a new one")

    def check(self) -> None:
        """Compares the guard blocks with what was written there; nothing to compare unless in debug mode.

        Raises:
            InvariantViolation: names layer, pool and side: something wrote outside the pool.
        """
        if not self._guards:
            return
        for name, pool in self._pools.items():
            for side, block in (("before", 0), ("behind", -1)):
                clean = (pool[:, block].view(torch.uint8) == POISON).flatten(1).all(dim=1)
                if not bool(clean.all()):
                    layer = int(torch.nonzero(~clean)[0])
                    detail = f"the guard block {side} the {name} pool of layer {layer} was written to"
                    raise InvariantViolation(Invariant.GUARD, detail)

    def guard_element(self) -> torch.Tensor:
        """One element of the guard block before the first pool, [1]: to try whether it is watched."""
        return next(iter(self._pools.values()))[0, 0].view(-1)[:1]

    def _layer(self, pool: torch.Tensor, layer: int) -> torch.Tensor:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} of {self.num_layers}: layers are 0 to {self.num_layers - 1}")
        return self._visible(pool)[layer]

    def _visible(self, pool: torch.Tensor) -> torch.Tensor:
        """A pool without its guard blocks, [num_layers, num_blocks, ...], the null block behind if there is one."""
        count = self.num_blocks + int(self.null_block is not None)
        return pool[:, self._guards : self._guards + count]
