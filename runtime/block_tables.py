"""Block tables and context lengths: kept on the device, edited on the host, brought up to date by differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..kernels.problem import require_positive
from .arrays import IntArray, as_ints, blocks_for, ragged_arange, to_device
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
        device: where the tables are read.

    Attributes:
        block_tables: int32 [max_num_seqs, max_blocks] on the device; past the end of a row -1. The same storage
            for the life of the object, as a captured graph needs it.
        context_lens: int32 [max_num_seqs] on the device; 0 for an unused row.
        num_blocks: int64 [max_num_seqs] on the host: blocks that each row names. Read only.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, device: torch.device | str = "cpu") -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_blocks", max_blocks), ("block_size", block_size)):
            require_positive(name, value)
        self.max_num_seqs, self.max_blocks, self.block_size = max_num_seqs, max_blocks, block_size
        self.device = torch.device(device)
        entries = max_num_seqs * max_blocks
        # One buffer holds both, so that one scatter updates both: the tables row by row, then the lengths.
        self._host = np.full(entries + max_num_seqs, EMPTY, np.int32)
        self._host[entries:] = 0
        self._host_tables = self._host[:entries].reshape(max_num_seqs, max_blocks)
        self._host_context_lens = self._host[entries:]
        self._device = torch.from_numpy(self._host.copy()).to(self.device)
        self.block_tables = self._device[:entries].view(max_num_seqs, max_blocks)
        self.context_lens = self._device[entries:]
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self._dirty: list[IntArray] = []  # indices into the buffer; one may occur twice: values are read at flush

    def missing_blocks(self, rows: IntArray, num_tokens: IntArray) -> IntArray:
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
            row = int(rows[np.argmax(start + counts)])
            raise ValueError(f"row {row} would name {(start + counts).max()} blocks: the tables have {self.max_blocks}")
        index = np.repeat(rows * self.max_blocks + start, counts) + ragged_arange(counts)
        self._host[index] = blocks
        self.num_blocks[rows] = start + counts
        self._mark(index)

    def set_context_lens(self, rows: IntArray, context_lens: IntArray) -> None:
        """Sets the tokens that each of `rows` holds."""
        self._host_context_lens[rows] = context_lens
        self._mark(rows + self._host_tables.size)

    def blocks_of(self, rows: Any) -> IntArray:
        """Blocks named by `rows`, row by row, in order."""
        rows = as_ints(rows)
        counts = self.num_blocks[rows]
        return self._host[np.repeat(rows * self.max_blocks, counts) + ragged_arange(counts)].astype(np.int64)

    def clear(self, rows: Any) -> IntArray:
        """Empties `rows` and returns the blocks that they named, for `BlockAllocator.free`."""
        rows = as_ints(rows)
        counts = self.num_blocks[rows]
        index = np.repeat(rows * self.max_blocks, counts) + ragged_arange(counts)
        blocks = self._host[index].astype(np.int64)
        self._host[index] = EMPTY
        self.num_blocks[rows] = 0
        self._mark(index)
        self.set_context_lens(rows, np.zeros(rows.size, np.int64))
        return blocks

    def slot_mapping(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Slot (block · block_size + slot in block) of token `positions[i]` of row `rows[i]`; int64 [num_tokens].

        Raises:
            ValueError: a position that no block of its row holds: writing there would hit another sequence.
        """
        column, offset = np.divmod(positions, self.block_size)
        outside = (column < 0) | (column >= self.num_blocks[rows])
        if outside.any():
            bad = int(np.argmax(outside))
            row = int(rows[bad])
            raise ValueError(
                f"position {positions[bad]} of row {row} lies outside its {self.num_blocks[row]} blocks of "
                f"{self.block_size} tokens: append blocks first"
            )
        return self._host_tables[rows, column].astype(np.int64) * self.block_size + offset

    def flush(self) -> int:
        """Brings the device up to date and returns how many entries were sent."""
        if not self._dirty:
            return 0
        index = np.concatenate(self._dirty)
        self._dirty.clear()
        values = self._host[index]
        if self.device.type == "cpu":  # torch would hand a few thousand int32s to a pool of threads
            self._device.numpy()[index] = values
        else:
            self._device[to_device(index, self.device)] = to_device(values, self.device)
        return int(index.size)

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
        named = self._host_tables[self._host_tables != EMPTY]
        return np.bincount(named, minlength=num_pool_blocks)

    def _mark(self, index: IntArray) -> None:
        self._dirty.append(index)

    def check(self) -> None:
        """Derives every invariant of the tables anew.

        Raises:
            InvariantViolation: names the invariant and a row.
        """
        named = self._host_tables != EMPTY
        inside = np.arange(self.max_blocks) < self.num_blocks[:, None]
        wrong = np.flatnonzero((named != inside).any(axis=1))
        if wrong.size:
            row = int(wrong[0])
            detail = f"row {row} counts {self.num_blocks[row]} blocks and holds {self._host_tables[row].tolist()}"
            raise InvariantViolation(Invariant.TABLE_SHAPE, detail)
        differs = self._device.cpu().numpy() != self._host
        for index in self._dirty:
            differs[index] = False
        lost = np.flatnonzero(differs)
        if lost.size:
            row, column = divmod(int(lost[0]), self.max_blocks)
            where = f"entry [{row}, {column}]" if row < self.max_num_seqs else "a context length"
            raise InvariantViolation(Invariant.TABLE_DEVICE, f"{where} differs and is not among those still to send")
