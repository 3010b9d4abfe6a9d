"""Issue slots of a launch: machine instructions of the cubin x how often the virtual GPU saw their PTX run.

Loops of the PTX are paired with loops of the binary by nesting, order and the instructions that survive assembly one
for one (anchors). A block of the binary with an anchor runs as often as its counterpart's block, divided by the
unrolling; others as a block that runs equally often, or between 0 and the count of their dominator.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .flow import Flow
from .ptx_blocks import MACHINE_NAMES, PtxBlocks
from .sass import SassError, SassKernel, disassemble
from .vgpu.report import SiteReport, StepReport


@dataclass(frozen=True)
class LoopMatch:
    """A loop of the PTX beside its counterpart in the binary.

    Args:
        line: PTX line of its header.
        address: offset of the counterpart's header in the machine code, -1 without one.
        iterations: times round, over all warps.
        unroll: PTX iterations in one of the binary's.
        instructions: machine instructions of one time round, inner loops left out.
        matched: whether a counterpart was found.
        reason: why not, or what the match rests on.
    """

    line: int
    address: int
    iterations: int
    unroll: int
    instructions: int
    matched: bool
    reason: str


@dataclass(frozen=True)
class IssueSlots:
    """Warp instructions that a launch issues on the machine.

    Args:
        total: the estimate; `low` and `high` bound it by the blocks whose count is not known.
        by_class: the estimate by class of `SassClass`.
        loops: every loop of the PTX.
        main_loop: machine instructions of one time round the loop that issues most, 0 without loops.
        spills: of these, loads and stores of local memory.
        matched: whether every loop that ran was found.
        reason: which was not, and why.
    """

    total: int
    low: int
    high: int
    by_class: Mapping[str, int]
    loops: tuple[LoopMatch, ...]
    main_loop: int
    spills: int
    matched: bool
    reason: str = ""


def issue_slots(cubin: Path, entry: str, report: StepReport) -> IssueSlots:
    """The issue slots of one launch of `entry`, from the binary and the virtual GPU's counts.

    Raises:
        SassError: the binary cannot be read, or has no such entry.
    """
    kernels = disassemble(cubin)
    if entry not in kernels:
        raise SassError(f"{cubin.name} has no entry {entry!r}; it has {', '.join(sorted(kernels))}")
    return count_slots(kernels[entry], report.sites)


def count_slots(kernel: SassKernel, sites: Sequence[SiteReport]) -> IssueSlots:
    """As `issue_slots`, of code that has been read."""
    return _Matcher(kernel, PtxBlocks(sites)).result()


def _sass_anchors(kernel: SassKernel) -> list[list[str]]:
    def name(opcode: str) -> str:
        words = opcode.split(".")
        return next((n for n in (".".join(words[:2]), words[0]) if n in MACHINE_NAMES), "")

    return [[n for i in block if (n := name(i.opcode))] for block in kernel.blocks]


def _nearly_whole(ratio: float) -> float:
    """A ratio of counts as the whole number that it is all but: the assembler splits a few accesses in two."""
    whole = round(ratio)
    return float(whole) if abs(ratio - whole) <= 0.05 * whole else ratio


class _Matcher:
    def __init__(self, kernel: SassKernel, ptx: PtxBlocks) -> None:
        self.kernel, self.ptx = kernel, ptx
        self.anchors = _sass_anchors(kernel)
        self.evidence: dict[int, int] = {}  # executions by block of the binary
        self.rounds: dict[int, int] = {-1: ptx.counts[0]}  # iterations by loop of the binary; -1: warps
        self.matches: dict[int, LoopMatch] = {}
        self._pair_level(-1, -1)
        self._read_anchors(-1, -1, 1)

    # ---- loops
    def _pair_level(self, ptx_parent: int, sass_parent: int) -> None:
        """Pairs the loops right inside two paired loops, in order: the pairing with the most anchors in agreement."""
        ours = [k for k, loop in enumerate(self.ptx.flow.loops) if loop.parent == ptx_parent]
        theirs = [k for k, loop in enumerate(self.kernel.flow.loops) if loop.parent == sass_parent]
        best: dict[tuple[int, int], tuple[float, tuple[tuple[int, int, int], ...]]] = {}
        for a in range(len(ours), -1, -1):
            for b in range(len(theirs), -1, -1):
                if a == len(ours) or b == len(theirs):
                    best[a, b] = (0.0, ())
                    continue
                options = [best[a + 1, b], best[a, b + 1]]
                for n in (1, 2, 3):  # an unrolled loop leaves a remainder
                    if b + n <= len(theirs) and (score := self._agreement(ours[a], theirs[b : b + n])) > 0:
                        rest, pairs = best[a + 1, b + n]
                        options.append((score + rest, ((a, b, n), *pairs)))
                best[a, b] = max(options, key=lambda o: o[0])
        for a, b, n in best[0, 0][1]:
            self._pair(ours[a], theirs[b : b + n])
        for k in ours:
            if k not in self.matches:
                self._give_up(k, "no loop of the binary has its instructions: unrolled away, merged or split")

    def _histogram(self, flow: Flow, anchors: Sequence[Sequence[str]], loop: int) -> Counter[str]:
        return Counter(a for block in flow.loops[loop].blocks for a in anchors[block])

    def _ratios(self, ours: int, theirs: int) -> Counter[float]:
        p = self._histogram(self.ptx.flow, self.ptx.anchors, ours)
        s = self._histogram(self.kernel.flow, self.anchors, theirs)
        out: Counter[float] = Counter()
        for name in p.keys() | s.keys():
            out[_nearly_whole(s[name] / p[name]) if p[name] else 0.0] += max(p[name], s[name])
        return out

    def _unroll(self, ours: int, theirs: int) -> int:
        """PTX iterations in one of the binary's; 0 where the anchors do not agree on a whole number."""
        ratios = self._ratios(ours, theirs)
        if not ratios:
            return 1
        ratio, weight = ratios.most_common(1)[0]
        agreed = 2 * weight >= sum(ratios.values())
        return int(ratio) if agreed and ratio >= 1 and ratio == int(ratio) else 0

    def _agreement(self, ours: int, theirs: Sequence[int]) -> float:
        unrolls = [self._unroll(ours, t) for t in theirs]
        if 0 in unrolls or (len(theirs) > 1 and unrolls != sorted(set(unrolls), reverse=True)):
            return 0.0
        agreed = sum(self._ratios(ours, t)[float(u)] for t, u in zip(theirs, unrolls, strict=True))
        nested = len([o for o in self.ptx.flow.loops if o.parent == ours])
        same_shape = nested == len([o for o in self.kernel.flow.loops if o.parent == theirs[0]])
        return 0.5 + 0.25 * same_shape + agreed

    def _pair(self, ours: int, theirs: Sequence[int]) -> None:
        left, entered = self.ptx.iterations(ours), self.ptx.entered(ours)
        total, unrolls = left, [self._unroll(ours, t) for t in theirs]
        for k, (loop, unroll) in enumerate(zip(theirs, unrolls, strict=True)):
            each = left / entered if entered else 0.0
            self.rounds[loop] = left // unroll if k == len(theirs) - 1 else int(each // unroll) * entered
            left -= self.rounds[loop] * unroll
        body = sum(len(self.kernel.blocks[b]) for b in self._own_blocks(self.kernel.flow, theirs[0]))
        weight = sum(self._ratios(ours, theirs[0]).values())
        reason = f"{weight} instructions agree" if weight else "by its place among the loops alone"
        if len(theirs) > 1:
            reason += f"; split by the assembler, unrolled {' and '.join(map(str, unrolls))} times"
        address = self.kernel.blocks[self.kernel.flow.loops[theirs[0]].header][0].address
        self.matches[ours] = LoopMatch(self.ptx.line(ours), address, total, unrolls[0], body, True, reason)
        for loop, unroll in zip(theirs, unrolls, strict=True):
            self._read_anchors(ours, loop, unroll)
        self._pair_level(ours, theirs[0])

    def _give_up(self, loop: int, reason: str) -> None:
        self.matches[loop] = LoopMatch(self.ptx.line(loop), -1, self.ptx.iterations(loop), 1, 0, False, reason)
        for k, inner in enumerate(self.ptx.flow.loops):
            if inner.parent == loop:
                self._give_up(k, "the loop around it was not found")

    def _own_blocks(self, flow: Flow, loop: int) -> list[int]:
        return [b for b in range(len(flow.successors)) if flow.loop_of[b] == loop and flow.dominators[b]]

    # ---- blocks
    def _read_anchors(self, ours: int, theirs: int, unroll: int) -> None:
        """Takes executions from the anchors right inside two paired loops (-1: outside of all)."""
        p: dict[str, list[int]] = defaultdict(list)
        s: dict[str, list[int]] = defaultdict(list)
        for block in self._own_blocks(self.ptx.flow, ours):
            for name in self.ptx.anchors[block]:
                p[name].append(self.ptx.counts[block])
        for block in self._own_blocks(self.kernel.flow, theirs):
            for name in self.anchors[block]:
                s[name].append(block)
        share = self.rounds[theirs] / max(1, self.ptx.iterations(ours)) if ours >= 0 else 1.0
        for name, blocks in s.items():
            if len(blocks) != unroll * len(p[name]):
                continue
            for k, block in enumerate(blocks):
                count = round(p[name][k % len(p[name])] * share)
                self.evidence[block] = max(count, self.evidence.get(block, 0))

    def _block_counts(self) -> tuple[list[int], list[int]]:
        """Least and most executions of each block of the binary."""
        flow = self.kernel.flow
        n = len(self.kernel.blocks)
        low, high = [0] * n, [0] * n
        known = dict(self.evidence)
        for loop, rounds in self.rounds.items():
            start = 0 if loop < 0 else flow.loops[loop].latches[0]
            known.setdefault(start, rounds)
        for block in range(n):
            if not flow.dominators[block]:
                continue
            same = [known[b] for b in known if flow.equivalent(b, block)]
            if same:
                low[block] = high[block] = max(same)
                continue
            loop, above = flow.loop_of[block], flow.nearest_dominator(block)
            inside = above >= 0 and flow.loop_of[above] == loop
            high[block] = high[above] if inside else self.rounds.get(loop, high[above] if above >= 0 else 0)
        for caller, function in sorted(self.kernel.calls.items()):
            for block in self._function_blocks(function):
                high[block] += high[caller]
        return low, high

    def _function_blocks(self, start: int) -> list[int]:
        seen: set[int] = set()
        stack = [start]
        while stack:
            block = stack.pop()
            if block not in seen:
                seen.add(block)
                stack += self.kernel.flow.successors[block]
        return sorted(seen)

    def result(self) -> IssueSlots:
        low, high = self._block_counts()
        by_class: Counter[str] = Counter()
        for block, count in zip(self.kernel.blocks, high, strict=True):
            for i in block:
                by_class[i.cls.value] += count
        loops = tuple(self.matches[k] for k in sorted(self.matches))
        busiest = max(loops, key=lambda m: m.iterations // m.unroll * m.instructions, default=None)
        lost = [f"the loop at PTX line {m.line}: {m.reason}" for m in loops if not m.matched and m.iterations]
        return IssueSlots(
            total=sum(by_class.values()),
            low=sum(n * len(b) for n, b in zip(low, self.kernel.blocks, strict=True)),
            high=sum(n * len(b) for n, b in zip(high, self.kernel.blocks, strict=True)),
            by_class={name: count for name, count in sorted(by_class.items()) if count},
            loops=loops,
            main_loop=busiest.instructions if busiest else 0,
            spills=by_class["local"],
            matched=not lost,
            reason="; ".join(lost),
        )
