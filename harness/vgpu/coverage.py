"""Which instructions of a PTX text the virtual GPU runs: `python -m pagedtune.harness.vgpu.coverage FILE.ptx ...`

Without a file, all forms that it runs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from .core_library import core
from .decoder import decode_one
from .emitter import Emitter
from .forms import all_forms
from .program import LOCAL_START
from .ptx_module import Instruction
from .ptx_parser import parse
from .ptx_tokens import PtxError


def coverage(ptx: str) -> tuple[Counter[str], dict[str, str]]:
    """Occurrences of every opcode, and for those that cannot run, why not.

    Raises:
        PtxError: the text does not parse.
    """
    module = parse(ptx)
    handlers = set(core().handlers())
    counts: Counter[str] = Counter()
    missing: dict[str, str] = {}
    for function in module.functions.values():
        emitter = Emitter(module, function)
        emitter.lay_out_shared()
        if not function.is_entry:
            emitter.frame.params = {v.name: LOCAL_START for v in (*function.results, *function.params)}
        for item in function.body:
            if not isinstance(item, Instruction):
                continue
            counts[item.opcode] += 1
            if item.opcode.partition(".")[0] in ("call", "ret"):
                continue  # inlined
            first = len(emitter.emitted)
            try:
                decode_one(emitter, item)
            except PtxError as error:
                missing.setdefault(item.opcode, str(error))
                continue
            unknown = next((e.operation.key for e in emitter.emitted[first:] if e.operation.key not in handlers), None)
            if unknown is not None:
                missing.setdefault(item.opcode, f"no handler {unknown}")
    return counts, missing


def table(texts: Iterable[str]) -> str:
    """Opcodes of all texts with their counts; those that cannot run say why."""
    counts: Counter[str] = Counter()
    missing: dict[str, str] = {}
    for text in texts:
        found, absent = coverage(text)
        counts += found
        missing |= absent
    rows = [f"{counts[o]:7d}  {o}" + (f"   NOT RUN: {missing[o]}" if o in missing else "") for o in sorted(counts)]
    rows.append(f"{len(counts) - len(missing)} of {len(counts)} opcodes run")
    return "\n".join(rows)


def main() -> None:
    """Prints the table of the files named on the command line, or the list of forms."""
    files = sys.argv[1:]
    text = table(Path(name).read_text() for name in files) if files else "\n".join(sorted(all_forms()))
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
