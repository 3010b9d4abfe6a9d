"""Variants that each misbehave in one way, for test_cli_check.py. They compute the right answer first."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from dataclasses import dataclass
from functools import partial

import torch

from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.device import Device
from pagedtune.kernels.eager import Eager, attend
from pagedtune.kernels.launch import CallStep, LaunchPlan, Tensors
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.slots import attention_slots, batch_limits
from pagedtune.kernels.variant import BuildError, Config


@dataclass(frozen=True)
class TileConfig(Config):
    tile: int = 4


class Bad(Eager):
    """Runs `after` when the answer is there."""

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        step = CallStep(partial(self.run, problem, pool_format))
        return LaunchPlan((step,), attention_slots(problem, pool_format), limits=batch_limits(bounds))

    def run(self, problem: Problem, pool_format: PoolFormat, tensors: Tensors) -> None:
        attend(problem, pool_format, tensors)
        self.after(tensors)

    def after(self, tensors: Tensors) -> None:
        """The misbehaviour."""


class RaisesInBuild(Bad):
    name = "raises_in_build"

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        raise BuildError("mycc: kernel.cu:3: no such instruction")


class RaisesInPlan(Bad):
    name = "raises_in_plan"

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        raise KeyError("no tile for this shape")


class RaisesInRun(Bad):
    name = "raises_in_run"

    def after(self, tensors: Tensors) -> None:
        raise RuntimeError("launch failed\nwith two lines")


class Hangs(Bad):
    name = "hangs"

    def after(self, tensors: Tensors) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the interpreter lock


class Crashes(Bad):
    name = "crashes"

    def after(self, tensors: Tensors) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class WritesOutside(Bad):
    name = "writes_outside"

    def after(self, tensors: Tensors) -> None:
        out = tensors["out"]
        last = out[-1, -1, -1:]
        ctypes.memset(last.data_ptr() + last.element_size(), 0x11, 8)


class ChangesInputs(Bad):
    name = "changes_inputs"

    def after(self, tensors: Tensors) -> None:
        tensors["q"][-1, 0, 0] += 1


class Wrong(Bad):
    name = "wrong"

    def after(self, tensors: Tensors) -> None:
        tensors["out"].mul_(1.5)


class RejectsAll(Bad):
    name = "rejects_all"

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        return "needs a Tuesday"


class Good(Bad):
    name = "good"
    config_type = TileConfig

    def run(self, problem: Problem, pool_format: PoolFormat, tensors: Tensors) -> None:
        print("a chatty kernel\n" * 1000)
        super().run(problem, pool_format, tensors)


class Slow(Bad):
    name = "slow"

    def after(self, tensors: Tensors) -> None:
        time.sleep(0.5)


class NotAVariant:
    name = "not_a_variant"


class Partly(Good):
    """Rejects one dtype only."""

    name = "partly"

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        return "no fp32" if problem.q_dtype.torch == torch.float32 else None
