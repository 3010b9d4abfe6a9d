"""Jobs that the tuner runs in a worker, beside those of the harness."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from pagedtune.harness import jobs as gate_jobs
from pagedtune.harness.external import load_variant
from pagedtune.harness.occupancy import reject_static
from pagedtune.kernels.artifact import content_key
from pagedtune.kernels.bounds import Bucket
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.serial import from_jsonable, to_jsonable
from pagedtune.kernels.variant import Variant


def build_candidate(payload: dict[str, Any]) -> dict[str, Any]:
    """Builds one candidate (or finds it in the cache) and plans it for every bucket.

    Args:
        payload: `variant` (reference), `config`, `problem`, `pool_format`, `device`, `buckets`.

    Returns:
        `artifact_keys`, `resources` (of all entries, summed up as maxima), `workspace_bytes` by bucket key, and
        `rejected`: why the binary is not worth running on the device, or None.
    """
    variant = load_variant(payload["variant"])
    config = variant.config_from(payload["config"])
    problem = from_jsonable(Problem, payload["problem"])
    pool_format = from_jsonable(PoolFormat, payload["pool_format"])
    device = from_jsonable(Device, payload["device"])
    buckets = [from_jsonable(Bucket, b) for b in payload["buckets"]]
    artifacts = variant.build(problem, pool_format, config, device)
    plans = {b.key: variant.plan(problem, pool_format, config, b.bounds) for b in buckets}
    rejected = None
    if device.kind is DeviceKind.CUDA:
        allow_spills = bool(config.as_dict().get("allow_spills"))
        reasons = (reject_static(artifacts, plan, device, allow_spills) for plan in plans.values())
        rejected = next((reason for reason in reasons if reason is not None), None)
    entries = [resources for artifact in artifacts for resources in artifact.resources.values()]
    return {
        "artifact_keys": [artifact.key for artifact in artifacts],
        "resources": {
            name: max(getattr(r, name) for r in entries)
            for name in ("registers", "static_shared_bytes", "dynamic_shared_bytes", "spill_bytes")
            if entries
        },
        "workspace_bytes": {key: plan.workspace_bytes for key, plan in plans.items()},
        "rejected": rejected,
    }


def check_candidate(payload: dict[str, Any]) -> Any:
    """The gate's job with one torch thread: several workers prove at once, and torch's threads wait by spinning."""
    torch.set_num_threads(1)
    return gate_jobs.check_candidate(payload)


def identify_variant(payload: dict[str, Any]) -> dict[str, Any]:
    """What the tuner must know of a variant that only workers load.

    Args:
        payload: `variant` (reference).

    Returns:
        `name`, `op`, `device_kind`, and `source`: a key over the source files of its class and bases, for what its
        artifacts do not cover.
    """
    variant = load_variant(payload["variant"])
    own = [c for c in type(variant).__mro__ if issubclass(c, Variant) and c is not Variant]
    files = sorted({inspect.getsourcefile(c) or "" for c in own} - {""})
    return {
        "name": variant.name,
        "op": variant.op.value,
        "device_kind": variant.device_kind.value,
        "source": content_key({Path(f).name: Path(f).read_text() for f in files}),
    }


def list_space(payload: dict[str, Any]) -> dict[str, Any]:
    """All configs of a variant for one problem and format.

    Args:
        payload: `variant` (reference), `problem`, `pool_format`, `device`, `buckets`.

    Returns:
        `configs`: a list of `[config, reason or None]`, the reason being the variant's for refusing it; `defaults`:
        the config of an untuned user by bucket key. A default that is not in the space comes first in `configs`.
    """
    variant = load_variant(payload["variant"])
    problem = from_jsonable(Problem, payload["problem"])
    pool_format = from_jsonable(PoolFormat, payload["pool_format"])
    device = from_jsonable(Device, payload["device"])
    buckets = [from_jsonable(Bucket, b) for b in payload["buckets"]]
    defaults = {b.key: variant.default_config(problem, pool_format, b.bounds, device) for b in buckets}
    configs = dict.fromkeys((*variant.space(problem, pool_format, device),))
    extra = [c for c in dict.fromkeys(defaults.values()) if c not in configs]
    return {
        "configs": [
            [to_jsonable(c.as_dict()), variant.reject(problem, pool_format, c, device)] for c in (*extra, *configs)
        ],
        "defaults": {key: to_jsonable(config.as_dict()) for key, config in defaults.items()},
    }
