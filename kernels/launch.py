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

Tensors = Mapping[str, torch.Tensor]


class Access(StrEnum):
    """What a plan does to a slot; the gate checks that an `IN` slot is unchanged afterwards."""

    IN = "in"
    OUT = "out"  # every element is written
    INOUT = "inout"  # some elements are written, the others stay


class CType(StrEnum):
    """Type of one kernel argument as the binary sees it."""

    POINTER = "pointer"
    I64 = "i64"
    I32 = "i32"
    F32 = "f32"


@dataclass(frozen=True)
class SlotSpec:
    """What a tensor must be to fill a slot.

    Args:
        dtype: its dtype.
        shape: one entry per dimension: a size, or a symbol such as `num_tokens`. Equal symbols must have equal
            sizes in one binding, and at most the size that the plan's `limits` gives for that symbol.
        access: what the plan does to it.
        unit_stride: dimensions that must have stride 1 (a dimension of size 1 always passes).
        contiguous: whether it must be contiguous.
        align: alignment of its first element, in bytes (0: that of the dtype).
        optional: whether it may be absent (the kernel then gets a null pointer and zero strides).
    """

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    access: Access = Access.IN
    unit_stride: tuple[int, ...] = ()
    contiguous: bool = False
    align: int = 0
    optional: bool = False


@dataclass(frozen=True)
class WorkspaceSpec:
    """Scratch memory that the caller owns and passes to `bind` under its name; contents are undefined before a launch.

    Args:
        dtype: its dtype.
        shape: sizes at the plan's bounds.
        partial_of: for split-K partials, the slot they are merged into (`out` or `lse`), so that the gate can
            check them; dimensions are then [num_tokens, num_q_heads, num_splits, ...].
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    partial_of: str = ""

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


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
        num_threads: for a native library, how many CPU threads share the grid.
    """

    cooperative: bool = False
    programmatic_dependent_launch: bool = False
    num_threads: int = 1


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
            _check_slot(name, spec, tensors.get(name), sizes)
        for symbol, size in sizes.items():
            if symbol in self.limits and size > self.limits[symbol]:
                raise ValueError(f"{symbol}={size} exceeds the plan's bound of {self.limits[symbol]}: plan anew")
        for name, workspace in self.workspaces.items():
            _check_workspace(name, workspace, tensors.get(name))
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


def _check_slot(name: str, spec: SlotSpec, tensor: torch.Tensor | None, sizes: dict[str, int]) -> None:
    if tensor is None:
        if not spec.optional:
            raise ValueError(f"slot {name!r} is not filled: it needs a {spec.dtype} tensor of shape {spec.shape}")
        return
    if tensor.dtype != spec.dtype:
        raise ValueError(f"slot {name!r} has dtype {tensor.dtype}, expected {spec.dtype}")
    if tensor.dim() != len(spec.shape):
        raise ValueError(f"slot {name!r} has shape {tuple(tensor.shape)}, expected {spec.shape}")
    for size, expected in zip(tensor.shape, spec.shape, strict=True):
        known = sizes.setdefault(expected, size) if isinstance(expected, str) else expected
        if size != known:
            raise ValueError(
                f"slot {name!r} has shape {tuple(tensor.shape)}, expected {spec.shape} with {expected}={known}"
            )
    _check_memory(name, spec, tensor)


def _check_memory(name: str, spec: SlotSpec, tensor: torch.Tensor) -> None:
    for dim in spec.unit_stride:
        if tensor.shape[dim] > 1 and tensor.stride(dim) != 1:
            raise ValueError(f"slot {name!r} has strides {tensor.stride()}, expected 1 along dimension {dim}")
    if spec.contiguous and not tensor.is_contiguous():
        raise ValueError(f"slot {name!r} has strides {tensor.stride()}, expected a contiguous tensor")
    align = spec.align or spec.dtype.itemsize
    if tensor.numel() and tensor.data_ptr() % align:
        raise ValueError(f"slot {name!r} starts at {tensor.data_ptr():#x}, expected an alignment of {align} bytes")


def _check_workspace(name: str, spec: WorkspaceSpec, tensor: torch.Tensor | None) -> None:
    if tensor is None:
        raise ValueError(f"workspace {name!r} is missing: it needs {spec.shape} of {spec.dtype}")
    if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape or not tensor.is_contiguous():
        raise ValueError(
            f"workspace {name!r} is {tuple(tensor.shape)} of {tensor.dtype}, "
            f"expected contiguous {spec.shape} of {spec.dtype}"
        )
