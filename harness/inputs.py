"""The tensors of a case: poisoned, guarded, laid out as the pool format says, and the oracle's private copy of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagedtune.kernels.launch import Access, LaunchPlan
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.slots import attention_slots

from .case import Case, Hazard
from .content import Content, make_content
from .memory import Carved, Poison, carve, reserve_apart
from .placement import Placement, place
from .pools import make_pools, make_token_scales, offset_of, unit_of

INT_MAX = 2**31 - 1
TAIL_COLUMNS = 3  # table entries past the end of the longest sequence


@dataclass(frozen=True)
class Inputs:
    """Everything that a bound plan touches.

    Args:
        slots: by slot name.
        workspaces: by workspace name.
        access: what the plan may do to each slot.
        poison: what fills memory that must not matter.
        first_block: first block of the pool that `Carved.parent` of a pool tensor covers.
        block_slots: see `PoolFormat.block_slots`: pool tensors.
        whole_blocks: whether blocks move as they are, slots that no token lives in included.
    """

    slots: Mapping[str, Carved]
    workspaces: Mapping[str, Carved]
    access: Mapping[str, Access]
    poison: Poison
    first_block: int = 0
    block_slots: tuple[str, ...] = ("k_cache", "v_cache")
    whole_blocks: bool = False

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What `LaunchPlan.bind` takes."""
        return {name: carved.view for name, carved in {**self.slots, **self.workspaces}.items()}

    def freeze(self) -> None:
        """Remembers the contents of everything."""
        for carved in (*self.slots.values(), *self.workspaces.values()):
            carved.freeze()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Private copies of all slots that are read, pools from `first_block` on."""
        return {
            name: (carved.view[self.first_block :] if name in self.block_slots else carved.view).clone()
            for name, carved in self.slots.items()
            if self.access[name] is not Access.OUT
        }


@dataclass(frozen=True)
class AttentionData:
    """What the oracles and the yardstick compute from: private copies, nothing that a kernel could have changed.

    Args:
        problem, pool_format: of the case.
        tensors: copies by slot name; pools start at block `first_block`.
        first_block: what to subtract from a table's entries.
        exact: see `Content.exact`.
    """

    problem: Problem
    pool_format: PoolFormat
    tensors: Mapping[str, torch.Tensor]
    first_block: int = 0
    exact: bool = False


class AttentionInputs:
    """Makes the tensors of an attention case as often as they are needed, with the same numbers each time."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(case.seed)
        self._case = case
        self.placement: Placement = place(case, rng)
        self.content: Content = make_content(case, self.placement, rng)

    def make(self, plan: LaunchPlan, poison: Poison, sequences: Sequence[int] | None = None) -> Inputs:
        """Fresh tensors for a plan; with `sequences`, a batch of only these."""
        case, content = self._case, self.content
        chosen = range(case.workload.num_seqs) if sequences is None else sequences
        rows, heads = self._rows(chosen), case.problem.num_q_heads
        values: dict[str, torch.Tensor] = {
            "q": content.q[rows],
            "context_lens": _int32([case.workload.context_lens[s] for s in chosen]),
            "query_start_loc": _int32([0, *np.cumsum([case.workload.query_lens[s] for s in chosen]).tolist()]),
        }
        for name in ("k_scale", "v_scale", "sinks", "alibi_slopes"):
            if getattr(content, name) is not None and name not in case.pool_format.block_slots:
                values[name] = getattr(content, name)
        slots = {
            **{name: self._copy(name, value, poison, unit_of(plan, name)) for name, value in values.items()},
            **make_pools(case, plan, self.placement, content.k, content.v, poison),
            **make_token_scales(case, plan, self.placement, (content.k_scale, content.v_scale), poison),
            "block_table": make_table(case, self.placement, chosen, poison, unit_of(plan, "block_table")),
            "out": self._empty((len(rows), heads, case.problem.head_dim_v), content.q.dtype, poison, plan, "out"),
        }
        if Hazard.NO_LSE not in case.hazards:
            slots["lse"] = self._empty((len(rows), heads), torch.float32, poison, plan, "lse")
        specs = attention_slots(case.problem, case.pool_format)
        access = {name: specs[name].access for name in slots}
        first_block, block_slots = self.placement.window_start, case.pool_format.block_slots
        return Inputs(slots, make_workspaces(plan, poison), access, poison, first_block, block_slots)

    def data(self, before: Mapping[str, torch.Tensor]) -> AttentionData:
        """What the oracles compute from, given the private copies of a run."""
        case, first_block = self._case, self.placement.window_start
        return AttentionData(case.problem, case.pool_format, before, first_block, self.content.exact)

    def _rows(self, sequences: Sequence[int]) -> list[int]:
        starts = np.concatenate([[0], np.cumsum(self._case.workload.query_lens)])
        return [row for s in sequences for row in range(int(starts[s]), int(starts[s + 1]))]

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, poison: Poison, plan: LaunchPlan, name: str) -> Carved:
        if self._rows_apart(shape):
            return reserve_apart(shape, dtype, poison)
        unit = unit_of(plan, name)
        return carve(shape, dtype, poison, self._pad(shape, unit), offset_of(self._case, unit), canary=True)

    def _rows_apart(self, shape: Sequence[int]) -> bool:
        """Whether rows of q, out and lse lie far apart; the single row of a batch of one token cannot."""
        return Hazard.HIGH_ROWS in self._case.hazards and shape[0] > 1

    def _copy(self, name: str, values: torch.Tensor, poison: Poison, unit: int) -> Carved:
        if name == "q" and self._rows_apart(values.shape):
            carved = reserve_apart(values.shape, values.dtype, poison)
            carved.view.copy_(values)
            return carved
        pad = self._pad(values.shape, unit) if values.dim() > 1 else ()
        carved = carve(values.shape, values.dtype, poison, pad, offset_of(self._case, unit))
        carved.view.copy_(values)
        return carved

    def _pad(self, shape: Sequence[int], unit: int) -> tuple[int, ...]:
        """Strides of a slice of a larger tensor: rows of heads lie 8 elements apart, rows of numbers 5."""
        if Hazard.STRIDED not in self._case.hazards:
            return ()
        inner = 8 if len(shape) > 2 else 5
        return (2, *(1 for _ in shape[1:-1]), -(-inner // unit) * unit)


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_table(case: Case, placement: Placement, sequences: Sequence[int], poison: Poison, unit: int = 1) -> Carved:
    """`block_table` of the chosen sequences, with what the hazards put into unused entries."""
    columns = -(-case.bounds.max_context_len // case.pool_format.block_size) + TAIL_COLUMNS
    pad = (0, -(-5 // unit) * unit) if Hazard.STRIDED in case.hazards else (0, 0)
    carved = carve((len(sequences), columns), torch.int32, poison, pad, offset_of(case, unit))
    for row, seq in enumerate(sequences):
        table = placement.tables[seq]
        unused = _unused_entry(case, placement, seq)
        carved.view[row] = unused
        for logical, block in enumerate(table):
            carved.view[row, logical] = unused if block < 0 else placement.window_start + block
    return carved


def _unused_entry(case: Case, placement: Placement, seq: int) -> int:
    if Hazard.TAIL_FOREIGN in case.hazards:
        others = [b for s, table in enumerate(placement.tables) if s != seq for b in table if b >= 0]
        dead = np.flatnonzero(~placement.live.any(axis=1))
        return placement.window_start + (others[0] if others else int(dead[0]))
    return INT_MAX if Hazard.TAIL_INT_MAX in case.hazards else -1


def make_workspaces(plan: LaunchPlan, poison: Poison) -> dict[str, Carved]:
    """Poisoned workspaces of a plan."""
    return {name: carve(spec.shape, spec.dtype, poison, canary=True) for name, spec in plan.workspaces.items()}


def element_of(offset: int, strides: Sequence[int], shape: Sequence[int]) -> tuple[int, ...] | None:
    """Coordinates of the element at `offset` from the first one, None where no element of the view lies."""
    order = sorted(range(len(shape)), key=lambda d: -strides[d])
    index, rest = [0] * len(shape), offset
    for dim in order:
        step = max(1, strides[dim])
        index[dim] = min(rest // step, shape[dim] - 1) if shape[dim] > 1 else 0
        rest -= index[dim] * step
    inside = rest == 0 and offset >= 0 and math.prod(shape) > 0
    return tuple(index) if inside else None
