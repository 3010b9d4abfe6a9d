"""A GPU variant whose configs say what they are predicted at and whether they are right; nothing of it ever runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from fake_variants import Many, ManyConfig

from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import Status
from pagedtune.kernels.variant import Config, Op

CANDIDATES = (
    ("wrong", 1.0),  # the fastest, if it were right
    ("uncounted", 2.0),
    ("dies", 3.0),
    ("good", 100.5),
    ("good", 100.0),
    ("good", 101.5),
    ("good", 150.0),
    ("good", 160.0),
    ("refused", 1.0),
    ("unbuildable", 1.0),
)


class ManyGpu(Many):
    """Good and bad configs; the default one takes 200 µs."""

    name = "many_gpu"
    device_kind = DeviceKind.CUDA

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        for kind, us in CANDIDATES:
            yield ManyConfig(kind, us)


def predict(payload: dict[str, Any]) -> dict[str, Any]:
    """A predicted time, or one of the ways in which there is none."""
    kind, us = payload["config"]["kind"], payload["config"]["us"]
    if kind == "dies":
        os.abort()
    if kind == "uncounted":
        return {"status": Status.NOT_RUN.value, "reason": "its work is not regular enough"}
    timing = {"mode": "predicted", "samples_us": [], "median_us": us, "ci_us": [us * 0.7, us * 1.3], "kv_bytes": 1000}
    return {"timing": timing, "counters": {"predicted": [], "extrapolation": {"how": "made up", "error": 0.0}}}


class WriteGpu(ManyGpu):
    """The same for writes of K and V."""

    name = "write_gpu"
    op = Op.KV_WRITE
