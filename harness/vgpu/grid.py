"""Runs one grid of a decoded program on the execution core: addresses in, raw faults and counters out."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .address_space import CONSTANT, AddressSpace
from .core_library import LaunchArgs, RawFault, RawOptions, Totals, core
from .program import MODULE_BASE, PARAM_BASE, Program

MAX_FAULTS = 64
_GLOBAL_VARIABLE = 2  # access code of a module variable that may be read and written


@dataclass(frozen=True)
class GridResult:
    """What the core gave.

    Args:
        faults: the first of each kind at its instruction.
        sites: one `SITE` per instruction.
        totals: sums that belong to no instruction.
        seconds: wall-clock time of the interpretation.
    """

    faults: Sequence[RawFault]
    sites: npt.NDArray[np.void]
    totals: Totals
    seconds: float


def run_grid(
    program: Program,
    space: AddressSpace,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    params: bytes,
    dynamic_shared: int,
    options: RawOptions,
) -> GridResult:
    """Runs a grid on the allocations of `space`, to which module variables and parameters are added.

    Take what is wanted from the result, then call `forget_module`.

    Args:
        params: the parameter buffer, laid out as the PTX declares it.
        dynamic_shared: dynamic shared memory of a block, in bytes.
    """
    buffers = _module_variables(space, program)
    buffers.append(np.frombuffer(params + bytes(16), np.uint8).copy())
    space.add("kernel parameters", PARAM_BASE, buffers[-1][: max(len(params), 1)], CONSTANT)
    space.reset_touched()
    table = space.table()
    arrays = _const_arrays(program)
    args = LaunchArgs(
        grid=grid,
        block=block,
        dynamic_shared=dynamic_shared,
        static_shared=program.static_shared,
        local_bytes=program.local_bytes,
        num_units=program.num_units,
        num_consts=len(program.consts),
        param_bytes=len(params),
        params=buffers[-1].ctypes.data,
        const_units=arrays[0].ctypes.data,
        const_widths=arrays[1].ctypes.data,
        const_values=arrays[2].ctypes.data,
        special_units=arrays[3].ctypes.data,
        allocs=ctypes.addressof(table),
        num_allocs=len(space.allocations),
        options=options,
        use_starts=program.use_starts.ctypes.data,
        uses=program.uses.ctypes.data,
    )
    start = time.perf_counter()
    faults, sites, totals = core().run(program.code, args, MAX_FAULTS)
    return GridResult(faults, sites, totals, time.perf_counter() - start)


def forget_module(space: AddressSpace) -> None:
    """Removes what `run_grid` added."""
    space.allocations = [a for a in space.allocations if a.base < MODULE_BASE]


def _const_arrays(program: Program) -> tuple[npt.NDArray[np.generic], ...]:
    units = np.array([c[0] for c in program.consts], np.int32)
    widths = np.array([c[1] for c in program.consts], np.int32)
    values = np.array([c[2] for c in program.consts], np.uint64)
    return units, widths, values, np.array(program.specials, np.int32)


def _module_variables(space: AddressSpace, program: Program) -> list[npt.NDArray[np.uint8]]:
    buffers = []
    for address, variable in program.variables.items():
        data = np.zeros(max(variable.num_bytes, 1), np.uint8)
        if variable.data:
            data[: len(variable.data)] = np.frombuffer(variable.data, np.uint8)
        buffers.append(data)
        space.add(variable.name, address, data, CONSTANT if variable.space == "const" else _GLOBAL_VARIABLE)
    return buffers
