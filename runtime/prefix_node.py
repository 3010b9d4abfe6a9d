"""Nodes of the prefix tree: runs of blocks with the tokens that they hold, and the walk over them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .arrays import IntArray
from .prefix_events import Namespace

TOKEN_BYTES = 4  # a token is an int32, as in the rows
MAX_RUN = 256  # blocks of one node: bounds what a split, an extension or a cut of its end copies
_CHUNK = 512  # keys in one list of `SortedKeys`


def pack(tokens: npt.ArrayLike) -> bytes:
    """Tokens as int32 in native order: equal bytes are equal tokens, and memcmp compares them.

    Raises:
        ValueError: they are no integers in one dimension, or one does not fit: cut short, it would be another token.
    """
    given = np.asarray(tokens)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"tokens of type {given.dtype} and shape {given.shape}: expected integers in one dimension")
    packed = given.astype(np.int32, copy=False)
    if packed is not given and given.size and not np.array_equal(packed, given):
        raise ValueError(f"a token of {given.min()} to {given.max()} is none: token ids are below 2^31")
    return packed.tobytes()


def common_bytes(data: bytes, start: int, key: bytes) -> int:
    """Length in bytes, in whole tokens, of the longest common prefix of `data[start:]` and `key`."""
    count = min(len(data) - start, len(key)) // TOKEN_BYTES
    if count == 0:
        return 0
    differs = np.frombuffer(data, np.int32, count, start) != np.frombuffer(key, np.int32, count)
    first = int(differs.argmax())
    return TOKEN_BYTES * (first if differs[first] else count)


class SortedKeys:
    """A sorted set of byte strings in short lists, so that a change moves few of them however many there are.

    What shares the longest prefix with a string stands next to where that string would: no scan finds it sooner.
    """

    def __init__(self) -> None:
        self._chunks: list[list[bytes]] = []
        self._lasts: list[bytes] = []  # the greatest key of each list

    def __iter__(self) -> Iterator[bytes]:
        return (key for chunk in self._chunks for key in chunk)

    def add(self, key: bytes) -> None:
        """Adds a key that is not in the set."""
        if not self._chunks:
            self._chunks, self._lasts = [[key]], [key]
            return
        at = min(bisect_left(self._lasts, key), len(self._chunks) - 1)
        chunk = self._chunks[at]
        chunk.insert(bisect_left(chunk, key), key)
        self._lasts[at] = chunk[-1]
        if len(chunk) > _CHUNK:
            half = _CHUNK // 2
            self._chunks[at : at + 1] = [chunk[:half], chunk[half:]]
            self._lasts[at : at + 1] = [chunk[half - 1], chunk[-1]]

    def remove(self, key: bytes) -> None:
        """Removes a key that is in the set."""
        at = bisect_left(self._lasts, key)
        chunk = self._chunks[at]
        del chunk[bisect_left(chunk, key)]
        if chunk:
            self._lasts[at] = chunk[-1]
        else:
            del self._chunks[at], self._lasts[at]

    def neighbours(self, key: bytes) -> list[bytes]:
        """The greatest key below `key` and the least one not below it, as far as they exist."""
        at = bisect_left(self._lasts, key)
        found: list[bytes] = []
        place = 0
        if at < len(self._chunks):
            chunk = self._chunks[at]
            place = bisect_left(chunk, key)
            found.append(chunk[place])
        if place > 0:
            found.append(self._chunks[at][place - 1])
        elif at > 0:
            found.append(self._lasts[at - 1])
        return found


class Node:
    """A run of blocks behind those of its ancestors.

    Attributes:
        parent: None for a root and for a node that has left the tree.
        key: the tokens of its blocks, packed.
        blocks: int64 ids, one for each `block_size` tokens of `key`.
        children: by the tokens of their first block.
        order: the keys of `children`, sorted.
        locks: leases that end here or below.
        pins: those of them that are pins.
        last_use: the cache's clock when it was last locked or unlocked.
        read_until: number of the newest step that may read its blocks, as of its last unlock.
        queued: whether it stands in the queue of leaves.
    """

    __slots__ = ("blocks", "children", "key", "last_use", "locks", "order", "parent", "pins", "queued", "read_until")

    def __init__(self, parent: Node | None, key: bytes, blocks: IntArray) -> None:
        self.parent, self.key, self.blocks = parent, key, blocks
        self.children: dict[bytes, Node] = {}
        self.order = SortedKeys()
        self.locks = self.pins = self.last_use = self.read_until = 0
        self.queued = False

    def attach(self, child: Node, unit: int) -> None:
        """Makes `child` a child; `unit` is the bytes of one block's tokens."""
        first = child.key[:unit]
        self.children[first] = child
        self.order.add(first)
        child.parent = self

    def detach(self, child: Node, unit: int) -> None:
        """Takes `child` out of the children."""
        first = child.key[:unit]
        del self.children[first]
        self.order.remove(first)
        child.parent = None

    def split(self, num_blocks: int, unit: int) -> Node:
        """Puts the first `num_blocks` blocks into a new node above this one, and returns that.

        This node keeps the rest and its identity, so what ends at its end still does.
        """
        parent, cut = self.parent, num_blocks * unit
        assert parent is not None
        above = Node(parent, self.key[:cut], self.blocks[:num_blocks].copy())
        above.locks, above.pins = self.locks, self.pins
        above.last_use, above.read_until = self.last_use, self.read_until
        parent.children[above.key[:unit]] = above  # in the place of this one, under the same key
        self.key, self.blocks = self.key[cut:], self.blocks[num_blocks:].copy()
        above.attach(self, unit)
        return above

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, root included, upwards."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def descendants(self) -> Iterator[Node]:
        """Every node below this one."""
        pending = list(self.children.values())
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            yield node


