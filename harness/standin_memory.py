"""Device memory of the stand-in driver: ranges of made-up addresses, each backed by memory of this process."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedtune.harness.vgpu.address_space import ACCESS_CODES, ALIGNMENT, FIRST_BASE, AddressSpace
from pagedtune.kernels.launch import Access, BoundPlan, LaunchPlan

GAP = 64 << 20  # bytes between two allocations that belong to nobody
FRESH_BYTE = 0xDA  # what small fresh memory holds: read as a number it is large and odd
LAZY_BYTES = 1 << 20  # larger allocations take pages when they are touched, and start as zeros
REMEMBERED = 64  # freed ranges that an access is recognised in
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class NotMapped(Exception):
    """An address range that no live allocation holds."""


@dataclass
class Range:
    """One allocation: `host` is its bytes, as long as it lives."""

    base: int
    num_bytes: int
    host: npt.NDArray[np.uint8]

    @property
    def end(self) -> int:
        """One past the last address."""
        return self.base + self.num_bytes


class StandInMemory:
    """Allocations of one device.

    Args:
        capacity: bytes that it has.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._used = capacity, 0
        self._next = FIRST_BASE
        self._live: dict[int, Range] = {}
        self._freed: list[tuple[int, int]] = []

    def allocate(self, num_bytes: int) -> int:
        """Address of a new allocation; 0 where there is not that much left."""
        if num_bytes > self._capacity - self._used:
            return 0
        base = self._next
        self._next += -(-num_bytes // ALIGNMENT) * ALIGNMENT + GAP
        self._live[base] = Range(base, num_bytes, _host_memory(num_bytes))
        self._used += num_bytes
        return base

    def free(self, base: int) -> None:
        """Takes an allocation back; raises NotMapped where none starts there."""
        if base not in self._live:
            raise NotMapped(f"{base:#x} is no allocation")
        gone = self._live.pop(base)
        self._used -= gone.num_bytes
        self._freed = [*self._freed, (gone.base, gone.num_bytes)][-REMEMBERED:]

    def host_address(self, address: int, num_bytes: int) -> int:
        """Where the bytes of a range lie in this process; raises NotMapped unless one live allocation holds them."""
        live = tuple(self._live.values())  # a copy, as below
        found = next((r for r in live if r.base <= address and address + num_bytes <= r.end), None)
        if found is None:
            was = any(base <= address < base + size for base, size in self._freed)
            raise NotMapped(f"{num_bytes} bytes at {address:#x} are {'freed' if was else 'not allocated'}")
        return int(found.host.ctypes.data) + address - found.base

    def copy(self, destination: int, source: int, num_bytes: int) -> None:
        """Copies between two host addresses."""
        ctypes.memmove(destination, source, num_bytes)

    def fill(self, destination: int, byte: int, num_bytes: int) -> None:
        """Sets bytes at a host address."""
        ctypes.memset(destination, byte, num_bytes)

    def address_space(self) -> AddressSpace:
        """What a kernel sees: all live allocations, and the freed ones, whose use is a fault."""
        space = AddressSpace(BoundPlan(LaunchPlan((), {}), {}))
        readable = ACCESS_CODES[Access.INOUT]
        # Copies: a finaliser that the garbage collector runs meanwhile may free memory.
        for number, found in enumerate(tuple(self._live.values())):
            space.add(f"allocation {number}", found.base, found.host, readable)
        dead = np.zeros(1, np.uint8)
        for base, num_bytes in tuple(self._freed):
            space.add("freed memory", base, dead, readable)
            space.allocations[-1].freed, space.allocations[-1].num_bytes = True, num_bytes
        return space


def _host_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    if num_bytes < LAZY_BYTES:
        return np.full(num_bytes, FRESH_BYTE, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), np.uint8)
