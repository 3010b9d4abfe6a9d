"""Bugs of public runtimes, and where this project would notice each: `python -m tests.runtime_machine.public_bugs`.

The numbers are those of the project's survey of public issues; `source` names the first of them. A planted version of a
bug is a function put in the place of a method; its scenario must then fail, and must pass without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagedtune.runtime.admission import Admission
from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.arrays import as_ints
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.graph_batch import GraphBatch
from pagedtune.runtime.kv_cache import KVCache
from pagedtune.runtime.kv_ledger import KVLedger
from pagedtune.runtime.roster import Roster
from pagedtune.runtime.rows import RunningRows
from pagedtune.runtime.scheduler import Scheduler
from pagedtune.runtime.sequence import Request
from pagedtune.runtime.staging import Staging
from pagedtune.runtime.swap import SwapSpace

from . import public_scenarios as must

ELSEWHERE_KERNELS = "kernels: blocks above 2^31 elements, poisoned tails and padding are hazards of every gate case"
ELSEWHERE_CACHE = "prefix cache: tests/runtime/test_prefix_public_bugs.py"


@dataclass(frozen=True)
class Bug:
    """One bug class.

    Args:
        number: in the survey.
        source: where it was public.
        title: what goes wrong.
        where: who would notice, if it is not planted here; or why it cannot happen.
        owner, method, fault: what to put in the place of what.
        scenario: fails with the fault.
    """

    number: int
    source: str
    title: str
    where: str = ""
    owner: Any = None
    method: str = ""
    fault: Callable[..., Any] | None = None
    scenario: Callable[[], Any] | None = None


def free_without_fence(self: BlockAllocator, blocks: Any) -> None:
    self._push(blocks)


def trim_booked(self: KVLedger, rows: Any) -> None:
    """By what is booked, not by what is processed."""
    if self.window is not None:
        self.allocator.free(self.tables.release_front(rows, self._needed_from(self.stored[rows])))


def share_without_looking(self: BlockAllocator, blocks: Any) -> None:
    np.add.at(self._refcount, as_ints(blocks), 1)


def count_twice(self: BlockAllocator, blocks: Any) -> None:
    np.add.at(self._refcount, np.repeat(as_ints(blocks), 2), 1)


def load_and_keep(self: SwapSpace, host_blocks: Any, blocks: Any) -> None:
    """The blocks on the host are never given back."""
    self.num_loaded += blocks.size


def one_buffer(self: Staging, num_bytes: int) -> Any:
    """Every step gets the same memory."""
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    slot = getattr(Staging, "planted", None) or swap_slot(memory)
    Staging.planted = slot  # type: ignore[attr-defined]
    return slot


def swap_slot(memory: torch.Tensor) -> Any:
    from pagedtune.runtime.staging import _Slot

    return _Slot(memory, memory)


def narrow_slots(self: BlockTables, rows: Any, positions: Any) -> Any:
    column, offset = np.divmod(positions, self.block_size)
    blocks = self._host_tables[rows, column]
    return (blocks * np.int32(self.block_size) + offset.astype(np.int32)).astype(np.int64)


def no_limit(self: Scheduler, request: Request) -> None:
    """Any request is queued."""


def chunk_only(self: Admission, sequence: Any, shared_tokens: int) -> int:
    """Admission looks at the first chunk alone."""
    return 1


def preempt_at_any_rate(self: Admission, counts: Any) -> Any:
    preempted: list[str] = []
    while True:
        rows = self._roster.running
        missing = self._ledger.demand(rows, counts)
        if int(missing.sum()) <= self._allocator.num_free or rows.size == 1:
            return rows, counts, preempted, True
        preempted.append(self._roster.preempt(int(rows[-1])))
        counts = counts[:-1]


def tokens_for_blocks(self: BlockTables, rows: Any, num_tokens: Any) -> Any:
    """A full last block counts as having room for one more."""
    return np.maximum(-(-(num_tokens - 1) // self.block_size) - self.num_blocks[rows], 0)


def a_block_early(self: BlockTables, rows: Any, num_tokens: Any) -> Any:
    """The next block is taken when the last one is full, not when the next token needs it."""
    return np.maximum(num_tokens // self.block_size + 1 - self.num_blocks[rows], 0)


def all_entries(ledger: KVLedger, rows: Any, entries: Any) -> int:
    """Shared blocks count as often as they are named."""
    return int(ledger.stored[rows].sum())


def release_twice(self: KVLedger, row: int) -> None:
    blocks = self.tables.blocks_of(row)
    self.allocator.free(self.tables.clear(row))
    self.allocator.free(blocks)


def release_nothing(self: KVLedger, row: int) -> None:
    self.tables.clear(row)


def all_of_it(self: Roster, row: int, tokens: Any) -> int:
    """A sequence that another one covers wholly has no query left."""
    count = min(int(self.rows.num_tokens[row]), tokens.size)
    differs = np.flatnonzero(self.rows.tokens[row, :count] != tokens[:count])
    return int(differs[0]) if differs.size else count


def forget_what_came_along(self: RunningRows, index: Any) -> Any:
    """What a resumed sequence brought back is computed once more on top."""
    return self.num_tokens[index] + self.num_pending[index]


def last_in_the_queue(self: Roster, row: int, recompute: bool = False) -> str:
    sequence = self.rows_sequence(row)
    sequence.parked = self._park(row) if self.swap else None
    self._leave(sequence)
    self.waiting.append(sequence)
    return sequence.request_id


def oldest_first(self: BlockAllocator, blocks: Any) -> None:
    self._refcount[blocks] = 0
    free = np.concatenate((self._free_stack[self._head :], blocks))
    self._head -= blocks.size
    self._free_stack[self._head :] = free


def k_alone(self: KVCache) -> Any:
    return (self._k,)


def keep_members(self: Roster, sequence: Any) -> None:
    """Relatives that have ended stay on the list."""


def fork_what_is_booked(self: KVLedger, step: int, index: Any, ends: Any) -> None:
    self.allocator.end_step(step)
    self.processed[:] = self.stored


def write_in_place(self: KVLedger, rows: Any, writes: Any) -> Any:
    return np.empty(0, np.int64)


def pad_with_the_last_slot(self: GraphBatch, plan: Any) -> int:
    self.slot_mapping[: plan.num_tokens].copy_(plan.slot_mapping)
    self.slot_mapping[plan.num_tokens :] = 39
    return self.slot_mapping.shape[0]


def leave_the_padding(self: GraphBatch, plan: Any) -> int:
    count, width = plan.num_tokens, plan.block_table.shape[1]
    self.slot_mapping[:count].copy_(plan.slot_mapping)
    self.block_table[:count, :width].copy_(plan.block_table)
    return self.slot_mapping.shape[0]


BUGS = (
    Bug(1, "vllm #1486", "slots overflow 32 bits", owner=BlockTables, method="slot_mapping", fault=narrow_slots,
        scenario=must.slots_far_out),
    *(Bug(number, source, "a kernel's offsets overflow 32 bits", ELSEWHERE_KERNELS) for number, source in (
        (2, "vllm #50427"), (3, "vllm #47671"), (4, "flashinfer #3136"), (5, "vllm-xpu-kernels #445"))),
    Bug(6, "vllm #43810", "slot -1 of padding is the last slot", owner=GraphBatch, method="load",
        fault=pad_with_the_last_slot, scenario=must.padding_writes_nowhere_and_reads_nothing_old),
    Bug(7, "sglang #32477", "what padding holds leaks through a mask", ELSEWHERE_KERNELS),
    Bug(8, "lmdeploy #4569", "padded rows keep the tables of a step before", owner=GraphBatch, method="load",
        fault=leave_the_padding, scenario=must.padding_writes_nowhere_and_reads_nothing_old),
    Bug(9, "vllm #13922", "a kernel writes more rows than there are slots", ELSEWHERE_KERNELS),
    Bug(10, "vllm #45357", "freed while a step in flight writes", owner=BlockAllocator, method="_retire",
        fault=free_without_fence, scenario=must.random_ledger),
    Bug(11, "vllm #47728", "window by booked tokens", owner=KVLedger, method="trim", fault=trim_booked,
        scenario=must.window_under_a_failed_step),
    Bug(12, "TensorRT-LLM #15546", "staging overwritten before its copy ran", owner=Staging, method="_slot",
        fault=one_buffer, scenario=must.staged_twice),
    Bug(13, "vllm #56525", "shared before it was written", owner=KVLedger, method="finish_step",
        fault=fork_what_is_booked, scenario=must.random_scheduler),
    Bug(14, "sglang #38319", "a chunk is cached amid its prompt", ELSEWHERE_CACHE),
    Bug(15, "vllm #11565", "hits counted as evictable", ELSEWHERE_CACHE),
    Bug(16, "vllm #3347", "a fork counts blocks twice", owner=BlockAllocator, method="add_reference",
        fault=count_twice, scenario=must.random_ledger),
    Bug(17, "TensorRT-LLM #12667", "a reference to a free block", owner=BlockAllocator, method="add_reference",
        fault=share_without_looking, scenario=must.share_what_is_free),
    Bug(18, "TensorRT-LLM #12834", "blocks of a tier are lost", owner=SwapSpace, method="load", fault=load_and_keep,
        scenario=must.host_memory_comes_back_once),
    Bug(19, "TensorRT-LLM #19242", "a cycle keeps what has ended", owner=Roster, method="_forget_relative",
        fault=keep_members, scenario=must.nothing_keeps_what_has_ended),
    Bug(20, "TensorRT-LLM #15018", "removed before its blocks were stored", ELSEWHERE_CACHE),
    Bug(21, "nano-vllm #163", "an old hash names a new block", ELSEWHERE_CACHE),
    Bug(22, "nano-vllm #211", "what came along is computed again", owner=RunningRows, method="owed",
        fault=forget_what_came_along, scenario=must.random_scheduler),
    Bug(23, "nano-vllm #144", "a query of no token", owner=Roster, method="_common_tokens", fault=all_of_it,
        scenario=must.random_scheduler),
    *(Bug(number, source, "wrong block by its hash", ELSEWHERE_CACHE) for number, source in (
        (24, "vllm #49125"), (25, "vllm #4761"), (26, "kvcached #446"), (27, "openvino.genai #3722"))),
    Bug(28, "vllm #39734", "larger than the pool, never refused", owner=Scheduler, method="_require_fits",
        fault=no_limit, scenario=must.too_large_is_refused),
    Bug(29, "vllm #45388", "loads reserve less than they need", "admission counts the whole prompt, loads included"),
    Bug(30, "vllm-ascend #16315", "preempting what frees nothing now", owner=Admission, method="secure",
        fault=preempt_at_any_rate, scenario=must.nobody_is_preempted_in_vain),
    Bug(31, "vllm #21809", "admitted by its first chunk", owner=Admission, method="_blocks_of", fault=chunk_only,
        scenario=must.a_long_prompt_is_admitted_when_all_of_it_fits),
    Bug(32, "sglang #6731", "tokens counted where blocks are needed", owner=BlockTables, method="missing_blocks",
        fault=tokens_for_blocks, scenario=must.random_ledger),
    Bug(33, "sglang #6888", "shared blocks counted twice", owner="pagedtune.runtime.metrics", method="_live_tokens",
        fault=all_entries, scenario=must.samples_count_once),
    Bug(34, "sglang-jax #982", "freed on two ways", owner=KVLedger, method="release", fault=release_twice,
        scenario=must.random_scheduler),
    Bug(35, "vllm #46283", "an abort keeps its blocks", owner=KVLedger, method="release", fault=release_nothing,
        scenario=must.random_scheduler),
    Bug(36, "pegainfer #350", "the next block is taken too early", owner=BlockTables, method="missing_blocks",
        fault=a_block_early, scenario=must.random_scheduler),
    Bug(37, "vllm #5578", "new ones get in before those swapped out", owner=Roster, method="preempt",
        fault=last_in_the_queue, scenario=must.who_was_first_goes_on_first),
    Bug(38, "vllm #51482", "reuse turned from last to first", owner=BlockAllocator, method="_push",
        fault=oldest_first, scenario=must.the_last_freed_is_the_first_reused),
    Bug(39, "vllm-ascend #16013", "a copy of one tensor of two", owner=KVCache, method="block_tensors",
        fault=k_alone, scenario=must.both_k_and_v_are_copied),
    Bug(40, "this project", "a write to a shared block without a copy", owner=KVLedger, method="_must_copy",
        fault=write_in_place, scenario=must.random_ledger),
)  # fmt: skip


def table() -> str:
    """All of them, a line each."""
    lines = []
    for bug in BUGS:
        where = bug.where
        if bug.scenario is not None:
            owner = bug.owner if isinstance(bug.owner, str) else bug.owner.__name__
            where = f"planted in {owner.rsplit('.')[-1]}.{bug.method}, found by {bug.scenario.__name__}"
        lines.append(f"{bug.number:3d}  {bug.source:24s} {bug.title:46s} {where}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
