"""What a tune looks at: the cells of a sweep, and the candidates of a cell."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pagedtune.kernels.bounds import Bucket
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Op
from pagedtune.kernels.workload import Workload

from .configs import Configs, SweepFile
from .errors import UsageError


@dataclass(frozen=True)
class Cell:
    """Where candidates compete: one problem in one pool format in one bucket.

    Args:
        op, model, problem, pool_format, bucket: see `Record`.
        workload: the batch that is timed; its name is part of the key.
        num_layers: layers of the model that have this problem.
        bucket_weight: the sweep's weight of the bucket; a cache operation's has none, so 0.
    """

    op: Op
    model: str
    problem: Problem
    pool_format: PoolFormat
    bucket: Bucket
    workload: Workload
    num_layers: int
    bucket_weight: float

    @property
    def key(self) -> str:
        """Equal to `Record.cell_key` of the cell's records."""
        parts = (self.op, self.model, self.problem.key, self.pool_format.key, self.bucket.key, self.workload.name)
        return "|".join(parts)

    @property
    def mean_context(self) -> float:
        """Mean context length in tokens."""
        return self.workload.total_context / self.workload.num_seqs


@dataclass(frozen=True)
class VariantRef:
    """A variant as the tuner knows it; only workers load it, for its code may be anybody's.

    Args:
        ref: what a worker loads it by: a catalogue name or an absolute `path/to/file.py:Name`.
        name: its own name.
        source: key over its source.
        op: what it computes.
    """

    ref: str
    name: str
    source: str
    op: Op = Op.ATTENTION


@dataclass(frozen=True)
class Candidate:
    """A variant with a config.

    Args:
        variant: the variant.
        config: values by tunable.
        order: position among all candidates of the cell, the last tie-break.
        is_default: whether an untuned user would run this config.
    """

    variant: VariantRef
    config: Mapping[str, Any] = field(hash=False)
    order: int
    is_default: bool

    @property
    def key(self) -> str:
        """Equal to `Record.candidate_key` of its records."""
        return candidate_key(self.variant.name, self.config)


def candidate_key(variant: str, config: Mapping[str, Any]) -> str:
    """Equal to `Record.candidate_key`."""
    return f"{variant}[{','.join(f'{k}={v}' for k, v in config.items())}]"


@dataclass(frozen=True)
class Space:
    """A cell with its candidates in canonical order, and those that their variant refuses, with its reason."""

    cell: Cell
    accepted: tuple[Candidate, ...]
    rejected: tuple[tuple[Candidate, str], ...]


def cells_of(configs: Configs, sweep: SweepFile, models: Sequence[str] = ()) -> tuple[Cell, ...]:
    """All attention cells of a sweep in its own order; `models` replaces the sweep's list.

    Raises:
        UsageError: an unknown model, or a sweep none of whose dtypes a model has.
    """
    cells: list[Cell] = []
    for name in models or sweep.models:
        cells += [
            Cell(Op.ATTENTION, name, problem, pool_format, entry.bucket, workload, layers, entry.weight)
            for problem, pool_format, layers in pools_of(configs, sweep, name)
            for entry in sweep.buckets
            for workload in (sweep.workload(w, entry.bucket) for w in sweep.workloads)
        ]
    return tuple(cells)


def pools_of(configs: Configs, sweep: SweepFile, name: str) -> list[tuple[Problem, PoolFormat, int]]:
    """Each problem of a model in each pool format of the sweep, with the number of layers that have the problem.

    Raises:
        UsageError: an unknown model, or one that has none of the sweep's dtypes.
    """
    model = configs.model(name)
    dtypes = [dtype for dtype in sweep.dtypes if dtype in model.dtypes]
    if not dtypes:
        raise UsageError(
            f"model {name} is tuned in {', '.join(model.dtypes)}, the sweep in {', '.join(sweep.dtypes)}: "
            "add a common dtype to one of the two files"
        )
    return [
        (problem, pool_format, layers)
        for dtype in dtypes
        for problem, layers in model.problems(dtype)
        for pool_format in sweep.formats(dtype)
    ]


def space_of(cell: Cell, listings: Sequence[tuple[VariantRef, Mapping[str, Any]]]) -> Space:
    """The candidates of a cell from what `jobs.list_space` gave for each variant."""
    accepted: list[Candidate] = []
    rejected: list[tuple[Candidate, str]] = []
    order = 0
    for variant, listing in listings:
        default = listing["defaults"][cell.bucket.key]
        for config, reason in listing["configs"]:
            candidate = Candidate(variant, config, order, config == default)
            order += 1
            if reason is None:
                accepted.append(candidate)
            else:
                rejected.append((candidate, reason))
    return Space(cell, tuple(accepted), tuple(rejected))


def thinned(space: Space, limit: int | None) -> Space:
    """At most `limit` of the accepted candidates of each variant: the default, then others in a fixed order that is
    as good as random, those together that differ in the number of splits alone, as they share a binary."""
    if limit is None:
        return space

    def rank(candidate: Candidate) -> tuple[bool, str, int]:
        binary = {k: v for k, v in candidate.config.items() if not k.endswith("splits")}
        text = f"{space.cell.problem.key}/{space.cell.pool_format.key}/{sorted(binary.items())}"
        return not candidate.is_default, hashlib.sha256(text.encode()).hexdigest(), candidate.order

    kept: set[Candidate] = set()
    for variant in dict.fromkeys(c.variant for c in space.accepted):
        kept.update(sorted((c for c in space.accepted if c.variant == variant), key=rank)[:limit])
    return replace(space, accepted=tuple(c for c in space.accepted if c in kept))


def exploration_order(cell: Cell, candidates: Sequence[Candidate], favourites: Iterable[str]) -> tuple[Candidate, ...]:
    """Candidates in the order in which a short budget should try them.

    First the defaults, which every speed-up is relative to; then configs that won elsewhere (`favourites`, by
    candidate key, best first); then the rest in a fixed order that is as good as random, so that a budget that ends
    early has looked all over the space and not only at its beginning.
    """
    rank = {key: i for i, key in enumerate(favourites)}

    def sort_key(candidate: Candidate) -> tuple[int, int, str]:
        if candidate.is_default:
            return 0, candidate.order, ""
        if candidate.key in rank:
            return 1, rank[candidate.key], ""
        return 2, 0, hashlib.sha256(f"{cell.key}/{candidate.key}".encode()).hexdigest()

    return tuple(sorted(candidates, key=sort_key))
