"""Frozen facts about the machine that runs a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DeviceKind(StrEnum):
    """What executes the kernels."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class Device:
    """A machine as kernels and the tuner see it. Zero means "not applicable"; None means "not known".

    Args:
        name: short name, as in `configs/gpus/NAME.yaml` and `results/NAME/`.
        kind: cpu or cuda.
        product: what the vendor calls it.
        capability: compute capability as 10·major + minor for CUDA; 0 for a CPU.
        num_units: streaming multiprocessors, or cores that this process may use.
        registers_per_unit: 32-bit registers of an SM.
        shared_bytes_per_block: largest dynamic shared memory of a block (opt-in), in bytes.
        shared_bytes_per_unit: shared memory of an SM, in bytes.
        l2_bytes: last-level cache, in bytes.
        memory_bytes: device memory, in bytes.
        bandwidth_gb_s: memory bandwidth in 10^9 bytes/s: from the data sheet for a GPU, measured for a CPU.
        base_clock_mhz: base clock of the SMs or cores.
        isa: for a CPU, the widest vector path it runs (`avx512`, `avx2`, `portable`).
        boost_clock_mhz: highest clock of the SMs by the data sheet.
    """

    name: str
    kind: DeviceKind
    product: str = ""
    capability: int = 0
    num_units: int = 1
    registers_per_unit: int = 0
    shared_bytes_per_block: int = 0
    shared_bytes_per_unit: int = 0
    l2_bytes: int | None = None
    memory_bytes: int | None = None
    bandwidth_gb_s: float | None = None
    base_clock_mhz: float | None = None
    isa: str = ""
    boost_clock_mhz: float | None = None

    @property
    def fingerprint(self) -> str:
        """What must agree for a measured time to hold: name, product, units, capability or ISA."""
        detail = f"sm{self.capability}" if self.kind is DeviceKind.CUDA else self.isa
        return f"{self.name}|{self.product}|{self.num_units}|{detail}"
