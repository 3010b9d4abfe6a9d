"""One algorithm in one language: what every variant, in the tree or from outside it, declares and does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar

from .artifact import Artifact
from .bounds import Bounds
from .device import Device, DeviceKind
from .dtypes import DType
from .launch import LaunchPlan
from .pool_format import PoolFormat
from .problem import Problem
from .serial import from_jsonable, to_jsonable


class Op(StrEnum):
    """What a variant computes. The named slots of each op are in `kernels/slots.py`."""

    ATTENTION = "attention"
    KV_WRITE = "kv_write"
    COPY_BLOCKS = "copy_blocks"
    GATHER_KV = "gather_kv"
    PACK_BLOCKS = "pack_blocks"
    UNPACK_BLOCKS = "unpack_blocks"


@dataclass(frozen=True)
class Numerics:
    """The precision a variant claims; the gate holds it to that.

    Args:
        scores: dtype that q·k is rounded to before the softmax.
        p: dtype of the softmax weights in P·V; where each token has a scale for its values, of weight times scale.
        partials: dtype of split-K partial outputs and of everything merged.
        accumulate: dtype of the sums.
    """

    scores: DType = DType.FP32
    p: DType = DType.FP32
    partials: DType = DType.FP32
    accumulate: DType = DType.FP32


@dataclass(frozen=True)
class Properties:
    """What a variant promises; the gate tests each promise.

    Args:
        deterministic: the same inputs give the same bits in every run.
        batch_invariant: a sequence's bits do not depend on the rest of the batch, at one config.
        graph_safe: a launch allocates nothing, reads nothing back and may be captured.
    """

    deterministic: bool = True
    batch_invariant: bool = False
    graph_safe: bool = False


@dataclass(frozen=True)
class Config:
    """Base of a variant's own frozen config: every field is a tunable with a default that works."""

    @property
    def key(self) -> str:
        """Canonical identity, e.g. `num_splits=4,tile_tokens=64`; `default` without tunables."""
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self)) or "default"

    def as_dict(self) -> dict[str, Any]:
        """Tunables by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Rejection:
    """Why a config is not even built."""

    config: Config
    reason: str


@dataclass(frozen=True)
class SpaceSummary:
    """All configs of a space, with those that were refused and why."""

    accepted: tuple[Config, ...] = ()
    rejected: tuple[Rejection, ...] = field(default=())


class Variant(ABC):
    """One algorithm in one language. Stateless: everything is a function of the arguments.

    A subclass sets the class attributes and implements the abstract methods. The gate accepts it only if every
    case of its op passes. `plan` must not compile, import a compiler or touch a device.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    op: ClassVar[Op] = Op.ATTENTION
    device_kind: ClassVar[DeviceKind]
    config_type: ClassVar[type[Config]] = Config
    properties: ClassVar[Properties] = Properties()

    def numerics(self, problem: Problem, pool_format: PoolFormat) -> Numerics:
        """The declared precision (default: fp32 throughout, one rounding of the output)."""
        return Numerics()

    def default_config(self, problem: Problem, pool_format: PoolFormat, bounds: Bounds, device: Device) -> Config:
        """The config an untuned user would run: the baseline of the tuner's speed-up."""
        return self.config_type()

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        """Every config worth a look, in canonical order, the rejected ones included."""
        yield self.config_type()

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Why this combination cannot run, or None. Each constraint is stated here once."""
        return None

    @abstractmethod
    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """Compiles, or finds in the cache, what `plan` launches.

        Raises:
            BuildError: the compiler refused; the message carries its output.
        """

    def binary_id(self, problem: Problem, pool_format: PoolFormat, config: Config) -> str:
        """Names what `build` makes, without a compiler: equal names mean equal binaries.

        An exported package finds its binaries by it, so a name should hold no more than what the binary depends on
        (default: everything). Source, compiler and flags are not part of it.
        """
        return f"{problem.key}|{pool_format.key}|{config.key}"

    @abstractmethod
    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """The launch plan for everything within `bounds`.

        Raises:
            ValueError: the combination is one that `reject` refuses.
        """

    def config_from(self, values: Mapping[str, Any]) -> Config:
        """The config with these tunables, whose values are of their declared types or what JSON has for them.

        Raises:
            ValueError: an unknown tunable, and the message lists the known ones; or a value of another type.
        """
        known = {f.name for f in fields(self.config_type)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"{self.name} has no tunable {', '.join(unknown)}; it has {', '.join(sorted(known)) or 'none'}"
            )
        return from_jsonable(self.config_type, to_jsonable(values), self.name)

    def summarise_space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> SpaceSummary:
        """The space split into accepted and rejected configs."""
        accepted: list[Config] = []
        rejected: list[Rejection] = []
        for config in self.space(problem, pool_format, device):
            reason = self.reject(problem, pool_format, config, device)
            if reason is None:
                accepted.append(config)
            else:
                rejected.append(Rejection(config, reason))
        return SpaceSummary(tuple(accepted), tuple(rejected))


class BuildError(RuntimeError):
    """A compiler is missing or refused the source; the message says which, and what to do."""
