"""The device of this machine."""

from __future__ import annotations

import dataclasses
from functools import cache

from pagedtune.harness.nvidia import probe_nvidia
from pagedtune.harness.stream import stream_curve
from pagedtune.kernels.cpu_facts import cpu_device
from pagedtune.kernels.device import Device


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
    return cpu_device()
