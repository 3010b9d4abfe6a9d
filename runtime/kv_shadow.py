"""Finds writes to places that are not the writer's: what every slot should hold, and whether it does."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import numpy as np
import torch

from .allocator import BlockAllocator
from .block_memory import POISON, BlockMemory
from .errors import Invariant, InvariantViolation
from .plan import StepPlan

_SEED = 0x5EED
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class Fault(StrEnum):
    """What `KVShadow.prove` does on purpose, and must find."""

    FOREIGN_WRITE = "one element of a slot that somebody else wrote is changed"
    WRITE_AFTER_FREE = "a free block is written to"
    GUARD_WRITE = "the block before the pool is written to"


class KVShadow:
    """A second opinion on the content of a cache: a hash of every written slot, in every layer and pool.

    For debugging: every step costs a pass over what it wrote, every check one over all that is live. A block that is
    freed is filled with poison (NaN in every float format), which stays until somebody gets the block: reads after
    free show as NaN, writes after free are found by `check`.

    The hash of a slot is the sum of its elements' bit patterns, each times a random odd number, modulo 2^64: a single
    changed element always changes it.

    Args:
        cache: pools to watch.
        allocator: who hands out their blocks.
    """

    def __init__(self, cache: BlockMemory, allocator: BlockAllocator) -> None:
        self._cache, self._allocator = cache, allocator
        shape = (len(cache.pool_axes), cache.num_layers, cache.num_blocks, cache.block_size)
        self._hash = torch.zeros(shape, dtype=torch.int64)
        self._known = np.zeros((cache.num_blocks, cache.block_size), np.bool_)
        self._poisoned = np.zeros(cache.num_blocks, np.bool_)
        self._returns = allocator.count_returns()
        self._seen = self._returns.copy()
        names, axes = cache.pool_axes.keys(), cache.pool_axes.values()
        self._pools = tuple(zip(names, cache.block_tensors(), axes, strict=True))
        generator = torch.Generator().manual_seed(_SEED)
        self._weights = []
        for _, pool, _ in self._pools:
            count = pool[0, 0].numel() // cache.block_size
            self._weights.append(torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator) | 1)

    def before_step(self, plan: StepPlan) -> None:
        """What the step got is no longer poisoned; what somebody else brought back is not known."""
        self._forget_returned()
        taken = self._allocator.refcounts(np.arange(self._cache.num_blocks)) > 0
        self._poisoned &= ~taken
        self._known[~taken] = False

    def after_step(self, plan: StepPlan) -> None:
        """Takes note of what the step copied and wrote."""
        if plan.copies is not None:
            pairs = plan.copies.cpu()
            self._hash[:, :, pairs[:, 1]] = self._hash[:, :, pairs[:, 0]]
            self._known[pairs[:, 1].numpy()] = self._known[pairs[:, 0].numpy()]
        slots = plan.slot_mapping.cpu().numpy()
        blocks, offsets = np.divmod(slots[slots >= 0], self._cache.block_size)
        touched, place = np.unique(blocks, return_inverse=True)
        for i in range(len(self._pools)):
            fresh = self._hashes(i, touched)
            self._hash[i][:, blocks, offsets] = fresh[:, place, offsets]
        self._known[blocks, offsets] = True

    def after_commit(self) -> None:
        """Poisons what came back; to be called before a step too, for what came back in between."""
        self._forget_returned()
        free = np.flatnonzero(self._free & ~self._poisoned)
        for tensor in self._cache.block_tensors():
            if free.size:
                tensor[:, torch.from_numpy(free)] = _poison(tensor)
        self._poisoned[free] = True
        self._known[free] = False

    def _forget_returned(self) -> None:
        """A block that came back may have a new owner by now, who need not have got its content from a step."""
        returned = self._returns != self._seen
        self._known[returned] = False
        self._poisoned[returned] = False
        self._seen[:] = self._returns

    @property
    def _free(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        free = np.ones(self._cache.num_blocks, np.bool_)
        free[self._allocator.taken_blocks()] = False
        return free

    def check(self) -> None:
        """Compares everything with what was written.

        Raises:
            InvariantViolation: names layer, pool, block and slot that somebody else wrote to.
        """
        self._forget_returned()
        live = np.flatnonzero(self._known.any(axis=1) & ~self._free)
        for i, (name, _, _) in enumerate(self._pools):
            wrong = self._hashes(i, live) != self._hash[i][:, live]
            wrong &= torch.from_numpy(self._known[live])
            if bool(wrong.any()):
                layer, which, slot = torch.nonzero(wrong)[0].tolist()
                detail = f"layer {layer}, {name}, block {live[which]}, slot {slot} is not what its step wrote"
                raise InvariantViolation(Invariant.SHADOW, detail)
        self._check_poison()
        self._cache.check()

    def _check_poison(self) -> None:
        blocks = np.flatnonzero(self._poisoned & self._free)
        if blocks.size == 0:
            return
        for name, pool, _ in self._pools:
            bits = pool[:, torch.from_numpy(blocks)].contiguous().view(torch.uint8)
            touched = (bits != POISON).flatten(2).any(dim=2)
            if bool(touched.any()):
                layer, which = torch.nonzero(touched)[0].tolist()
                detail = f"layer {layer}, {name}: block {blocks[which]} was written to after it was freed"
                raise InvariantViolation(Invariant.POISON, detail)

    def _hashes(self, which: int, blocks: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> torch.Tensor:
        """Hashes of all slots of `blocks`, [num_layers, len(blocks), block_size]."""
        _, pool, axis = self._pools[which]
        part = pool[:, torch.from_numpy(blocks)].contiguous()
        bits = part.view(_INTEGERS[part.element_size()]).movedim(axis, 2)
        return (bits.flatten(3).long() * self._weights[which].to(bits.device)).sum(dim=3).cpu()

    def prove(self) -> tuple[Fault, ...]:
        """Commits every fault that it can, one after the other, and undoes it; returns those that were found.

        A write to a foreign slot needs one that is live, a write after free a block that is free, a guard write a
        cache in debug mode: call it amid a run.

        Raises:
            InvariantViolation: something is wrong already.
            AssertionError: a fault was not found.
        """
        self.check()
        found = []
        for fault, place in self._places().items():
            target = place()
            if target is None:
                continue
            before = target.clone()
            target.view(torch.uint8)[0] ^= 1
            try:
                self.check()
            except InvariantViolation:
                found.append(fault)
            finally:
                target.copy_(before)
            if fault not in found:
                raise AssertionError(f"planted and not found: {fault}")
        self.check()
        return tuple(found)

    def _places(self) -> dict[Fault, Callable[[], torch.Tensor | None]]:
        """Where to commit each fault: one element of the first pool in the last layer."""
        _, pool, axis = self._pools[0]

        def element(block: int, slot: int) -> torch.Tensor:
            part = pool[-1, block].movedim(axis - 2, 0)[slot]
            return torch.as_strided(part, (1,), (1,), part.storage_offset())

        def foreign() -> torch.Tensor | None:
            live = np.argwhere(self._known & ~self._free[:, None])
            return None if not live.size else element(int(live[0][0]), int(live[0][1]))

        def freed() -> torch.Tensor | None:
            poisoned = np.flatnonzero(self._poisoned & self._free)
            return None if not poisoned.size else element(int(poisoned[0]), 0)

        return {
            Fault.FOREIGN_WRITE: foreign,
            Fault.WRITE_AFTER_FREE: freed,
            Fault.GUARD_WRITE: lambda: self._cache.guard_element() if self._cache.debug else None,
        }


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """One element of poison."""
    return torch.full((tensor.element_size(),), POISON, dtype=torch.uint8, device=tensor.device).view(tensor.dtype)[0]
