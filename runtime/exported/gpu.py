"""The NVIDIA GPU of this machine, asked of the driver; nothing here creates a context."""

from __future__ import annotations

from typing import Any

from ...kernels.device import Device, DeviceKind

_CAPABILITY = ("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR")


def gpu_here(tuned: Device, driver: Any = None) -> Device | None:
    """The first GPU that this process may use, None where there is no driver or no GPU.

    Args:
        tuned: device that a package was tuned for: a GPU of its product gets its short name.
        driver: `cuda.bindings.driver`, or what stands in for it; loaded without.
    """
    driver = driver or _driver()
    if driver is None:
        return None
    status, handle = driver.cuDeviceGet(0)
    if int(status):
        return None
    product = _name(driver, handle)
    major, minor = (_attribute(driver, handle, name) for name in _CAPABILITY)
    status, memory_bytes = driver.cuDeviceTotalMem(handle)
    return Device(
        name=tuned.name if product == tuned.product else product.lower().replace(" ", "-"),
        kind=DeviceKind.CUDA,
        product=product,
        capability=10 * major + minor,
        num_units=_attribute(driver, handle, "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"),
        registers_per_unit=_attribute(driver, handle, "CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR"),
        shared_bytes_per_block=_attribute(driver, handle, "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_bytes_per_unit=_attribute(driver, handle, "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        l2_bytes=_attribute(driver, handle, "CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE") or None,
        memory_bytes=None if int(status) else memory_bytes,
    )


def _driver() -> Any:
    try:
        from cuda.bindings import driver

        (status,) = driver.cuInit(0)
    except (ImportError, RuntimeError):  # no bindings, or no libcuda.so.1
        return None
    return None if int(status) else driver


def _name(driver: Any, handle: Any) -> str:
    status, name = driver.cuDeviceGetName(128, handle)
    return "" if int(status) else name.rstrip(b"\0 ").decode(errors="replace")


def _attribute(driver: Any, handle: Any, name: str) -> int:
    status, value = driver.cuDeviceGetAttribute(getattr(driver.CUdevice_attribute, name), handle)
    return 0 if int(status) else int(value)
