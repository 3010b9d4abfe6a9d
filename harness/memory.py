"""Memory that the gate hands to a kernel: guard bands around everything, poison in everything that is not live."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

GUARD_BYTES = 1024  # on each side: a stray vector store or an off-by-one row of a small tensor lands in it
HIGH_ELEMENTS = 1 << 32  # a high pool starts its live blocks here, so that a 32-bit offset wraps to mapped memory
ROW_ALIGNMENT = 64  # elements: rows that lie far apart stay as aligned as contiguous ones
_MAP_NORESERVE_LINUX = 0x4000  # <asm-generic/mman.h>; Python has no name for it before 3.12


class Poison(StrEnum):
    """What fills memory that must not matter. Both must give the same bits."""

    NAN = "nan"  # a quiet NaN whose payload no arithmetic produces
    FINITE = "finite"  # large finite numbers: finds reads that a NaN test or a maximum would swallow


# Integer type, NaN poison, finite poison. The canary of outputs is one more than the poison, so that a poison that was
# read and passed on does not look like an element that was not written.
_BITS: dict[torch.dtype, tuple[torch.dtype, int, int]] = {
    torch.float64: (torch.int64, 0x7FF8DADADADADADA, 0x46293E5939A08CEA),  # 1e30
    torch.float32: (torch.int32, 0x7FDADADA, 0x7149F2CA),  # 1e30
    torch.bfloat16: (torch.int16, 0x7FDA, 0x7149),  # 1e30
    torch.float16: (torch.int16, 0x7EDA, 0x7B00),  # 57344
    torch.float8_e4m3fn: (torch.uint8, 0x7F, 0x7E),  # NaN, 448
    torch.int8: (torch.int8, -127, 127),
    torch.uint8: (torch.uint8, 0xDA, 0x7E),
    torch.int16: (torch.int16, -9510, 0x7F7F),
    torch.int32: (torch.int32, -623191334, 0x7F7F7F7F),
    torch.int64: (torch.int64, -2676586395008836902, 0x7F7F7F7F7F7F7F7E),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width, so that NaNs and signed zeros can be compared."""
    return tensor.view(_BITS[tensor.dtype][0])


def poison_bits(dtype: torch.dtype, poison: Poison) -> int:
    """The bit pattern of the poison, as the integer that `bits` shows."""
    _, nan, finite = _BITS[dtype]
    return nan if poison is Poison.NAN else finite


def canary_bits(dtype: torch.dtype, poison: Poison) -> int:
    """What outputs and workspaces hold before a launch: the same kind of number as the poison, in other bits."""
    pattern = poison_bits(dtype, poison)
    if dtype == torch.float8_e4m3fn:
        return pattern ^ 0x80  # it has but two NaNs: the sign is all they differ in
    return pattern - 1 if dtype == torch.int8 else pattern + 1


def flip_signs(tensor: torch.Tensor) -> None:
    """Other numbers of the same size in the same memory: floats change sign, integers their lowest bit."""
    integers = bits(tensor)
    top = 1 << (8 * tensor.element_size() - 1)
    mask = 1 if not tensor.is_floating_point() else top if integers.dtype is torch.uint8 else -top
    integers.bitwise_xor_(mask)


def change_sizes(tensor: torch.Tensor) -> None:
    """Other fp32 numbers of the same sign and about the same size: the highest bit of the mantissa is turned over."""
    bits(tensor).bitwise_xor_(1 << 22)


