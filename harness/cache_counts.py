"""What the kernels of a cache operation do in a cell, counted on the virtual GPU.

Their work is proportional to what they move: tokens of a write or a gather, blocks of the others. A launch that moves
little is run as it is. Of a larger one two small parts are run (`_parts`), the rest is on the line through both, and a
third part is compared with what that line says of it. A gather has a line for each sequence, as its grid covers the
longest context of every one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Op
from pagedtune.kernels.workload import Workload

from .count_run import Counts
from .count_target import Target, num_units, run_batch, works_of
from .kernel_counts import MAX_ERROR, MAX_KV_BYTES, MAXIMA, Counted, NotCounted, num_instructions
from .roofline import moved_bytes

MAX_WHOLE_BYTES = 1 << 20  # moved by a launch that is run as it is: what a core interprets in well under a second
PART_BYTES = 1 << 18  # moved by the smallest part
UNITS = {
    Op.KV_WRITE: "tokens",
    Op.COPY_BLOCKS: "block pairs",
    Op.GATHER_KV: "tokens",
    Op.PACK_BLOCKS: "blocks",
    Op.UNPACK_BLOCKS: "blocks",
}
MIN_TOKENS = 64  # of a part: whole blocks of threads, whichever number of tokens each of them takes


@dataclass(frozen=True)
class _Size:
    """How large a launch is: `amount` of tokens or blocks, in `starts` pieces that each begin anew."""

    amount: int
    starts: int


def count_cache_op(target: Target, workload: Workload) -> Counted:
    """The work of one launch of a cache operation.

    Args:
        target: its variant computes any op but attention.
        workload: as `cache_tensors` takes it.

    Raises:
        NotCounted: the launch is too large to be run whole and too irregular to be extrapolated.
        VirtualGpuError: the kernel is faulty.
        Exception: what the variant's own code raises.
    """
    op = target.variant.op
    total_bytes = moved_bytes(op, target.problem, target.pool_format, workload)
    parts = _parts(op, target.problem, target.pool_format, workload)
    counted = None
    if total_bytes > MAX_WHOLE_BYTES and _size(op, parts[-1]).amount < _size(op, workload).amount:
        counted = _extrapolated(target, workload, parts)
        if counted.error <= MAX_ERROR:
            return counted
    if counted is not None and total_bytes > MAX_KV_BYTES:
        raise NotCounted(
            f"its work is not proportional to what it moves ({counted.error:.1%} off at the checked part, at most "
            f"{MAX_ERROR:.0%}), and {total_bytes / 2**20:.0f} MiB are too many to be run whole (limit "
            f"{MAX_KV_BYTES >> 20} MiB)"
        )
    units = num_units(op, workload.query_lens)
    return Counted(works_of(target, target.problem, units, _run(target, workload)), 0.0, "the launch itself was run")


def _extrapolated(target: Target, workload: Workload, parts: Sequence[Workload]) -> Counted:
    op = target.variant.op
    small, large, checked = parts
    first, second, seen = (_run(target, part) for part in parts)
    line = [(_size(op, small), first), (_size(op, large), second)]
    error = max(_error(told, found) for told, found in zip(_on_line(line, _size(op, checked)), seen, strict=True))
    total = _on_line(line, _size(op, workload))
    sizes = " and ".join(f"{_size(op, part).amount:,}" for part in (small, large))
    how = f"from {sizes} {UNITS[op]}; checked on {_size(op, checked).amount:,}: {error:.2%} off"
    return Counted(works_of(target, target.problem, num_units(op, workload.query_lens), total), error, how)


def _run(target: Target, workload: Workload) -> list[Counts]:
    return run_batch(target, target.problem, workload.context_lens, workload.query_lens)


def _size(op: Op, workload: Workload) -> _Size:
    if op is Op.GATHER_KV:
        return _Size(workload.total_context, workload.num_seqs)
    return _Size(num_units(op, workload.query_lens), 1)


def _parts(op: Op, problem: Problem, pool_format: PoolFormat, workload: Workload) -> tuple[Workload, ...]:
    """Three launches of the kind of `workload`: two that the line goes through, and one that is checked."""
    amount = _size(op, workload).amount
    of_one = max(1, moved_bytes(op, problem, pool_format, workload) // amount)
    least = max(MIN_TOKENS, pool_format.block_size) if op in (Op.KV_WRITE, Op.GATHER_KV) else 1
    step = least * max(1, PART_BYTES // (of_one * least))
    if op is Op.GATHER_KV:  # the check is of several sequences, one of them with a tail
        lengths = ((step,), (2 * step,), (step, step + pool_format.block_size // 2 + 1, 2 * step))
        return tuple(Workload(each) for each in lengths)
    one_sequence = workload.num_seqs == 1
    return tuple(Workload((n,), (n,)) if one_sequence else Workload((1,) * n) for n in (step, 2 * step, 3 * step))


def _on_line(line: Sequence[tuple[_Size, list[Counts]]], size: _Size) -> list[Counts]:
    """Counts by step of a launch of `size`, from those of two smaller ones that each start once."""
    (small, first), (large, second) = line
    share = (size.amount - size.starts * small.amount) / (large.amount - small.amount)
    steps = []
    for a, b in zip(first, second, strict=True):
        steps.append(
            {
                name: max(a.get(name, 0.0), b.get(name, 0.0))
                if name in MAXIMA
                else max(0.0, size.starts * a.get(name, 0.0) + share * (b.get(name, 0.0) - a.get(name, 0.0)))
                for name in {*a, *b}
            }
        )
    return steps


def _error(told: Counts, seen: Counts) -> float:
    pairs = [(told[name], seen[name]) for name in ("sectors.read", "sectors.write")]
    pairs.append((num_instructions(told), num_instructions(seen)))
    return max(abs(a - b) / max(b, 1.0) for a, b in pairs)
