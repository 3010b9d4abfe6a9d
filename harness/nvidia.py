"""Finds an NVIDIA GPU through the driver library, without any NVIDIA package: absent library, absent GPU."""

from __future__ import annotations

import ctypes
import re

from pagedtune.kernels.device import Device, DeviceKind

# CUdevice_attribute of cuda.h.
_CLOCK_KHZ = 13
_NUM_UNITS = 16
_MEMORY_CLOCK_KHZ = 36
_MEMORY_BUS_BITS = 37
_L2_BYTES = 38
_MAJOR, _MINOR = 75, 76
_SHARED_BYTES_PER_UNIT = 81
_REGISTERS_PER_UNIT = 82
_SHARED_BYTES_PER_BLOCK = 97


class DriverError(RuntimeError):
    """The driver library is there but refuses; the message has its error code."""


class _Driver:
    """The few driver calls that detection needs."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, *args: object) -> None:
        code = self._library[name](*args)
        if code:
            raise DriverError(f"{name} of the CUDA driver failed with CUresult {code}")

    def attribute(self, device: ctypes.c_int, attribute: int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        return value.value


def probe_nvidia(ordinal: int = 0) -> Device | None:
    """The GPU with this ordinal as its driver describes it; None without a driver, a GPU, or leave to use one.

    It creates no context. Bandwidth comes from memory clock and bus width where the driver still reports a clock.
    """
    try:
        driver = _Driver(ctypes.CDLL("libcuda.so.1"))
        driver.call("cuInit", 0)
        count = ctypes.c_int()
        driver.call("cuDeviceGetCount", ctypes.byref(count))
        return _describe(driver, ordinal) if count.value > ordinal else None
    except (OSError, AttributeError, DriverError):  # no library; one without these symbols; no usable device
        return None


def _describe(driver: _Driver, ordinal: int) -> Device:
    device, memory = ctypes.c_int(), ctypes.c_size_t()
    driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
    name = ctypes.create_string_buffer(256)
    driver.call("cuDeviceGetName", name, len(name), device)
    driver.call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    product = name.value.decode(errors="replace")
    clock_khz = driver.attribute(device, _MEMORY_CLOCK_KHZ)
    bits = driver.attribute(device, _MEMORY_BUS_BITS)
    return Device(
        name=short_name(product),
        kind=DeviceKind.CUDA,
        product=product,
        capability=10 * driver.attribute(device, _MAJOR) + driver.attribute(device, _MINOR),
        num_units=driver.attribute(device, _NUM_UNITS),
        registers_per_unit=driver.attribute(device, _REGISTERS_PER_UNIT),
        shared_bytes_per_block=driver.attribute(device, _SHARED_BYTES_PER_BLOCK),
        shared_bytes_per_unit=driver.attribute(device, _SHARED_BYTES_PER_UNIT),
        l2_bytes=driver.attribute(device, _L2_BYTES),
        memory_bytes=memory.value,
        # Two transfers per clock, bits over eight bytes: GDDR and HBM alike.
        bandwidth_gb_s=2 * clock_khz * bits / 8 / 1e6 if clock_khz and bits else None,
        base_clock_mhz=driver.attribute(device, _CLOCK_KHZ) / 1e3 or None,
    )


def short_name(product: str) -> str:
    """The name of `configs/gpus/NAME.yaml` for a product name: `NVIDIA H100 80GB HBM3` is `h100`.

    GeForce cards keep their prefix: `NVIDIA GeForce RTX 4090` is `rtx4090`.
    """
    words = [w for w in re.split(r"[\s-]+", product.lower()) if w not in ("nvidia", "geforce", "tesla")]
    for index, word in enumerate(words):
        if word in ("rtx", "gtx") and index + 1 < len(words):
            return word + words[index + 1]
        if any(c.isdigit() for c in word):
            return word
    return "-".join(words) or "gpu"
