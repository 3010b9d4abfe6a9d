"""Launch plans: what is run, in which order, with which named tensors, whatever executes it.

A plan is made once per problem x bounds and holds no tensor. `bind` fills its named slots for one layer and
checks them; an executor turns the bound plan into a launch that does no allocation, synchronisation or check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import torch

from .slot import Access, SlotSpec, WorkspaceSpec, check_slot, check_workspace

__all__ = [
    "Access",
    "Arg",
    "BoundPlan",
    "CType",
    "CallStep",
    "Executor",
    "KernelStep",
    "LaunchAttributes",
    "LaunchPlan",
    "MemsetStep",
    "ScalarArg",
    "SizeArg",
    "SlotArg",
    "SlotSpec",
    "Step",
    "StrideArg",
    "Tensors",
    "WorkspaceSpec",
]

Tensors = Mapping[str, torch.Tensor]


class CType(StrEnum):
    """Type of one kernel argument as the binary sees it."""

    POINTER = "pointer"
    I64 = "i64"
    I32 = "i32"
    F32 = "f32"


@dataclass(frozen=True)
class SlotArg:
    """Argument: the address of a slot's or workspace's first element (null where an optional slot is absent)."""

    slot: str


@dataclass(frozen=True)
class StrideArg:
    """Argument (i64): a slot's stride in elements along a dimension; 0 for an absent slot."""

    slot: str
    dim: int


@dataclass(frozen=True)
class SizeArg:
    """Argument (i64): a slot's size along a dimension; 0 for an absent slot."""

    slot: str
    dim: int


@dataclass(frozen=True)
class ScalarArg:
    """Argument: a value fixed when the plan is made."""

    value: int | float
    ctype: CType


Arg = SlotArg | StrideArg | SizeArg | ScalarArg


@dataclass(frozen=True)
class LaunchAttributes:
    """How a kernel is launched beyond its grid.

    Args:
        cooperative: all blocks are resident at once (grid barriers allowed).
        programmatic_dependent_launch: may start before the previous kernel has ended.
        num_threads: for a native library, how many CPU threads share the grid; 0 is every core this process may use.
    """

    cooperative: bool = False
    programmatic_dependent_launch: bool = False
    num_threads: int = 0


@dataclass(frozen=True)
class KernelStep:
    """Launch of one kernel.

    Args:
        entry: symbol in one of the variant's artifacts.
        grid, block, cluster: launch dimensions (`block` and `cluster` are 1 for a native library).
        args: in the order of the binary's ABI, hidden arguments included.
        shared_bytes: dynamic shared memory of a block, in bytes.
        attributes: see `LaunchAttributes`.
    """

    entry: str
    grid: tuple[int, int, int]
    args: tuple[Arg, ...]
    block: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    attributes: LaunchAttributes = LaunchAttributes()


@dataclass(frozen=True)
class MemsetStep:
    """Fill of a whole workspace with one byte value, on the launch's own stream."""

    workspace: str
    byte: int = 0


@dataclass(frozen=True)
class CallStep:
    """Call of a host function that computes with torch on the bound tensors: for `eager` and for foreign stacks.

    Never part of a plan that declares itself graph-safe.
    """

    function: Callable[[Tensors], None]


Step = KernelStep | MemsetStep | CallStep


@dataclass(frozen=True)
class LaunchPlan:
    """An ordered tuple of steps over named slots and workspaces.

    Args:
        steps: run in order.
        slots: what each named tensor must be.
        workspaces: scratch memory by name.
        limits: largest size of each symbol that occurs in the slots' shapes.
    """

    steps: tuple[Step, ...]
    slots: Mapping[str, SlotSpec]
    workspaces: Mapping[str, WorkspaceSpec] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory in bytes."""
        return sum(spec.num_bytes for spec in self.workspaces.values())

    def allocate_workspaces(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Fresh, uninitialised workspaces."""
        return {n: torch.empty(s.shape, dtype=s.dtype, device=device) for n, s in self.workspaces.items()}

    def bind(self, tensors: Tensors) -> BoundPlan:
        """Checks `tensors` (slots and workspaces by name; others are ignored) and ties the plan to them.

        The plan keeps references: the tensors may change in content, never in address, while it is in use.

        Raises:
            ValueError: a tensor is missing or has the wrong dtype, shape, stride, alignment or size; the message
                names the slot, what was expected and what was given.
        """
        sizes: dict[str, int] = {}
        for name, spec in self.slots.items():
            check_slot(name, spec, tensors.get(name), sizes)
        for symbol, size in sizes.items():
            if symbol in self.limits and size > self.limits[symbol]:
                raise ValueError(f"{symbol}={size} exceeds the plan's bound of {self.limits[symbol]}: plan anew")
        for name, workspace in self.workspaces.items():
            check_workspace(name, workspace, tensors.get(name))
        names = [*self.slots, *self.workspaces]
        return BoundPlan(self, {n: tensors[n] for n in names if n in tensors})


@dataclass(frozen=True)
class BoundPlan:
    """A plan tied to checked tensors."""

    plan: LaunchPlan
    tensors: Tensors

    def resolve(self, arg: Arg) -> tuple[CType, int | float]:
        """The C type and value of one argument."""
        if isinstance(arg, ScalarArg):
            return arg.ctype, arg.value
        tensor = self.tensors.get(arg.slot)
        if isinstance(arg, SlotArg):
            return CType.POINTER, 0 if tensor is None else tensor.data_ptr()
        if tensor is None:
            return CType.I64, 0
        return CType.I64, tensor.stride(arg.dim) if isinstance(arg, StrideArg) else tensor.shape[arg.dim]


class Executor(Protocol):
    """Runs bound plans of the artifacts that it was made for."""

    def prepare(self, bound: BoundPlan) -> Callable[[], None]:
        """A function that runs the plan once on the bound tensors; it allocates and checks nothing."""
        ...
