"""The cases and the device that planted faults are tried on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest

from pagedtune.harness.case import Case, Level
from pagedtune.harness.coverings import cases_for
from pagedtune.kernels.catalogue import find_variant
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.native import usable_cores
from pagedtune.kernels.variant import Op

_REAL = {
    Op.ATTENTION: "cpu_split",
    Op.KV_WRITE: "cpu_kv_write",
    Op.COPY_BLOCKS: "cpu_copy_blocks",
    Op.GATHER_KV: "cpu_gather_kv",
    Op.PACK_BLOCKS: "cpu_pack_blocks",
    Op.UNPACK_BLOCKS: "cpu_unpack_blocks",
}


@pytest.fixture(scope="session")
def device() -> Device:
    """This machine; its bandwidth does not matter here."""
    return Device("cpu", DeviceKind.CPU, num_units=usable_cores())


@pytest.fixture(scope="session")
def corner_cases(device: Device) -> Callable[[Op], Sequence[Case]]:
    """The corner level of the gate, by op."""

    @cache
    def cases(op: Op) -> Sequence[Case]:
        return cases_for(find_variant(_REAL[op]), device, Level.CORNER)

    return cases
