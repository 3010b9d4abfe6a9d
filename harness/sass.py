"""The machine code of a cubin: instructions by class, basic blocks, loops, spills. Read with NVIDIA's `cuobjdump`."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pagedtune.kernels.cubin import find_cuda_tool

from .flow import Flow, analyse
from .sass_class import SassClass, class_of

_ENDS = ("EXIT", "RET", "BRX", "BRXU", "JMX", "KILL")
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(@!?U?P[0-9T]+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")


class SassError(RuntimeError):
    """Machine code that cannot be read; the message says what is missing."""


@dataclass(frozen=True)
class SassInstruction:
    """One machine instruction: offset, guard (e.g. `@!P0`, or ""), opcode with modifiers, and operands as written."""

    address: int
    guard: str
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def cls(self) -> SassClass:
        """What it keeps busy."""
        return class_of(self.name)

    @property
    def target(self) -> int | None:
        """Where it branches to or calls, None for other instructions."""
        if self.name not in ("BRA", "CALL", "JMP"):
            return None
        match = _TARGET.search(self.operands)
        return int(match[1], 16) if match else None

    @property
    def conditional(self) -> bool:
        """Whether the next instruction may follow a branch: guarded, or with a condition as its first operand."""
        return bool(self.guard) or bool(re.match(r"!?U?P\d", self.operands))


@dataclass(frozen=True)
class SassKernel:
    """One entry's machine code.

    Args:
        entry: symbol.
        blocks: basic blocks in address order. Copies of code for warps that have diverged (`BRA.DIV`) and what
            nothing leads to are left out; functions called (e.g. of a division) come after the entry's own blocks.
        flow: its graph over the entry's own blocks; calls lead on to the next instruction.
        calls: by block that calls a function, the first block of that function.
    """

    entry: str
    blocks: tuple[tuple[SassInstruction, ...], ...]
    flow: Flow
    calls: Mapping[int, int]

    @property
    def num_instructions(self) -> int:
        """Instructions of all blocks."""
        return sum(len(block) for block in self.blocks)

    @property
    def counts(self) -> dict[SassClass, int]:
        """Instructions by class."""
        return dict(Counter(i.cls for block in self.blocks for i in block))

    @property
    def spills(self) -> int:
        """Loads and stores of local memory: registers that did not fit, or arrays indexed at run time."""
        return self.counts.get(SassClass.LOCAL, 0)

    @property
    def main_loop(self) -> int:
        """Instructions of the longest innermost loop, 0 where there is no loop."""
        inner = [k for k in range(len(self.flow.loops)) if all(o.parent != k for o in self.flow.loops)]
        return max((sum(len(self.blocks[b]) for b in self.flow.loops[k].blocks) for k in inner), default=0)


def disassemble(cubin: Path) -> dict[str, SassKernel]:
    """The kernels of a cubin by entry.

    Raises:
        SassError: `cuobjdump` is missing or does not understand the file.
        OSError: the file cannot be read.
    """
    return dict(_disassemble(cubin.read_bytes(), str(cubin)))


@lru_cache(maxsize=64)
def _disassemble(data: bytes, path: str) -> dict[str, SassKernel]:
    tool = find_cuda_tool("cuobjdump")
    if tool is None:
        raise SassError("cuobjdump is missing: install Triton, whose wheel has it, or set CUDA_HOME")
    done = subprocess.run([str(tool), "-sass", path], capture_output=True, text=True, timeout=120, check=False)
    kernels = parse_sass(done.stdout)
    if not kernels:
        tail = done.stderr.strip().splitlines()[-1:] or ["no function in its output"]
        raise SassError(f"cuobjdump finds no machine code in {path} ({len(data)} bytes): {tail[0]}")
    return kernels


def parse_sass(text: str) -> dict[str, SassKernel]:
    """The kernels in the output of `cuobjdump -sass`, by entry."""
    out = {}
    starts = list(_FUNCTION.finditer(text))
    for k, start in enumerate(starts):
        end = starts[k + 1].start() if k + 1 < len(starts) else len(text)
        code = [
            SassInstruction(int(m[1], 16), (m[2] or "").strip(), m[3], m[4].strip())
            for m in _LINE.finditer(text, start.end(), end)
        ]
        if code:
            out[start[1]] = _build(start[1], code)
    return out


def _build(entry: str, code: Sequence[SassInstruction]) -> SassKernel:
    index = {i.address: k for k, i in enumerate(code)}
    functions = {t for i in code if i.name == "CALL" and (t := index.get(i.target or -1)) and _returns(code, index, t)}
    own = _reach(code, index, 0, functions)
    spans, order = _spans(code, index, sorted(own), functions), []
    order += spans
    for function in sorted(functions):
        order += _spans(code, index, sorted(_reach(code, index, function, functions) - own), functions)
    where = {span[0]: k for k, span in enumerate(order)}
    edges = [[where[t] for t in _next(code, index, span[-1], functions) if t in where] for span in order]
    calls = {
        k: where[index[code[span[-1]].target or 0]]
        for k, span in enumerate(order)
        if code[span[-1]].name == "CALL" and index.get(code[span[-1]].target or -1) in functions
    }
    blocks = tuple(tuple(code[k] for k in span) for span in order)
    ends = [k for k, span in enumerate(order) if code[span[-1]].name in _ENDS]
    return SassKernel(entry, blocks, analyse(edges, ends), calls)


def _next(code: Sequence[SassInstruction], index: Mapping[int, int], at: int, functions: set[int]) -> list[int]:
    """Instructions that may follow; a call of a function comes back, any other call is a jump."""
    i = code[at]
    out = []
    target = index.get(i.target) if i.target is not None else None
    if target is not None and target not in functions and ".DIV" not in i.opcode:
        out.append(target)
    jumps = i.name in ("BRA", "JMP") or (i.name == "CALL" and target not in functions)
    ends = jumps or i.name in _ENDS
    if (not ends or i.conditional or ".DIV" in i.opcode) and at + 1 < len(code):
        out.append(at + 1)
    return out


def _reach(code: Sequence[SassInstruction], index: Mapping[int, int], start: int, functions: set[int]) -> set[int]:
    seen: set[int] = set()
    stack = [start]
    while stack:
        at = stack.pop()
        if at not in seen:
            seen.add(at)
            stack += _next(code, index, at, functions)
    return seen


def _returns(code: Sequence[SassInstruction], index: Mapping[int, int], start: int) -> bool:
    """Whether what lies at a call's target comes back; calls inside it are taken to come back."""
    others = {index[t] for i in code if i.name == "CALL" and (t := i.target) is not None and t in index} - {start}
    return any(code[k].name == "RET" for k in _reach(code, index, start, others))


def _spans(
    code: Sequence[SassInstruction], index: Mapping[int, int], reached: Sequence[int], functions: set[int]
) -> list[list[int]]:
    leaders = {reached[0]} if reached else set()
    for at in reached:
        following = _next(code, index, at, functions)
        if following != [at + 1] or code[at].name in ("CALL", *_ENDS):
            leaders |= {at + 1, *following}
    spans: list[list[int]] = []
    for at in reached:
        if at in leaders or not spans or spans[-1][-1] != at - 1:
            spans.append([])
        spans[-1].append(at)
    return spans
