"""What a prefix cache hands out: a match, a lease on it, and the account of an insertion."""

from __future__ import annotations

from dataclasses import dataclass

from .arrays import IntArray
from .errors import DoubleFree
from .prefix_events import NO_BLOCK, Namespace
from .prefix_node import Continuation, Node, Place


@dataclass(frozen=True, eq=False)
class PrefixMatch:
    """What the cache has of a sequence. Good until the cache changes.

    Args:
        namespace: where it was looked for.
        num_queried: tokens of the sequence.
        blocks: int64: whole blocks that hold its first tokens, in order.
        num_idle: those of `blocks` that could be evicted at the time, and no more once they are acquired. See
            `PrefixCache.recount`.
        copy: a block whose first tokens are the next ones, to be copied; None without one worth it.
        place: where the walk ended; None where the namespace is empty.
        version: of the cache, to notice a change.
    """

    namespace: Namespace
    num_queried: int
    blocks: IntArray
    num_idle: int
    copy: Continuation | None
    place: Place | None
    version: int

    def num_tokens(self, block_size: int) -> int:
        """Tokens that need not be computed."""
        return self.blocks.size * block_size + self.copy_tokens

    @property
    def copy_block(self) -> int:
        """The block to copy from; -1 without one."""
        return NO_BLOCK if self.copy is None else self.copy.block

    @property
    def copy_tokens(self) -> int:
        """Tokens of `copy_block` that fit; 0 without one."""
        return 0 if self.copy is None else self.copy.num_tokens


@dataclass(eq=False)
class Lease:
    """Keeps a prefix in the cache: the blocks from the root to the end of `node`.

    Args:
        node: where it ends.
        num_blocks: how long it is.
        is_pin: whether it counts as a pin.
        is_released: whether it has ended: it keeps nothing any more.
    """

    node: Node
    num_blocks: int
    is_pin: bool = False
    is_released: bool = False

    def require_live(self) -> None:
        """Raises DoubleFree if it has ended."""
        if self.is_released:
            raise DoubleFree(
                f"this lease on {self.num_blocks} blocks was released already and keeps nothing: release each lease "
                "once, and acquire a new one for more"
            )


@dataclass(frozen=True, eq=False)
class Insertion:
    """What `extend` made of the blocks given to it.

    Args:
        num_new: blocks that entered the cache.
        columns: int64: places in the sequence whose tokens the cache has in another block.
        blocks: int64: the cache's block for each of them. The sequence should name these and drop its own: the
            cache then keeps no block for it that its table does not name.
    """

    num_new: int
    columns: IntArray
    blocks: IntArray
