"""Clocks, temperature, power and what holds the clocks back, from NVML; absent where the library is."""

from __future__ import annotations

import ctypes
from typing import Any

# Constants of nvml.h.
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_TEMPERATURE_GPU = 0
# Bits of nvmlClocksEventReasons; idle, application clocks and display clocks slow nothing that we measure.
REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}


class Nvml:
    """State of one GPU.

    Args:
        pci_bus_id: as the driver gives it; the first GPU without.
        library: the loaded library; found without.

    Raises:
        OSError: the library is not there, or refuses; the message has its code.
    """

    def __init__(self, pci_bus_id: str = "", library: Any = None) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1") if library is None else library
        self._call("nvmlInit_v2")
        self._handle = ctypes.c_void_p()
        if pci_bus_id:
            self._call("nvmlDeviceGetHandleByPciBusId_v2", pci_bus_id.encode(), ctypes.byref(self._handle))
        else:
            self._call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self._handle))

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            raise OSError(f"{name} failed with nvmlReturn {code}")

    def _number(self, kind: Any, name: str, *args: Any) -> int | None:
        value = kind()
        try:
            self._call(name, self._handle, *args, ctypes.byref(value))
        except (OSError, AttributeError):  # not supported by this GPU or this driver
            return None
        return int(value.value)

    def sm_clock_mhz(self) -> int | None:
        """Clock of the multiprocessors now."""
        return self._number(ctypes.c_uint, "nvmlDeviceGetClockInfo", _CLOCK_SM)

    def base_clock_mhz(self) -> int | None:
        """The clock that applications get by default."""
        return self._number(ctypes.c_uint, "nvmlDeviceGetDefaultApplicationsClock", _CLOCK_SM)

    def state(self) -> dict[str, Any]:
        """All of it; what the GPU does not tell is None."""
        reasons = self._number(ctypes.c_ulonglong, "nvmlDeviceGetCurrentClocksThrottleReasons")
        milliwatts = self._number(ctypes.c_uint, "nvmlDeviceGetPowerUsage")
        return {
            "sm_clock_mhz": self.sm_clock_mhz(),
            "max_sm_clock_mhz": self._number(ctypes.c_uint, "nvmlDeviceGetMaxClockInfo", _CLOCK_SM),
            "base_clock_mhz": self.base_clock_mhz(),
            "memory_clock_mhz": self._number(ctypes.c_uint, "nvmlDeviceGetClockInfo", _CLOCK_MEMORY),
            "temperature_c": self._number(ctypes.c_uint, "nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
            "power_w": None if milliwatts is None else milliwatts / 1e3,
            "held_back_by": None if reasons is None else [n for bit, n in REASONS.items() if reasons & bit],
        }


def find_nvml(pci_bus_id: str = "") -> Nvml | None:
    """NVML of the GPU; None where it is not there or refuses."""
    try:
        return Nvml(pci_bus_id)
    except (OSError, AttributeError):
        return None
