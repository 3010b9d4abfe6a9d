"""Block tables and context lengths: kept on the device, edited on the host, brought up to date by differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..kernels.problem import require_positive
from .arrays import ONE, IntArray, RowIndex, as_ints, blocks_for, ragged_arange, to_device, true_at
from .errors import Invariant, InvariantViolation

EMPTY = -1  # a table entry that names no block


class BlockTables:
    """The tables of up to `max_num_seqs` sequences, one row each.

    The host edits its own copy and notes which entries changed; `flush` sends those and nothing else, with one
    scatter. It is queued behind the steps launched before it on the caller's stream, so they still read the
    tables as they were; a step launched after it reads them as they are.

    Args:
        max_num_seqs: rows.
        max_blocks: columns: most blocks of one sequence.
        block_size: tokens of one block.
        device: where the tables are read; on torch's "meta" nobody reads them, and nothing is sent.
        null_block: what entries of blocks given back behind a window name; without it they are -1.

    Attributes:
        block_tables: int32 [max_num_seqs, max_blocks] on the device; past the end of a row -1. The same storage
            for the life of the object, as a captured graph needs it.
        context_lens: int32 [max_num_seqs] on the device; 0 for an unused row.
        num_blocks: int64 [max_num_seqs] on the host: blocks that each row spans. Read only.
        first_block: int64 [max_num_seqs] on the host: how many of them were given back. Read only.
        stored: int64 [max_num_seqs] on the host: tokens that each row holds, those of steps in flight included.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
        null_block: int | None = None,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_blocks", max_blocks), ("block_size", block_size)):
            require_positive(name, value)
        self.max_num_seqs, self.max_blocks, self.block_size = max_num_seqs, max_blocks, block_size
        self.device = torch.device(device)
        self._gone = EMPTY if null_block is None else null_block
        self._host = np.full(max_num_seqs * max_blocks, EMPTY, np.int32)
        self._host_tables = self._host.reshape(max_num_seqs, max_blocks)
        self._device = torch.from_numpy(self._host.copy()).to(self.device)
        self.block_tables = self._device.view(max_num_seqs, max_blocks)
        self.context_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=self.device)
        self._near = self.device.type == "cpu"
        if self._near:  # torch would hand a few thousand int32s to a pool of threads
            self._near_tables, self._near_lens = self._device.numpy(), self.context_lens.numpy()
        self.num_blocks, self.first_block, self.stored = (np.zeros(max_num_seqs, np.int64) for _ in range(3))
        self._width = np.array(max_blocks)
        self._spare = 0  # columns that every row has left at least; 0 is looked up anew
        self._dirty: list[IntArray] = []  # indices into the tables; one may occur twice: values are read at flush
        self.lens_changed = False

    def missing_blocks(self, rows: RowIndex, num_tokens: IntArray) -> IntArray:
        """Blocks that each of `rows` lacks to hold `num_tokens` tokens (0 where it holds them)."""
        missing: IntArray = np.maximum(blocks_for(num_tokens, self.block_size) - self.num_blocks[rows], 0)
        return missing

    def append(self, rows: Any, counts: Any, blocks: Any) -> None:
        """Adds the first `counts[0]` of `blocks` to `rows[0]`, the next `counts[1]` to `rows[1]`, and so on.

        Args:
            rows: distinct rows, [n].
            counts: blocks for each, [n].
            blocks: ids, [sum(counts)].

        Raises:
            ValueError: the counts do not add up to the blocks, or a row has no room; nothing was changed.
        """
        rows, counts, blocks = as_ints(rows), as_ints(counts), as_ints(blocks)
        if rows.size != counts.size or int(counts.sum()) != blocks.size:
            raise ValueError(f"{blocks.size} blocks for {rows.size} rows with counts {counts.tolist()} do not add up")
        start = self.num_blocks[rows]
        if rows.size and int((start + counts).max()) > self.max_blocks:
            self._reject_full(rows, start + counts)
        index = np.repeat(rows * self.max_blocks + start, counts) + ragged_arange(counts)
        self._host[index] = blocks
        self._set_num_blocks(rows, start + counts)
        self._mark(index)

    def require_room(self, rows: RowIndex, num_tokens: IntArray) -> None:
        """Raises ValueError unless the tables have columns for `num_tokens` tokens of each of `rows`."""
        if num_tokens.size and int(num_tokens.max()) > self.max_blocks * self.block_size:
            self._reject_full(np.arange(self.max_num_seqs)[rows], blocks_for(num_tokens, self.block_size))

    def next_columns(self, rows: IntArray) -> IntArray:
        """Where each of `rows` gets its next block.

        Raises:
            ValueError: a row has no room.
        """
        columns: IntArray = self.num_blocks[rows]
        if not self._spare:
            self._spare = self.max_blocks - int(self.num_blocks.max())
            if not self._spare and rows.size and int(columns.max()) == self.max_blocks:
                self._reject_full(rows, columns + 1)
        return columns

    def append_each(self, rows: IntArray, columns: IntArray, blocks: IntArray) -> None:
        """Adds one block to each of `rows`, in `next_columns`: `append` for the commonest case."""
        index = rows * self._width + columns
        self._host[index] = blocks.astype(np.int32)
        self.num_blocks[rows] = columns + ONE
        self._spare = max(self._spare - 1, 0)
        self._mark(index)

    def _set_num_blocks(self, rows: Any, counts: Any) -> None:
        """Sets how many blocks `rows` span; `next_columns` then looks anew how much room is left."""
        self.num_blocks[rows] = counts
        self._spare = 0

    def replace(self, rows: IntArray, columns: IntArray, blocks: IntArray) -> IntArray:
        """Makes one entry of each of `rows` name another block; returns the blocks that they named."""
        index = rows * self.max_blocks + columns
        before: IntArray = self._host[index].astype(np.int64)
        self._host[index] = blocks
        self._mark(index)
        return before

    def share(self, source: int, row: int, count: int) -> IntArray:
        """Lets the empty `row` name the first `count` blocks of `source`; returns those that it names now too."""
        first = min(int(self.first_block[source]), count)
        self._host_tables[row, :count] = self._host_tables[source, :count]
        self._set_num_blocks(row, count)
        self.first_block[row] = first
        self._mark(row * self.max_blocks + np.arange(count))
        return self._host_tables[row, first:count].astype(np.int64)

    def skip(self, row: int, count: int) -> None:
        """Makes the empty `row` begin with `count` blocks that were given back already."""
        self._host_tables[row, :count] = self._gone
        self._set_num_blocks(row, count)
        self.first_block[row] = count
        self._mark(row * self.max_blocks + np.arange(count))

    def truncate(self, row: int, count: int) -> IntArray:
        """Takes the blocks behind the first `count` from `row`, and returns them."""
        end = int(self.num_blocks[row])
        if count >= end:
            return np.empty(0, np.int64)
        first = max(count, int(self.first_block[row]))
        blocks = self._host_tables[row, first:end].astype(np.int64)
        self._host_tables[row, count:end] = EMPTY
        self.num_blocks[row], self.first_block[row] = count, min(int(self.first_block[row]), count)
        self._mark(row * self.max_blocks + np.arange(count, end))
        return blocks

    def release_front(self, rows: IntArray, keep_from: IntArray) -> IntArray:
        """Takes the blocks before `keep_from[i]` from `rows[i]`, whose later ones stay where they are; returns them."""
        start = self.first_block[rows]
        counts = np.maximum(np.minimum(keep_from, self.num_blocks[rows]) - start, 0)
        if not counts.any():
            return np.empty(0, np.int64)
        index = np.repeat(rows * self.max_blocks + start, counts) + ragged_arange(counts)
        blocks: IntArray = self._host[index].astype(np.int64)
        self._host[index] = self._gone
        self.first_block[rows] = start + counts
        self._mark(index)
        return blocks

    def set_context_lens(self, rows: RowIndex, context_lens: IntArray) -> None:
        """Sets the tokens that each of `rows` holds."""
        self.stored[rows] = context_lens
        self.lens_changed = True

    def block_at(self, rows: IntArray, columns: IntArray) -> IntArray:
        """The block that each of `rows` names in its column; int32."""
        blocks: IntArray = self._host[rows * self.max_blocks + columns]
        return blocks

    def blocks_of(self, rows: Any) -> IntArray:
        """Blocks named by `rows`, row by row, in order."""
        rows = as_ints(rows)
        first = self.first_block[rows]
        counts = self.num_blocks[rows] - first
        return self._host[np.repeat(rows * self.max_blocks + first, counts) + ragged_arange(counts)].astype(np.int64)

    def clear(self, rows: Any) -> IntArray:
        """Empties `rows` and returns the blocks that they named, for `BlockAllocator.free`."""
        rows = as_ints(rows)
        blocks = self.blocks_of(rows)
        counts = self.num_blocks[rows]
        index = np.repeat(rows * self.max_blocks, counts) + ragged_arange(counts)
        self._host[index] = EMPTY
        self.num_blocks[rows] = self.first_block[rows] = 0
        self._mark(index)
        self.set_context_lens(rows, np.zeros(rows.size, np.int64))
        return blocks

    def slot_mapping(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Slot (block · block_size + slot in block) of token `positions[i]` of row `rows[i]`; int64 [num_tokens].

        Raises:
            ValueError: a position that no block of its row holds: writing there would hit another sequence.
        """
        column, offset = np.divmod(positions, self.block_size)
        outside = (column < self.first_block[rows]) | (column >= self.num_blocks[rows])
        if outside.any():
            bad = int(np.argmax(outside))
            row = int(rows[bad])
            raise ValueError(
                f"position {positions[bad]} of row {row} lies outside its {self.num_blocks[row]} blocks of "
                f"{self.block_size} tokens: append blocks first"
            )
        return self._host_tables[rows, column].astype(np.int64) * self.block_size + offset

    def differences(self) -> tuple[IntArray, npt.NDArray[np.int32]] | None:
        """Indices into the flat tables that are still to be sent, and their values; None if there are none.

        They stay so until `apply` has brought them to the device.
        """
        if not self._dirty:
            return None
        index = self._dirty[0] if len(self._dirty) == 1 else np.concatenate(self._dirty)
        return index, self._host[index]

    def apply(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Writes all that was to be sent, and is on the device already, in stream order."""
        self._device[index] = values
        self._dirty.clear()

    def flush(self) -> int:
        """Brings the device up to date and returns how many entries of the tables were sent.

        The host's memory has been read when this returns. A step of the scheduler sends through its staging instead.
        """
        changes = self.differences()
        if self.device.type == "meta":
            self.lens_changed = False
            self._dirty.clear()
        elif changes is not None:
            if self._near:
                self._near_tables[changes[0]] = changes[1]
                self._dirty.clear()
            else:
                self.apply(to_device(changes[0], self.device), to_device(changes[1], self.device))
        if self.lens_changed:
            self.lens_changed = False
            if self._near:
                self._near_lens[:] = self.stored
            else:
                self.context_lens.copy_(to_device(self.stored, self.device))
        return 0 if changes is None else int(changes[0].size)

    def batch(self, rows: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """Device tables and context lengths of `rows`, in that order, as of the last flush.

        Columns end at the longest row. Views of the persistent tensors where `rows` is 0, 1, 2, ..., which later
        flushes change; copies otherwise.
        """
        width = int(self.num_blocks[rows].max()) if rows.size else 0
        if np.array_equal(rows, np.arange(rows.size)):
            return self.block_tables[: rows.size, :width], self.context_lens[: rows.size]
        index = to_device(rows, self.device)
        return self.block_tables[:, :width].index_select(0, index), self.context_lens.index_select(0, index)

    def count_references(self, num_pool_blocks: int) -> IntArray:
        """Table entries that name each block of the pool, [num_pool_blocks]."""
        return np.bincount(self._host_tables[self._inside()], minlength=num_pool_blocks)

    def _inside(self) -> Any:
        columns = np.arange(self.max_blocks)
        return (columns >= self.first_block[:, None]) & (columns < self.num_blocks[:, None])

    def _mark(self, index: IntArray) -> None:
        self._dirty.append(index)

    def _reject_full(self, rows: IntArray, ends: IntArray) -> None:
        row = int(rows[np.argmax(ends)])
        raise ValueError(f"row {row} would name {ends.max()} blocks: the tables have {self.max_blocks}")

    def check(self) -> None:
        """Derives every invariant of the tables anew.

        Raises:
            InvariantViolation: names the invariant and a row.
        """
        named = (self._host_tables != EMPTY) & (self._host_tables != self._gone)
        wrong = true_at((named != self._inside()).any(axis=1))
        if wrong.size:
            row = int(wrong[0])
            detail = (
                f"row {row} counts {self.num_blocks[row]} blocks, {self.first_block[row]} of them given back, and "
                f"holds {self._host_tables[row].tolist()}"
            )
            raise InvariantViolation(Invariant.TABLE_SHAPE, detail)
        differs = self._device.cpu().numpy() != self._host
        for index in self._dirty:
            differs[index] = False
        lost = true_at(differs)
        if lost.size:
            row, column = divmod(int(lost[0]), self.max_blocks)
            where = f"entry [{row}, {column}]"
            raise InvariantViolation(Invariant.TABLE_DEVICE, f"{where} differs and is not among those still to send")
        if not self.lens_changed and (self.context_lens.cpu().numpy() != self.stored).any():
            raise InvariantViolation(Invariant.TABLE_DEVICE, "a context length differs and is not to be sent")
