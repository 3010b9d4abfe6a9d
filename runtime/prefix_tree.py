"""The tree of a prefix cache: its nodes, which leases keep them, and which can be evicted."""

from __future__ import annotations

import numpy as np

from .arrays import IntArray
from .prefix_check import check_tree
from .prefix_events import Namespace
from .prefix_leaves import LeafQueue
from .prefix_node import MAX_RUN, Node, Place, Root


class PrefixTree:
    """Nodes of all namespaces, and counts of their blocks. Knows nothing of who owns the blocks.

    A lease locks every node from where it ends up to the root, so what is not locked can be evicted from the leaves
    up. Locking costs a step for each node of the path; nodes are long.

    Args:
        unit: bytes of one block's tokens.

    Attributes:
        roots: by namespace.
        leaves: what can be evicted.
        version: changes with every change of the nodes.
        num_cached, num_evictable, num_pinned: blocks in the tree; those on no lease's path; those on a pin's.
    """

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.roots: dict[Namespace, Root] = {}
        self.leaves = LeafQueue()
        self.version = self.num_cached = self.num_evictable = self.num_pinned = 0
        self._orphans: set[Root] = set()  # of invalidated namespaces, until their last block has gone
        self._clock = 0

    @property
    def all_roots(self) -> list[Root]:
        """Roots that can be found and those that no longer can."""
        return [*self.roots.values(), *self._orphans]

    @property
    def all_blocks(self) -> IntArray:
        """Every block in the tree, once."""
        runs = [node.blocks for root in self.all_roots for node in root.descendants()]
        return np.concatenate([np.empty(0, np.int64), *runs])

    def namespace_of(self, node: Node) -> Namespace | None:
        """Where a node is found; None if that has been invalidated since."""
        *_, root = node.path()
        assert isinstance(root, Root)
        return None if root in self._orphans else root.namespace

    def cut(self, place: Place) -> Node:
        """The node that ends at `place`, made if there is none."""
        if place.num_blocks == place.node.blocks.size:
            return place.node
        self.version += 1
        return place.node.split(place.num_blocks, self.unit)

    def lock(self, node: Node, until: Node | None, is_pin: bool) -> None:
        """One more lease on the nodes from `node` up to, and not including, `until`."""
        self._clock += 1
        for each in node.path():
            if each is until:
                return
            self.num_evictable -= 0 if each.locks else each.blocks.size
            each.locks += 1
            each.last_use = self._clock
            if is_pin:
                self.num_pinned += 0 if each.pins else each.blocks.size
                each.pins += 1

    def unlock(self, node: Node, is_pin: bool, step: int) -> None:
        """One lease less from `node` to the root; `step` is the newest that may read what is then idle."""
        self._clock += 1
        for each in node.path():
            each.locks -= 1
            each.last_use = self._clock
            if is_pin:
                each.pins -= 1
                self.num_pinned -= 0 if each.pins else each.blocks.size
            if each.locks == 0:
                each.read_until = max(each.read_until, step)
                self.num_evictable += each.blocks.size
        self._let_go(node)

    def grow(self, node: Node, key: bytes, blocks: IntArray, is_pin: bool) -> Node:
        """Puts `blocks` behind `node`, on the path of the one lease that ends there; returns the last node.

        A node that this lease alone keeps grows longer; else the blocks get nodes of their own.
        """
        self.version += 1
        self.num_cached += blocks.size
        self.num_pinned += blocks.size if is_pin else 0
        start = 0
        if node.locks == 1 and node.parent is not None and not node.children:
            start = max(0, min(blocks.size, MAX_RUN - node.blocks.size))
            node.key += key[: start * self.unit]
            node.blocks = np.concatenate((node.blocks, blocks[:start]))
        for at in range(start, blocks.size, MAX_RUN):
            end = at + MAX_RUN
            child = Node(node, key[at * self.unit : end * self.unit], blocks[at:end].copy())
            child.locks, child.pins, child.last_use = 1, int(is_pin), self._clock
            node.attach(child, self.unit)
            node = child
        return node

    def shorten(self, leaf: Node, num_blocks: int) -> None:
        """Leaves the first `num_blocks` blocks of an evictable leaf in the tree."""
        self.version += 1
        gone = leaf.blocks.size - num_blocks
        self.num_cached -= gone
        self.num_evictable -= gone
        if num_blocks:
            leaf.key, leaf.blocks = leaf.key[: num_blocks * self.unit], leaf.blocks[:num_blocks].copy()
            self.leaves.push(leaf)
            return
        parent = leaf.parent
        assert parent is not None
        parent.detach(leaf, self.unit)
        self._let_go(parent)

    def orphan(self, namespace: Namespace) -> bool:
        """Makes a namespace start empty; its nodes stay until they are evicted. Whether there was anything of it."""
        root = self.roots.pop(namespace, None)
        if root is not None:
            self.version += 1
            self._orphans.add(root)
        return root is not None

    def check(self) -> None:
        """Raises InvariantViolation where the tree is wrong."""
        check_tree(self.all_roots, self.unit, (self.num_cached, self.num_evictable, self.num_pinned))

    def _let_go(self, node: Node) -> None:
        """Queues a node that may have become an evictable leaf, or forgets a root that nobody needs any more."""
        if not isinstance(node, Root):
            self.leaves.push(node)
        elif node.locks == 0 and not node.children:
            self.version += 1
            self._orphans.discard(node)
            if self.roots.get(node.namespace) is node:
                del self.roots[node.namespace]
