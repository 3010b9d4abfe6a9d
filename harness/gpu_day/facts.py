"""Stage `facts`: the machine and the device as the driver tells them, against the data sheet that we tune with."""

from __future__ import annotations

import os
import platform
import shutil
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pagedtune.harness.cuda_context import CudaContext
from pagedtune.harness.gpu_day.session import Session, data_sheet
from pagedtune.harness.nvml import find_nvml
from pagedtune.kernels.cubin import find_cuda_tool
from pagedtune.kernels.device import Device

TOLERANCE = 0.05  # memory: ECC and the driver keep a part; bandwidth: sheets round
_EXACT = ("product", "capability", "num_units", "registers_per_unit", "shared_bytes_per_block", "shared_bytes_per_unit")
_ABOUT = ("l2_bytes", "memory_bytes", "bandwidth_gb_s")
PACKAGES = ("torch", "triton", "numpy", "cuda-bindings", "nvidia-cuda-nvrtc")


def run(session: Session) -> dict[str, Any]:
    """Writes the facts, and each that contradicts the data sheet."""
    with session.open() as context:
        device = context.device()
        driver_version = int(context.call("cuDriverGetVersion", doing="reading the driver's version"))
        bus_id = pci_bus_id(context)
    nvml = None if session.dry else find_nvml(bus_id)
    contradictions = compare(device, data_sheet(device.name))
    session.journal.add(
        "facts",
        device=device,
        driver=driver_version,
        contradictions=contradictions,
        nvml=nvml.state() if nvml else None,
        machine=machine(),
    )
    return {"contradictions": len(contradictions)}


def pci_bus_id(context: CudaContext) -> str:
    """Bus id of device 0, by which NVML finds the same one."""
    device = context.call("cuDeviceGet", 0, doing="opening CUDA device 0")
    raw = context.call("cuDeviceGetPCIBusId", 32, device, doing="reading the device's bus id")
    return str(raw.partition(b"\0")[0].decode().strip())


def compare(device: Device, sheet: dict[str, str]) -> list[str]:
    """What the driver and `configs/gpus` say differently, one line each."""
    if not sheet:
        return [f"configs/gpus has no {device.name}.yaml: nothing to compare with"]
    found = []
    for name in (*_EXACT, *_ABOUT):
        here, there = getattr(device, name), sheet.get(name)
        if there is None or here is None or here == "":
            continue
        if name in _ABOUT:
            differs = abs(float(here) - float(there)) > TOLERANCE * float(there)
        else:
            differs = str(here) != there
        if differs:
            found.append(f"{name}: the driver says {here}, configs/gpus/{device.name}.yaml says {there}")
    return found


def machine() -> dict[str, Any]:
    """Versions, cores and tools."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)),
        "packages": {name: _version(name) for name in PACKAGES},
        "tools": {name: tool(name) for name in ("ncu", "compute-sanitizer", "ptxas", "cuobjdump")},
    }


def tool(name: str) -> str | None:
    """Path of a CUDA tool; None where it is not installed."""
    homes = ("/usr/local/cuda", os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    places = [shutil.which(name), *(f"{home}/bin/{name}" for home in homes)]
    places += sorted(glob(f"/opt/nvidia/nsight-compute/*/{name}"), reverse=True)
    found = next((place for place in places if place and os.path.exists(place)), None)
    bundled = find_cuda_tool(name)
    return found or (str(bundled) if bundled else None)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
