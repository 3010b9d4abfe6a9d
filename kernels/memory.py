"""Host memory for KV pools: on huge pages where the system grants them.

A decode launch touches every block of a pool once, in table order. With 4 KiB pages it misses the TLB at nearly every
block, so the same kernel runs several percent to tens of percent slower on a pool from plain `torch.empty`.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch

HUGE_PAGE_BYTES = 2 << 20  # x86-64 and AArch64 with 4 KiB base pages
_THP_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised contiguous CPU tensor, aligned to and advised onto 2 MiB pages if it is that large.

    The tensor owns its memory. Pages are mapped when first written: a pool that is only ever read is backed by the one
    zero page, and its timing means nothing.

    Raises:
        OSError: the system has not that much memory.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype)
    # Private: a shared anonymous mapping is shmem, which has its own huge-page switch, off nearly everywhere.
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages: small pages serve, only slower
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes].view(dtype).view(tuple(shape))


def huge_page_mode() -> str:
    """The system's policy for transparent huge pages: `always`, `madvise`, `never`, or `unknown`."""
    try:
        text = _THP_MODE.read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or "unknown"


def huge_fraction(tensor: torch.Tensor) -> float | None:
    """Share of the tensor's mapping that lies on huge pages now, in [0, 1]; None where the system does not say."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return None
    address, inside = tensor.data_ptr(), False
    resident_kb = 0
    for line in lines:
        key, _, value = line.partition(" ")
        if "-" in key and not key.endswith(":"):
            start, end = (int(part, 16) for part in key.split("-"))
            inside = start <= address < end
        elif inside and key == "Rss:":
            resident_kb = int(value.split()[0])
        elif inside and key == "AnonHugePages:":
            return int(value.split()[0]) / resident_kb if resident_kb else 0.0
    return None
