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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Config
from pagedtune.kernels.workload import Workload

from .count_run import Counts
from .count_target import Target, run_batch, works_of
from .fewer_heads import with_fewer_heads
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
