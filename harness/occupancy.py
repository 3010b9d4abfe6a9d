"""How many blocks of a kernel fit on one streaming multiprocessor, and what keeps more from fitting.

Limits are those of the CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability" (resident
blocks and warps, registers, shared memory, and the 1 KiB that the system keeps of each block's); granularities are
those of NVIDIA's occupancy calculator (registers per warp in units of 256, shared memory in units of 128 bytes). A
multiprocessor has four partitions, each with a quarter of the registers, and a warp lives in one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.device import Device
from pagedtune.kernels.launch import KernelStep, LaunchPlan

WARP_SIZE = 32
PARTITIONS = 4  # of a multiprocessor
REGISTER_UNIT = 256  # registers are given to a warp in multiples of this
MAX_REGISTERS = 255  # of a thread
MAX_THREADS = 1024  # of a block
SHARED_UNIT = 128  # bytes
MAX_STACK = 64  # bytes of a thread: what does not lie in the main loop; the tools count small frames as spills too
RESERVED_SHARED = 1024  # bytes of each block, from compute capability 8.0 on


@dataclass(frozen=True)
class Limits:
    """Most blocks and warps that are resident on a multiprocessor."""

    blocks: int
    warps: int


LIMITS: Mapping[int, Limits] = {
    80: Limits(32, 64),
    86: Limits(16, 48),
    87: Limits(16, 48),
    89: Limits(24, 48),
    90: Limits(32, 64),
    100: Limits(32, 64),
    103: Limits(32, 64),
    120: Limits(24, 48),
}


class Limit(StrEnum):
    """What keeps more blocks from fitting."""

    REGISTERS = "registers"
    SHARED = "shared memory"
    WARPS = "warps"
    BLOCKS = "blocks"


@dataclass(frozen=True)
class Occupancy:
    """Blocks of one kernel on one multiprocessor.

    Args:
        blocks: resident at once; 0 if not even one fits.
        warps: of these blocks.
        max_warps: that a multiprocessor can hold.
        limit: what keeps more from fitting.
    """

    blocks: int
    warps: int
    max_warps: int
    limit: Limit

    @property
    def share(self) -> float:
        """Resident warps over those that the multiprocessor can hold."""
        return self.warps / self.max_warps


def limits_of(device: Device) -> Limits:
    """The resident limits of a device.

    Raises:
        ValueError: its compute capability is not in the table.
    """
    if device.capability not in LIMITS:
        raise ValueError(
            f"no occupancy limits are known for compute capability {device.capability / 10}: "
            f"add them to LIMITS from the CUDA C++ Programming Guide (known: {', '.join(map(str, LIMITS))})"
        )
    return LIMITS[device.capability]


def occupancy(device: Device, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Blocks that fit on one multiprocessor of `device`.

    Args:
        device: with its registers and shared memory.
        threads: of a block.
        registers: of a thread.
        shared_bytes: of a block, static and dynamic.

    Raises:
        ValueError: an unknown compute capability, or a block that no device can have.
    """
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"threads={threads} must be from 1 to {MAX_THREADS}")
    limits, warps = limits_of(device), _up(threads, WARP_SIZE) // WARP_SIZE
    fits = {
        Limit.REGISTERS: _by_registers(device, warps, registers),
        Limit.SHARED: _by_shared(device, shared_bytes),
        Limit.WARPS: limits.warps // warps,
        Limit.BLOCKS: limits.blocks,
    }
    limit = min(fits, key=lambda name: fits[name])
    return Occupancy(fits[limit], fits[limit] * warps, limits.warps, limit)


def _by_registers(device: Device, warps: int, registers: int) -> int:
    if registers > MAX_REGISTERS:
        return 0
    of_warp = max(REGISTER_UNIT, _up(registers * WARP_SIZE, REGISTER_UNIT))
    of_partition = device.registers_per_unit // PARTITIONS // of_warp
    return of_partition * PARTITIONS // warps


def _by_shared(device: Device, shared_bytes: int) -> int:
    if shared_bytes > device.shared_bytes_per_block:
        return 0
    return device.shared_bytes_per_unit // _up(shared_bytes + RESERVED_SHARED, SHARED_UNIT)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def step_shared_bytes(step: KernelStep, artifacts: Mapping[str, Artifact]) -> int:
    """Shared memory of a block of `step`: static, and dynamic as the plan or else the compiler asks for it."""
    resources = artifacts[step.entry].resources[step.entry]
    return resources.static_shared_bytes + max(step.shared_bytes, resources.dynamic_shared_bytes)


def by_entry(artifacts: tuple[Artifact, ...]) -> dict[str, Artifact]:
    """The artifact of each entry symbol."""
    return {entry: artifact for artifact in artifacts for entry in artifact.abi}


def reject_static(
    artifacts: tuple[Artifact, ...], plan: LaunchPlan, device: Device, allow_spills: bool = False
) -> str | None:
    """Why a compiled candidate is not worth running on `device`, or None: found from the binary alone.

    Args:
        artifacts, plan: of the candidate.
        device: a CUDA device.
        allow_spills: whether registers may spill to memory (a config opts in by a tunable `allow_spills`).
    """
    entries = by_entry(artifacts)
    for step in plan.steps:
        if not isinstance(step, KernelStep):
            continue
        resources = entries[step.entry].resources[step.entry]
        threads = step.block[0] * step.block[1] * step.block[2]
        shared = step_shared_bytes(step, entries)
        if resources.registers > MAX_REGISTERS:
            return f"{step.entry} needs {resources.registers} registers a thread, a device has {MAX_REGISTERS}"
        if resources.spill_bytes > MAX_STACK and not allow_spills:
            return f"{step.entry} spills: {resources.spill_bytes} bytes of stack a thread, {MAX_STACK} are harmless"
        if shared > device.shared_bytes_per_block:
            return (
                f"{step.entry} needs {shared} bytes of shared memory, a block has {device.shared_bytes_per_block} "
                f"on {device.name}"
            )
        found = occupancy(device, threads, resources.registers, shared)
        if not found.blocks:
            need = f"too much of its {found.limit}"
            return f"not one block of {step.entry} ({threads} threads) fits on {device.name}: {need}"
    return None
