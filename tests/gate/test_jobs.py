"""The gate's jobs: JSON in, JSON out."""

from __future__ import annotations

import json
from typing import Any

from pagedtune.harness.jobs import check_candidate, check_case
from pagedtune.harness.verdicts import CaseResult
from pagedtune.kernels.bounds import Bucket
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.serial import from_jsonable, to_jsonable

from .toy import CPU, make_case

COMMON = {"config": {}, "device": to_jsonable(CPU)}
WRONG_VARIANT = """
from pagedtune.kernels.eager import Eager
from pagedtune.kernels.launch import CallStep, LaunchPlan


class Half(Eager):
    name = "half"

    def plan(self, *args):
        plan = super().plan(*args)

        def call(tensors):
            plan.steps[0].function(tensors)
            tensors["out"].mul_(float("nan"))

        return LaunchPlan((CallStep(call),), plan.slots, plan.workspaces, plan.limits)
"""


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def test_check_case() -> None:
    payload = through_json({**COMMON, "variant": "eager", "code": True, "case": to_jsonable(make_case((17, 0)))})
    result = from_jsonable(CaseResult, through_json(check_case(payload)))
    assert result.passed, result.reason
    assert result.duration_s > 0


def test_check_candidate_stops_at_the_first_failure_and_writes_finite_numbers(tmp_path: Any) -> None:
    cell = {
        "problem": to_jsonable(Problem(4, 2, 64)),
        "pool_format": to_jsonable(PoolFormat(16, DType.BF16)),
        "bucket": to_jsonable(Bucket(2, 128)),
    }
    results = through_json(check_candidate(through_json({**COMMON, **cell, "variant": "eager"})))
    assert [r["status"] for r in results] == ["passed"] * 7
    path = tmp_path / "wrong.py"
    path.write_text(WRONG_VARIANT)
    (failure,) = through_json(check_candidate({**COMMON, **cell, "variant": f"{path}:Half"}))
    assert failure["status"] == "wrong"
    assert failure["failed"] == "nonfinite"
