"""The device of this machine."""

from __future__ import annotations

import dataclasses
from functools import cache

from pagedtune.harness.cpu_facts import (
    base_clock_mhz,
    cpu_info,
    last_level_cache_bytes,
    memory_bytes,
    product_name,
    usable_cores,
    vector_isa,
)
from pagedtune.harness.nvidia import probe_nvidia
from pagedtune.harness.stream import stream_curve
from pagedtune.kernels.device import Device, DeviceKind


@cache
def probe_device() -> Device:
    """The NVIDIA GPU of this machine if there is one, else its CPU with the measured bandwidth.

    The first call after a boot measures for some seconds; see `stream_curve`.

    Raises:
        BuildError: there is no GPU, and no C++ compiler to measure the CPU with.
    """
    gpu = probe_nvidia()
    return gpu if gpu is not None else probe_cpu()


@cache
def probe_cpu() -> Device:
    """The CPU, with its measured bandwidth.

    Raises:
        BuildError: there is no C++ compiler.
    """
    facts = cpu_facts()
    return dataclasses.replace(facts, bandwidth_gb_s=stream_curve(facts).memory_gb_s)


@cache
def cpu_facts() -> Device:
    """The CPU as the system describes it; nothing is measured, so the bandwidth is not known."""
    info = cpu_info()
    return Device(
        name="cpu",
        kind=DeviceKind.CPU,
        product=product_name(info),
        num_units=usable_cores(),
        l2_bytes=last_level_cache_bytes(),
        memory_bytes=memory_bytes(),
        base_clock_mhz=base_clock_mhz(info),
        isa=vector_isa(info),
    )
