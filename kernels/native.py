"""Runs launch plans on the CPU: kernels of a native library, and host calls.

A native kernel is `int32_t entry(const PagedtuneLaunch*, void* const* params)`: like `cuLaunchKernel`, `params[i]`
points at the value of argument i, and one call runs the whole grid.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from .arguments import PackedArguments, resolve_arguments
from .artifact import Artifact
from .launch import BoundPlan, CallStep, KernelStep, MemsetStep


class Launch(ctypes.Structure):
    """`PagedtuneLaunch` of `kernels/cpu/pagedtune_cpu.h`."""

    _fields_ = (
        ("grid", ctypes.c_int64 * 3),
        ("num_threads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LaunchError(RuntimeError):
    """A launch failed: the message says what was refused, by whom, and what to do about it."""


@cache
def load_library(path: Path) -> ctypes.CDLL:
    """The library at `path`, loaded once per process.

    Raises:
        LaunchError: it does not load on this machine; the message is the loader's.
    """
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise LaunchError(f"{path} does not load: {error}") from error


class NativeExecutor:
    """Runs plans whose kernels lie in native `artifacts`, and plans of host calls (with no artifact)."""

    def __init__(self, artifacts: Sequence[Artifact] = ()) -> None:
        self._entries = {
            entry: (load_library(artifact.path), abi) for artifact in artifacts for entry, abi in artifact.abi.items()
        }

    def prepare(self, bound: BoundPlan) -> Callable[[], None]:
        """See `Executor.prepare`.

        Raises:
            ValueError: a step names an entry that no artifact has, or its arguments do not fit the binary's ABI.
        """
        calls = tuple(self._prepare_step(bound, step) for step in bound.plan.steps)
        if len(calls) == 1:
            return calls[0]

        def run() -> None:
            for call in calls:
                call()

        return run

    def _prepare_step(self, bound: BoundPlan, step: KernelStep | MemsetStep | CallStep) -> Callable[[], None]:
        if isinstance(step, CallStep):
            function, tensors = step.function, bound.tensors
            return lambda: function(tensors)
        if isinstance(step, MemsetStep):
            target = bound.tensors[step.workspace].view(torch.uint8)
            byte = step.byte

            def fill() -> None:
                target.fill_(byte)

            return fill
        return self._prepare_kernel(bound, step)

    def _prepare_kernel(self, bound: BoundPlan, step: KernelStep) -> Callable[[], None]:
        if step.entry not in self._entries:
            raise ValueError(f"no artifact has the entry {step.entry!r}; there are {sorted(self._entries) or 'none'}")
        library, abi = self._entries[step.entry]
        packed = PackedArguments(resolve_arguments(bound, step, abi))
        launch = Launch((ctypes.c_int64 * 3)(*step.grid), step.attributes.num_threads or usable_cores(), 0)
        function = library[step.entry]
        function.restype, function.argtypes = ctypes.c_int32, (ctypes.c_void_p, ctypes.c_void_p)
        launch_ptr, params_ptr = ctypes.addressof(launch), packed.address

        # The default argument keeps alive what the two addresses point into.
        def run(_keep: object = (packed, launch, bound)) -> None:
            code = function(launch_ptr, params_ptr)
            if code:
                raise LaunchError(f"{step.entry}: {_describe(library, code)}")

        return run


def _describe(library: ctypes.CDLL, code: int) -> str:
    try:
        describe = library["pagedtune_error"]
    except AttributeError:
        return f"error code {code}"
    describe.restype, describe.argtypes = ctypes.c_char_p, (ctypes.c_int32,)
    text = describe(code)
    return str(text.decode()) if text else f"error code {code}"
