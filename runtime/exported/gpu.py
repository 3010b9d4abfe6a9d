"""The NVIDIA GPU of this machine, asked of the driver library itself; nothing here creates a context."""

from __future__ import annotations

import ctypes
from typing import Any

from ...kernels.device import Device, DeviceKind

# CUdevice_attribute of the CUDA driver API.
MULTIPROCESSORS, REGISTERS, L2_BYTES = 16, 82, 38
SHARED_PER_BLOCK_OPTIN, SHARED_PER_UNIT = 97, 81
MAJOR, MINOR = 75, 76
_LIBRARY = "libcuda.so.1"


def gpu_here(tuned: Device, library: Any = None) -> Device | None:
    """The first GPU that this process may use, None where there is no driver or no GPU.

    Args:
        tuned: device that a package was tuned for: a GPU of its product gets its short name.
        library: the driver's library as ctypes has it, or what stands in for it; loaded without.
    """
    library = library or _load()
    handle = ctypes.c_int()
    if library is None or library.cuInit(0) or library.cuDeviceGet(ctypes.byref(handle), 0):
        return None
    product = _name(library, handle)
    memory = ctypes.c_size_t()
    known = library.cuDeviceTotalMem_v2(ctypes.byref(memory), handle) == 0

    def ask(attribute: int) -> int:
        value = ctypes.c_int()
        return 0 if library.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle) else value.value

    return Device(
        name=tuned.name if product == tuned.product else product.lower().replace(" ", "-"),
        kind=DeviceKind.CUDA,
        product=product,
        capability=10 * ask(MAJOR) + ask(MINOR),
        num_units=ask(MULTIPROCESSORS),
        registers_per_unit=ask(REGISTERS),
        shared_bytes_per_block=ask(SHARED_PER_BLOCK_OPTIN),
        shared_bytes_per_unit=ask(SHARED_PER_UNIT),
        l2_bytes=ask(L2_BYTES) or None,
        memory_bytes=memory.value if known else None,
    )


def _load() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def _name(library: Any, handle: ctypes.c_int) -> str:
    buffer = ctypes.create_string_buffer(256)
    status = library.cuDeviceGetName(buffer, len(buffer), handle)
    return "" if status else buffer.value.decode(errors="replace")
