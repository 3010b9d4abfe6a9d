"""What runs the launches of the gate: a native library, or the PTX of a cubin on the virtual GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Protocol

import torch

from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.launch import LaunchPlan
from pagedtune.kernels.native import NativeExecutor
from pagedtune.kernels.record import Verdict
from pagedtune.kernels.slot import Access

from .inputs import Inputs
from .memory import Poison, bits, poison_bits
from .verdicts import Check, Fault
from .vgpu.report import VirtualGpuError
from .vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions

# Orders of execution that a correct kernel cannot tell apart, one after the other for the launches of a case: all are
# held to the same answer, and those of a deterministic variant to the same bits.
SCHEDULES = (
    VirtualGpuOptions(),
    VirtualGpuOptions(reverse_warps=True, reverse_ctas=True, async_early=True, quantum=64),
    VirtualGpuOptions(quantum=7, shuffle_seed=1),
    VirtualGpuOptions(reverse_ctas=True, quantum=31, shuffle_seed=2),
)


class Machine(Protocol):
    """Launches a plan on the tensors of a case.

    Attributes:
        repeats: launches, beyond three on the same inputs, that can still show another result.
    """

    repeats: int

    def prepare(self, plan: LaunchPlan, inputs: Inputs) -> Callable[[], None]:
        """A function that launches once.

        Raises:
            Fault: the machine itself saw that the kernel breaks a rule (raised by the function).
        """
        ...


MachineFor = Callable[[Device, Sequence[Artifact]], Machine]


def machine_for(device: Device, artifacts: Sequence[Artifact]) -> Machine:
    """What runs these artifacts of a variant for `device`, here."""
    if device.kind is DeviceKind.CPU:
        return NativeMachine(artifacts)
    return VirtualMachine(artifacts, device)


def verdict_for(device: Device) -> Verdict:
    """How a verdict of the gate about `device` is obtained on this machine."""
    return Verdict.ON_DEVICE if device.kind is DeviceKind.CPU else Verdict.EMULATED


class NativeMachine:
    """Native libraries and host calls, on this machine's CPU."""

    repeats = 2

    def __init__(self, artifacts: Sequence[Artifact]) -> None:
        self._executor = NativeExecutor(artifacts)

    def prepare(self, plan: LaunchPlan, inputs: Inputs) -> Callable[[], None]:
        """See `Machine`."""
        return self._executor.prepare(plan.bind(inputs.tensors))


class VirtualMachine:
    """The PTX of the artifacts on the virtual GPU, with every check on and another schedule for each launch.

    Args:
        artifacts: cubins with their PTX.
        device: whose limits hold.
    """

    repeats = len(SCHEDULES) - 3  # the same schedule again would give the same bits

    def __init__(self, artifacts: Sequence[Artifact], device: Device) -> None:
        self._limits = VirtualGpuOptions(
            num_threads=1, shared_bytes=device.shared_bytes_per_block, capability=device.capability
        )
        self._gpu = VirtualGpu(artifacts, self._limits)
        self._schedules = cycle(SCHEDULES)

    def prepare(self, plan: LaunchPlan, inputs: Inputs) -> Callable[[], None]:
        """See `Machine`."""
        launch = self._gpu.prepare(plan.bind(inputs.tensors))
        windows = {name: carved.parent for name, carved in inputs.slots.items() if not carved.guarded}

        def run() -> None:
            self._gpu.options = replace(
                next(self._schedules),
                num_threads=self._limits.num_threads,
                shared_bytes=self._limits.shared_bytes,
                capability=self._limits.capability,
                uninitialised=dead_slots(inputs),
                windows=windows,
            )
            try:
                launch()
            except VirtualGpuError as error:
                raise Fault(Check.EMULATION, str(error)) from error

        return run


def dead_slots(inputs: Inputs) -> dict[str, torch.Tensor]:
    """By pool that is only read, which elements hold nothing that a result may depend on: those with the poison that no
    number equals. (What moves whole blocks takes what no token lives in along with the rest.)"""
    if inputs.poison is not Poison.NAN or inputs.whole_blocks:
        return {}
    found = {}
    for name in inputs.block_slots:
        carved = inputs.slots.get(name)
        if carved is None or inputs.access[name] is not Access.IN:
            continue
        if carved.view.dtype.itemsize > 1 and carved.guarded:
            found[name] = bits(carved.view) == poison_bits(carved.view.dtype, Poison.NAN)
    return found
