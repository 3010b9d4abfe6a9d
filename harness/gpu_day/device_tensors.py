"""Tensors that exist on the device alone: shapes without memory on the host, each with its address there."""

from __future__ import annotations

import torch

from pagedtune.harness.cuda_context import CudaContext, DeviceMemory


class DeviceTensors:
    """Makes tensors, and tells a `CudaExecutor` where they lie.

    Args:
        context: whose device.
    """

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._memory: dict[int, tuple[torch.Tensor, DeviceMemory]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with undefined content."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        memory = self._context.allocate(tensor.numel() * tensor.element_size())
        self._memory[id(tensor)] = (tensor, memory)
        return tensor

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """A copy of a contiguous CPU tensor."""
        tensor = self.empty(tuple(host.shape), host.dtype)
        self.memory(tensor).copy_from(host)
        return tensor

    def tiled(self, shape: tuple[int, ...], tile: torch.Tensor) -> torch.Tensor:
        """A tensor whose elements are those of the one-dimensional `tile` over and over."""
        tensor, source = self.empty(shape, tile.dtype), self._context.upload(tile)
        total, step = tensor.numel() * tensor.element_size(), source.num_bytes
        start = self.memory(tensor).address
        for offset in range(0, total, step):
            args = (start + offset, source.address, min(step, total - offset), self._context.stream)
            self._context.call("cuMemcpyDtoDAsync", *args, doing="filling a pool")
        self._context.synchronise("filling a pool")
        return tensor

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.memory(tensor).copy_to(host)
        return host

    def memory(self, tensor: torch.Tensor) -> DeviceMemory:
        """Where a tensor that was made here lies."""
        return self._memory[id(tensor)][1]

    def address(self, tensor: torch.Tensor) -> int:
        """Its first byte: the `pointer_of` of an executor."""
        return self.memory(tensor).address

    def free(self) -> None:
        """Gives all of it back."""
        for _, memory in self._memory.values():
            memory.free()
        self._memory.clear()
