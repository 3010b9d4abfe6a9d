"""Inputs of a captured graph: tensors that stay where they are, filled up so that padding can write nowhere."""

from __future__ import annotations

from typing import Any

import torch

from ..kernels.bounds import Bounds, bucket_of
from ..kernels.problem import require_positive
from .plan import StepPlan


class GraphBatch:
    """The inputs of decode steps at fixed addresses, for engines that capture the whole step in a CUDA graph.

    One graph is captured for each bucket (`kernels.bounds.bucket_of`: powers of two) over the first rows of these
    tensors. What a step does not fill of its bucket is padding: sequences without query token and context, whose
    tables name the null block, and tokens whose slot is negative, which `Op.KV_WRITE` skips. A kernel that knows no
    negative slots gets the null block's (`null_slots`). Nothing of an earlier step is left in the padding.

    Args:
        max_num_seqs: rows.
        max_blocks: columns of the table.
        block_size: tokens of one block.
        null_block: `KVCache.null_block`; without one, padded tables name block 0 and are never to be followed.
        device: of the tensors.
        null_slots: whether padded tokens write to the null block instead of nowhere.

    Attributes:
        input_ids, positions, slot_mapping: int64 [max_num_seqs].
        block_table: int32 [max_num_seqs, max_blocks].
        context_lens: int32 [max_num_seqs].
        query_start_loc: int32 [max_num_seqs + 1].

    Raises:
        ValueError: a count below 1, or null slots without a null block.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        null_block: int | None = None,
        device: torch.device | str = "cpu",
        null_slots: bool = False,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_blocks", max_blocks), ("block_size", block_size)):
            require_positive(name, value)
        if null_slots and null_block is None:
            raise ValueError("null_slots=True needs a null block: build the KVCache with null_block=True")
        rows = bucket_of(Bounds(max_num_seqs, 1)).max_num_seqs
        self._pad_slot = -1 if null_block is None or not null_slots else null_block * block_size
        self._pad_block = 0 if null_block is None else null_block
        long: dict[str, Any] = {"dtype": torch.int64, "device": device}
        short: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.input_ids, self.positions = torch.zeros(rows, **long), torch.zeros(rows, **long)
        self.slot_mapping = torch.full((rows,), self._pad_slot, **long)
        self.block_table = torch.full((rows, max_blocks), self._pad_block, **short)
        self.context_lens = torch.zeros(rows, **short)
        self.query_start_loc = torch.zeros(rows + 1, **short)
        self._filled = 0

    def load(self, plan: StepPlan) -> int:
        """Takes over a step in which every sequence has one query token; returns the rows of its bucket.

        Raises:
            ValueError: a sequence has more query tokens, or there are more sequences than rows.
        """
        count = len(plan.query_lens)
        if plan.num_tokens != count or count > self.input_ids.shape[0]:
            raise ValueError(
                f"step {plan.step} has {count} sequences with {plan.num_tokens} query tokens: a graph takes one each, "
                f"of at most {self.input_ids.shape[0]}"
            )
        bucket = bucket_of(Bounds(count, 1)).max_num_seqs
        width = plan.block_table.shape[1]
        for own, new in ((self.input_ids, plan.input_ids), (self.positions, plan.positions)):
            own[:count].copy_(new)
            own[count:bucket].zero_()
        self.slot_mapping[:count].copy_(plan.slot_mapping)
        self.slot_mapping[count:].fill_(self._pad_slot)
        self.block_table[: max(self._filled, bucket)].fill_(self._pad_block)
        self.block_table[:count, :width].copy_(plan.block_table)
        self.context_lens[:count].copy_(plan.context_lens)
        self.context_lens[count:].zero_()
        self.query_start_loc[: count + 1].copy_(plan.query_start_loc)
        self.query_start_loc[count + 1 :].fill_(count)
        self._filled = bucket
        return bucket