def fill(tensor: torch.Tensor, poison: Poison) -> None:
    """Fills a tensor with poison."""
    bits(tensor).fill_(poison_bits(tensor.dtype, poison))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bits."""
    return torch.equal(bits(a), bits(b))


def first_difference(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """Coordinates of the first element whose bits differ.

    Raises:
        ValueError: there is none.
    """
    different = (bits(a) != bits(b)).nonzero()
    if not len(different):
        raise ValueError("the tensors are the same")
    return tuple(int(i) for i in different[0])


@dataclass
class Carved:
    """A tensor inside a larger allocation.

    Args:
        parent: the whole allocation, one-dimensional (for a high pool, only the part around the live blocks; for rows
            far apart, the rows).
        view: the tensor that the kernel gets.
        guarded: whether `parent` holds all of `view`, with guard bands around it.
        before: copy of `parent`, taken by `freeze`.
    """

    parent: torch.Tensor
    view: torch.Tensor
    guarded: bool = True
    before: torch.Tensor | None = None

    def freeze(self) -> None:
        """Remembers the contents."""
        self.before = self.parent.clone()

    def restore(self) -> None:
        """Puts the remembered contents back."""
        self.parent.copy_(self._frozen())

    def changed_anywhere(self) -> int | None:
        """Offset in elements, from the view's first one, of the first element that changed since `freeze`."""
        return self._first_change(self.parent)

    def changed_outside(self) -> int | None:
        """As `changed_anywhere`, but the elements of the view may have changed; None for an unguarded tensor."""
        if not self.guarded:
            return None
        after = self.parent.clone()
        self._inside(after).copy_(self._inside(self._frozen()))
        return self._first_change(after)

    def _frozen(self) -> torch.Tensor:
        if self.before is None:
            raise RuntimeError("Carved.freeze was not called")
        return self.before

    def _inside(self, parent: torch.Tensor) -> torch.Tensor:
        return parent.as_strided(self.view.shape, self.view.stride(), self._start())

    def _start(self) -> int:
        return (self.view.data_ptr() - self.parent.data_ptr()) // self.parent.element_size()

    def _first_change(self, after: torch.Tensor) -> int | None:
        frozen = self._frozen()
        if same_bits(after, frozen):
            return None
        place = first_difference(after, frozen)
        return sum(i * stride for i, stride in zip(place, self.parent.stride(), strict=True)) - self._start()


def carve(
    shape: Sequence[int],
    dtype: torch.dtype,
    poison: Poison,
    pad: Sequence[int] = (),
    offset: int = 0,
    canary: bool = False,
) -> Carved:
    """A poisoned tensor with guard bands.

    Args:
        pad: elements that each dimension is longer in the allocation than in the view (empty: none).
        offset: elements by which the start is moved off its 64-byte alignment.
        canary: fill the view with the canary instead.
    """
    padded = [size + extra for size, extra in zip(shape, pad or [0] * len(shape), strict=True)]
    guard = GUARD_BYTES // dtype.itemsize
    parent = torch.empty(2 * guard + offset + math.prod(padded), dtype=dtype)
    fill(parent, poison)
    strides = [math.prod(padded[i + 1 :]) for i in range(len(padded))]
    view = parent.as_strided(tuple(shape), strides, guard + offset)
    if canary:
        bits(view).fill_(canary_bits(dtype, poison))
    return Carved(parent, view)


def reserve(shape: Sequence[int], dtype: torch.dtype, window_start: int) -> Carved:
    """A tensor of a huge shape whose pages are committed when touched; `parent` is its part from block
    `window_start` on: the only part that is filled, remembered and compared.

    Raises:
        OSError: the system refuses the address space.
    """
    view = _reserved(math.prod(shape), dtype).view(tuple(shape))
    return Carved(view[window_start:].view(-1), view, guarded=False)


def reserve_rows(rows: int, length: int, stride: int, dtype: torch.dtype) -> Carved:
    """Rows `stride` elements apart, of which only the last exists (`parent`); pages are committed when touched.

    Raises:
        OSError: the system refuses the address space.
    """
    flat = _reserved((rows - 1) * stride + length, dtype)
    return Carved(flat[-length:], flat.as_strided((rows, length), (stride, 1)), guarded=False)


def reserve_apart(shape: Sequence[int], dtype: torch.dtype, poison: Poison) -> Carved:
    """A tensor filled with the canary, whose last row along the first dimension lies above `HIGH_ELEMENTS`: rows are
    contiguous, all equally far apart, and what is between them has no pages and is not compared.

    Args:
        shape: at least two rows.

    Raises:
        OSError: the system refuses the address space.
    """
    rows, length = shape[0], math.prod(shape[1:])
    apart = -(-HIGH_ELEMENTS // (rows - 1) // ROW_ALIGNMENT) * ROW_ALIGNMENT
    flat = _reserved((rows - 1) * apart + length, dtype)
    inner = [math.prod(shape[i + 1 :]) for i in range(1, len(shape))]
    carved = Carved(
        flat.as_strided((rows, length), (apart, 1)), flat.as_strided(tuple(shape), (apart, *inner)), guarded=False
    )
    bits(carved.view).fill_(canary_bits(dtype, poison))
    return carved


def _reserved(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", _MAP_NORESERVE_LINUX)
    return torch.frombuffer(mmap.mmap(-1, num_elements * dtype.itemsize, flags=flags), dtype=dtype)
