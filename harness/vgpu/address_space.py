"""The virtual address space of a bound plan: tensors as allocations with guards, and what is known of each byte."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pagedtune.kernels.launch import BoundPlan
from pagedtune.kernels.slot import Access

from .core_library import Alloc

FIRST_BASE = 0x0123_0000_0000  # above 2^40: an address cut to 32 bits hits nothing
SPACING = 0x0010_0000_0000  # 64 GiB between allocations
ALIGNMENT = 256  # of an allocation, as the driver's
ACCESS_CODES = {Access.IN: 0, Access.OUT: 1, Access.INOUT: 2}
WORKSPACE, CONSTANT = 3, 4

Bitmap = npt.NDArray[np.uint8]


@dataclass
class Allocation:
    """One range of virtual addresses backed by host memory.

    Args:
        name: slots that lie in it, joined by `+`.
        base: first virtual address.
        host: address on the host.
        num_bytes: size.
        access: as in the core (`ACCESS_CODES`, WORKSPACE, CONSTANT).
        granule: bytes of an element, at most 4: what a race is detected on.
        init: initialised bytes as a bitmap, None where all are.
        gaps: bytes that belong to no element, None where there are none.
        freed: whether it was given back.
        read, written: bytes that were touched.
        pending_written, pending_read: see core/state.h.
        keep: what owns the memory.
    """

    name: str
    base: int
    host: int
    num_bytes: int
    access: int
    granule: int
    init: Bitmap | None = None
    gaps: Bitmap | None = None
    freed: bool = False
    read: Bitmap = field(default_factory=lambda: np.zeros(0, np.uint8))
    written: Bitmap = field(default_factory=lambda: np.zeros(0, np.uint8))
    keep: object = None
    pending_written: Bitmap | None = None  # by the previous kernel, which may not have ended
    pending_read: Bitmap | None = None


def bitmap_size(num_bytes: int) -> int:
    """Bytes of a bitmap over `num_bytes`, with slack for wide reads; whole words, in which it is counted."""
    return (num_bytes // 8 + 23) & ~7


def bitmap(num_bytes: int) -> Bitmap:
    """An empty bitmap over `num_bytes`."""
    return np.zeros(bitmap_size(num_bytes), np.uint8)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Host addresses from the first element to past the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _element_bytes(tensor: torch.Tensor, start: int, end: int) -> npt.NDArray[np.bool_]:
    """Which bytes of [start, end) belong to the tensor's elements."""
    size = tensor.element_size()
    mask = torch.zeros((end - start) // size + 1, dtype=torch.bool)
    offset = (tensor.data_ptr() - start) // size
    torch.as_strided(mask, tensor.shape, tensor.stride(), offset).fill_(True)
    bytes_: npt.NDArray[np.bool_] = np.repeat(mask.numpy(), size)[: end - start]
    return bytes_


def _pack(bits: npt.NDArray[np.bool_]) -> Bitmap:
    out = bitmap(len(bits))
    packed = np.packbits(bits, bitorder="little")
    out[: len(packed)] = packed
    return out


class AddressSpace:
    """Places the tensors of a bound plan."""

    def __init__(
        self,
        bound: BoundPlan,
        uninitialised: Mapping[str, torch.Tensor] | None = None,
        freed: frozenset[str] = frozenset(),
        windows: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.allocations: list[Allocation] = []
        self._addresses: dict[str, int] = {}
        self._pieces: dict[str, list[tuple[torch.Tensor, Allocation]]] = {}
        self._next = FIRST_BASE
        self._bound = bound
        self._uninitialised = dict(uninitialised or {})
        self._freed = freed
        self._touched = np.zeros(0, np.uint8)
        self._bounds = np.zeros(0, np.int64)
        windows = windows or {}
        whole = {name: tensor for name, tensor in bound.tensors.items() if name not in windows}
        for group in _overlapping(whole):
            self._place(group)
        for name, window in windows.items():
            self._place_window(name, window)

    def _access(self, name: str) -> int:
        plan = self._bound.plan
        return WORKSPACE if name in plan.workspaces else ACCESS_CODES[plan.slots[name].access]

    def _place(self, names: list[str]) -> None:
        tensors = [self._bound.tensors[n] for n in names]
        if not tensors[0].numel():
            self._addresses[names[0]] = self._next
            self._next += SPACING
            return
        spans = [_span(t) for t in tensors]
        start, end = min(s for s, _ in spans), max(e for _, e in spans)
        offset = (start - tensors[0].untyped_storage().data_ptr()) % ALIGNMENT
        base = self._next + offset
        self._next += -(-(end - start) // SPACING) * SPACING + SPACING
        for name, (first, _) in zip(names, spans, strict=True):
            self._addresses[name] = base + first - start
        accesses = {self._access(n) for n in names}
        access = accesses.pop() if len(accesses) == 1 else ACCESS_CODES[Access.INOUT]
        granule = min(4, *(t.element_size() for t in tensors))
        allocation = Allocation("+".join(names), base, start, end - start, access, granule, keep=tensors)
        if not (len(names) == 1 and tensors[0].is_contiguous()):
            covered = np.zeros(end - start, np.bool_)
            for tensor in tensors:
                covered |= _element_bytes(tensor, start, end)
            if not covered.all():
                allocation.gaps = _pack(~covered)
        allocation.freed = bool(self._freed.intersection(names))
        self._set_initialised(allocation, names)
        self.allocations.append(allocation)

    def _place_window(self, name: str, window: torch.Tensor) -> None:
        """Places a tensor of which only `window` exists: one piece, or rows with nothing between them."""
        tensor = self._bound.tensors[name]
        first = self._addresses[name] = self._next
        granule, access = min(4, tensor.element_size()), self._access(name)
        whole = window.is_contiguous()
        self._pieces[name] = []
        for row, piece in enumerate([window] if whole else window.unbind()):
            before = piece.data_ptr() - tensor.data_ptr()
            num_bytes = piece.numel() * piece.element_size()
            self._next = first + -(-(before + num_bytes) // SPACING) * SPACING + SPACING
            shown = name if whole else f"{name}[{row}]"
            allocation = Allocation(shown, first + before, piece.data_ptr(), num_bytes, access, granule, keep=tensor)
            self.allocations.append(allocation)
            self._pieces[name].append((piece, allocation))

    def _set_initialised(self, allocation: Allocation, names: list[str]) -> None:
        if allocation.access in (ACCESS_CODES[Access.OUT], WORKSPACE):
            allocation.init = bitmap(allocation.num_bytes)
        masked = [n for n in names if n in self._uninitialised]
        if not masked:
            return
        unknown = np.zeros(allocation.num_bytes, np.bool_)
        for name in masked:
            tensor, mask = self._bound.tensors[name], self._uninitialised[name]
            first = tensor.data_ptr() - allocation.host
            positions = _element_positions(tensor)[mask.expand(tensor.shape)].numpy() + first
            for k in range(tensor.element_size()):
                unknown[positions + k] = True
        allocation.init = _pack(~unknown)

    def add(self, name: str, base: int, data: npt.NDArray[np.uint8], access: int) -> None:
        """An allocation at a fixed address, e.g. of a module variable."""
        self.allocations.append(Allocation(name, base, data.ctypes.data, len(data), access, 1, keep=data))

    def address(self, name: str) -> int:
        """Virtual address of a slot's or workspace's first element."""
        return self._addresses[name]

    def reset_touched(self) -> None:
        """Forgets what was read and written."""
        sizes = [size for a in self.allocations for size in (bitmap_size(a.num_bytes),) * 2]
        bounds = np.cumsum([0, *sizes])
        self._touched = np.zeros(bounds[-1], np.uint8)
        self._bounds = bounds[:-1]
        views = np.split(self._touched, bounds[1:-1])
        for k, a in enumerate(self.allocations):
            a.read, a.written = views[2 * k], views[2 * k + 1]

    def count_touched(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes that were read and written since, by allocation, where there are any."""
        words = np.bitwise_count(self._touched.view(np.uint64))
        counts = np.add.reduceat(words, self._bounds // 8, dtype=np.int64).tolist()
        names = [a.name for a in self.allocations]
        read, written = (dict(zip(names, counts[k::2], strict=True)) for k in (0, 1))
        return {n: c for n, c in read.items() if c}, {n: c for n, c in written.items() if c}

    def table(self) -> ctypes.Array[Alloc]:
        """All allocations for the core, sorted by address."""
        self.allocations.sort(key=lambda a: a.base)
        out = (Alloc * len(self.allocations))()
        for k, a in enumerate(self.allocations):
            init = None if a.init is None else a.init.ctypes.data
            gaps = None if a.gaps is None else a.gaps.ctypes.data
            touched = (a.read.ctypes.data, a.written.ctypes.data)
            pending = (_address(a.pending_written), _address(a.pending_read))
            out[k] = Alloc(a.base, a.num_bytes, a.host, init, gaps, *touched, a.access, a.granule, a.freed, k, *pending)
        return out

    def describe(self, index: int, address: int) -> str:
        """An address in terms of the allocation it hit or missed."""
        if index < 0:
            return "no allocation exists"
        a = self.allocations[index]
        if address < a.base:
            return f"{a.base - address} bytes before {a.name}"
        if address >= a.base + a.num_bytes:
            return f"{address - a.base - a.num_bytes} bytes past the end of {a.name} ({a.num_bytes} bytes)"
        return f"{a.name}+{address - a.base}"

    def by_name(self, name: str) -> Allocation | None:
        """The allocation that holds a slot."""
        return next((a for a in self.allocations if name in a.name.split("+")), None)

    def pieces(self, name: str) -> list[tuple[torch.Tensor, Allocation]]:
        """The parts of a slot or workspace that exist, each with the allocation that holds it."""
        if name in self._pieces:
            return self._pieces[name]
        allocation = self.by_name(name)
        return [] if allocation is None else [(self._bound.tensors[name], allocation)]


def _address(bits: Bitmap | None) -> int | None:
    return None if bits is None else bits.ctypes.data


def _element_positions(tensor: torch.Tensor) -> torch.Tensor:
    """Byte offset of each element from the first one."""
    out = torch.zeros(tensor.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[dim] = size
        out += torch.arange(size).view(shape) * stride
    return out * tensor.element_size()


def unwritten_elements(tensor: torch.Tensor, allocation: Allocation) -> int:
    """Elements of `tensor` of which no byte was written."""
    if int(np.bitwise_count(allocation.written).sum()) == allocation.num_bytes:
        return 0
    bits = np.unpackbits(allocation.written, bitorder="little")
    first = tensor.data_ptr() - allocation.host
    positions = _element_positions(tensor).flatten().numpy() + first
    written: int = int(bits[positions].sum())
    return len(positions) - written


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names grouped by overlap of their host memory."""
    spans = sorted((*_span(t), n) if t.numel() else (0, 0, n) for n, t in tensors.items())
    groups: list[list[str]] = []
    reach = -1
    for start, end, name in spans:
        if end == 0 or start >= reach or not groups:
            groups.append([name])
            reach = end
        else:
            groups[-1].append(name)
            reach = max(reach, end)
    return groups
