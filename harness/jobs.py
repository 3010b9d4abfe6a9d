"""Jobs of the gate for a worker process: JSON in, JSON out. What a variant raises ends the job."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from pagedtune.kernels.bounds import Bucket
from pagedtune.kernels.cubin import ptx_is_enough
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.serial import from_jsonable, to_jsonable
from pagedtune.kernels.variant import Config, Variant

from .case import Case
from .cell_cases import cases_for_cell, cases_for_virtual_cell
from .external import load_variant
from .gate import run_case
from .verdicts import CaseResult

# Cases that a candidate passed on the virtual GPU in this process: the buckets of a problem share most of them, and an
# emulation gives the same result each time.
_PASSED: dict[tuple[str, str, Device, Case], CaseResult] = {}


def check_case(payload: dict[str, Any]) -> dict[str, Any]:
    """Runs one case: payload `variant`, `config`, `case`, `device`, and whether the build must give machine code
    (`code`) or just what the virtual GPU runs; a `CaseResult` comes back."""
    variant, config, device = _candidate(payload)
    with nullcontext() if payload["code"] else ptx_is_enough():
        return _jsonable(run_case(variant, config, from_jsonable(Case, payload["case"]), device))


def check_candidate(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs what a candidate must pass before it is timed in a cell: payload `variant`, `config`, `device`, `problem`,
    `pool_format`, `bucket`; the `CaseResult`s come back, up to the first that did not pass."""
    variant, config, device = _candidate(payload)
    problem = from_jsonable(Problem, payload["problem"])
    pool_format = from_jsonable(PoolFormat, payload["pool_format"])
    bucket = from_jsonable(Bucket, payload["bucket"])
    results: list[dict[str, Any]] = []
    virtual = device.kind is DeviceKind.CUDA
    if virtual:
        cases = cases_for_virtual_cell(problem, pool_format, bucket, variant, config, device)
    else:
        cases = cases_for_cell(problem, pool_format, bucket, variant, config)
    for case in cases:
        known = (payload["variant"], config.key, device, case)
        result = _PASSED.get(known) or run_case(variant, config, case, device)
        if virtual and result.passed:
            _PASSED[known] = result
        results.append(_jsonable(result))
        if not result.passed:
            break
    return results


def _candidate(payload: dict[str, Any]) -> tuple[Variant, Config, Device]:
    variant = load_variant(payload["variant"])
    return variant, variant.config_from(payload["config"]), from_jsonable(Device, payload["device"])


def _jsonable(result: CaseResult) -> dict[str, Any]:
    """JSON knows no infinity: an error without measure is written as the largest finite number."""
    largest = 1e300
    finite = {name: min(ratio, largest) for name, ratio in result.checks.items()}
    data: dict[str, Any] = to_jsonable(replace(result, checks=finite, error_ratio=min(result.error_ratio, largest)))
    return data
