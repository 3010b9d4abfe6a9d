"""The leaves that can be evicted, least recently used first."""

from __future__ import annotations

import heapq
from itertools import count

from .prefix_node import Node


class LeafQueue:
    """A heap with one entry for each leaf at most, brought up to date when an entry surfaces.

    A leaf that is used again keeps its old entry: `pop` meets it and puts it back by its last use. So a use costs
    nothing here, and each use costs at most one more round of the heap later.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._numbers = count()  # orders equal times, so that nodes are never compared

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: Node) -> None:
        """Enters a node if it may be evicted and has no entry."""
        if not node.queued and is_evictable(node):
            node.queued = True
            heapq.heappush(self._heap, (node.last_use, next(self._numbers), node))

    def pop(self) -> Node | None:
        """Takes out the evictable leaf that was used least recently; None without one."""
        while self._heap:
            last_use, _, node = self._heap[0]
            if is_evictable(node) and node.last_use > last_use:
                heapq.heapreplace(self._heap, (node.last_use, next(self._numbers), node))
                continue
            heapq.heappop(self._heap)
            node.queued = False
            if is_evictable(node):
                return node
        return None

    def clear(self) -> None:
        """Takes out every entry."""
        for _, _, node in self._heap:
            node.queued = False
        self._heap.clear()


def is_evictable(node: Node) -> bool:
    """Whether a node is a leaf of the tree on which no lease ends."""
    return node.locks == 0 and node.parent is not None and not node.children
