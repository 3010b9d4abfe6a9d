"""A variant of which each config behaves in another way; nothing of it ever runs in these tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.launch import CallStep, LaunchPlan
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import BuildError, Config, Variant


@dataclass(frozen=True)
class ManyConfig(Config):
    kind: str = "good"
    us: float = 200.0


class Many(Variant):
    """Good and bad configs."""

    name = "many"
    summary = "for tests"
    device_kind = DeviceKind.CPU
    config_type = ManyConfig

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        for kind in ("crash", "raise", "wrong", "unproven", "refused", "unbuildable"):
            yield ManyConfig(kind, 1.0)
        yield ManyConfig("good", 100.0)
        yield ManyConfig("good", 100.1)
        yield ManyConfig("good", 900.0)

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        return "not this one" if getattr(config, "kind", "") == "refused" else None

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        if getattr(config, "kind", "") == "unbuildable":
            raise BuildError("the compiler says no")
        return ()

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        return LaunchPlan((CallStep(lambda tensors: None),), {})


class Fragile(Many):
    """One config passes the gate and takes the timer down with it."""

    name = "fragile"

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        yield ManyConfig("good", 100.0)
        yield ManyConfig("fragile", 1.0)


class Hanging(Many):
    """One config never ends."""

    name = "hanging"

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        yield ManyConfig("good", 100.0)
        yield ManyConfig("hang", 1.0)


class Impostor(Many):
    """Called like a variant of the catalogue."""

    name = "eager"


class Unlistable(Many):
    """Raises when asked for its configs."""

    name = "unlistable"

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        raise RuntimeError("no space today")
