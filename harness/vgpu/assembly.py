"""Emitted instructions -> `Program`: places rows, resolves labels, fills the table that the core reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from .emitter import Emitter
from .load_uses import load_uses
from .program import INSTRUCTION, MAX_OPS, NUM_P, Program
from .register_rows import Steps, lifetimes, share

_ENDS = ("bra", "exit", "trap")


def _place_rows(e: Emitter) -> tuple[npt.NDArray[np.int64], int]:
    """Where each row of the emitter goes in a warp's register file, and the file's size."""
    registers = np.full(e.num_units, -1)
    rows = np.array(e.register_rows, np.int64)
    registers[rows] = np.arange(len(rows))
    number = registers.tolist().__getitem__
    guarded = {id(item.writes) for item in e.emitted if item.guard >= 0}
    first, last, own = lifetimes(
        Steps(
            reads=[list(map(number, item.reads)) for item in e.emitted],
            writes=[list(map(number, item.writes)) for item in e.emitted],
            certain=[id(item.writes) not in guarded for item in e.emitted],
            goes_on=[item.guard >= 0 or item.operation.key not in _ENDS for item in e.emitted],
            targets=_targets(e),
        ),
        len(rows),
    )
    sizes = e.row_sizes
    shared, num_shared = share(first, last, own, [sizes[row] for row in e.register_rows])
    places, used = np.zeros(e.num_units, np.int64), 0
    for row, size in sizes.items():
        if registers[row] < 0:
            places[row], used = used, used + size
    places[rows] = used + np.array(shared, np.int64)
    return places, used + num_shared


def _targets(e: Emitter) -> list[int]:
    return [e.labels[item.operation.target] if item.operation.target else -1 for item in e.emitted]


def _padded(rows: Sequence[Sequence[int]], width: int) -> npt.NDArray[np.int32]:
    """Rows filled up with zeros."""
    counts = [len(row) for row in rows]
    padded = np.zeros((len(rows), width), np.int32)
    padded[np.arange(width) < np.array(counts)[:, None]] = np.fromiter(chain.from_iterable(rows), np.int32, sum(counts))
    return padded


def assemble(e: Emitter) -> Program:
    """The program of what was emitted."""
    keys: dict[str, int] = {}
    places, num_units = _place_rows(e)
    code = np.zeros(len(e.emitted), INSTRUCTION)
    operations = [item.operation for item in e.emitted]
    guards = np.array([item.guard for item in e.emitted])
    code["key"] = [keys.setdefault(o.key, len(keys)) for o in operations]
    code["guard"] = np.where(guards >= 0, places[guards], -1)
    code["guard_negated"] = [item.guard_negated for item in e.emitted]
    code["num_ops"] = num_ops = np.array([len(o.ops) for o in operations])
    given = np.arange(MAX_OPS) < num_ops[:, None]
    code["ops"] = np.where(given, places[_padded([o.ops for o in operations], MAX_OPS)], 0)
    code["p"] = _padded([o.p for o in operations], NUM_P)
    code["imm"] = [o.imm for o in operations]
    code["line"] = [item.instruction.line for item in e.emitted]
    code["cls"] = [o.cls for o in operations]
    code["target"] = _targets(e)
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
        opcodes=tuple(i.instruction.opcode for i in e.emitted),
        lines=tuple(i.instruction.line for i in e.emitted),
        sources=tuple(i.instruction.source for i in e.emitted),
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
