"""Which sequences that lost their blocks are in host memory, and the rule that says when it is worth the way."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from numbers import Real

import torch

from .allocator import BlockAllocator
from .arrays import IntArray, to_device
from .block_memory import BlockMemory
from .host_pool import BlockMover
from .validation import count_of


class Preemption(StrEnum):
    """How a sequence that lost its blocks gets its K and V back."""

    AUTO = "auto"  # whichever is cheaper
    RECOMPUTE = "recompute"
    SWAP = "swap"  # recomputed only if host memory is full


@dataclass(frozen=True)
class SwapPolicy:
    """When to swap: if moving the blocks out and in again takes less time than computing the tokens anew.

    swap cost = 2 · blocks · bytes of a block / bandwidth; recompute cost = tokens · time for each. The paper on
    PagedAttention (SOSP 2023, section 7.3) finds the two comparable at block sizes of 16 to 64; which one wins hangs
    on model and bus, so both figures are the engine's to measure.

    Args:
        preemption: forces one way, or leaves it to the rule; its name, such as "swap", will do.
        bytes_per_second: bandwidth between host and device.
        seconds_per_token: time to compute one token of a prompt.

    Raises:
        ValueError: an unknown way, or a figure that is not positive.
    """

    preemption: Preemption = Preemption.AUTO
    bytes_per_second: float = 25e9  # PCIe 4.0 x16: 31.5 GB/s raw, about 25 in page-locked copies
    seconds_per_token: float = 50e-6  # 20,000 tokens a second of prompt: an 8B model on one data-centre GPU, about

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "preemption", Preemption(self.preemption))
        except ValueError:
            ways = ", ".join(repr(str(way)) for way in Preemption)
            raise ValueError(f"preemption={self.preemption!r} must be one of {ways}") from None
        for name in ("bytes_per_second", "seconds_per_token"):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not is_number or not value > 0:  # NaN is not above 0 either
                raise ValueError(f"{name}={value!r} must be a positive number: measure it on the machine")

    def prefers_swap(self, num_blocks: int, num_tokens: int, block_bytes: int) -> bool:
        """Whether `num_blocks` blocks should be moved rather than their `num_tokens` tokens be computed anew."""
        if self.preemption is not Preemption.AUTO:
            return self.preemption is Preemption.SWAP
        return 2 * num_blocks * block_bytes / self.bytes_per_second < num_tokens * self.seconds_per_token


def copy_blocks(cache: BlockMemory, pairs: torch.Tensor) -> None:
    """Makes the copies of a step, [k, 2] (source, destination), in every layer: for engines without a copy kernel."""
    index = to_device(pairs.cpu().numpy(), cache.device) if pairs.device != cache.device else pairs
    for pool in cache.block_tensors():
        pool[:, index[:, 1]] = pool[:, index[:, 0]]


class SwapSpace:
    """Which sequences are in host memory, and where.

    Args:
        num_blocks: blocks of host memory.
        mover: moves them; None keeps the books only, for a replay without a device.
        policy: when to swap.
        block_bytes: bytes of a block, for the rule; the mover's by default.

    Raises:
        ValueError: a count below 1, or more blocks than the mover's `num_blocks`, where it has such an attribute.
    """

    def __init__(
        self,
        num_blocks: int,
        mover: BlockMover | None = None,
        policy: SwapPolicy | None = None,
        block_bytes: int | None = None,
    ) -> None:
        self.allocator = BlockAllocator(num_blocks)
        held = getattr(mover, "num_blocks", None)
        if held is not None and held < num_blocks:
            raise ValueError(
                f"num_blocks={num_blocks} exceeds the {held} blocks of host memory that the mover holds: build both "
                "with one number"
            )
        self.policy = policy or SwapPolicy()
        self._mover = mover
        self._block_bytes = mover.block_bytes if mover is not None else 0
        if block_bytes is not None:
            self._block_bytes = count_of("block_bytes", block_bytes, 1)
        self.num_saved = self.num_loaded = 0  # blocks moved since the start

    def require_mover_of(self, cache: BlockMemory) -> None:
        """Raises ValueError unless there is a mover, and it is one of `cache` as far as its attribute `cache` tells."""
        if self._mover is None:
            raise ValueError(
                "this SwapSpace has no mover, so it would keep nothing of what it saves: SwapSpace(n, "
                "HostPool(cache, n)). Without one it is for replays that have no cache"
            )
        if getattr(self._mover, "cache", cache) is not cache:
            raise ValueError(
                "this SwapSpace moves blocks of another cache: build its HostPool with the cache of this model"
            )

    def try_save(self, blocks: IntArray, num_tokens: int) -> IntArray | None:
        """Copies `blocks` out and returns where they are; None if that is not worth it, or does not fit.

        What the mover raises passes through, and no host block is taken.
        """
        if not 0 < blocks.size <= self.allocator.num_free:
            return None
        if not self.policy.prefers_swap(blocks.size, num_tokens, self._block_bytes):
            return None
        host_blocks = self.allocator.allocate(blocks.size)
        if self._mover is not None:
            try:
                self._mover.save(blocks, host_blocks)
            except BaseException:
                self.allocator.free(host_blocks)
                raise
        self.num_saved += blocks.size
        return host_blocks

    def load(self, host_blocks: IntArray, blocks: IntArray) -> None:
        """Copies back what `try_save` copied out, and forgets it; kept if the mover raises, which passes through."""
        if self._mover is not None:
            self._mover.load(host_blocks, blocks)
        self.num_loaded += blocks.size
        self.drop(host_blocks)

    def drop(self, host_blocks: IntArray) -> None:
        """Forgets what `try_save` copied out."""
        self.allocator.free(host_blocks)
