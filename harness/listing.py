"""Job: which cases a variant has to pass. Runs in a worker, because it imports and asks foreign code."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from pagedtune.harness.case import Level
from pagedtune.harness.config_corners import corner_config
from pagedtune.harness.coverings import Trial, trials_for
from pagedtune.harness.external import RequestError, load_variant
from pagedtune.kernels.device import Device
from pagedtune.kernels.serial import from_jsonable, to_jsonable
from pagedtune.kernels.variant import Config, Variant


def list_cases(payload: dict[str, Any]) -> dict[str, Any]:
    """The cases of payload `variant` (a reference) on `device` at `level`, each with its config or rejection.

    `settings` maps tunables to text; without it every second case runs a config other than the default one, taken in
    turn from the variant's own space, so that tunables are proven too. At production level on a GPU the corners of that
    space are a dimension of the covering.

    Raises:
        RequestError: see there.
        VariantLoadError: the variant's own code failed.
    """
    device = from_jsonable(Device, payload["device"])
    try:
        variant = load_variant(payload["variant"])
        chosen = parse_settings(variant, payload["settings"])
    except ValueError as error:
        raise RequestError(str(error)) from error
    if variant.device_kind is not device.kind:
        raise RequestError(
            f"{variant.name} is for {variant.device_kind} devices and {device.name} is a {device.kind} device: "
            "choose another --device"
        )
    trials = trials_for(variant, device, Level(payload["level"]))
    return {
        "name": variant.name,
        "op": variant.op.value,
        "cases": [_planned(variant, device, trial, index, chosen) for index, trial in enumerate(trials)],
    }


def parse_settings(variant: Variant, settings: Mapping[str, str]) -> dict[str, Any]:
    """Tunables of `variant` from text, in their declared types.

    Raises:
        ValueError: an unknown tunable, or text that is none of its values.
    """
    config = variant.config_from({name: _parse(text) for name, text in settings.items()})
    return {name: getattr(config, name) for name in settings}


def _parse(text: str) -> Any:
    """The value as `Config.key` prints it; whatever is no Python literal is text, e.g. the value of an enum."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _planned(variant: Variant, device: Device, trial: Trial, index: int, chosen: dict[str, Any]) -> dict[str, Any]:
    case, config = trial.case, _config_for(variant, device, trial, index, chosen)
    return {
        "case": to_jsonable(case),
        "key": case.key,
        "config": to_jsonable(config.as_dict()),
        "rejected": variant.reject(case.problem, case.pool_format, config, device),
    }


def _config_for(variant: Variant, device: Device, trial: Trial, index: int, chosen: dict[str, Any]) -> Config:
    case = trial.case
    default = variant.default_config(case.problem, case.pool_format, case.bounds, device)
    if chosen:
        return variant.config_from({**default.as_dict(), **chosen})
    if trial.corner == 0 or (trial.corner is None and index % 2 == 0):
        return default
    others = variant.summarise_space(case.problem, case.pool_format, device).accepted
    if not others:
        return default
    return others[index // 2 % len(others)] if trial.corner is None else corner_config(others, trial.corner)
