"""Finds out whether anything else used the cores while a sample was taken.

Two signals, because each misses what the other sees. `run_delay` of /proc/self/task/*/schedstat is the time that our
own threads stood ready without a core, in nanoseconds: right for a single sample, but blind to a neighbour on a core
that we do not want at that moment, who still takes memory bandwidth. The busy time of /proc/stat minus our own sees
him too (and what a hypervisor stole), but counts in ticks of 10 ms: right for blocks of a quarter second and more.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass

MIN_BLOCK_S = 0.25  # 25 ticks per core: one tick off is 4 %
MAX_FOREIGN_SHARE = 0.06  # of the usable cores' time; quiet machines show 0-3 %
# A wait of this share of a sample makes it unusable; the floor keeps the scheduler's own wake-ups out.
MAX_WAIT_SHARE, MIN_WAIT_NS = 0.02, 20_000


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds since boot on the usable cores (all processes, stolen time included) and of this process."""

    at_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> CpuUse:
        """The counters now."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        with open("/proc/stat", encoding="ascii") as file:
            busy_s = busy_seconds(file.read(), os.sched_getaffinity(0))
        return cls(time.perf_counter(), busy_s, usage.ru_utime + usage.ru_stime)

    def foreign_share(self, later: CpuUse, num_cores: int) -> float:
        """Share of the cores' time that went to others between the two readings, in [0, 1]."""
        foreign_s = (later.busy_s - self.busy_s) - (later.own_s - self.own_s)
        return min(1.0, max(0.0, foreign_s / ((later.at_s - self.at_s) * num_cores)))


def busy_seconds(stat: str, cores: set[int]) -> float:
    """Seconds that `cores` did not idle, from the text of /proc/stat: all but idle and iowait (guest is in user)."""
    ticks = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(f) for f in fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


class WaitMeter:
    """Sum of the time that the threads of this process stood ready without a core, in ns."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self.refresh()

    def refresh(self) -> None:
        """Looks anew for the threads of this process: kernels start some at their first launch."""
        self.close()
        for task in os.listdir("/proc/self/task"):
            try:
                self._files.append(os.open(f"/proc/self/task/{task}/schedstat", os.O_RDONLY))
            except OSError:  # the thread has ended, or the system keeps no such figures
                continue

    def read_ns(self) -> int:
        """The sum now; 0 where the system keeps no such figures."""
        return sum(self._read_one(handle) for handle in self._files)

    @staticmethod
    def _read_one(handle: int) -> int:
        try:
            fields = os.pread(handle, 96, 0).split()
        except OSError:  # the thread has ended
            return 0
        return int(fields[1]) if len(fields) > 1 else 0

    def close(self) -> None:
        """Gives the open files back."""
        for handle in self._files:
            os.close(handle)
        self._files = []


def waited_too_long(wait_ns: int, elapsed_ns: int) -> bool:
    """Whether a sample of `elapsed_ns` in which threads waited `wait_ns` for a core must be repeated."""
    return wait_ns > max(MIN_WAIT_NS, MAX_WAIT_SHARE * elapsed_ns)
