"""Proves and times kernels that a user names, on a setting that a user names: the work behind `pagedtune bench`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedtune.harness.external import absolute_ref
from pagedtune.harness.worker import JobRaised, Worker, WorkerError
from pagedtune.kernels.bounds import bucket_of
from pagedtune.kernels.device import Device
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import Timing
from pagedtune.kernels.serial import from_jsonable, to_jsonable
from pagedtune.kernels.workload import Workload

CHECK, TIME = "pagedtune.harness.jobs:check_candidate", "pagedtune.harness.timing_jobs:time_cell"
CHECK_LIMIT_S, OVERRUN_S = 120.0, 120.0
DEFAULT_PROBLEM = "32/8x128"
USAGE_ERRORS = ("ValueError", "VariantLoadError")


@dataclass(frozen=True)
class Choice:
    """A kernel as named on the command line: a variant's reference and the tunables that were given."""

    ref: str
    config: dict[str, Any]

    @property
    def label(self) -> str:
        """As the user may write it."""
        inner = ",".join(f"{k}={v}" for k, v in self.config.items())
        return f"{self.ref}[{inner}]" if inner else self.ref


@dataclass(frozen=True)
class Setting:
    """What all kernels are timed on."""

    device: Device
    problem: Problem
    pool_format: PoolFormat
    workload: Workload
    mode: str
    budget_s: float


def parse_problem(text: str, dtype: DType) -> Problem:
    """The problem called e.g. `32/8x128`, or `32/8x128v64` where V heads are smaller.

    Raises:
        ValueError: another form, or a shape that cannot be.
    """
    match = re.fullmatch(r"(\d+)/(\d+)x(\d+)(?:v(\d+))?", text)
    if not match:
        raise ValueError(f"problem {text!r} must be of the form QUERY_HEADS/KV_HEADSxHEAD_DIM, e.g. {DEFAULT_PROBLEM}")
    heads, kv_heads, dim, dim_v = (int(group or 0) for group in match.groups())
    return Problem(heads, kv_heads, dim, dim_v, q_dtype=dtype)


def parse_choice(text: str) -> Choice:
    """The kernel that `NAME[key=value,...]` names; values are JSON where they can be, else text.

    Raises:
        ValueError: a tunable without a value.
    """
    match = re.fullmatch(r"(?P<ref>[^\[\]]+)(?:\[(?P<inner>[^\[\]]*)\])?", text)
    if not match:
        raise ValueError(f"variant {text!r} must be of the form NAME or NAME[tunable=value,...]")
    config: dict[str, Any] = {}
    for part in filter(None, (match["inner"] or "").split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"tunable {part!r} of {text!r} has no value: write {part}=VALUE")
        config[name.strip()] = _value(value.strip())
    return Choice(absolute_ref(match["ref"]), config)


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


def measure(setting: Setting, choices: Sequence[Choice]) -> list[Timing | str]:
    """A timing for each choice, or why there is none; the first one is what ratios are taken to.

    Raises:
        ValueError: an unknown variant or tunable.
    """
    where = {
        "problem": to_jsonable(setting.problem),
        "pool_format": to_jsonable(setting.pool_format),
        "device": to_jsonable(setting.device),
    }
    with Worker() as worker:
        faults = [_fault(worker, setting, where, choice) for choice in choices]
        proven = [c for c, fault in zip(choices, faults, strict=True) if fault is None]
        timed = iter(_time(worker, setting, where, proven) if proven else [])
    return [fault if fault is not None else next(timed) for fault in faults]


def _fault(worker: Worker, setting: Setting, where: dict[str, Any], choice: Choice) -> str | None:
    """What the gate says against a choice, or None."""
    payload = {
        **where,
        "variant": choice.ref,
        "config": choice.config,
        "bucket": to_jsonable(bucket_of(setting.workload.bounds)),
    }
    try:
        cases = worker.call(CHECK, payload, CHECK_LIMIT_S)
    except WorkerError as error:
        _raise_usage(error)
        return str(error)
    failed = [case for case in cases if case["status"] != "passed"]
    if failed:
        return f"{failed[0]['status']}: {failed[0]['reason']} ({failed[0]['case_key']})"
    return None if cases else "not proven: the gate has no case for it"


def _time(worker: Worker, setting: Setting, where: dict[str, Any], choices: Sequence[Choice]) -> list[Timing | str]:
    payload = {
        **where,
        "workload": to_jsonable(setting.workload),
        "candidates": [{"variant": c.ref, "config": c.config} for c in choices],
        "mode": setting.mode,
        "stage": "final",
        "budget_s": setting.budget_s,
        "seed": 0,
    }
    try:
        answers = worker.call(TIME, payload, 2 * setting.budget_s + OVERRUN_S)
    except WorkerError as error:
        _raise_usage(error)
        return [str(error)] * len(choices)
    return [f"{a['status']}: {a['reason']}" if "status" in a else from_jsonable(Timing, a) for a in answers]


def _raise_usage(error: WorkerError) -> None:
    """Raises ValueError if the job refused what the user wrote."""
    if isinstance(error, JobRaised) and error.type in USAGE_ERRORS:
        raise ValueError(error.message) from error
