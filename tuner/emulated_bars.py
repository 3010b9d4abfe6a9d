"""The bars that a decode kernel's emulated figures are held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedtune.harness.kernel_figures import little_bytes
from pagedtune.kernels.device import Device

MAX_SECTOR_RATIO = 1.03
MAX_ISSUE_SHARE = 0.5


@dataclass(frozen=True)
class Bars:
    """Limits for one table.

    Args:
        flight_unit: fewest bytes in flight of an SM.
        flight_device: the device that needs so many.
    """

    flight_unit: float
    flight_device: str

    def missed(self, figures: Mapping[str, Any]) -> tuple[str, ...]:
        """Columns of a kernel's figures that miss their bar, by field of `Figures`."""
        misses = {
            "sector_ratio": figures["sector_ratio"] > MAX_SECTOR_RATIO,
            "loop_conflicts": figures["loop_conflicts"] > 0,
            "spills": figures["spills"] > 0 or figures["local_instructions"] > 0,
            "flight_unit": figures["flight_unit"] < self.flight_unit,
            "issue_share": figures["issue_share"] is None or figures["issue_share"] > MAX_ISSUE_SHARE,
        }
        return tuple(name for name, miss in misses.items() if miss)

    @property
    def text(self) -> str:
        """All of them in one sentence."""
        return (
            f"at most {MAX_SECTOR_RATIO}x the least possible sectors, no bank conflicts in the main loop, no spills, "
            f"at least {self.flight_unit / 1024:.1f} KiB in flight per SM (what the {self.flight_device} needs: "
            f"bandwidth x 700 ns / SMs), at most {MAX_ISSUE_SHARE:.0%} of the issue slots at the bandwidth roofline"
        )


def bars_for(device: Device, family: tuple[Device, ...]) -> Bars:
    """The bars of a device: bytes in flight for the fastest memory among it and its `family` of equal capability."""
    same = [device, *(d for d in family if d.capability == device.capability and d.bandwidth_gb_s)]
    hardest = max(same, key=little_bytes)
    return Bars(little_bytes(hardest), hardest.name)
