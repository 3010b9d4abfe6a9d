"""What a peer of an emulated table is: another project's decode kernel, and what its host code is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

from pagedtune.harness.foreign import Foreign, Launch, load, recording
from pagedtune.kernels.device import Device
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.slot import Access
from pagedtune.kernels.workload import Workload

Tensors = Mapping[str, torch.Tensor]
Named = dict[str, tuple[torch.Tensor, Access | None]]
IN, OUT = Access.IN, Access.OUT
DECODE = ("_fwd_kernel_stage1", "_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2")  # SGLang's, which vLLM took over


@dataclass(frozen=True)
class Ask:
    """What the engine's host code is asked for.

    Args:
        tensors: slots of `Op.ATTENTION` over an NHD pool; they may lie on torch's device `meta`.
        problem: of these tensors.
        longest: longest context.
        splits: split parameter, one of those in `Peer.choices`.
        splits_used: the same, where the engine takes fewer for the whole batch.
        device: that is launched on.
    """

    tensors: Tensors
    problem: Problem
    longest: int
    splits: int
    splits_used: int
    device: Device


@dataclass(frozen=True)
class Peer:
    """A foreign decode kernel.

    Args:
        name: for tables.
        foreign: where it lies.
        choices: split parameters worth a look for a problem, a batch and a device; the engine's own default first.
        used: splits that the engine's host code takes for a batch, given the parameter.
        tensors: what its kernels take, by our names.
        call: calls its host code with these.
        note: what a reader should know.
    """

    name: str
    foreign: Callable[[], Foreign]
    choices: Callable[[Problem, Workload, Device], tuple[int, ...]]
    used: Callable[[Problem, Workload, Device, int], int]
    tensors: Callable[[Ask], Named]
    call: Callable[[ModuleType, Ask, Named], None]
    note: str

    def record(self, ask: Ask) -> tuple[list[Launch], Named]:
        """The launches that its host code makes, and every tensor that they name.

        Raises:
            ForeignError: its wheel cannot be had.
        """
        foreign = self.foreign()
        module, named = load(foreign), self.tensors(ask)
        with recording(module, foreign.kernels) as launches:
            self.call(module, ask, named)
        return launches, named


def empty(ask: Ask, *shape: int) -> torch.Tensor:
    """A workspace of float32 where the tensors lie."""
    return torch.zeros(shape, device=ask.tensors["q"].device)


def common(ask: Ask) -> Named:
    """Queries, pools and output: what every kernel takes."""
    named: Named = {name: (ask.tensors[name], IN) for name in ("q", "k_cache", "v_cache")}
    return named | {"out": (ask.tensors["out"], OUT)}


def scales(ask: Ask) -> Named:
    """One scale each of K and V, both 1."""
    return {name: (torch.ones(1, device=ask.tensors["q"].device), IN) for name in ("k_scale", "v_scale")}
