"""Shares rows between registers that are never alive together, which keeps a warp's registers in the cache.

Compilers write every value to a register of its own: thousands of rows, of which a few hundred are alive at a time.
A register that some path may read before it is written keeps a row of its own, so that the read is still found. Lanes
that have diverged do no harm: each lane follows some path of the program, and no instruction writes lanes that it does
not run for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

Bits = int  # one bit per register


@dataclass(frozen=True)
class Step:
    """What one operation of the core does to registers.

    Args:
        reads, writes: registers as bits; a write under a guard does not end the life of the value before it.
        certain: whether it writes for every lane that reaches it.
        goes_on: whether the next operation may follow.
        target: operation that it may branch to, -1 for none.
    """

    reads: Bits
    writes: Bits
    certain: bool
    goes_on: bool
    target: int


def lifetimes(steps: Sequence[Step], num_registers: int) -> tuple[list[tuple[int, int]], Bits]:
    """First and last operation during which each register may hold a value that is read later; and, as bits, the
    registers that may be read before they are written."""
    starts = _block_starts(steps)
    ends = [*starts[1:], len(steps)]
    index = {start: k for k, start in enumerate(starts)}
    before, after = _live(steps, starts, ends, index)
    first, last = [len(steps)] * num_registers, [-1] * num_registers

    def touch(bits: Bits, at: int) -> None:
        for r in _members(bits):
            first[r] = min(first[r], at)
            last[r] = max(last[r], at)

    for block, (start, end) in enumerate(zip(starts, ends, strict=True)):
        touch(before[block], start)
        touch(after[block], end - 1)
        for at in range(start, end):
            touch(steps[at].reads | steps[at].writes, at)
    return list(zip(first, last, strict=True)), before[0] if before else 0


def _block_starts(steps: Sequence[Step]) -> list[int]:
    starts = {0}
    for at, step in enumerate(steps):
        if step.target >= 0:
            starts |= {step.target, at + 1}
        elif not step.goes_on:
            starts.add(at + 1)
    return sorted(s for s in starts if s < len(steps))


def _live(
    steps: Sequence[Step], starts: Sequence[int], ends: Sequence[int], index: Mapping[int, int]
) -> tuple[list[Bits], list[Bits]]:
    """Registers alive before and after each block."""
    needs, kills, follows = [], [], []
    for start, end in zip(starts, ends, strict=True):
        need = kill = 0
        for step in steps[start:end]:
            need |= step.reads & ~kill
            if step.certain:
                kill |= step.writes
        needs.append(need)
        kills.append(kill)
        final = steps[end - 1]
        follow = [index[final.target]] if final.target >= 0 else []
        follows.append([*follow, index[end]] if final.goes_on and end in index else follow)
    before, after = list(needs), [0] * len(starts)
    changed = True
    while changed:
        changed = False
        for block in range(len(starts) - 1, -1, -1):
            live = 0
            for follow_block in follows[block]:
                live |= before[follow_block]
            after[block] = live
            now = needs[block] | (live & ~kills[block])
            changed |= now != before[block]
            before[block] = now
    return before, after


def _members(bits: Bits) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def share(lives: Sequence[tuple[int, int]], own: Bits, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where the row of each register starts, in units from 0, and how many units there are.

    Args:
        lives: as `lifetimes` gives them.
        own: registers that share with nobody.
        sizes: units of each register's row.
    """
    places, used = [0] * len(lives), 0
    free: dict[int, list[int]] = {}  # by size: rows whose register is dead
    alive: list[tuple[int, int, int]] = []  # (last, size, place)
    for register in sorted(range(len(lives)), key=lambda r: lives[r]):
        size, (first, last) = sizes[register], lives[register]
        while alive and alive[0][0] < first:
            _, width, place = heappop(alive)
            heappush(free.setdefault(width, []), place)
        if own >> register & 1 or not free.get(size):
            places[register], used = used, used + size
        else:
            places[register] = heappop(free[size])
        if not own >> register & 1:
            heappush(alive, (last, size, places[register]))
    return places, used
