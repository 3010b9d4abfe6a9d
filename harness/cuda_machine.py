"""Runs the cases of the gate on a CUDA device: whole allocations go there and come back, guard bands included."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from pagedtune.harness.cuda_context import ALIGNMENT, CudaContext, DeviceMemory
from pagedtune.harness.inputs import Inputs
from pagedtune.harness.memory import Carved
from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.cuda_driver import DriverError
from pagedtune.kernels.cuda_executor import CudaExecutor
from pagedtune.kernels.launch import LaunchPlan

OUTSIDE_BYTE = 0xFF  # what a high pool holds around its window: NaN in every float format


@dataclass(frozen=True)
class Mirror:
    """One allocation of the gate and its place on the device.

    Args:
        parent: the allocation on the host: one piece, or rows far apart.
        memory: where it lies on the device.
        offset: byte of `memory` at which `parent` begins.
        first: lowest host address that has a place on the device.
    """

    parent: torch.Tensor
    memory: DeviceMemory
    offset: int
    first: int

    def send(self) -> None:
        """Host to device."""
        for piece, offset in self._pieces():
            self.memory.copy_from(piece, offset)

    def fetch(self) -> None:
        """Device to host."""
        for piece, offset in self._pieces():
            self.memory.copy_to(piece, offset)

    def _pieces(self) -> Iterable[tuple[torch.Tensor, int]]:
        """The contiguous parts of `parent`, each with its byte of `memory`."""
        pieces = (self.parent,) if self.parent.is_contiguous() else self.parent.unbind()
        return [(piece, self.offset + piece.data_ptr() - self.parent.data_ptr()) for piece in pieces]


class _Places:
    """Where tensors on the host lie on the device.

    An object of its own, so that the executor, which asks, does not refer to the machine, which owns the executor: the
    gigabytes of such a ring would be the device's until the garbage collector comes by.
    """

    def __init__(self) -> None:
        self.mirrors: tuple[Mirror, ...] = ()

    def address(self, tensor: torch.Tensor) -> int:
        """Address on the device of what a tensor on the host shows."""
        host = tensor.data_ptr()
        for mirror in self.mirrors:
            start = mirror.parent.data_ptr() - mirror.offset
            if mirror.first <= host < start + mirror.memory.num_bytes:
                return mirror.memory.address + host - start
        if not tensor.numel():
            return 0
        raise ValueError(f"a tensor at {host:#x} lies in none of the {len(self.mirrors)} mirrored allocations")


class CudaMachine:
    """Launches plans on a device; every launch starts from the host's bytes and leaves the device's bytes there.

    So the gate's own checks of guards, inputs and outputs see what the device did. Memory is given back when the
    prepared function is no longer used, the binaries with `close`.

    Args:
        artifacts: cubins of the plans' kernels.
        context: the device, current in this thread.

    Raises:
        LaunchError: the driver refuses a binary.
    """

    repeats = 2

    def __init__(self, artifacts: Sequence[Artifact], context: CudaContext) -> None:
        self._context = context
        self._artifacts = tuple(artifacts)
        self._places = _Places()
        self._high_pools: dict[tuple[str, int], DeviceMemory] = {}
        self._executor = CudaExecutor(artifacts, context.driver, lambda: context.stream, self._places.address)

    def __enter__(self) -> CudaMachine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unloads the binaries: nothing that was prepared may be launched afterwards."""
        self._executor.close()

    def prepare(self, plan: LaunchPlan, inputs: Inputs, turn: int = 0) -> Callable[[], None]:
        """A function that launches once and waits.

        Args:
            turn: number of the launch within its case; all launches of a device are alike.

        Raises:
            ValueError: the tensors or the binary do not fit the plan.
            OSError: the device has no room for a high pool.
            LaunchError: the driver refuses (also raised by the function, with what a fault on the device looks like).
        """
        mirrors = tuple(self._mirror(name, carved) for name, carved in _distinct(inputs))
        self._places.mirrors = mirrors  # looked at while the arguments are packed
        launch = self._executor.prepare(plan.bind(inputs.tensors))
        entries = ", ".join(entry for artifact in self._artifacts for entry in artifact.abi)

        def run() -> None:
            for mirror in mirrors:
                mirror.send()
            launch()
            self._context.synchronise(f"waiting for {entries}")
            for mirror in mirrors:
                mirror.fetch()

        return run

    def _mirror(self, name: str, carved: Carved) -> Mirror:
        """Room for an allocation, at the same alignment; for a high pool or rows far apart, room for all of it."""
        parent = carved.parent
        last = sum((size - 1) * stride for size, stride in zip(parent.shape, parent.stride(), strict=True))
        num_bytes = (last + 1) * parent.element_size() if parent.numel() else 0
        if carved.guarded:
            offset = parent.data_ptr() % ALIGNMENT
            return Mirror(parent, self._context.allocate(num_bytes + offset), offset, parent.data_ptr())
        offset = parent.data_ptr() - carved.view.data_ptr()
        memory = self._high_pool(name, offset + num_bytes)
        return Mirror(parent, memory, offset, carved.view.data_ptr())

    def _high_pool(self, name: str, num_bytes: int) -> DeviceMemory:
        """Room that all launches of a case share: two of them would not fit, and each sends its window anew."""
        if (name, num_bytes) not in self._high_pools:
            try:
                memory = self._context.allocate(num_bytes)
            except DriverError as error:
                if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                    raise
                raise OSError(errno.ENOMEM, str(error)) from error
            if not self._context.emulated:  # where it would take gigabytes of this process's memory
                memory.fill(OUTSIDE_BYTE)
            self._high_pools[name, num_bytes] = memory
        return self._high_pools[name, num_bytes]


def _distinct(inputs: Inputs) -> Iterable[tuple[str, Carved]]:
    """Each allocation once, with the name of a tensor in it."""
    carved = {**inputs.slots, **inputs.workspaces}
    return {each.parent.data_ptr(): (name, each) for name, each in carved.items()}.values()
