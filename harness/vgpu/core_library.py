"""The execution core as a ctypes library; structures mirror core/state.h."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pagedtune.kernels.build_native import build_library

SOURCE_DIR = Path(__file__).parent / "core"


class Alloc(ctypes.Structure):
    """`Alloc` of core/state.h."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("host", ctypes.c_void_p),
        ("init", ctypes.c_void_p),
        ("gaps", ctypes.c_void_p),
        ("read", ctypes.c_void_p),
        ("written", ctypes.c_void_p),
        ("access", ctypes.c_int32),
        ("granule", ctypes.c_int32),
        ("freed", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("pending_written", ctypes.c_void_p),
        ("pending_read", ctypes.c_void_p),
    )


class RawFault(ctypes.Structure):
    """`Fault` of core/state.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("pc", ctypes.c_int32),
        ("thread", ctypes.c_int32),
        ("other_thread", ctypes.c_int32),
        ("cta", ctypes.c_int64),
        ("other_cta", ctypes.c_int64),
        ("address", ctypes.c_uint64),
        ("alloc", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("space", ctypes.c_int32),
        ("other_pc", ctypes.c_int32),
    )


class RawOptions(ctypes.Structure):
    """`Options` of core/state.h."""

    _fields_ = (
        ("num_threads", ctypes.c_int32),
        ("reverse_warps", ctypes.c_int32),
        ("reverse_ctas", ctypes.c_int32),
        ("async_early", ctypes.c_int32),
        ("check_races", ctypes.c_int32),
        ("max_faults", ctypes.c_int32),
        ("quantum", ctypes.c_int32),
        ("cooperative", ctypes.c_int32),
        ("max_warp_instructions", ctypes.c_uint64),
        ("shuffle_seed", ctypes.c_int32),
        ("strict_stores", ctypes.c_int32),
    )


class LaunchArgs(ctypes.Structure):
    """`LaunchArgs` of core/state.h."""

    _fields_ = (
        ("grid", ctypes.c_int32 * 3),
        ("block", ctypes.c_int32 * 3),
        ("dynamic_shared", ctypes.c_int32),
        ("static_shared", ctypes.c_int32),
        ("local_bytes", ctypes.c_int32),
        ("num_units", ctypes.c_int32),
        ("num_consts", ctypes.c_int32),
        ("param_bytes", ctypes.c_int32),
        ("params", ctypes.c_void_p),
        ("const_units", ctypes.c_void_p),
        ("const_widths", ctypes.c_void_p),
        ("const_values", ctypes.c_void_p),
        ("special_units", ctypes.c_void_p),
        ("allocs", ctypes.c_void_p),
        ("num_allocs", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("options", RawOptions),
        ("use_starts", ctypes.c_void_p),
        ("uses", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Totals:
    """Sums of a launch that belong to no instruction.

    Args:
        barriers: warp arrivals at CTA barriers.
        most_flying: most bytes that one CTA had on their way from global memory.
        flying_area: such bytes, summed over the warp instructions (`instructions`) that were issued meanwhile.
        benign: unordered stores of the value that was there already.
        busiest: warp instructions of the CTA that issued most.
    """

    barriers: int
    most_flying: int
    flying_area: int
    instructions: int
    benign: int
    busiest: int


SITE = np.dtype([(n, "u8") for n in ("executed", "lanes", "sectors", "lines", "bytes", "conflicts", "flight", "alloc")])


def _host_has_avx2() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = set(text.partition("flags")[2].partition("\n")[0].split())
    return {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm"} <= flags


class Core:
    """The loaded library."""

    def __init__(self) -> None:
        headers, host = sorted(SOURCE_DIR.glob("*.h")), {"VGPU_AVX2": int(_host_has_avx2())}
        artifact = build_library(SOURCE_DIR / "core.cpp", headers, host, {}, more=(SOURCE_DIR / "integers.cpp",))
        library = ctypes.CDLL(str(artifact.path))
        self._handlers = library.vgpu_handlers
        self._handlers.restype, self._handlers.argtypes = ctypes.c_int64, (ctypes.c_char_p, ctypes.c_int64)
        self._link = library.vgpu_link
        self._link.restype = ctypes.c_int32
        self._link.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p)
        self._run = library.vgpu_run
        self._run.restype = ctypes.c_int32
        self._run.argtypes = (ctypes.c_void_p, ctypes.c_int32, *(ctypes.c_void_p,) * 4)

    def handlers(self) -> tuple[str, ...]:
        """Names of everything that the core can execute."""
        size = self._handlers(None, 0)
        buffer = ctypes.create_string_buffer(size)
        self._handlers(buffer, size)
        return tuple(buffer.raw[:size].decode().split())

    def link(self, code: npt.NDArray[np.void], keys: tuple[str, ...]) -> int:
        """Resolves handler names in place; -1, or the index of the first instruction without a handler."""
        text = "".join(f"{key}\n" for key in keys).encode()
        return int(self._link(code.ctypes.data, len(code), text))

    def run(
        self, code: npt.NDArray[np.void], args: LaunchArgs, max_faults: int
    ) -> tuple[list[RawFault], npt.NDArray[np.void], Totals]:
        """Runs a grid: faults, one `SITE` per instruction, and sums over all."""
        faults = (RawFault * max_faults)()
        sites = np.zeros(len(code), SITE)
        totals = (ctypes.c_uint64 * 6)()
        count = self._run(
            code.ctypes.data,
            len(code),
            ctypes.addressof(args),
            ctypes.addressof(faults),
            sites.ctypes.data,
            ctypes.addressof(totals),
        )
        return list(faults[:count]), sites, Totals(*totals)


@cache
def core() -> Core:
    """The library, built on first use.

    Raises:
        BuildError: no C++ compiler, or it refused.
    """
    return Core()
