"""Control flow graphs: dominators, natural loops, and which blocks run equally often. For PTX and for SASS alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Edges = Sequence[Sequence[int]]  # successors by block; block 0 is the entry


@dataclass(frozen=True)
class Loop:
    """A natural loop.

    Args:
        header: block that dominates all others.
        blocks: all blocks, those of inner loops too.
        latches: blocks with an edge back to the header.
        parent: index of the loop around it, -1 at the top.
    """

    header: int
    blocks: frozenset[int]
    latches: tuple[int, ...]
    parent: int = -1


@dataclass(frozen=True)
class Flow:
    """What is known of a graph from its edges alone.

    Args:
        successors: by block.
        dominators: by block, all blocks on every path from the entry to it, itself included; empty if unreachable.
        post_dominators: by block, all blocks on every path from it to an end, itself included.
        loops: by address of the header, outer before inner.
        loop_of: by block, index of its innermost loop, -1 for none.
        irreducible: whether an edge leads back to a block that does not dominate its origin.
    """

    successors: Edges
    dominators: tuple[frozenset[int], ...]
    post_dominators: tuple[frozenset[int], ...]
    loops: tuple[Loop, ...]
    loop_of: tuple[int, ...]
    irreducible: bool

    def equivalent(self, a: int, b: int) -> bool:
        """Whether two reachable blocks run equally often, whatever the branches do."""
        if self.loop_of[a] != self.loop_of[b]:
            return False
        ahead = a in self.dominators[b] and b in self.post_dominators[a]
        return ahead or (b in self.dominators[a] and a in self.post_dominators[b])

    def nearest_dominator(self, block: int) -> int:
        """The last block before `block` on every path to it, -1 for the entry."""
        above = self.dominators[block] - {block}
        return max(above, key=lambda b: len(self.dominators[b]), default=-1)


def analyse(successors: Edges, ends: Sequence[int] = ()) -> Flow:
    """The flow of a graph whose blocks are in address order; `ends`: blocks that may end it though they lead on."""
    dominators = _dominators(successors, [0])
    reversed_edges: list[list[int]] = [[] for _ in successors]
    for block, targets in enumerate(successors):
        for target in targets:
            reversed_edges[target].append(block)
    post = _dominators(reversed_edges, [*ends, *(b for b, targets in enumerate(successors) if not targets)])
    back = [(b, t) for b, targets in enumerate(successors) for t in targets if t in dominators[b]]
    loops = _natural_loops(back, reversed_edges, dominators)
    loop_of = [-1] * len(successors)
    for k, loop in enumerate(loops):  # outer before inner: the innermost writes last
        for block in loop.blocks:
            loop_of[block] = k
    forward = [[t for t in targets if (b, t) not in set(back)] for b, targets in enumerate(successors)]
    return Flow(successors, dominators, post, loops, tuple(loop_of), _has_cycle(forward))


def _dominators(successors: Edges, entries: Sequence[int]) -> tuple[frozenset[int], ...]:
    n = len(successors)
    everything = (1 << n) - 1
    dom = [everything] * n
    before: list[list[int]] = [[] for _ in range(n)]
    for block, targets in enumerate(successors):
        for target in targets:
            before[target].append(block)
    reachable: set[int] = set()
    stack = list(entries)
    while stack:
        block = stack.pop()
        if block not in reachable:
            reachable.add(block)
            stack += successors[block]
    changed = True
    while changed:
        changed = False
        for block in sorted(reachable):
            new = 0 if block in entries else everything
            if block not in entries:
                for b in before[block]:
                    new &= dom[b] if b in reachable else everything
            new |= 1 << block
            changed |= new != dom[block]
            dom[block] = new
    return tuple(frozenset(k for k in range(n) if dom[b] >> k & 1) if b in reachable else frozenset() for b in range(n))


def _natural_loops(
    back: Sequence[tuple[int, int]], before: Edges, dominators: Sequence[frozenset[int]]
) -> tuple[Loop, ...]:
    bodies: dict[int, set[int]] = {}
    latches: dict[int, list[int]] = {}
    for latch, header in back:
        body = bodies.setdefault(header, {header})
        latches.setdefault(header, []).append(latch)
        stack = [latch]
        while stack:
            block = stack.pop()
            if block not in body and dominators[block]:
                body.add(block)
                stack += before[block]
    found = sorted(bodies, key=lambda h: (-len(bodies[h]), h))
    order = sorted(found, key=lambda h: (h, -len(bodies[h])))
    loops: list[Loop] = []
    for header in order:
        around = [k for k, o in enumerate(loops) if header in o.blocks and bodies[header] <= o.blocks]
        parent = min(around, key=lambda k: len(loops[k].blocks), default=-1)
        loops.append(Loop(header, frozenset(bodies[header]), tuple(latches[header]), parent))
    return tuple(loops)


def _has_cycle(successors: Edges) -> bool:
    state = [0] * len(successors)
    for start in range(len(successors)):
        stack = [(start, 0)]
        while stack:
            block, at = stack.pop()
            if at == 0:
                if state[block]:
                    continue
                state[block] = 1
            if at < len(successors[block]):
                stack.append((block, at + 1))
                target = successors[block][at]
                if state[target] == 1:
                    return True
                if state[target] == 0:
                    stack.append((target, 0))
            else:
                state[block] = 2
    return False
