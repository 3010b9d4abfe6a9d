"""Which instructions read the result of a global load: there a warp waits for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .emitter import Emitted
from .program import InstructionClass


def load_uses(emitted: Sequence[Emitted]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """By instruction, where its part of the second array starts (one more entry than instructions); and the loads.

    A move hands the result on without waiting: assemblers make it disappear.
    """
    moves = [item for item in emitted if item.operation.cls is InstructionClass.MOVE]
    loads: dict[int, set[int]] = defaultdict(set)  # by register row
    for k, item in enumerate(emitted):
        if item.operation.key == "ld" and item.operation.cls is InstructionClass.GLOBAL:
            for row in item.writes:
                loads[row].add(k)
    changed = bool(loads)
    while changed:
        changed = False
        for item in moves:
            held: set[int] = set().union(*(loads[row] for row in item.reads if row in loads))
            for row in item.writes if held else ():
                if not held <= loads[row]:
                    loads[row] |= held
                    changed = True
    starts, uses = [0], []
    for item in emitted:
        if item.operation.cls is not InstructionClass.MOVE:
            uses += sorted(set().union(*(loads[row] for row in item.reads if row in loads)))
        starts.append(len(uses))
    return np.array(starts, np.int32), np.array(uses, np.int32)
