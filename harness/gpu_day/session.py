"""What every stage shares: the device, real or emulated, where results go, and how much time is left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedtune.harness.cuda_context import CudaContext
from pagedtune.harness.cuda_machine import CudaMachine
from pagedtune.harness.gpu_day.journal import Journal
from pagedtune.harness.machines import Machine, MachineFor
from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.device import Device, DeviceKind

ROOT = Path(__file__).resolve().parents[2]
_REQUIRED = ("capability", "num_units", "registers_per_unit", "shared_bytes_per_block", "shared_bytes_per_unit")


@dataclass(frozen=True)
class Session:
    """One stage's view of the day.

    Args:
        device: facts: of the driver, or for a dry run those of a data sheet.
        journal: where results go.
        deadline: on `time.monotonic()`, when the stage is ended.
        seed: of what is drawn by lot.
    """

    device: Device
    journal: Journal
    deadline: float
    seed: int = 0

    @property
    def dry(self) -> bool:
        """Whether the device is the stand-in."""
        return self.journal.dry

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def bandwidth_gb_s(self) -> float | None:
        """Of the data sheet, else of the driver, in 10^9 bytes/s."""
        stated = data_sheet(self.device.name).get("bandwidth_gb_s")
        return float(stated) if stated else self.device.bandwidth_gb_s

    def open(self) -> CudaContext:
        """A context on the device.

        Raises:
            LaunchError: there is none.
        """
        return open_context(self.device if self.dry else None)

    def machines(self, context: CudaContext) -> MachineFor:
        """What the gate takes, on `context`."""

        def machine(_: Device, artifacts: Sequence[Artifact]) -> Machine:
            introduce(context, artifacts)
            return CudaMachine(artifacts, context)

        return machine


def open_context(emulated: Device | None) -> CudaContext:
    """A context on the GPU, or on a stand-in for `emulated`."""
    if emulated is None:
        return CudaContext()
    from pagedtune.harness.standin_driver import StandInDriver

    driver = StandInDriver(emulated)
    driver.cuInit(0)
    return CudaContext(driver)


def introduce(context: CudaContext, artifacts: Sequence[Artifact]) -> None:
    """Tells a stand-in driver which binaries there are; a real one reads them itself."""
    if context.emulated:
        context.driver.know(*artifacts)


def data_sheet(name: str) -> dict[str, str]:
    """The facts of `configs/gpus/NAME.yaml` as text by name; empty without such a file.

    These files are flat: one fact a line. A YAML parser may not be at hand here.
    """
    path = ROOT / "configs" / "gpus" / f"{name}.yaml"
    if not path.exists():
        return {}
    lines = (line.split(" #")[0] for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def sheet_device(name: str) -> Device:
    """The device that a data sheet describes.

    Raises:
        ValueError: there is no such sheet, or not of a GPU.
    """
    facts = data_sheet(name)
    if facts.get("kind") != "cuda":
        raise ValueError(f"configs/gpus/{name}.yaml does not describe an NVIDIA GPU")
    numbers: dict[str, Any] = {key: int(facts[key]) for key in _REQUIRED}
    numbers |= {key: int(facts[key]) for key in ("l2_bytes", "memory_bytes") if key in facts}
    numbers |= {key: float(facts[key]) for key in ("bandwidth_gb_s",) if key in facts}
    return Device(name, DeviceKind.CUDA, facts.get("product", ""), **numbers)
