"""Emitted instructions -> `Program`: places rows, resolves labels, fills the table that the core reads."""

from __future__ import annotations

import numpy as np

from .emitter import Emitter
from .load_uses import load_uses
from .program import INSTRUCTION, MAX_OPS, NUM_P, Program
from .register_rows import Step, lifetimes, share


def _place_rows(e: Emitter) -> tuple[dict[int, int], int]:
    """Where each row of the emitter goes in a warp's register file, and the file's size."""
    registers = {row: k for k, row in enumerate(e.register_rows)}
    guarded = {id(item.writes) for item in e.emitted if item.guard >= 0}
    steps = []
    for item in e.emitted:
        key = item.operation.key
        steps.append(
            Step(
                reads=sum(1 << registers[row] for row in item.reads),
                writes=sum(1 << registers[row] for row in item.writes),
                certain=id(item.writes) not in guarded,
                goes_on=item.guard >= 0 or key not in ("bra", "exit", "trap"),
                target=e.labels[item.operation.target] if item.operation.target else -1,
            )
        )
    sizes = e.row_sizes
    lives, own = lifetimes(steps, len(registers))
    shared, num_shared = share(lives, own, [sizes[row] for row in registers])
    places, used = {}, 0
    for row, size in sizes.items():
        if row not in registers:
            places[row], used = used, used + size
    places |= {row: used + shared[k] for row, k in registers.items()}
    return places, used + num_shared


def assemble(e: Emitter) -> Program:
    """The program of what was emitted."""
    keys: dict[str, int] = {}
    places, num_units = _place_rows(e)
    code = np.zeros(len(e.emitted), INSTRUCTION)
    operations = [item.operation for item in e.emitted]
    code["key"] = [keys.setdefault(o.key, len(keys)) for o in operations]
    code["guard"] = [places[item.guard] if item.guard >= 0 else -1 for item in e.emitted]
    code["guard_negated"] = [item.guard_negated for item in e.emitted]
    code["num_ops"] = [len(o.ops) for o in operations]
    code["ops"] = [(*(places[row] for row in o.ops), *(0,) * (MAX_OPS - len(o.ops))) for o in operations]
    code["p"] = [(*o.p, *(0,) * (NUM_P - len(o.p))) for o in operations]
    code["imm"] = [o.imm for o in operations]
    code["line"] = [item.instruction.line for item in e.emitted]
    code["cls"] = [int(o.cls) for o in operations]
    code["target"] = [e.labels[o.target] if o.target else -1 for o in operations]
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
        consts=tuple((places[unit], width, value) for unit, width, value in e.consts),
        specials=tuple(places[unit] if unit >= 0 else -1 for unit in e.specials),
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
