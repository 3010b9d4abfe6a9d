"""Emitted instructions -> `Program`: places rows, resolves labels, fills the table that the core reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .emitter import Emitter
from .load_uses import load_uses
from .program import INSTRUCTION, MAX_OPS, NUM_P, Operation, Program
from .ptx_module import Instruction
from .register_rows import Steps, accesses, lifetimes, share

_ENDS = ("bra", "exit", "trap")


class _Columns(NamedTuple):
    """What was emitted, by column."""

    operations: tuple[Operation, ...]
    instructions: tuple[Instruction, ...]
    guards: tuple[int, ...]
    negated: tuple[bool, ...]
    reads: tuple[list[int], ...]
    writes: tuple[list[int], ...]


def _place_rows(e: Emitter, columns: _Columns, targets: Sequence[int]) -> tuple[npt.NDArray[np.int64], int]:
    """Where each row of the emitter goes in a warp's register file, and the file's size."""
    registers = np.full(e.num_units, -1)
    rows = np.array(e.register_rows, np.int64)
    registers[rows] = np.arange(len(rows))
    guarded = {id(writes) for writes, guard in zip(columns.writes, columns.guards, strict=True) if guard >= 0}
    pairs = zip(columns.operations, columns.guards, strict=True)
    steps = Steps(
        reads=accesses(columns.reads, registers),
        writes=accesses(columns.writes, registers),
        certain=[id(writes) not in guarded for writes in columns.writes],
        goes_on=[guard >= 0 or operation.key not in _ENDS for operation, guard in pairs],
        targets=targets,
    )
    first, last, own = lifetimes(steps, len(rows))
    sizes = e.row_sizes
    shared, num_shared = share(first, last, own, [sizes[row] for row in e.register_rows])
    places, used = np.zeros(e.num_units, np.int64), 0
    alone = registers.tolist()
    for row, size in sizes.items():
        if alone[row] < 0:
            places[row], used = used, used + size
    places[rows] = used + np.array(shared, np.int64)
    return places, used + num_shared


def _padded(rows: Sequence[Sequence[int]], width: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Rows filled up with zeros, and which numbers were given."""
    counts = list(map(len, rows))
    padded = np.zeros((len(rows), width), np.int32)
    given = np.arange(width) < np.array(counts)[:, None]
    padded[given] = np.fromiter(chain.from_iterable(rows), np.int32, sum(counts))
    return padded, given


def assemble(e: Emitter) -> Program:
    """The program of what was emitted."""
    columns = _Columns(*zip(*e.emitted, strict=True))
    key, ops, p, imm, cls, target = zip(*columns.operations, strict=True)
    opcodes, _, lines, _, _, sources = zip(*columns.instructions, strict=True)
    targets = [e.labels[label] if label else -1 for label in target]
    places, num_units = _place_rows(e, columns, targets)
    keys = {name: index for index, name in enumerate(dict.fromkeys(key))}
    guards = np.array(columns.guards)
    rows, given = _padded(ops, MAX_OPS)
    code = np.zeros(len(e.emitted), INSTRUCTION)
    code["key"] = [keys[name] for name in key]
    code["guard"] = np.where(guards >= 0, places[guards], -1)
    code["guard_negated"] = columns.negated
    code["num_ops"] = given.sum(1)
    code["ops"] = np.where(given, places[rows], 0)
    code["p"], _ = _padded(p, NUM_P)
    code["imm"] = imm
    code["line"] = lines
    code["cls"] = cls
    code["target"] = targets
    use_starts, uses = load_uses(e.emitted)
    code["waits"] = np.diff(use_starts) > 0
    directives = e.entry.directives
    block = directives.get("reqntid", ())
    limit = directives.get("maxntid", block)
    return Program(
        entry=e.entry.name,
        target=e.module.target,
        code=code,
        keys=tuple(keys),
        opcodes=opcodes,
        lines=lines,
        sources=sources,
        num_units=num_units,
        consts=tuple((int(places[unit]), width, value) for unit, width, value in e.consts),
        specials=tuple(int(places[unit]) if unit >= 0 else -1 for unit in e.specials),
        params=tuple(e.params.values()),
        static_shared=e.static_shared,
        local_bytes=-(-e.local_bytes // 16) * 16,
        use_starts=use_starts,
        uses=uses,
        variables=e.variables,
        block=block,
        max_threads=int(np.prod(limit)) if limit else 0,
        uses_dynamic_shared=any(v.space == "shared" and not v.num_bytes for v in e.module.variables.values()),
    )
