"""Jobs for workers in tests of the pipeline: a gate and a timer that do what the config says."""

from __future__ import annotations

import os
import time
from typing import Any

from pagedtune.kernels.record import Status


def process_of(payload: dict[str, Any]) -> int:
    """Who does the work."""
    return os.getpid()


def check(payload: dict[str, Any]) -> list[dict[str, Any]]:
    kind = payload["config"].get("kind", "good")
    if kind == "crash":
        os.abort()
    if kind == "hang":
        time.sleep(600)
    if kind == "raise":
        raise RuntimeError("no such thing")
    if kind == "wrong":
        return [_case(Status.PASSED), _case(Status.WRONG, "row 3 is off")]
    if kind == "unproven":
        return []
    return [_case(Status.PASSED)]


def _case(status: Status, reason: str = "") -> dict[str, Any]:
    return {"case_key": "a-case", "status": status.value, "reason": reason}


def time_cell(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Each candidate takes its `us`; one of kind `fragile` dies in the timer, alone or not."""
    kinds = [c["config"].get("kind", "good") for c in payload["candidates"]]
    if "fragile" in kinds:
        os.abort()
    first = payload["candidates"][0]["config"].get("us", 400)
    return [_timing(c["config"].get("us", 400), first, payload) for c in payload["candidates"]]


def _timing(us: float, first: float, payload: dict[str, Any]) -> dict[str, Any]:
    final = payload["stage"] == "final"
    return {
        "mode": payload["mode"],
        "samples_us": [us] * 12,
        "median_us": us,
        "ci_us": [us, us],
        "kv_bytes": 1000,
        "pair_ratios": [us / first] * 12 if final else [],
        "ratio_ci": [us / first, us / first] if final else None,
    }
