"""Host memory for blocks of a cache, and the ways to bring them there and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..kernels.bounds import Bounds
from ..kernels.executors import torch_device
from ..kernels.problem import require_positive
from ..kernels.slots import block_elements
from ..kernels.variant import Op
from .arrays import IntArray
from .attention import PagedOp, PlannedOp
from .block_memory import BlockMemory
from .dispatch import Dispatch, NoKernel, Selection
from .kv_cache import KVCache
from .transfer_check import checked_transfer, require_distinct

STAGING_BYTES = 64 << 20  # 2.5 ms at the 25 GB/s of PCIe 4.0 x16: the launch before each copy does not show


class BlockMover(Protocol):
    """Moves blocks between device and host, in the order of the caller's stream: behind the steps launched before."""

    block_bytes: int

    def save(self, blocks: IntArray, host_blocks: IntArray) -> None:
        """Copies `blocks` of the pool to `host_blocks`."""
        ...

    def load(self, host_blocks: IntArray, blocks: IntArray) -> None:
        """Copies `host_blocks` back to `blocks` of the pool."""
        ...


class HostPool:
    """A `BlockMover` for a cache: as many blocks of host memory, page-locked where there is a GPU.

    All that belongs to a block moves together; scales of whole tensors or heads stay where they are. With kernels for
    `Op.PACK_BLOCKS` and `Op.UNPACK_BLOCKS` one launch packs blocks of all layers, on a GPU into a staging buffer from
    which each run of adjacent host blocks is one copy; on a CPU each run is one launch and no copy. Without kernels
    each block of each pool is a copy of its own.

    Args:
        cache: the device's pools.
        num_blocks: blocks of host memory.
        dispatch: where those kernels come from; None does without.
        staging_bytes: of the staging buffer on the device, at most, though at least one block: more blocks than it
            holds move in several turns.
        staged: whether there is such a buffer; default not on the CPU, whose kernels reach host memory themselves.

    Attributes:
        cache: the device's pools.
        num_blocks: of host memory.
        selection: the kernel that packs, None where blocks are copied one by one: no dispatch, no kernel, or a cache
            whose blocks hold more than K and V.

    Raises:
        ValueError: a count below 1, or a dispatch for another kind of device than the cache's.
    """

    def __init__(
        self,
        cache: BlockMemory,
        num_blocks: int,
        dispatch: Dispatch | None = None,
        staging_bytes: int = STAGING_BYTES,
        staged: bool | None = None,
    ) -> None:
        require_positive("num_blocks", num_blocks)
        require_positive("staging_bytes", staging_bytes)
        self.cache = cache
        self.num_blocks, self.block_bytes, self._pool_blocks = num_blocks, cache.block_bytes, cache.num_blocks
        staged = cache.device.type != "cpu" if staged is None else staged
        most = min(num_blocks, max(1, staging_bytes // cache.block_bytes)) if staged else num_blocks
        kernels = None if dispatch is None else _kernels(cache, dispatch, most)
        self.selection: Selection | None = None if kernels is None else kernels.pack.selection
        self._mover: BlockMover
        if kernels is None:
            self._mover = _Copies(cache, num_blocks)
        else:
            self._mover = _Staged(kernels, num_blocks) if staged else _Packed(kernels, num_blocks)
        self._order = StreamOrder(cache.device)

    def save(self, blocks: IntArray, host_blocks: IntArray) -> None:
        """See `BlockMover.save`.

        Raises:
            ValueError: an id outside the pool or host memory, a host block named twice, or unequal numbers of both.
        """
        blocks, host_blocks = checked_transfer(blocks, host_blocks, self._pool_blocks, self.num_blocks)
        with self._order:
            self._mover.save(blocks, host_blocks)

    def load(self, host_blocks: IntArray, blocks: IntArray) -> None:
        """See `BlockMover.load`.

        Raises:
            ValueError: as for `save`, or a block of the pool named twice.
        """
        blocks, host_blocks = checked_transfer(blocks, host_blocks, self._pool_blocks, self.num_blocks)
        require_distinct("blocks", blocks)
        with self._order:
            self._mover.load(host_blocks, blocks)


class StreamOrder:
    """Keeps transfers in order whose memory is shared, where the caller goes from one stream to another.

    A transfer runs within `with order:`. On one stream transfers are in order as it is, and nothing waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        """What the caller's stream does from now on comes after the last transfer."""
        if self._device.type != "cuda" or self._done is None:
            return
        stream = torch.cuda.current_stream(self._device)
        if stream != self._last:
            stream.wait_event(self._done)

    def __exit__(self, *_: object) -> None:
        """All that is in the caller's stream until now belongs to the transfer, ended or not."""
        if self._device.type != "cuda":
            return
        if self._done is None:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last = torch.cuda.current_stream(self._device)
        self._done.record(self._last)


class _Copies:
    """Every block of every pool by itself: takes any cache."""

    def __init__(self, cache: BlockMemory, num_blocks: int) -> None:
        self._cache, self.block_bytes = cache, cache.block_bytes
        pinned = cache.device.type == "cuda"
        self._memory = [
            torch.empty((pool.shape[0], num_blocks, *pool.shape[2:]), dtype=pool.dtype, pin_memory=pinned)
            for pool in cache.block_tensors()
        ]

    def save(self, blocks: IntArray, host_blocks: IntArray) -> None:
        for memory, pool in zip(self._memory, self._cache.block_tensors(), strict=True):
            for host, block in zip(host_blocks.tolist(), blocks.tolist(), strict=True):
                memory[:, host].copy_(pool[:, block], non_blocking=True)

    def load(self, host_blocks: IntArray, blocks: IntArray) -> None:
        for memory, pool in zip(self._memory, self._cache.block_tensors(), strict=True):
            for host, block in zip(host_blocks.tolist(), blocks.tolist(), strict=True):
                pool[:, block].copy_(memory[:, host], non_blocking=True)


@dataclass(frozen=True)
class _Kernels:
    """Both kernels, planned for `most` blocks in all layers.

    Args:
        cache: whose blocks they move.
        pack, unpack: one launch moves the blocks of all layers, which are those of one long pool.
        most: blocks of a launch.
    """

    cache: KVCache
    pack: PlannedOp
    unpack: PlannedOp
    most: int


def _kernels(cache: BlockMemory, dispatch: Dispatch, most: int) -> _Kernels | None:
    """The kernels for a cache, None where there are none."""
    kind = torch_device(dispatch.device.kind).type
    if kind != cache.device.type:
        raise ValueError(f"the cache is on {cache.device} and the kernels run on {kind}: both must be on one device")
    if not isinstance(cache, KVCache) or len(cache.block_tensors()) != 2:
        return None
    bounds = Bounds(most * cache.num_layers, 1)
    try:
        pack, unpack = (
            PagedOp(op, cache.problem, cache.pool_format, dispatch).plan(bounds)
            for op in (Op.PACK_BLOCKS, Op.UNPACK_BLOCKS)
        )
    except NoKernel:
        return None
    return _Kernels(cache, pack, unpack, most)


class _Packed:
    """Packs blocks where they are kept: one launch for each run of adjacent host blocks, and no copy.

    Host memory is [num_blocks, num_layers, elements of K and V].
    """

    def __init__(self, kernels: _Kernels, num_blocks: int) -> None:
        cache = kernels.cache
        self._kernels, self.block_bytes = kernels, cache.block_bytes
        self._record = (cache.num_layers, sum(block_elements(cache.problem, cache.pool_format)))
        self._dtype, pinned = cache.pool_format.kv_dtype.torch, cache.device.type == "cuda"
        self._memory = torch.empty((num_blocks, *self._record), dtype=self._dtype, pin_memory=pinned)

    def save(self, blocks: IntArray, host_blocks: IntArray) -> None:
        self._move_runs(self._kernels.pack, blocks, host_blocks)

    def load(self, host_blocks: IntArray, blocks: IntArray) -> None:
        self._move_runs(self._kernels.unpack, blocks, host_blocks)

    def _move_runs(self, op: PlannedOp, blocks: IntArray, host_blocks: IntArray) -> None:
        order = np.argsort(host_blocks)
        for at, first, count in adjacent_runs(host_blocks[order]):
            self._launch(op, blocks[order[at : at + count]], self._memory[first : first + count])

    def _launch(self, op: PlannedOp, blocks: IntArray, rows: torch.Tensor) -> None:
        """Moves `blocks` of all layers to `rows` [len(blocks), num_layers, elements], or back."""
        cache = self._kernels.cache
        k_cache, v_cache = cache.layers_as_one()
        ids = _sent(cache.ids_in_layers(blocks), cache.device)
        op.bind({"k_cache": k_cache, "v_cache": v_cache, "block_ids": ids, "staging": rows.flatten(0, 1)})()


class _Staged(_Packed):
    """Packs blocks into a staging buffer on the device, which is copied as a whole.

    The buffer serves one turn after the other: packing, copying and unpacking follow each other in the stream, so none
    overtakes the one before.
    """

    def __init__(self, kernels: _Kernels, num_blocks: int) -> None:
        super().__init__(kernels, num_blocks)
        self._staging = torch.empty((kernels.most, *self._record), dtype=self._dtype, device=kernels.cache.device)

    def save(self, blocks: IntArray, host_blocks: IntArray) -> None:
        for part, hosts in self._turns(blocks, host_blocks):
            self._launch(self._kernels.pack, part, self._staging[: len(part)])
            for at, first, count in adjacent_runs(hosts):
                copy(self._staging[at : at + count], self._memory[first : first + count])

    def load(self, host_blocks: IntArray, blocks: IntArray) -> None:
        for part, hosts in self._turns(blocks, host_blocks):
            for at, first, count in adjacent_runs(hosts):
                copy(self._memory[first : first + count], self._staging[at : at + count])
            self._launch(self._kernels.unpack, part, self._staging[: len(part)])

    def _turns(self, blocks: IntArray, host_blocks: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
        """Blocks and host blocks in the order of the latter, as many at a time as the staging buffer holds."""
        order = np.argsort(host_blocks)
        for start in range(0, len(order), len(self._staging)):
            part = order[start : start + len(self._staging)]
            yield blocks[part], host_blocks[part]


def _sent(values: IntArray, device: torch.device) -> torch.Tensor:
    """`values` on `device`. The host does not wait: torch keeps the page-locked memory until the copy has read it."""
    on_host = torch.from_numpy(values)
    return on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)


def adjacent_runs(blocks: IntArray) -> list[tuple[int, int, int]]:
    """Runs of consecutive numbers in `blocks`: (index of the first, its number, how many)."""
    starts = np.flatnonzero(np.diff(blocks, prepend=blocks[:1] - 2) != 1)
    counts = np.diff(starts, append=len(blocks))
    return list(zip(starts.tolist(), blocks[starts].tolist(), counts.tolist(), strict=True))


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """One transfer, in the order of the stream; with page-locked memory the host does not wait for it."""
    target.copy_(source, non_blocking=True)
