"""What a candidate's kernels do in a cell, counted on the virtual GPU from shapes that are small enough to run there.

The work of a decode batch is the sum over its sequences, and within a sequence nearly proportional to its keys. So one
sequence with one KV head is run at a few lengths (`knots`), what lies between is interpolated, and the batch is the sum
over sequences times the KV heads. Kernels work in tiles: lengths that are spread evenly over the remainders cost half a
tile on average, so the knots lie in the middle of tiles (and of splits). What a sequence costs more beside others
(finding it in the batch) is taken from a batch of as many short ones. One more run, of several sequences and heads at
other lengths, is compared with what that rule says of it. Where the two differ by more than MAX_ERROR, lengths of the
batch become knots; where they still do, the batch itself is run, if its KV fits into MAX_KV_BYTES.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.device import Device
from pagedtune.kernels.launch import KernelStep, LaunchPlan
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Config, Op, Variant
from pagedtune.kernels.workload import Workload

from .count_run import Counts, Run, block_threads, run_counts
from .fewer_heads import with_fewer_heads, with_heads
from .occupancy import by_entry, step_shared_bytes
from .prediction import StepWork

MAX_ERROR = 0.03  # of sectors and instructions, at the checked point
MAX_KV_BYTES = 30 << 20  # of a batch that is run whole; what a core interprets in a second or two
MAX_KNOT_BYTES = 8 << 20  # KV of all lengths that are run one by one
MAX_KNOTS = 16  # of a batch of many lengths, before all of them are tried
MAX_BESIDE = 64  # sequences of the batch that shows what one costs beside others; more cost hardly more
MAXIMA = ("busiest", "in_flight")  # of a batch, the largest of its sequences'; all other counts are sums


class NotCounted(Exception):
    """The counts of this shape cannot be had; the message says why."""


@dataclass(frozen=True)
class Counted:
    """Work of every step of a plan.

    Args:
        steps: in order.
        error: largest relative difference at the checked point; 0 where the batch itself was run.
        how: which runs it rests on, for people.
    """

    steps: tuple[StepWork, ...]
    error: float
    how: str


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


def count(target: Target, workload: Workload) -> Counted:
    """The work of one launch of `workload`.

    Raises:
        NotCounted: the batch is too large to be run whole and too irregular to be extrapolated.
        VirtualGpuError: the kernel is faulty.
        Exception: what the variant's own code raises.
    """
    one_head = with_fewer_heads(
        target.variant, target.config, target.problem, target.pool_format, target.device, num_kv_heads=1
    )
    heads = one_head.num_kv_heads
    lengths = tuple(workload.context_lens)
    query_len = max(workload.query_lens)
    if set(workload.query_lens) == {query_len} and query_len <= min(lengths):
        for knots, checked in _knot_choices(target, heads, lengths):
            counted = _extrapolated(target, workload, heads, knots, checked)
            if counted.error <= MAX_ERROR:
                return counted
    kv = workload.num_blocks(target.pool_format.block_size) * _block_bytes(target, target.problem)
    if kv > MAX_KV_BYTES:
        raise NotCounted(
            f"its work is not regular enough to be extrapolated (more than {MAX_ERROR:.0%} off at the checked point), "
            f"and {kv / 2**20:.0f} MiB of KV are too many to be run whole (limit {MAX_KV_BYTES >> 20} MiB)"
        )
    counts = run_batch(target, target.problem, lengths, workload.query_lens)
    return Counted(works_of(target, target.problem, workload.num_seqs, counts), 0.0, "the batch itself was run")


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


def _block_bytes(target: Target, problem: Problem) -> int:
    return target.pool_format.block_size * target.pool_format.bytes_per_token(problem)


Knots = tuple[int, ...]


def _knot_choices(target: Target, heads: int, lengths: Sequence[int]) -> list[tuple[Knots, Knots]]:
    """Lengths to run one by one, with those to check on: first around powers of two, which other buckets share, then
    some of the batch's own, then all of them."""
    own = tuple(sorted(set(lengths)))
    of_token = target.pool_format.bytes_per_token(target.with_heads(heads))
    (tile, part), low, high = _steps(target.config), max(1, own[0]), max(1, own[-1])
    middle = (part + tile) // 2 if part > tile else tile // 2
    inner = [(1 << k) + middle for k in range(low.bit_length() - 1, high.bit_length())]
    powers = (low, *(n for n in inner if low < n < high), high)
    sixths = [own[0] + (own[-1] - own[0]) * k // 6 for k in (0, 1, 2, 4)]
    spread = tuple(max(1, n - n % part + part * (2 * k + 1) // 8) for k, n in enumerate(sixths))
    several = [(powers, spread)] if len(own) > 2 else []
    if len(own) > MAX_KNOTS:
        chosen = (*own[:: -(-len(own) // MAX_KNOTS)], own[-1])
        several.append((tuple(dict.fromkeys(chosen)), own[1 :: max(1, len(own) // 5)]))
    exact = (own, tuple(sorted(lengths)[:: max(1, len(lengths) // 3)]))
    return [
        (knots, checked)
        for knots, checked in (*several, exact)
        if sum(knots) * of_token <= MAX_KV_BYTES and knots[-1] * of_token <= MAX_KNOT_BYTES
    ]


def _steps(config: Config) -> tuple[int, int]:
    """Keys that the kernel takes at a time, and the largest piece that it divides them into, as far as tunables called
    `...tokens` say."""
    values = [v for name, v in config.as_dict().items() if name.endswith("tokens") and isinstance(v, int) and v > 0]
    return min(values, default=1), max(values, default=1)


def _extrapolated(target: Target, workload: Workload, heads: int, knots: Knots, checked: Knots) -> Counted:
    problem, query_len = target.with_heads(heads), max(workload.query_lens)
    known = [run_batch(target, problem, (n,), (query_len,)) for n in knots]
    beside = _beside_others(target, problem, workload.num_seqs, min(knots), query_len)
    total = _sum(known, knots, workload.context_lens, target.problem.num_kv_heads / heads, beside)
    more_heads = min(2 * heads, target.problem.num_kv_heads)
    told = _sum(
        known,
        knots,
        checked,
        more_heads / heads,
        _beside_others(target, problem, len(checked), min(knots), query_len),
    )
    seen = run_batch(target, target.with_heads(more_heads), checked, (query_len,) * len(checked))
    error = max(_error(a, b) for a, b in zip(told, seen, strict=True))
    how = (
        f"from one sequence and {heads} of {target.problem.num_kv_heads} KV heads at {', '.join(map(str, knots))} "
        f"tokens; checked on {len(checked)} sequences and {more_heads} heads: {error:.2%} off"
    )
    return Counted(works_of(target, target.problem, workload.num_seqs, total), error, how)


def _error(told: Counts, seen: Counts) -> float:
    pairs = [(told["sectors.read"], seen["sectors.read"]), (num_instructions(told), num_instructions(seen))]
    return max(abs(a - b) / max(b, 1.0) for a, b in pairs)


def num_instructions(counts: Counts) -> float:
    """Of all classes."""
    return sum(value for name, value in counts.items() if name.startswith("instructions."))


def _beside_others(target: Target, problem: Problem, num_seqs: int, length: int, query_len: int) -> list[Counts]:
    """What each of `num_seqs` sequences costs more than one alone."""
    num_seqs = min(num_seqs, MAX_BESIDE)
    (alone, together) = (run_batch(target, problem, (length,) * n, (query_len,) * n) for n in (1, num_seqs))
    return [
        {name: b[name] / num_seqs - a.get(name, 0.0) for name in b if name not in MAXIMA}
        for a, b in zip(alone, together, strict=True)
    ]


def _sum(
    known: Sequence[list[Counts]],
    knots: Sequence[int],
    lengths: Sequence[int],
    heads: float,
    beside: Sequence[Counts],
) -> list[Counts]:
    """Counts of a batch: piecewise linear in the length of each sequence, proportional to the heads."""
    steps = []
    for index in range(len(known[0])):
        names = {name for counts in known for name in counts[index]}
        step: Counts = {}
        for name in names:
            values = np.interp(lengths, knots, [counts[index].get(name, 0.0) for counts in known])
            if name in MAXIMA:
                step[name] = float(values.max())
            else:
                step[name] = max(0.0, float(values.sum()) + len(lengths) * beside[index].get(name, 0.0)) * heads
        steps.append(step)
    return steps


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
