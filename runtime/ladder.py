"""How near a tuned table comes to the machine at hand, and what must change in a config that comes from another."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..kernels.device import Device
from ..kernels.variant import Config


class Rung(StrEnum):
    """How well a choice is founded, best first."""

    EXACT = "exact"  # tuned on this device
    FAMILY = "family"  # tuned on this product with another number of units: splits recomputed
    CAPABILITY = "capability"  # tuned on another product of this capability or ISA: splits recomputed
    UNTUNED = "untuned"  # nothing was measured for these bounds: a default config
    SAFE = "safe-default"  # the variant that runs everywhere


@dataclass(frozen=True)
class TunedOn:
    """The device of a table, taken apart.

    Args:
        product: what the vendor calls it.
        num_units: streaming multiprocessors or cores.
        detail: capability or ISA.
    """

    product: str
    num_units: int
    detail: str

    @classmethod
    def parse(cls, fingerprint: str) -> TunedOn:
        """From a `Device.fingerprint`: name, product, units and detail, separated by bars; a product may hold bars.

        Raises:
            ValueError: it is no fingerprint.
        """
        parts = fingerprint.split("|")
        if len(parts) < 4 or not parts[-2].isdecimal() or int(parts[-2]) < 1:
            raise ValueError(f"device {fingerprint!r} of the table is no fingerprint (name|product|units|detail)")
        return cls("|".join(parts[1:-2]), int(parts[-2]), parts[-1])


def rung_of(fingerprint: str, device: Device) -> Rung | None:
    """How near the device of a table is to `device`; None if nothing that was measured there holds here.

    Raises:
        ValueError: `fingerprint` is none.
    """
    tuned, here = TunedOn.parse(fingerprint), TunedOn.parse(device.fingerprint)
    if fingerprint == device.fingerprint:
        return Rung.EXACT
    if tuned.detail != here.detail:
        return None
    return Rung.FAMILY if tuned.product == here.product else Rung.CAPABILITY


def recompute_splits(config: Config, fingerprint: str, device: Device) -> Config:
    """`config` with its `num_splits`, if it has that tunable, scaled to the units of `device` and at least 1.

    Splits are there to occupy all units: what filled 132 of them needs proportionally fewer on 66.
    """
    names = {field.name for field in dataclasses.fields(config)}
    tuned_units = TunedOn.parse(fingerprint).num_units
    if "num_splits" not in names or tuned_units == device.num_units:
        return config
    splits = config.as_dict()["num_splits"]
    scaled = max(1, round(splits * device.num_units / tuned_units))
    changes: dict[str, Any] = {"num_splits": scaled}
    return dataclasses.replace(config, **changes)
