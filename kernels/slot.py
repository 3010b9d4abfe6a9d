"""What a named tensor of a launch plan must be, and the checks of one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch


class Access(StrEnum):
    """What a plan does to a slot; the gate checks that an `IN` slot is unchanged afterwards."""

    IN = "in"
    OUT = "out"  # every element is written
    INOUT = "inout"  # some elements are written, the others stay


@dataclass(frozen=True)
class SlotSpec:
    """What a tensor must be to fill a slot.

    Args:
        dtype: its dtype.
        shape: one entry per dimension: a size, a symbol such as `num_tokens`, or a symbol plus one (`num_seqs+1`).
            Equal symbols must have equal sizes in one binding, and at most the size that the plan's `limits` gives.
        access: what the plan does to it.
        unit_stride: dimensions that must have stride 1 (a dimension of size 1 always passes).
        contiguous: whether it must be contiguous.
        align: alignment in bytes of its first element and of all strides but the unit ones (0: that of the dtype).
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


def check_slot(name: str, spec: SlotSpec, tensor: torch.Tensor | None, sizes: dict[str, int]) -> None:
    if tensor is None:
        if not spec.optional:
            raise ValueError(f"slot {name!r} is not filled: it needs a {spec.dtype} tensor of shape {spec.shape}")
        return
    if tensor.dtype != spec.dtype:
        raise ValueError(f"slot {name!r} has dtype {tensor.dtype}, expected {spec.dtype}")
    if tensor.dim() != len(spec.shape):
        raise ValueError(f"slot {name!r} has shape {tuple(tensor.shape)}, expected {spec.shape}")
    for size, expected in zip(tensor.shape, spec.shape, strict=True):
        known = _expected_size(expected, size, sizes)
        if size != known:
            raise ValueError(
                f"slot {name!r} has shape {tuple(tensor.shape)}, expected {spec.shape}: {size} is not {known}"
            )
    _check_memory(name, spec, tensor)


def _expected_size(expected: int | str, size: int, sizes: dict[str, int]) -> int:
    """What `size` must be; a symbol met for the first time takes its size from here."""
    if isinstance(expected, int):
        return expected
    symbol, plus, _ = expected.partition("+1")
    extra = 1 if plus else 0
    return sizes.setdefault(symbol, size - extra) + extra


def _check_memory(name: str, spec: SlotSpec, tensor: torch.Tensor) -> None:
    for dim in spec.unit_stride:
        if tensor.shape[dim] > 1 and tensor.stride(dim) != 1:
            raise ValueError(f"slot {name!r} has strides {tensor.stride()}, expected 1 along dimension {dim}")
    if spec.contiguous and not tensor.is_contiguous():
        raise ValueError(f"slot {name!r} has strides {tensor.stride()}, expected a contiguous tensor")
    align = spec.align or spec.dtype.itemsize
    if tensor.numel() and tensor.data_ptr() % align:
        raise ValueError(f"slot {name!r} starts at {tensor.data_ptr():#x}, expected an alignment of {align} bytes")
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and dim not in spec.unit_stride and stride * spec.dtype.itemsize % align:
            raise ValueError(
                f"slot {name!r} has strides {tensor.stride()}: along dimension {dim} rows are "
                f"{stride * spec.dtype.itemsize} bytes apart, expected a multiple of {align}"
            )


def check_workspace(name: str, spec: WorkspaceSpec, tensor: torch.Tensor | None) -> None:
    if tensor is None:
        raise ValueError(f"workspace {name!r} is missing: it needs {spec.shape} of {spec.dtype}")
    if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape or not tensor.is_contiguous():
        raise ValueError(
            f"workspace {name!r} is {tuple(tensor.shape)} of {tensor.dtype}, "
            f"expected contiguous {spec.shape} of {spec.dtype}"
        )
