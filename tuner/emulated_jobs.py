"""The jobs behind `bench --emulated`, for worker processes: figures of one kernel in one cell, ours or a peer's.

A batch of equal sequences is a repetition of one sequence and one KV head: that is run at the true context length, and
its counts times sequences and heads are the batch's. With `check`, two sequences and twice the heads are run as well,
and the answer says how far the rule is off. In both runs the answer is compared with attention in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from pagedtune.harness.count_run import random_tensors
from pagedtune.harness.external import load_variant
from pagedtune.harness.fewer_heads import with_fewer_heads, with_heads
from pagedtune.harness.kernel_figures import all_sectors, figures, kv_sectors, least_of
from pagedtune.harness.observation import Prepared, Seen, check_answer, observe
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.device import Device
from pagedtune.kernels.launch import KernelStep
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.serial import from_jsonable
from pagedtune.kernels.variant import Config, Variant
from pagedtune.kernels.workload import Workload

from .emulated_peer import Ask, Cell, Peer
from .peers_emulated import PEERS


class Subject(Protocol):
    """A kernel that can be asked for any batch of a cell."""

    def heads(self) -> int:
        """Fewest KV heads that run on the same binary."""

    def prepare(self, num_seqs: int, num_kv_heads: int) -> Prepared:
        """Ready to run on that many sequences and KV heads."""

    def blocks(self) -> list[int]:
        """Blocks of each kernel's grid for the whole batch."""


@dataclass(frozen=True)
class Ours:
    """A variant with a config."""

    cell: Cell
    variant: Variant
    config: Config

    def heads(self) -> int:
        """One, unless the number of heads is compiled in."""
        c = self.cell
        return with_fewer_heads(self.variant, self.config, c.problem, c.pool_format, c.device, 1).num_kv_heads

    def prepare(self, num_seqs: int, num_kv_heads: int) -> Prepared:
        """The plan that the batch has, cut to a few sequences and heads."""
        c, problem = self.cell, with_heads(self.cell.problem, num_kv_heads)
        bounds = replace(c.workload.bounds, max_num_seqs=num_seqs)
        artifacts = self.variant.build(problem, c.pool_format, self.config, c.device)
        plan = self.variant.plan(problem, c.pool_format, self.config, bounds)
        return Prepared(artifacts, plan, _tensors(c, problem, num_seqs))

    def blocks(self) -> list[int]:
        """From the batch's own plan."""
        c = self.cell
        plan = self.variant.plan(c.problem, c.pool_format, self.config, c.workload.bounds)
        return [s.grid[0] * s.grid[1] * s.grid[2] for s in plan.steps if isinstance(s, KernelStep)]


@dataclass(frozen=True)
class Theirs:
    """A peer's kernel with a config."""

    cell: Cell
    peer: Peer
    config: Mapping[str, int]

    def heads(self) -> int:
        """Two where there are two: Triton compiles an argument that is 1 into the code."""
        return min(2, self.cell.problem.num_kv_heads)

    def prepare(self, num_seqs: int, num_kv_heads: int) -> Prepared:
        """What its host code launches for a few sequences and heads, at the splits of the whole batch."""
        problem = with_heads(self.cell.problem, num_kv_heads)
        tensors = _tensors(self.cell, problem, num_seqs)
        return self.peer.prepare(Ask(self.cell, tensors, problem, self.config))

    def blocks(self) -> list[int]:
        """From the launches for the batch itself, over tensors that take no memory."""
        with torch.device("meta"):
            tensors = _tensors(self.cell, self.cell.problem, self.cell.workload.num_seqs)
            return self.peer.blocks(Ask(self.cell, tensors, self.cell.problem, self.config))


def _tensors(cell: Cell, problem: Problem, num_seqs: int) -> dict[str, torch.Tensor]:
    return random_tensors(problem, cell.pool_format, (cell.length,) * num_seqs, (1,) * num_seqs)


def measure(cell: Cell, subject: Subject, check: bool) -> dict[str, Any]:
    """The figures of a subject, and with `check` how far their extrapolation is off.

    Raises:
        VirtualGpuError, WrongAnswerError: the kernel is wrong.
        Exception: what building and planning raise.
    """
    heads, whole = subject.heads(), cell.problem.num_kv_heads
    seen, error = _run(cell, subject, 1, heads)
    factor = cell.workload.num_seqs * whole / heads
    found = figures(
        seen, subject.blocks(), factor, least_of(cell.problem, cell.pool_format, cell.workload), cell.device
    )
    answer: dict[str, Any] = {
        "figures": asdict(found),
        "answer_error": error,
        "counted": f"1 sequence of {cell.length} tokens, {heads} of {whole} KV heads, times {factor:g}",
    }
    if check:
        num_seqs, more = min(2, cell.workload.num_seqs), min(2 * heads, whole)
        ratio = num_seqs * more / heads
        larger, _ = _run(cell, subject, num_seqs, more)
        answer["check"] = {
            "what": f"{num_seqs} sequences, {more} KV heads",
            "off": _off(seen, larger, ratio),
        }
    return answer


def _run(cell: Cell, subject: Subject, num_seqs: int, num_kv_heads: int) -> tuple[list[Seen], float]:
    prepared = subject.prepare(num_seqs, num_kv_heads)
    seen = observe(prepared, cell.device)
    tensors = dict(prepared.tensors)
    for name in ("k_cache", "v_cache"):  # token-indexed views of a peer are blocks of one token
        if tensors[name].dim() == 3:
            tensors[name] = tensors[name].view(-1, cell.pool_format.block_size, *tensors[name].shape[1:])
    return seen, check_answer(tensors, cell.problem.softmax_scale)


def _off(small: Sequence[Seen], large: Sequence[Seen], ratio: float) -> float:
    """How far sectors, KV sectors and instructions are from `ratio` times as many: the worst, relative."""
    worst = 0.0
    for count in (all_sectors, kv_sectors, _instructions):
        told, found = ratio * sum(map(count, small)), sum(map(count, large))
        worst = max(worst, abs(told - found) / max(found, 1))
    return worst


def _instructions(seen: Seen) -> int:
    return sum(seen.report.counters.instructions.values())


def measure_variant(payload: Mapping[str, Any]) -> dict[str, Any]:
    """`variant` (reference), `config`, the fields of a `Cell`, `check`."""
    torch.set_num_threads(1)
    cell, variant = cell_from(payload), load_variant(payload["variant"])
    return measure(cell, Ours(cell, variant, variant.config_from(payload["config"])), payload["check"])


def measure_peer(payload: Mapping[str, Any]) -> dict[str, Any]:
    """`peer` (name), `config`, the fields of a `Cell`, `check`."""
    torch.set_num_threads(1)
    cell = cell_from(payload)
    peer = next(p for p in PEERS if p.name == payload["peer"])
    return measure(cell, Theirs(cell, peer, payload["config"]), payload["check"])


def cell_from(payload: Mapping[str, Any]) -> Cell:
    """The cell of a payload."""
    return Cell(
        from_jsonable(Problem, payload["problem"]),
        from_jsonable(PoolFormat, payload["pool_format"]),
        from_jsonable(Workload, payload["workload"]),
        from_jsonable(Device, payload["device"]),
    )


def default_config(cell: Cell, variant: Variant) -> Config:
    """What an untuned user would run in the cell."""
    tight = cell.workload.bounds
    bounds = Bounds(tight.max_num_seqs, tight.max_context_len, 1)
    return variant.default_config(cell.problem, cell.pool_format, bounds, cell.device)
