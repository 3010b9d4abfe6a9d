"""The job that predicts a candidate's time in a cell, for the worker process: in place of timing where no device is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagedtune.kernels.bounds import Bucket
from pagedtune.kernels.device import Device
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import Status, Timing
from pagedtune.kernels.serial import from_jsonable, to_jsonable
from pagedtune.kernels.variant import Op
from pagedtune.kernels.workload import Workload

from .cache_counts import count_cache_op
from .count_target import Target
from .external import load_variant
from .kernel_counts import Counted, NotCounted, count
from .prediction import Prediction, predict
from .roofline import moved_bytes
from .vgpu.report import VirtualGpuError

MODE = "predicted"  # timer mode of a predicted time


def predict_candidate(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Counts a candidate's work on the virtual GPU and predicts its time.

    The payload has `variant` (reference), `config`, `problem`, `pool_format`, `bucket`, `workload`, `device`.

    Returns:
        `timing`, a `Timing` as JSON whose interval is the model's stated uncertainty, and `counters`: the terms of
        the model by step, and what the counts rest on. Or `status` and `reason` where there is no prediction.
    """
    torch.set_num_threads(1)  # several workers predict at once
    variant = load_variant(payload["variant"])
    target = Target(
        variant,
        variant.config_from(payload["config"]),
        from_jsonable(Problem, payload["problem"]),
        from_jsonable(PoolFormat, payload["pool_format"]),
        from_jsonable(Bucket, payload["bucket"]).bounds,
        from_jsonable(Device, payload["device"]),
    )
    workload = from_jsonable(Workload, payload["workload"])
    try:
        counted = (count if variant.op is Op.ATTENTION else count_cache_op)(target, workload)
    except NotCounted as error:
        return {"status": Status.NOT_RUN.value, "reason": str(error)}
    except VirtualGpuError as error:
        return {"status": Status.WRONG.value, "reason": f"on the virtual GPU: {error}"}
    prediction = predict(counted.steps, target.device)
    num_bytes = moved_bytes(variant.op, target.problem, target.pool_format, workload)
    return {
        "timing": to_jsonable(timing_of(prediction, counted, num_bytes)),
        "counters": counters_of(prediction, counted),
    }


def timing_of(prediction: Prediction, counted: Counted, num_bytes: int) -> Timing:
    """The predicted time as a `Timing` without samples: its interval is what the model claims to know."""
    return Timing(
        mode=MODE,
        samples_us=(),
        median_us=prediction.total_us,
        ci_us=(prediction.low_us, prediction.high_us),
        kv_bytes=num_bytes,
        note=f"predicted, not measured: {prediction.text}",
    )


def counters_of(prediction: Prediction, counted: Counted) -> dict[str, Any]:
    """What the prediction rests on, for the record."""
    return {
        "predicted": to_jsonable(prediction.steps),
        "counted": to_jsonable(counted.steps),
        "extrapolation": {"how": counted.how, "error": counted.error},
    }
