"""The memory of the KV pool, allocated once."""

from __future__ import annotations

import weakref

import torch

from ..kernels.memory import huge_empty
from ..kernels.pool_format import PoolFormat
from ..kernels.problem import Problem, require_positive
from .errors import CacheInUse, Invariant, InvariantViolation

POISON = 0xFF  # every byte of a guard block: NaN in fp32, bf16, fp16 and fp8_e4m3, -1 in int8


class KVCache:
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
        k_scale, v_scale: fp32 dequantisation scales of each layer, [num_layers, ...] of ones, or None.

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
        require_positive("num_layers", num_layers)
        require_positive("num_blocks", num_blocks)
        reason = pool_format.reject(problem)
        if reason:
            raise ValueError(f"{pool_format.key} cannot hold {problem.key}: {reason}")
        self.problem, self.pool_format = problem, pool_format
        self.num_layers, self.num_blocks, self.debug = num_layers, num_blocks, debug
        self.device = torch.device(device)
        self._guards = 1 if debug else 0
        self.null_block = num_blocks if null_block else None
        self._owner: weakref.ref[object] | None = None
        physical_blocks = num_blocks + int(null_block) + 2 * self._guards
        self._k = self._allocate(pool_format.k_shape(physical_blocks, problem))
        self._v = self._allocate(pool_format.v_shape(physical_blocks, problem))
        scales = pool_format.scale_shape(problem)
        self.k_scale = None if scales is None else torch.ones((num_layers, *scales), device=self.device)
        self.v_scale = None if scales is None else torch.ones((num_layers, *scales), device=self.device)
        if null_block:
            for pool in (self._k, self._v):
                pool[:, self._guards + num_blocks].zero_()

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

    def k_cache(self, layer: int) -> torch.Tensor:
        """K pool of a layer, shaped `pool_format.k_shape(num_blocks, problem)`, the null block behind if there is one:
        a view, to read and to write."""
        return self._layer(self._k, layer)

    def v_cache(self, layer: int) -> torch.Tensor:
        """V pool of a layer, likewise."""
        return self._layer(self._v, layer)

    def block_tensors(self) -> tuple[torch.Tensor, ...]:
        """Views of everything that belongs to a block and moves with it, each [num_layers, num_blocks, ...]."""
        return tuple(pool[:, self._guards : self._guards + self.num_blocks] for pool in (self._k, self._v))

    def guard_element(self) -> torch.Tensor:
        """One element of the guard block before the K pool of the first layer, [1]: to try whether it is watched."""
        return self._k[0, 0].view(-1)[:1]

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self.pool_format.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return self.num_layers * self.block_size * self.pool_format.bytes_per_token(self.problem)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools, guard and null blocks included."""
        return (self.num_blocks + int(self.null_block is not None) + 2 * self._guards) * self.block_bytes

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
        for name, pool in (("K", self._k), ("V", self._v)):
            for side, block in (("before", 0), ("behind", -1)):
                clean = (pool[:, block].view(torch.uint8) == POISON).flatten(1).all(dim=1)
                if not bool(clean.all()):
                    layer = int(torch.nonzero(~clean)[0])
                    detail = f"the guard block {side} the {name} pool of layer {layer} was written to"
                    raise InvariantViolation(Invariant.GUARD, detail)

    def _allocate(self, shape: tuple[int, ...]) -> torch.Tensor:
        dtype, shape = self.pool_format.kv_dtype.torch, (self.num_layers, *shape)
        on_cpu = self.device.type == "cpu"
        pool = huge_empty(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype, device=self.device)
        if self.debug:
            pool.view(torch.uint8).fill_(POISON)
        return pool

    def _layer(self, pool: torch.Tensor, layer: int) -> torch.Tensor:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} of {self.num_layers}: layers are 0 to {self.num_layers - 1}")
        count = self.num_blocks + int(self.null_block is not None)
        return pool[layer, self._guards : self._guards + count]
