"""How many bytes a block has asked of memory at a time: what Little's law needs, read off a run and its PTX.

In the hottest loop of the kernel, where nearly all bytes come from:

    asynchronous copies   bytes of a trip x groups that its wait leaves open, that which it waits for included
    plain loads           the most bytes that are loaded before the first of them is used, in the order of the PTX

ptxas may move a plain load ahead of a use that it does not depend on, so the second is a lower bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .vgpu.report import SiteReport, StepReport

_REGISTER = re.compile(r"%[a-z]+\d+")
_STORES = ("st", "atom", "red")


def bytes_in_flight(report: StepReport, ptx: str, warps: int) -> float:
    """Bytes that one block of `warps` warps keeps in flight; 0 where nothing was loaded.

    Args:
        report: of a run in which the kernel's main loop ran.
        ptx: what ran.
        warps: of a block.
    """
    loads = [s for s in report.sites if s.sectors and s.executed and not s.instruction.startswith(_STORES)]
    if not loads:
        return 0.0
    trips = max(loads, key=lambda s: s.bytes).executed  # of all warps
    hot = [s for s in loads if s.executed >= trips / 2]
    lines = ptx.splitlines()
    copies = [s for s in hot if s.instruction.startswith("cp.async")]
    plain = [s for s in hot if not s.instruction.startswith("cp.async")]
    of_copies = sum(s.bytes for s in copies) / trips * _open_groups(report.sites, lines, trips)
    return (of_copies + _before_use(plain, lines)) * warps


def _open_groups(sites: Iterable[SiteReport], lines: Sequence[str], trips: int) -> float:
    """Trips whose copies are open when the loop waits."""
    hot = [s for s in sites if s.executed >= trips / 2]
    commits = sum(s.instruction.startswith("cp.async.commit") for s in hot)
    waits = [_operand(lines[s.line - 1]) for s in hot if s.instruction.startswith("cp.async.wait_group")]
    left_open = max(waits, default=0)
    return 1.0 + left_open / max(1, commits)


def _operand(line: str) -> int:
    found = re.search(r"(\d+)\s*;", line)
    return int(found[1]) if found else 0


def _before_use(loads: Sequence[SiteReport], lines: Sequence[str]) -> float:
    """The most bytes of a warp that are loaded before the first of them is used."""
    if not loads:
        return 0.0
    by_line = {site.line: site.bytes / site.executed for site in loads}
    first, last = min(by_line), max(by_line)
    most, open_, pending = 0.0, 0.0, set[str]()
    for number in range(first, last + 1):
        registers = _REGISTER.findall(lines[number - 1])
        if number in by_line:
            targets, sources = registers[:-1], registers[-1:]
        else:
            targets, sources = [], registers
        if pending.intersection(sources):
            open_, pending = 0.0, set()
        if number in by_line:
            open_ += by_line[number]
            pending |= set(targets)
        most = max(most, open_)
    return most
