"""How fast this machine reads memory: the measure that bandwidths are set against.

Of several readings the fastest counts, since everything that disturbs one only slows it: the curve is a ceiling.
The loop is C++ (`stream.cpp`): beyond the caches `torch.sum` comes near it, but inside them the cost of a torch call
hides the rates, and a ceiling for small working sets needs those.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from pagedtune.harness.contention import MAX_FOREIGN_SHARE, CpuUse
from pagedtune.kernels.artifact import cache_dir, content_key, publish
from pagedtune.kernels.build_native import build_library
from pagedtune.kernels.cpu_facts import read_text
from pagedtune.kernels.device import Device
from pagedtune.kernels.memory import huge_empty
from pagedtune.kernels.native import load_library
from pagedtune.kernels.serial import from_jsonable, to_jsonable

DEFAULT_CACHE_BYTES = 64 << 20  # where the system does not say how large the last-level cache is
MAX_BUFFER_BYTES = 2 << 30
_STEP_BYTES = 512  # kStepBytes of stream.cpp
_PASS_BYTES = 256 << 20  # read in one timing of a buffer that is smaller
_MIN_TRIES, _PATIENCE, _TIME_LIMIT_S = 8, 8, 2.0  # per size; ends after PATIENCE tries without a gain of 0.5 %


@dataclass(frozen=True)
class StreamPoint:
    """The fastest read of a buffer of `num_bytes`, in 10^9 bytes/s."""

    num_bytes: int
    gb_s: float


@dataclass(frozen=True)
class StreamCurve:
    """Read bandwidth by buffer size, ascending.

    Args:
        points: at least one; the last buffer is far larger than the last-level cache.
        foreign_share: share of the cores' time that others used meanwhile.
    """

    points: tuple[StreamPoint, ...]
    foreign_share: float = 0.0

    @property
    def memory_gb_s(self) -> float:
        """Bandwidth beyond the caches, in 10^9 bytes/s."""
        return self.points[-1].gb_s

    @property
    def contended(self) -> bool:
        """Whether others used the machine so much that the figures may be too low."""
        return self.foreign_share > MAX_FOREIGN_SHARE

    def ceiling_gb_s(self, working_set_bytes: int) -> float:
        """The fastest that a set of this size, read again and again, can come in.

        The best of all measured sizes from the next smaller one up: never too low, by a step of the curve too high.
        """
        smaller = [p.num_bytes for p in self.points if p.num_bytes <= working_set_bytes]
        first = max(smaller, default=0)
        return max(p.gb_s for p in self.points if p.num_bytes >= first)

    def merged(self, other: StreamCurve) -> StreamCurve:
        """The faster of the two at each size; as quiet as the quieter."""
        best = {p.num_bytes: p.gb_s for p in self.points}
        for point in other.points:
            best[point.num_bytes] = max(point.gb_s, best.get(point.num_bytes, 0.0))
        points = tuple(StreamPoint(size, best[size]) for size in sorted(best))
        return StreamCurve(points, min(self.foreign_share, other.foreign_share))


def buffer_sizes(cache_bytes: int | None, memory_bytes: int | None) -> tuple[int, ...]:
    """Sizes to read, in bytes: from 64 KiB in fours to the last-level cache, then 2, 4 and 16 times that."""
    last_level = cache_bytes or DEFAULT_CACHE_BYTES
    limit = min(MAX_BUFFER_BYTES, (memory_bytes or MAX_BUFFER_BYTES * 8) // 8)
    sizes, size = [], 64 << 10
    while size < last_level:
        sizes.append(size)
        size *= 4
    sizes += [last_level * factor for factor in (1, 2, 4, 16)]
    return tuple(sorted({min(s, limit) // _STEP_BYTES * _STEP_BYTES for s in sizes}))


def stream_curve(device: Device, refresh: bool = False) -> StreamCurve:
    """The curve of this machine: measured once per boot and kept in the cache folder.

    A curve that was measured while others used the machine is measured again, and the faster of both kept.

    Raises:
        BuildError: there is no C++ compiler, and nothing in the cache.
    """
    path = cache_dir() / "stream" / f"{_machine_key(device)}.json"
    known = _load(path)
    if known is not None and not refresh and not known.contended:
        return known
    curve = measure_curve(buffer_sizes(device.l2_bytes, device.memory_bytes), device.num_units)
    merged = curve if known is None else curve.merged(known)
    publish(json.dumps(to_jsonable(merged)).encode(), path)
    return merged


def measure_curve(sizes: Sequence[int], num_threads: int) -> StreamCurve:
    """Reads buffers of `sizes` bytes (multiples of 512) with `num_threads` threads."""
    buffer = huge_empty((max(sizes),), torch.uint8)
    buffer.fill_(1)
    before = CpuUse.now()
    points = tuple(StreamPoint(size, _best_rate(buffer, size, num_threads)) for size in sorted(sizes))
    return StreamCurve(points, before.foreign_share(CpuUse.now(), num_threads))


def _best_rate(buffer: torch.Tensor, num_bytes: int, num_threads: int) -> float:
    read, sink = _reader(), ctypes.c_uint64()
    repeats = max(1, _PASS_BYTES // num_bytes)
    best, since_gain, tries = 0.0, 0, 0
    end = time.perf_counter() + _TIME_LIMIT_S
    while tries < _MIN_TRIES or (since_gain < _PATIENCE and time.perf_counter() < end):
        seconds = read(buffer.data_ptr(), num_bytes, num_threads, repeats, tries % 2, ctypes.addressof(sink))
        rate = repeats * num_bytes / seconds / 1e9
        since_gain = 0 if rate > best * 1.005 else since_gain + 1
        best, tries = max(best, rate), tries + 1
    return best


@cache
def _reader() -> Callable[..., float]:
    artifact = build_library(Path(__file__).with_name("stream.cpp"), (), {}, {})
    function = load_library(artifact.path)["pagedtune_stream_read"]
    function.restype = ctypes.c_double
    function.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.c_void_p,
    )
    return function


def _machine_key(device: Device) -> str:
    boot = read_text(Path("/proc/sys/kernel/random/boot_id")).strip()
    source = Path(__file__).with_name("stream.cpp").read_text()
    sizes = buffer_sizes(device.l2_bytes, device.memory_bytes)
    return content_key({"device": device.fingerprint, "boot": boot, "source": source, "sizes": sizes})


def _load(path: Path) -> StreamCurve | None:
    try:
        return from_jsonable(StreamCurve, json.loads(path.read_text()))
    except (OSError, ValueError):  # not there, or written by another version: measure
        return None
