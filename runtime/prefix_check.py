"""The invariants of a prefix tree, derived from its nodes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .errors import Invariant, InvariantViolation
from .prefix_node import MAX_RUN, Node, Root


def check_tree(roots: Iterable[Root], unit: int, counted: tuple[int, int, int]) -> None:
    """Checks all nodes below `roots`.

    Args:
        roots: of all namespaces.
        unit: bytes of one block's tokens.
        counted: the cache's counts of blocks that are cached, evictable and pinned.

    Raises:
        InvariantViolation: the first invariant that does not hold.
    """
    nodes = [node for root in roots for node in (root, *root.descendants())]
    for node in nodes:
        _check_node(node, unit)
    _check_blocks(nodes)
    _check_counts(nodes, counted)


def _fail(node: Node, detail: str) -> None:
    where = f"the node of block {node.blocks[0]}" if node.blocks.size else "a root"
    raise InvariantViolation(Invariant.PREFIX_TREE, f"{where} {detail}")


def _check_node(node: Node, unit: int) -> None:
    size = int(node.blocks.size)
    if len(node.key) != size * unit:
        _fail(node, f"has {size} blocks and tokens of {len(node.key)} bytes")
    if not isinstance(node, Root) and not 1 <= size <= MAX_RUN:
        _fail(node, f"has {size} blocks, not 1 to {MAX_RUN}")
    if any(child.parent is not node or child.key[:unit] != first for first, child in node.children.items()):
        _fail(node, "has a child that stands under other tokens, or elsewhere")
    if list(node.order) != sorted(node.children):
        _fail(node, "has children that the sorted keys do not name")
    below = sum(child.locks for child in node.children.values()), sum(child.pins for child in node.children.values())
    if node.locks < max(below[0], node.pins) or node.pins < below[1]:
        _fail(node, f"has {node.locks} leases, {node.pins} of them pins, and its children have {below}")
    if not (node.locks or node.children or node.queued or isinstance(node, Root)):
        _fail(node, "could be evicted and is not queued")


def _check_blocks(nodes: list[Node]) -> None:
    blocks = np.concatenate([node.blocks for node in nodes]) if nodes else np.empty(0, np.int64)
    named, times = np.unique(blocks, return_counts=True)
    if (times > 1).any():
        raise InvariantViolation(Invariant.PREFIX_TREE, f"block {named[times > 1][0]} stands in the tree twice")


def _check_counts(nodes: list[Node], counted: tuple[int, int, int]) -> None:
    sizes = [int(node.blocks.size) for node in nodes]
    found = (
        sum(sizes),
        sum(size for node, size in zip(nodes, sizes, strict=True) if node.locks == 0),
        sum(size for node, size in zip(nodes, sizes, strict=True) if node.pins),
    )
    if found != counted:
        raise InvariantViolation(
            Invariant.PREFIX_TREE, f"cached, evictable and pinned blocks are {found}, but {counted} are counted"
        )
