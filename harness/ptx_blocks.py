"""The PTX of a launch as basic blocks with executions, and the instructions that are found again in machine code."""

from __future__ import annotations

from collections.abc import Sequence

from .flow import analyse
from .vgpu.report import SiteReport

# PTX prefix -> machine opcode, where one gives one.
_ANCHORS = (
    ("mma.sync.aligned.m16n8k16.row.col.f32.f16", "HMMA"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.bf16", "HMMA"),
    ("ldmatrix", "LDSM"),
    ("stmatrix", "STSM"),
    ("cp.async.commit_group", "LDGDEPBAR"),
    ("cp.async.wait", ""),
    ("cp.async", "LDGSTS"),
    ("bar.", "BAR"),
    ("barrier.", "BAR"),
    ("shfl", "SHFL"),
    ("redux", "REDUX"),
    ("ex2", "MUFU.EX2"),
    ("lg2", "MUFU.LG2"),
    ("tanh", "MUFU.TANH"),
    ("ld.shared", "LDS"),
    ("st.shared", "STS"),
    ("ld.global", "LDG"),
    ("st.global", "STG"),
    ("atom.global", "ATOMG"),
    ("red.global", "RED"),
)
MACHINE_NAMES = {name for _, name in _ANCHORS if name}


class PtxBlocks:
    """Blocks of the PTX in order, by the sites of a launch.

    `counts` holds each block's executions by warps, `anchors` the machine names of its instructions that have one,
    `flow` the graph.
    """

    def __init__(self, sites: Sequence[SiteReport]) -> None:
        leaders = {0}
        for k, site in enumerate(sites):
            if site.target >= 0 or _ends(site):
                leaders |= {k + 1} | ({site.target} if site.target >= 0 else set())
        starts = sorted(k for k in leaders if k < len(sites))
        where = {start: k for k, start in enumerate(starts)}
        self.blocks = [sites[a:b] for a, b in zip(starts, [*starts[1:], len(sites)], strict=True)]
        edges, finish = [], []
        for k, block in enumerate(self.blocks):
            last = block[-1]
            goes_on = last.guarded or (last.target < 0 and not _ends(last))
            targets = [k + 1] if goes_on and k + 1 < len(starts) else []
            edges.append(targets + ([where[last.target]] if last.target in where else []))
            if _ends(last):
                finish.append(k)
        self.flow = analyse(edges, finish)
        self.counts = [max(site.executed for site in block) for block in self.blocks]
        anchors = [[a for site in block if (a := _anchor(site.instruction))] for block in self.blocks]
        self.anchors: list[list[str]] = anchors

    def iterations(self, loop: int) -> int:
        """Times round a loop, over all warps."""
        return sum(self.counts[latch] for latch in self.flow.loops[loop].latches)

    def entered(self, loop: int) -> int:
        """Times that the loop was started."""
        found = self.flow.loops[loop]
        back = sum(
            self.blocks[b][-1].executed if self.blocks[b][-1].target >= 0 else self.counts[b] for b in found.latches
        )
        return max(0, self.counts[found.header] - back)

    def line(self, loop: int) -> int:
        """PTX line of a loop's header."""
        return self.blocks[self.flow.loops[loop].header][0].line


def _ends(site: SiteReport) -> bool:
    return site.target < 0 and site.instruction.partition(".")[0] in ("ret", "exit", "trap")


def _anchor(instruction: str) -> str:
    return next((name for prefix, name in _ANCHORS if instruction.startswith(prefix)), "")
