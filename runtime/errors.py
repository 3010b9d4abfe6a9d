"""Everything that the runtime raises on purpose."""

from __future__ import annotations

from enum import StrEnum


class PagedRuntimeError(Exception):
    """Base of all errors of the runtime."""


class PoolExhausted(PagedRuntimeError):
    """Fewer free blocks than asked for. Nothing was changed.

    Attributes:
        needed: blocks asked for.
        free: blocks that were free.
        fenced: blocks that come back when the steps in flight have ended.
    """

    def __init__(self, needed: int, free: int, fenced: int, reserved: int) -> None:
        self.needed, self.free, self.fenced = needed, free, fenced
        super().__init__(
            f"{needed} blocks asked for, {free} free ({fenced} fenced by steps in flight, {reserved} reserved): "
            "end a step, free a sequence, or build a larger pool"
        )


class InvalidBlock(PagedRuntimeError, ValueError):
    """A block id outside the pool, or a block in a state that the operation does not allow. Nothing was changed."""


class DoubleFree(InvalidBlock):
    """A reference was dropped that nobody holds. Nothing was changed."""


class StepError(PagedRuntimeError):
    """Steps begun or ended in an order that the fences cannot follow."""


class CacheInUse(PagedRuntimeError):
    """A cache or a model was to serve two owners, who would overwrite each other's blocks. Nothing was changed."""


class InvalidRequest(PagedRuntimeError, ValueError):
    """A request that can never run: refused when it is added."""


class RequestTooLarge(InvalidRequest):
    """A request that would not fit even if it had the whole pool."""


class InvalidToken(PagedRuntimeError, ValueError):
    """A step sampled what is no token id, such as from logits of NaN: `commit` took nothing of it.

    Attributes:
        request_ids: whose tokens, each once. Cancel those, and the others can go on.
    """

    def __init__(self, message: str, request_ids: tuple[str, ...]) -> None:
        self.request_ids = request_ids
        super().__init__(message)


class UnknownRequest(PagedRuntimeError):
    """No live request has this id."""


class RequestFinished(UnknownRequest):
    """The request of this id has already finished or was cancelled."""


class Invariant(StrEnum):
    """What `check()` proves."""

    CONSERVATION = "free + referenced + fenced + reserved = pool"
    FREE_LIST = "the free list names exactly the free blocks, each once"
    REFCOUNT = "reference count = table entries, cache entries and transfers naming the block"
    FENCE = "no block of a step in flight is recycled; the fences name exactly the fenced blocks"
    TABLE_SHAPE = "a table row names its blocks first and -1 after them"
    TABLE_DEVICE = "the device's tables equal the host's, but for the differences still to send"
    WRITER = "a block that a row may write without asking has no other reference"
    COVERAGE = "a running sequence names exactly the blocks that its tokens need"
    ROWS = "every row is free or holds one running sequence"
    PREFIX_TREE = "the prefix cache names each block once, under its tokens, and counts what leases keep"
    SHADOW = "a slot holds what its own step wrote, until its block is freed"
    POISON = "nothing writes to a free block"
    GUARD = "guard blocks hold what was written at the start"


class InvariantViolation(PagedRuntimeError):
    """`check()` found a defect of the runtime or of a kernel.

    Attributes:
        invariant: the first one that does not hold.
    """

    def __init__(self, invariant: Invariant, detail: str) -> None:
        self.invariant = invariant
        super().__init__(f"{invariant.name}: {invariant.value}: {detail}")
