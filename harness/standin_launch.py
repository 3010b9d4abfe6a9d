"""Kernel launches of the stand-in driver: parameters read as the driver reads them, the PTX run on the virtual GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

from pagedtune.harness.standin_memory import StandInMemory
from pagedtune.harness.vgpu.core_library import RawOptions
from pagedtune.harness.vgpu.grid import MAX_FAULTS, forget_module, run_grid
from pagedtune.harness.vgpu.program import Program
from pagedtune.harness.vgpu.report import Fault, FaultKind
from pagedtune.harness.vgpu.summary import describe_fault
from pagedtune.harness.vgpu.virtual_gpu import load_program
from pagedtune.kernels.artifact import Artifact, Resources
from pagedtune.kernels.device import Device
from pagedtune.kernels.launch import KernelStep

DEFAULT_DYNAMIC_SHARED = 48 << 10
RESERVED_SHARED = 1 << 10  # bytes of each block that the system keeps, from compute capability 8.0 on
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_THREADS_PER_UNIT = 2048
MAX_WARP_INSTRUCTIONS = 50_000_000

# How silicon reports what the virtual GPU finds; everything else is an unspecified launch failure.
_STATUS = {
    FaultKind.OUT_OF_BOUNDS: "CUDA_ERROR_ILLEGAL_ADDRESS",
    FaultKind.USE_AFTER_FREE: "CUDA_ERROR_ILLEGAL_ADDRESS",
    FaultKind.MISALIGNED: "CUDA_ERROR_MISALIGNED_ADDRESS",
    FaultKind.DEADLOCK: "CUDA_ERROR_LAUNCH_TIMEOUT",
    FaultKind.ENDLESS_LOOP: "CUDA_ERROR_LAUNCH_TIMEOUT",
}


@dataclass
class Function:
    """One entry of a loaded binary.

    Args:
        context: in which it was loaded.
        max_dynamic_shared: what a launch may ask for, in bytes.
    """

    entry: str
    program: Program
    resources: Resources
    context: int
    max_dynamic_shared: int


@dataclass(frozen=True)
class LaunchRecord:
    """One launch as it reached the driver.

    Args:
        shared_bytes: dynamic shared memory of a block.
        stream: its handle.
        params: the parameter buffer that was made from the caller's pointers.
        cooperative, programmatic: launch attributes; `programmatic` is programmatic stream serialisation.
    """

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    params: bytes
    cooperative: bool = False
    programmatic: bool = False
    cluster: tuple[int, int, int] = (1, 1, 1)


@cache
def program_of(ptx: str, entry: str) -> Program:
    """`load_program`, once per process."""
    return load_program(ptx, entry)


def functions_of(artifact: Artifact, context: int) -> dict[str, Function]:
    """The entries of a binary."""
    if artifact.ptx_path is None:
        raise ValueError(f"{artifact.path} has no PTX, and the stand-in driver can run nothing else")
    ptx = artifact.ptx_path.read_text()
    found = {}
    for entry in artifact.abi:
        resources = artifact.resources.get(entry, Resources())
        program = program_of(ptx, entry)
        found[entry] = Function(entry, program, resources, context, DEFAULT_DYNAMIC_SHARED - program.static_shared)
    return found


def read_params(program: Program, address: int) -> bytes:
    """The parameter buffer, from an array of pointers to the values: as `cuLaunchKernel` documents `kernelParams`."""
    data = bytearray(program.param_bytes)
    pointers = (ctypes.c_void_p * len(program.params)).from_address(address) if program.params else ()
    for pointer, param in zip(pointers, program.params, strict=True):
        data[param.offset : param.offset + param.num_bytes] = ctypes.string_at(pointer, param.num_bytes)
    return bytes(data)


def refuse_launch(function: Function, launch: LaunchRecord, device: Device) -> str | None:
    """The error of a launch that this device cannot make, None if it can."""
    program = function.program
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    too_wide = any(not 1 <= n <= most for n, most in zip(launch.grid, MAX_GRID, strict=True))
    mismatch = bool(program.block) and tuple(launch.block[: len(program.block)]) != program.block
    if too_wide or mismatch or not 1 <= threads <= (program.max_threads or 1024):
        return "CUDA_ERROR_INVALID_VALUE"
    if launch.shared_bytes > function.max_dynamic_shared:
        return "CUDA_ERROR_INVALID_VALUE"
    if function.resources.registers * threads > (device.registers_per_unit or 65536):
        return "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
    num_blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
    if launch.cooperative and num_blocks > device.num_units * _blocks_per_unit(function, launch, threads, device):
        return "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"
    return "CUDA_ERROR_NOT_SUPPORTED" if launch.cluster != (1, 1, 1) else None  # the virtual GPU has no clusters


def _blocks_per_unit(function: Function, launch: LaunchRecord, threads: int, device: Device) -> int:
    shared = function.program.static_shared + launch.shared_bytes + RESERVED_SHARED
    limits = [MAX_THREADS_PER_UNIT // threads, (device.shared_bytes_per_unit or 1 << 30) // shared]
    if function.resources.registers:
        limits.append((device.registers_per_unit or 65536) // (function.resources.registers * threads))
    return min(limits)


def execute(function: Function, launch: LaunchRecord, memory: StandInMemory) -> list[Fault]:
    """Runs a launch on the memory of the device; the faults that the virtual GPU saw."""
    options = RawOptions(
        num_threads=1,
        max_faults=MAX_FAULTS,
        quantum=512,
        cooperative=launch.cooperative,
        max_warp_instructions=MAX_WARP_INSTRUCTIONS,
    )
    space = memory.address_space()
    program = function.program
    result = run_grid(program, space, launch.grid, launch.block, launch.params, launch.shared_bytes, options)
    step = KernelStep(function.entry, launch.grid, (), launch.block)
    faults = [describe_fault(fault, program, space, step) for fault in result.faults]
    forget_module(space)
    return faults


def status_of(fault: Fault) -> str:
    """The driver error that a fault shows as."""
    return _STATUS.get(fault.kind, "CUDA_ERROR_LAUNCH_FAILED")
