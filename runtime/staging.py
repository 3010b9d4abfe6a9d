"""What the host sends for one step: packed once, copied once, and not overwritten before the step has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .errors import StepError
from .fences import MAX_STEPS_IN_FLIGHT

ALIGNMENT = 16  # bytes: where each array starts
FIRST_BYTES = 1 << 16


@dataclass
class _Slot:
    """Memory of one step: page-locked on the host, and as much on the device."""

    host: torch.Tensor
    device: torch.Tensor
    step: int = 0


class Staging:
    """Brings the arrays of a step to the device with one asynchronous copy, through memory of that step alone.

    There are as many buffers as steps may be in flight. A buffer is written again only when the step that it served
    has ended: a copy queued behind slow kernels never finds a later step's numbers in it. On the CPU nothing is
    copied: the tensors are the arrays.

    Args:
        device: where the arrays go.
        copies: whether to copy; default not on the CPU.
    """

    def __init__(self, device: torch.device, copies: bool | None = None) -> None:
        self.device = device
        self._slots: list[_Slot] = []
        if copies or (copies is None and device.type != "cpu"):
            self._slots = [self._slot(FIRST_BYTES) for _ in range(MAX_STEPS_IN_FLIGHT)]

    def send(
        self, step: int, in_flight: tuple[int, ...], arrays: Sequence[npt.NDArray[Any]]
    ) -> tuple[torch.Tensor, ...]:
        """Tensors of `arrays` on the device, valid until `step` has ended.

        Args:
            step: its number.
            in_flight: the steps in flight.
            arrays: contiguous, of any dtype and shape.

        Raises:
            StepError: the buffer's last step is still in flight.
        """
        if not self._slots:
            return tuple(map(torch.from_numpy, arrays))
        index = step % len(self._slots)
        slot = self._slots[index]
        if slot.step != step and slot.step in in_flight:
            raise StepError(f"step {step} would overwrite what step {slot.step}, still in flight, was sent")
        starts, end = self._layout(arrays)
        if end > slot.host.numel():
            # The old ones go when torch knows that the copies from and to them are done.
            slot = self._slots[index] = self._slot(1 << (end - 1).bit_length())
        slot.step = step
        packed = slot.host.numpy()
        for start, values in zip(starts, arrays, strict=True):
            packed[start : start + values.nbytes] = values.reshape(-1).view(np.uint8)
        slot.device[:end].copy_(slot.host[:end], non_blocking=True)
        return tuple(self._view(slot.device, start, values) for start, values in zip(starts, arrays, strict=True))

    def _slot(self, num_bytes: int) -> _Slot:
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return _Slot(host, torch.empty(num_bytes, dtype=torch.uint8, device=self.device))

    @staticmethod
    def _layout(arrays: Sequence[npt.NDArray[Any]]) -> tuple[list[int], int]:
        starts, end = [], 0
        for values in arrays:
            starts.append(end)
            end += -(-values.nbytes // ALIGNMENT) * ALIGNMENT
        return starts, max(end, 1)

    @staticmethod
    def _view(memory: torch.Tensor, start: int, values: npt.NDArray[Any]) -> torch.Tensor:
        dtype = torch.from_numpy(values[:0]).dtype
        return memory[start : start + values.nbytes].view(dtype).view(values.shape)
