"""A candidate whose work is counted: runs of its plans on the virtual GPU, and what its steps take of the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.device import Device
from pagedtune.kernels.launch import KernelStep, LaunchPlan
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Config, Op, Variant

from .count_run import Counts, Run, block_threads, run_counts
from .fewer_heads import with_heads
from .occupancy import by_entry, step_shared_bytes
from .prediction import StepWork


@dataclass(frozen=True)
class Target:
    """A candidate in a cell.

    Args:
        variant, config: the candidate.
        problem, pool_format, device: the cell.
        bounds: of the cell's bucket, which the plan is made for.
    """

    variant: Variant
    config: Config
    problem: Problem
    pool_format: PoolFormat
    bounds: Bounds
    device: Device

    def artifacts(self, problem: Problem) -> tuple[Artifact, ...]:
        """Built, or found in the cache."""
        return self.variant.build(problem, self.pool_format, self.config, self.device)

    def plan(self, problem: Problem, num_seqs: int) -> LaunchPlan:
        """The bucket's plan, cut to `num_seqs` sequences, or what the op counts as such."""
        bounds = replace(self.bounds, max_num_seqs=num_seqs)
        return self.variant.plan(problem, self.pool_format, self.config, bounds)

    def with_heads(self, num_kv_heads: int) -> Problem:
        """The problem with fewer KV heads."""
        return with_heads(self.problem, num_kv_heads)


def num_units(op: Op, query_lens: Sequence[int]) -> int:
    """What a plan's bounds count as sequences: tokens of a write, else sequences, block pairs or listed blocks."""
    return sum(query_lens) if op is Op.KV_WRITE else len(query_lens)


def run_batch(target: Target, problem: Problem, lengths: Sequence[int], query_lens: Sequence[int]) -> list[Counts]:
    """Counts by step of a batch of these sequences, in a plan of as many launch units as the op has of them.

    Raises:
        VirtualGpuError: the kernel is faulty.
    """
    op = target.variant.op
    artifacts, plan = target.artifacts(problem), target.plan(problem, num_units(op, query_lens))
    return run_counts(
        Run(artifacts, plan, problem, target.pool_format, tuple(lengths), tuple(query_lens), target.device, op)
    )


def works_of(target: Target, problem: Problem, num_seqs: int, counts: Sequence[Counts]) -> tuple[StepWork, ...]:
    """Counts of a batch of `num_seqs` by step, beside what each step takes of the device."""
    artifacts = by_entry(target.artifacts(problem))
    kernels = [s for s in target.plan(problem, num_seqs).steps if isinstance(s, KernelStep)]
    return tuple(work_of(step, artifacts, c) for step, c in zip(kernels, counts, strict=True))


def work_of(step: KernelStep, artifacts: Mapping[str, Artifact], counts: Counts) -> StepWork:
    """Counts of a batch beside what the step takes of the device; `artifacts` by entry."""
    resources = artifacts[step.entry].resources[step.entry]
    return StepWork(
        step.entry,
        blocks=step.grid[0] * step.grid[1] * step.grid[2],
        threads=block_threads(step),
        registers=resources.registers,
        shared_bytes=step_shared_bytes(step, artifacts),
        instructions=_group(counts, "instructions."),
        slots=counts["slots"],
        busiest=counts["busiest"],
        read_sectors=counts["sectors.read"],
        write_sectors=counts["sectors.write"],
        unique_bytes=counts["bytes.slots"],
        workspace_bytes=counts["bytes.workspaces"],
        shared_passes=counts["shared.passes"],
        tensor=_group(counts, "tensor."),
        bytes_in_flight=counts["in_flight"],
    )


def _group(counts: Counts, prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in sorted(counts.items()) if name.startswith(prefix)}
