"""Shares rows between registers that are never alive together, which keeps a warp's registers in the cache.

Compilers write every value to a register of its own: thousands of rows, of which a few hundred are alive at a time.
A register that some path may read before it is written keeps a row of its own, so that the read is still found. Lanes
that have diverged do no harm: each lane follows some path of the program, and no instruction writes lanes that it does
not run for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]


class Accesses(NamedTuple):
    """Reads, or writes: operation and register of each, in the order of the operations."""

    at: Numbers
    register: Numbers


def accesses(rows: Sequence[Sequence[int]], registers: Numbers) -> Accesses:
    """The accesses of operations to `rows`, which hold the `registers` of those numbers."""
    counts = list(map(len, rows))
    flat = np.fromiter(chain.from_iterable(rows), np.int64, sum(counts))
    return Accesses(np.repeat(np.arange(len(counts)), counts), registers[flat])


@dataclass(frozen=True)
class Steps:
    """What each operation of the core does to registers; registers are numbers from 0.

    Args:
        reads, writes: a write under a guard does not end the life of the value before it.
        certain: of each operation, whether it writes for every lane that reaches it.
        goes_on: whether the next operation may follow.
        targets: operation that it may branch to, -1 for none.
    """

    reads: Accesses
    writes: Accesses
    certain: Sequence[bool]
    goes_on: Sequence[bool]
    targets: Sequence[int]


def lifetimes(steps: Steps, num_registers: int) -> tuple[Numbers, Numbers, Flags]:
    """First and last operation during which each register may hold a value that is read later (the number of
    operations and -1 for a register that nothing touches), and which registers may be read before they are written."""
    size = len(steps.targets)
    early = np.zeros(num_registers, np.bool_)
    first, last = np.full(num_registers, size), np.full(num_registers, -1)
    starts = _block_starts(steps)
    block_of = np.searchsorted(starts, np.arange(size), "right") - 1
    read_at, read = steps.reads
    write_at, written = steps.writes
    for at, register in ((read_at, read), (write_at, written)):
        np.minimum.at(first, register, at)
        np.maximum.at(last, register, at)
    certain = np.array(steps.certain, np.bool_)[write_at]
    kill_at, killed = write_at[certain], written[certain]
    # Only these can be alive where a block ends or starts: the others are written and read within one block.
    first_kill = np.full(num_registers, size)
    np.minimum.at(first_kill, killed, kill_at)
    crossing = np.zeros(num_registers, np.bool_)
    crossing[read[read_at <= first_kill[read]]] = True
    touched = last >= 0
    crossing[touched] |= block_of[first[touched]] != block_of[last[touched]]
    index, (members,) = np.cumsum(crossing) - 1, np.nonzero(crossing)
    if not len(members):
        return first, last, early
    kept = crossing[killed]
    kills = np.full((len(starts), len(members)), size)
    np.minimum.at(kills, (block_of[kill_at[kept]], index[killed[kept]]), kill_at[kept])
    needs = np.zeros(kills.shape, np.bool_)
    kept = crossing[read]
    rows, columns = block_of[read_at[kept]], index[read[kept]]
    exposed = read_at[kept] <= kills[rows, columns]
    needs[rows[exposed], columns[exposed]] = True
    before, after = _live(steps, starts, needs, kills < size)
    ends = np.append(starts[1:], size) - 1
    for alive, at in ((before, starts), (after, ends)):
        first[members] = np.minimum(first[members], np.where(alive, at[:, None], size).min(0))
        last[members] = np.maximum(last[members], np.where(alive, at[:, None], -1).max(0))
    early[members] = before[0]
    return first, last, early


def _block_starts(steps: Steps) -> Numbers:
    size = len(steps.targets)
    starts = {0}
    for at, (target, goes_on) in enumerate(zip(steps.targets, steps.goes_on, strict=True)):
        if target >= 0:
            starts |= {target, at + 1}
        elif not goes_on:
            starts.add(at + 1)
    return np.array(sorted(s for s in starts if s < size), np.int64)


def _live(steps: Steps, starts: Numbers, needs: Flags, kills: Flags) -> tuple[Flags, Flags]:
    """Registers alive before and after each block: one row a block, as `needs` (read before any write) and `kills`."""
    first_of = {int(start): block for block, start in enumerate(starts)}
    follows = []
    for end in (*starts[1:].tolist(), len(steps.targets)):
        target = steps.targets[end - 1]
        follow = [first_of[target]] if target >= 0 else []
        follows.append([*follow, first_of[end]] if steps.goes_on[end - 1] and end in first_of else follow)
    need, keep = _rows_as_bits(needs), _rows_as_bits(~kills)
    before, after = list(need), [0] * len(need)
    changed = True
    while changed:
        changed = False
        for block in range(len(need) - 1, -1, -1):
            live = 0
            for follow_block in follows[block]:
                live |= before[follow_block]
            after[block] = live
            now = need[block] | (live & keep[block])
            changed |= now != before[block]
            before[block] = now
    return _bits_as_rows(before, needs.shape[1]), _bits_as_rows(after, needs.shape[1])


def _rows_as_bits(rows: Flags) -> list[int]:
    return [int.from_bytes(row.tobytes(), "little") for row in np.packbits(rows, axis=1, bitorder="little")]


def _bits_as_rows(bits: Sequence[int], width: int) -> Flags:
    size = -(-width // 8)
    packed = np.frombuffer(b"".join(b.to_bytes(size, "little") for b in bits), np.uint8).reshape(len(bits), size)
    return np.unpackbits(packed, axis=1, count=width, bitorder="little").view(np.bool_)


def share(first: Numbers, last: Numbers, own: Flags, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where the row of each register starts, in units from 0, and how many units there are.

    Args:
        first, last: as `lifetimes` gives them.
        own: registers that share with nobody.
        sizes: units of each register's row.
    """
    places, used = [0] * len(sizes), 0
    free: dict[int, list[int]] = {}  # by size: rows whose register is dead
    alive: list[tuple[int, int, int]] = []  # (last, size, place)
    starts, ends, alone = first.tolist(), last.tolist(), own.tolist()
    for register in np.lexsort((last, first)).tolist():
        size, start = sizes[register], starts[register]
        while alive and alive[0][0] < start:
            _, width, place = heappop(alive)
            heappush(free.setdefault(width, []), place)
        if alone[register] or not free.get(size):
            places[register], used = used, used + size
        else:
            places[register] = heappop(free[size])
        if not alone[register]:
            heappush(alive, (ends[register], size, places[register]))
    return places, used
