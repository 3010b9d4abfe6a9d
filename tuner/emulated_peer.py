"""What a peer of an emulated table is: another project's decode kernel, and what its host code is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch

from pagedtune.harness.foreign import Foreign, Launch, load, recording
from pagedtune.harness.foreign_plan import plan_of
from pagedtune.harness.observation import Prepared
from pagedtune.kernels.device import Device
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.slot import Access
from pagedtune.kernels.workload import Workload

Tensors = Mapping[str, torch.Tensor]
Named = dict[str, tuple[torch.Tensor, Access | None]]
IN, OUT = Access.IN, Access.OUT
DECODE = ("_fwd_kernel_stage1", "_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2")  # SGLang's, which vLLM took over


@dataclass(frozen=True)
class Cell:
    """What all kernels of a table are asked for."""

    problem: Problem
    pool_format: PoolFormat
    workload: Workload
    device: Device

    @property
    def length(self) -> int:
        """Tokens of every sequence.

        Raises:
            ValueError: the batch is not uniform, or not one query token a sequence.
        """
        lengths = set(self.workload.context_lens)
        if len(lengths) != 1 or set(self.workload.query_lens) != {1}:
            raise ValueError("figures are made for sequences of one length with one query token: use a uniform batch")
        return lengths.pop()


@dataclass(frozen=True)
class Ask:
    """What an engine is asked to launch: a part of a cell's batch, or all of it, split as the whole batch would be.

    Args:
        cell: with the whole batch.
        tensors: slots of `Op.ATTENTION` over an NHD pool; they may lie on torch's device `meta`.
        problem: of these tensors.
        config: one of those that the peer has for the cell.
    """

    cell: Cell
    tensors: Tensors
    problem: Problem
    config: Mapping[str, int]


class Peer(Protocol):
    """A foreign decode kernel."""

    @property
    def name(self) -> str:
        """For tables."""

    @property
    def note(self) -> str:
        """What a reader should know."""

    @property
    def requirement(self) -> str:
        """The wheel, as pip takes it."""

    def fetch(self) -> None:
        """Gets the wheel, or finds it in the user's cache.

        Raises:
            ForeignError: it cannot be had.
        """

    def reject(self, cell: Cell) -> str:
        """Why the kernel cannot do a cell, or ""."""

    def configs(self, cell: Cell) -> tuple[Mapping[str, int], ...]:
        """Configs worth a look; the engine's own first."""

    def prepare(self, ask: Ask) -> Prepared:
        """Artifacts, plan and tensors of what its host code launches.

        Raises:
            ForeignError: its wheel cannot be had.
        """

    def blocks(self, ask: Ask) -> list[int]:
        """Blocks of each grid that its host code launches.

        Raises:
            ForeignError: its wheel cannot be had.
        """


@dataclass(frozen=True)
class TritonPeer:
    """A peer whose kernels are Triton's, launched by its own host code.

    Args:
        name, note: see `Peer`.
        foreign: where it lies.
        splits: split parameters worth a look for a cell; the engine's own default first.
        tensors: what its kernels take, by our names.
        call: calls its host code with these.
    """

    name: str
    note: str
    foreign: Callable[[], Foreign]
    splits: Callable[[Cell], tuple[int, ...]]
    tensors: Callable[[Ask], Named]
    call: Callable[[ModuleType, Ask, Named], None]

    @property
    def requirement(self) -> str:
        """See `Peer`."""
        return self.foreign().requirement

    def fetch(self) -> None:
        """See `Peer`."""
        load(self.foreign())

    def reject(self, cell: Cell) -> str:
        """See `Peer`: Triton's kernels are compiled for any shape."""
        return ""

    def configs(self, cell: Cell) -> tuple[Mapping[str, int], ...]:
        """See `Peer`."""
        return tuple({"splits": splits} for splits in self.splits(cell))

    def prepare(self, ask: Ask) -> Prepared:
        """See `Peer`."""
        launches, named = self.record(ask)
        artifacts, plan = plan_of(launches, named, ask.cell.device.capability)
        return Prepared(artifacts, plan, {**ask.tensors, **{name: tensor for name, (tensor, _) in named.items()}})

    def blocks(self, ask: Ask) -> list[int]:
        """See `Peer`."""
        launches, _ = self.record(ask)
        return [math.prod(launch.grid) for launch in launches]

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
