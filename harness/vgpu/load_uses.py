"""Which instructions read the result of a global load: there a warp waits for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .emitter import Emitted
from .program import InstructionClass


def load_uses(emitted: Sequence[Emitted]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """By instruction, where its part of the second array starts (one more entry than instructions); and the loads.

    A move hands the result on without waiting: assemblers make it disappear.
    """
    loads: dict[int, set[int]] = {}  # by register row
    for k, item in enumerate(emitted):
        if item.operation.key == "ld" and item.operation.cls is InstructionClass.GLOBAL:
            for row in item.writes:
                loads.setdefault(row, set()).add(k)
    if loads:
        _follow_moves([item for item in emitted if item.operation.cls is InstructionClass.MOVE], loads)
    starts, uses = [0], []
    untouched = loads.keys().isdisjoint
    for item in emitted:
        if not untouched(item.reads) and item.operation.cls is not InstructionClass.MOVE:
            uses += sorted(set().union(*(loads[row] for row in item.reads if row in loads)))
        starts.append(len(uses))
    return np.array(starts, np.int32), np.array(uses, np.int32)


def _follow_moves(moves: Sequence[Emitted], loads: dict[int, set[int]]) -> None:
    """Adds the rows that moves bring results to."""
    changed = True
    while changed:
        changed = False
        for item in moves:
            if loads.keys().isdisjoint(item.reads):
                continue
            held: set[int] = set().union(*(loads[row] for row in item.reads if row in loads))
            for row in item.writes:
                reached = loads.setdefault(row, set())
                if not held <= reached:
                    reached |= held
                    changed = True
