"""Where the tokens of every row go: new blocks, copies of shared ones, forks, roll-backs and windows, in bulk."""

from __future__ import annotations

import numpy as np

from .allocator import BlockAllocator
from .arrays import ONE, BoolArray, IntArray, RowIndex, as_ints, blocks_for, true_at
from .block_tables import BlockTables
from .errors import Invariant, InvariantViolation
from .validation import count_of


class KVLedger:
    """Books the tokens of sequences into blocks, on an allocator and tables that nobody else changes meanwhile.

    Each row has a limit: how far it may grow without asking anybody. It is the end of the block that it is filling
    or, if that block might be shared, what it holds now. So the usual step of a row is one comparison, and everything
    else (a new block, a copy before a write to a shared block, blocks behind the window) happens where the
    limit is met: for one row in `block_size` each step. The limit of an empty row is 0: its first token asks.

    A copy is made by the step that needs it, before it writes anything: `begin_step` tells which. Its destination is
    the row's own; its source stays fenced until that step has ended.

    Args:
        allocator: blocks.
        tables: rows.
        window: if every layer attends to no more than this many tokens, the query's own included: blocks behind it
            are given back as soon as their successors are certain to be processed.

    Attributes:
        stored: int64 [rows]: tokens that each row holds, those of steps in flight included; `BlockTables.stored`.
        processed: int64 [rows]: those whose step has ended: what others may build on.
    """

    def __init__(self, allocator: BlockAllocator, tables: BlockTables, window: int | None = None) -> None:
        if window is not None:
            count_of("window", window, 1)
        self.allocator, self.tables, self.window = allocator, tables, window
        self.stored = tables.stored
        self.processed = np.zeros(tables.max_num_seqs, np.int64)
        self._limit = np.zeros(tables.max_num_seqs, np.int64)
        self._next_slot = np.zeros(tables.max_num_seqs, np.int64)  # where the next token goes, below the limit
        self._size = np.array(tables.block_size)
        # Rows whose limit is what they hold: their last block might be shared, or is filled from elsewhere.
        self._asking: set[int] = set()
        # Rows whose next slot holds a token of somebody else, which a step in flight may read even when it has gone.
        self._overwrites = np.zeros(tables.max_num_seqs, np.bool_)
        self._copies: list[tuple[IntArray, IntArray]] = []  # (source, destination) for the next step
        self._unsure: list[tuple[int, IntArray, IntArray]] = []  # (step, rows, from where): what its copies will hold

    def demand(self, rows: IntArray, counts: IntArray) -> IntArray:
        """Blocks that each of `rows` needs for `counts` more tokens, copies of shared ones included."""
        needed = self.tables.missing_blocks(rows, self.stored[rows] + counts)
        needed[self._must_copy(rows, counts > 0)] += 1
        return needed

    def advance(self, rows: IntArray, counts: IntArray) -> None:
        """Books `counts` more tokens of distinct `rows`.

        Raises:
            PoolExhausted: the blocks do not suffice; nothing was changed.
            ValueError: a row would be longer than the tables; nothing was changed.
        """
        tables, ends = self.tables, self.stored[rows] + counts
        tables.require_room(rows, ends)
        copying = self._must_copy(rows, counts > 0)
        missing = tables.missing_blocks(rows, ends)
        blocks = self.allocator.allocate(copying.size + int(missing.sum()))
        if copying.size:
            self._copy(rows[copying], blocks[: copying.size])
        grows = missing > 0
        tables.append(rows[grows], missing[grows], blocks[copying.size :])
        tables.set_context_lens(rows, ends)
        self._settle(rows[counts > 0])

    def advance_one(self, index: RowIndex, rows: IntArray) -> IntArray | None:
        """Books one more token of each of `rows` and returns their slots [n]; None, and no change, without blocks.

        Args:
            index: the same rows, as a slice where they are 0, 1, 2, ...
            rows: distinct.

        Raises:
            ValueError: a row would be longer than the tables; nothing was changed.
        """
        stored = self.stored[index]
        met = (stored >= self._limit[index]).nonzero()[0]
        if met.size and not self._extend(met if type(index) is slice else rows[met], stored[met]):
            return None
        slots = self._next_slot[index]
        if type(index) is slice:  # views
            next_slots, slots = slots, slots.copy()
            next_slots += ONE
            stored += ONE
        else:
            self._next_slot[index] = slots + ONE
            self.stored[index] = stored + ONE
        self.tables.lens_changed = True
        return slots

    def fork(self, source: int, row: int, position: int) -> None:
        """Lets the empty `row` hold the first `position` tokens of `source`, sharing its blocks.

        Raises:
            ValueError: those tokens are not all processed yet, or their blocks were given back behind the window.
        """
        if not 0 < position <= self.processed[source]:
            raise ValueError(
                f"row {source} cannot be forked at {position}: {self.processed[source]} of its tokens are processed"
            )
        if not self.can_fork(source, position):
            raise ValueError(f"row {source} cannot be forked at {position}: blocks before it were given back")
        blocks = self.tables.share(source, row, blocks_for(position, self.tables.block_size))
        self.allocator.add_reference(blocks)
        self.tables.set_context_lens(as_ints(row), as_ints(position))
        self.processed[row] = position
        self.ask_before_writing(row)
        self._overwrites[row] = self._overwrites[source] or self.stored[source] > position
        if self.stored[source] // self.tables.block_size == position // self.tables.block_size:
            self.ask_before_writing(source)  # it is filling a block that is no longer its own

    def can_fork(self, source: int, position: int) -> bool:
        """Whether the blocks that a query after `position` tokens of `source` reads are still there."""
        return bool(self.tables.first_block[source] <= self._needed_from(position))

    def truncate(self, row: int, num_tokens: int) -> None:
        """Takes back what `row` holds beyond its first `num_tokens` tokens: drafts that were rejected.

        Raises:
            ValueError: it holds fewer, or those before were given back behind the window.
        """
        if not 0 <= num_tokens <= self.stored[row] or self.tables.first_block[row] > self._needed_from(num_tokens):
            raise ValueError(f"row {row} holds {self.stored[row]} tokens and cannot go back to {num_tokens}")
        self.allocator.free(self.tables.truncate(row, blocks_for(num_tokens, self.tables.block_size)))
        self.tables.set_context_lens(as_ints(row), as_ints(num_tokens))
        self.processed[row] = min(int(self.processed[row]), num_tokens)
        self.ask_before_writing(row)  # the last block may be shared
        self._overwrites[row] = True

    def ask_before_writing(self, row: int) -> None:
        """Tells that somebody else holds a reference to the block that `row` is filling, such as a cache."""
        self._limit[row] = self.stored[row]
        self._asking.add(row)

    def adopt(
        self, row: int, blocks: IntArray, num_tokens: int, first_block: int = 0, overwrites: bool = False
    ) -> None:
        """Lets the empty `row` hold `num_tokens` processed tokens in `blocks`, whose references become the row's.

        For what a prefix cache found or a swap brought back. If others share the last block, it is copied before
        the row writes to it.

        Args:
            row: an empty one.
            blocks: those that hold the tokens, from `first_block` on.
            num_tokens: more than the blocks before the last one hold.
            first_block: blocks before them that were given back behind the window.
            overwrites: whether the last block holds tokens of somebody else behind those of the row.
        """
        self.tables.skip(row, first_block)
        self.tables.append(row, blocks.size, blocks)
        self.tables.set_context_lens(as_ints(row), as_ints(num_tokens))
        self.processed[row] = num_tokens
        self.ask_before_writing(row)
        self._overwrites[row] = overwrites

    def release(self, row: int) -> None:
        """Empties `row` and drops its references."""
        self.allocator.free(self.tables.clear(row))
        self.processed[row] = 0
        self._limit[row] = 0
        self._overwrites[row] = False
        self._asking.discard(row)

    def trim(self, rows: IntArray) -> None:
        """Gives back the blocks of `rows` that no query to come can see; nothing without a window."""
        if self.window is None or rows.size == 0:
            return
        gone = self.tables.release_front(rows, self._needed_from(self.processed[rows]))
        self.allocator.free(gone)

    def begin_step(self, reads: IntArray | None = None) -> tuple[int, IntArray | None]:
        """Begins a step; returns its number and the (source, destination) copies that it makes first, [k, 2].

        Args:
            reads: see `BlockAllocator.begin_step`.
        """
        copies = self.next_copies
        if copies is None:
            return self.allocator.begin_step(reads), None
        sources = copies[:, 0].copy()
        step = self.allocator.begin_step(None if reads is None else np.concatenate((reads, sources)))
        self._copies.clear()
        self.allocator.free(sources)  # only now: the step that reads them is in flight, so they are fenced
        return step, copies

    @property
    def next_copies(self) -> IntArray | None:
        """The (source, destination) copies of the next step to begin, as booked until now, [k, 2]; None without any."""
        if not self._copies:
            return None
        sources = np.concatenate([source for source, _ in self._copies])
        destinations = np.concatenate([destination for _, destination in self._copies])
        return np.stack((sources, destinations), axis=1)

    def forget_copies(self) -> None:
        """Forgets the copies of a step that will not begin: the rows that they are for are to be released next."""
        for sources, _ in self._copies:
            self.allocator.free(sources)
        self._copies.clear()
        self._unsure = [entry for entry in self._unsure if entry[0] <= self.allocator.last_step]

    def finish_step(self, step: int, index: RowIndex, ends: IntArray) -> None:
        """Ends a step that went well.

        Args:
            step: its number, the oldest in flight.
            index: those of its rows that still belong to the same sequences.
            ends: tokens that each of them held with this step.

        Raises:
            StepError: another step must end first.
        """
        self.allocator.end_step(step)
        self.processed[index] = ends
        if self._unsure:
            self._unsure = [entry for entry in self._unsure if entry[0] > step]
            for _, rows, starts in self._unsure:
                self.processed[rows] = np.minimum(self.processed[rows], starts)

    def _needed_from(self, num_tokens: IntArray | int) -> IntArray:
        """First block that a query after `num_tokens` tokens can see."""
        if self.window is None:
            return np.zeros_like(num_tokens)
        needed: IntArray = np.maximum(np.asarray(num_tokens) - self.window + 1, 0) // self.tables.block_size
        return needed

    def _extend(self, rows: IntArray, stored: IntArray) -> bool:
        """Makes room for one token in each of `rows`, which are at their limit; False if blocks do not suffice."""
        if self.window is not None:
            self.trim(rows)
        if self._asking and not self._asking.isdisjoint(rows.tolist()):
            return self._extend_asking(rows, stored)
        if rows.size > self.allocator.num_free:
            return False
        columns = self.tables.next_columns(rows)
        blocks = self.allocator.allocate(rows.size)  # their last blocks are full
        self.tables.append_each(rows, columns, blocks)
        self._next_slot[rows] = blocks * self._size
        self._limit[rows] = stored + self._size
        return True

    def _extend_asking(self, rows: IntArray, stored: IntArray) -> bool:
        """As `_extend`, where some may have room in their last blocks, but not write there before they have asked."""
        tables, allocator = self.tables, self.allocator
        fresh = rows[stored == tables.num_blocks[rows] * tables.block_size]
        copying = rows[self._must_copy(rows, np.ones(rows.size, np.bool_))]
        if copying.size + fresh.size > allocator.num_free:
            return False
        columns = tables.next_columns(fresh)
        if copying.size:
            self._copy(copying, allocator.allocate(copying.size))
        if fresh.size:
            tables.append_each(fresh, columns, allocator.allocate(fresh.size))
        self._fill(rows, stored // tables.block_size)
        return True

    def _must_copy(self, rows: IntArray, writes: BoolArray) -> IntArray:
        """Which of `rows` (indices into it) write to a block that others hold: all its holders but the last one.

        That one too, if it would overwrite what a step in flight may read.
        """
        stored, size = self.stored[rows], self.tables.block_size
        asks = writes & (self._limit[rows] == stored) & (stored < self.tables.num_blocks[rows] * size)
        which: IntArray = asks.nonzero()[0]
        if which.size == 0:
            return which
        blocks = self.tables.block_at(rows[which], stored[which] // size)
        overwrites = self._overwrites[rows[which]] & bool(self.allocator.steps_in_flight)
        order = np.lexsort((~overwrites, blocks))  # those that must copy in any case come before their last holder
        ordered = blocks[order]
        new = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        first = true_at(new)[np.cumsum(new) - 1]
        holders_left = self.allocator.refcounts(ordered) - (np.arange(ordered.size) - first)
        copying: IntArray = which[np.sort(order[(holders_left > 1) | overwrites[order]])]
        return copying

    def _copy(self, rows: IntArray, blocks: IntArray) -> None:
        """Gives `rows` copies, in `blocks`, of the blocks that they are filling."""
        columns = self.stored[rows] // self.tables.block_size
        self._copies.append((self.tables.replace(rows, columns, blocks), blocks))
        # Should the step fail, the copies hold anything: until it ends nobody may build on them.
        starts = columns * self.tables.block_size
        self._unsure.append((self.allocator.last_step + 1, rows, starts))
        self.processed[rows] = np.minimum(self.processed[rows], starts)

    def _settle(self, rows: IntArray) -> None:
        """Sets the limits of `rows`, whose last blocks are their own."""
        self._fill(rows, np.maximum(self.stored[rows] - 1, 0) // self.tables.block_size)

    def _fill(self, rows: IntArray, columns: IntArray) -> None:
        """Lets `rows` fill the blocks in `columns`, their last and their own."""
        size = self.tables.block_size
        self._next_slot[rows] = (self.tables.block_at(rows, columns) - columns) * size + self.stored[rows]
        self._limit[rows] = (columns + 1) * size
        self._overwrites[rows] = False
        if self._asking:
            self._asking.difference_update(rows.tolist())

    @property
    def pending_references(self) -> IntArray:
        """References held by copies that no step has begun yet, [num_blocks of the pool]."""
        sources = [source for source, _ in self._copies]
        count = self.allocator.num_blocks
        return np.bincount(np.concatenate(sources), minlength=count) if sources else np.zeros(count, np.int64)

    def check(self) -> None:
        """Derives anew which rows may write where.

        Raises:
            InvariantViolation: a row would write, without asking, to a block that others hold, or to a wrong slot;
                or it would be given another block before its last one is full.
        """
        size = self.tables.block_size
        sure = np.ones(self._limit.size, np.bool_)
        sure[list(self._asking)] = False
        early = true_at(sure & ((self._limit != self.tables.num_blocks * size) | self._overwrites))
        if early.size:
            row = int(early[0])
            detail = f"row {row} spans {self.tables.num_blocks[row]} blocks and may grow to {self._limit[row]} unasked"
            raise InvariantViolation(Invariant.WRITER, detail)
        rows = true_at(self._limit > self.stored)
        column = self.stored[rows] // size
        blocks = self.tables.block_at(rows, column)
        pending = self.pending_references[blocks] if self._copies else 0
        wrong = true_at(
            (column >= self.tables.num_blocks[rows])
            | (self._limit[rows] > (column + 1) * size)
            | (self._next_slot[rows] != (blocks - column) * size + self.stored[rows])
            | (self.allocator.refcounts(np.maximum(blocks, 0)) - pending != 1)
        )
        if wrong.size:
            row, block = int(rows[wrong[0]]), int(blocks[wrong[0]])
            detail = (
                f"row {row} holds {self.stored[row]} tokens, may grow to {self._limit[row]} and fills block {block}"
            )
            raise InvariantViolation(Invariant.WRITER, detail)
