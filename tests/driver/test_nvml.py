"""NVML through a library that is a table."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from pagedtune.harness.nvml import Nvml, find_nvml

VALUES = {
    "nvmlDeviceGetClockInfo": {1: 1755, 2: 2619},
    "nvmlDeviceGetMaxClockInfo": {1: 1980},
    "nvmlDeviceGetDefaultApplicationsClock": {1: 1590},
    "nvmlDeviceGetTemperature": {0: 41},
    "nvmlDeviceGetPowerUsage": {None: 123_456},
    "nvmlDeviceGetCurrentClocksThrottleReasons": {None: 0x1 | 0x4 | 0x40},
}


class Library:
    """Answers from `VALUES`; names in `refused` fail with the code for "not supported"."""

    def __init__(self, *refused: str) -> None:
        self.refused, self.asked = refused, list[str]()

    def __getattr__(self, name: str) -> Any:
        def function(*args: Any) -> int:
            self.asked.append(name)
            if name in self.refused:
                return 3
            if name in VALUES:
                _, *key, target = args
                target._obj.value = VALUES[name][key[0] if key else None]
            elif name.startswith("nvmlDeviceGetHandle"):
                assert isinstance(args[1]._obj, ctypes.c_void_p)
            return 0

        return function


def test_the_state_in_plain_units() -> None:
    assert Nvml("00000000:19:00.0", Library()).state() == {
        "sm_clock_mhz": 1755,
        "max_sm_clock_mhz": 1980,
        "base_clock_mhz": 1590,
        "memory_clock_mhz": 2619,
        "temperature_c": 41,
        "power_w": 123.456,
        "held_back_by": ["sw_power_cap", "hw_thermal"],  # idle slows nothing that is measured
    }


def test_what_the_gpu_does_not_tell_is_none() -> None:
    library = Library("nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrentClocksThrottleReasons")
    state = Nvml(library=library).state()
    assert state["power_w"] is None
    assert state["held_back_by"] is None
    assert state["sm_clock_mhz"] == 1755
    assert "nvmlDeviceGetHandleByIndex_v2" in library.asked


def test_a_library_that_refuses() -> None:
    with pytest.raises(OSError, match="nvmlInit_v2 failed with nvmlReturn 3"):
        Nvml(library=Library("nvmlInit_v2"))


def test_absence_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert find_nvml() is None
