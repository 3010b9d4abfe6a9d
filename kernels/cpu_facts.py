"""What this machine's CPU is, as the operating system tells it."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from .device import Device, DeviceKind

# The vector paths of the native kernels, widest first, with the flags of /proc/cpuinfo that each needs.
_ISA_FLAGS: Mapping[str, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
}
ISAS = (*_ISA_FLAGS, "portable")  # widest first
_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cpu_device() -> Device:
    """The CPU as a device; nothing is measured, so its bandwidth is not known."""
    info = cpu_info()
    return Device(
        name="cpu",
        kind=DeviceKind.CPU,
        product=product_name(info),
        num_units=usable_cores(),
        l2_bytes=last_level_cache_bytes(),
        memory_bytes=memory_bytes(),
        base_clock_mhz=base_clock_mhz(info),
        isa=vector_isa(info),
    )


def cpu_info(text: str | None = None) -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo (or in `text`); empty where there is no such file."""
    if text is None:
        text = read_text(Path("/proc/cpuinfo"))
    first = text.partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def product_name(info: Mapping[str, str]) -> str:
    """The vendor's name, with family and model number, since virtual machines often hide the rest of the name."""
    name = info.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in info and "model" in info:
        return f"{name} (family {info['cpu family']}, model {info['model']})"
    return name


def vector_isa(info: Mapping[str, str]) -> str:
    """The widest vector path that this CPU runs: `avx512`, `avx2` or `portable`."""
    flags = set(info.get("flags", "").split())
    return next((isa for isa, needed in _ISA_FLAGS.items() if needed <= flags), "portable")


def base_clock_mhz(info: Mapping[str, str]) -> float | None:
    """The nominal clock: on x86 that of the time-stamp counter, which Linux reports as half of BogoMIPS."""
    if platform.machine() != "x86_64" or "bogomips" not in info:
        return None
    return float(info["bogomips"]) / 2


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its control group rounded up."""
    allowed = len(os.sched_getaffinity(0))
    quota = cgroup_quota(Path("/sys/fs/cgroup"))
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def cgroup_quota(root: Path) -> float | None:
    """Cores' worth of CPU time that the control group under `root` may use (v2, then v1); None without a limit."""
    words = read_text(root / "cpu.max").split()
    if not words:
        words = (read_text(root / "cpu/cpu.cfs_quota_us") + " " + read_text(root / "cpu/cpu.cfs_period_us")).split()
    if len(words) != 2 or words[0] in ("max", "-1"):
        return None
    return int(words[0]) / int(words[1])


def last_level_cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """Sum of the distinct last-level caches of the usable cores, in bytes; None where the system does not say."""
    sizes: dict[str, int] = {}
    for core in os.sched_getaffinity(0):
        levels = sorted((root / f"cpu{core}/cache").glob("index*"), key=lambda p: read_text(p / "level"))
        if levels and (size := parse_size(read_text(levels[-1] / "size"))):
            sizes[read_text(levels[-1] / "shared_cpu_list")] = size
    return sum(sizes.values()) or None


def parse_size(text: str) -> int | None:
    """Bytes of e.g. `32768K`; None for anything else."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    return int(match[1]) * _SIZE_UNITS[match[2]] if match else None


def memory_bytes() -> int:
    """Physical memory, or the control group's limit where that is lower, in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = read_text(Path("/sys/fs/cgroup") / name).strip()
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def read_text(path: Path) -> str:
    """The content of a file of /proc or /sys; empty where it is missing or may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