class Root(Node):
    """The start of a namespace: no block, no parent."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, b"", np.empty(0, np.int64))
        self.namespace = namespace


@dataclass(frozen=True, slots=True)
class Place:
    """Where a walk ended: behind the first `num_blocks` blocks of `node`, after `end` bytes of the data."""

    node: Node
    num_blocks: int
    end: int

    def runs(self) -> Iterator[tuple[Node, int]]:
        """Every node from here to the root, and its blocks up to here."""
        yield self.node, self.num_blocks
        parent = self.node.parent
        if parent is not None:
            yield from ((node, node.blocks.size) for node in parent.path())

    @property
    def num_idle(self) -> int:
        """Blocks up to here that nothing keeps from being evicted, at this moment."""
        return sum(count for node, count in self.runs() if node.locks == 0)


def walk(node: Node, data: bytes, start: int, unit: int, into: list[IntArray]) -> Place:
    """Follows `data[start:]` from the end of `node` over whole blocks; appends the blocks met to `into`."""
    while (child := node.children.get(data[start : start + unit])) is not None:
        if not data.startswith(child.key, start):
            same = common_bytes(data, start, child.key) // unit
            into.append(child.blocks[:same])
            return Place(child, same, start + same * unit)
        into.append(child.blocks)
        start += len(child.key)
        node = child
    return Place(node, node.blocks.size, start)


@dataclass(frozen=True, slots=True)
class Continuation:
    """The block behind a place that shares most tokens with the data there: its tokens, its id, how many it shares."""

    key: bytes
    block: int
    num_tokens: int


def best_continuation(place: Place, data: bytes, unit: int) -> Continuation | None:
    """The cached block that goes on longest as the data does; None where no block follows or no data is left."""
    rest = data[place.end : place.end + unit]
    if not rest:
        return None
    node, at = place.node, place.num_blocks
    if at < node.blocks.size:
        key = node.key[at * unit : (at + 1) * unit]
        return Continuation(key, int(node.blocks[at]), common_tokens(rest, key))
    nearest = [(common_tokens(rest, key), key) for key in node.order.neighbours(rest)]
    if not nearest:
        return None
    tokens, key = max(nearest)
    return Continuation(key, int(node.children[key].blocks[0]), tokens)


def common_tokens(a: bytes, b: bytes) -> int:
    """`common_bytes` in tokens, of strings as short as a block's: as numbers they need no array."""
    count = min(len(a), len(b))
    differs = int.from_bytes(a[:count], "little") ^ int.from_bytes(b[:count], "little")
    if differs:
        count = ((differs & -differs).bit_length() - 1) // 8  # bytes below the lowest bit that differs
    return count // TOKEN_BYTES
