"""A snapshot of pool and queue, and what there is to say about one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import IntArray, blocks_for, ragged_arange
from .kv_ledger import KVLedger
from .roster import Roster
from .sequence import Sequence


@dataclass(frozen=True)
class PoolBytes:
    """The pool in bytes; `live + fragmented + cached + fenced + reserved + free` is all of it.

    Args:
        live: slots that hold tokens of running sequences, each once however many share it.
        fragmented: the unfilled ends of their last blocks.
        cached: blocks that only a prefix cache names.
        shared: blocks that several name, which without sharing would be that many times as much; part of the others.
        saved: what sharing saves: how much more the running sequences would take without it.
        fenced: given back, and kept until the steps in flight have ended.
        reserved: set aside for loads.
        free: the rest.
    """

    live: int
    fragmented: int
    cached: int
    shared: int
    saved: int
    fenced: int
    reserved: int
    free: int


@dataclass(frozen=True)
class Snapshot:
    """Where the blocks are and what the queue does; `free + referenced + fenced + reserved = num_blocks`,
    and `referenced = named + cached`.

    Args:
        num_blocks, block_size: the pool.
        free, referenced, fenced, reserved: blocks in each state.
        shared: blocks with more than one reference.
        table_entries: blocks that running sequences name, each as often as it is named.
        named: blocks that running sequences name, each once; the other referenced ones are cached.
        live_tokens: tokens of running sequences whose K and V are in the pool, or will be when the steps in
            flight have ended; each once however many share it.
        running, waiting: requests.
        steps_in_flight: steps begun and not ended.
        preemptions: sequences that have lost their blocks since the start.
        swapped: those of them whose K and V went to host memory.
        parked_blocks: blocks of host memory in use.
        finished: requests that have ended since the start, cancelled ones included.
        block_bytes: bytes of a block, if known.
    """

    num_blocks: int
    block_size: int
    free: int
    referenced: int
    fenced: int
    reserved: int
    shared: int
    table_entries: int
    named: int
    live_tokens: int
    running: int
    waiting: int
    steps_in_flight: int
    preemptions: int
    swapped: int
    parked_blocks: int
    finished: int
    block_bytes: int | None = None

    @property
    def cached(self) -> int:
        """Blocks that only the prefix cache names, kept for later sequences."""
        return self.referenced - self.named

    @property
    def waste_tokens(self) -> int:
        """Slots of the sequences' blocks that hold no token: the unfilled ends of last blocks."""
        return self.named * self.block_size - self.live_tokens

    @property
    def utilisation(self) -> float:
        """Share of the slots of the sequences' blocks that hold a token; 1 where there are none."""
        slots = self.named * self.block_size
        return self.live_tokens / slots if slots else 1.0

    @property
    def bytes(self) -> PoolBytes:
        """The same in bytes.

        Raises:
            ValueError: the snapshot was taken without `block_bytes`.
        """
        if self.block_bytes is None:
            raise ValueError("the size of a block is unknown: take the snapshot with block_bytes=cache.block_bytes")
        slot = self.block_bytes // self.block_size
        return PoolBytes(
            live=self.live_tokens * slot,
            fragmented=self.waste_tokens * slot,
            cached=self.cached * self.block_bytes,
            shared=self.shared * self.block_bytes,
            saved=(self.table_entries - self.named) * self.block_bytes,
            fenced=self.fenced * self.block_bytes,
            reserved=self.reserved * self.block_bytes,
            free=self.free * self.block_bytes,
        )


@dataclass(frozen=True)
class SequenceReport:
    """What there is to say about one live request.

    Args:
        request_id: the caller's name.
        place: `running`, `waiting` or `in host memory`.
        queue_position: how many wait before it; None if it runs.
        num_tokens: prompt and output so far.
        num_prompt_tokens: the prompt.
        stored, processed: tokens whose K and V are booked, and those certainly written.
        blocks: ids, in order, those given back behind a window left out.
        shared_blocks: how many of them others name too.
        copies_before_writing: whether its next token makes a copy, as the block that it fills is shared.
        unfilled_slots: in its last block.
        relatives: live samples and forks of the same request.
        num_preemptions: times that it lost its blocks.
    """

    request_id: str
    place: str
    queue_position: int | None
    num_tokens: int
    num_prompt_tokens: int
    stored: int
    processed: int
    blocks: tuple[int, ...]
    shared_blocks: int
    copies_before_writing: bool
    unfilled_slots: int
    relatives: tuple[str, ...]
    num_preemptions: int

    def __str__(self) -> str:
        lines = [
            f"{self.request_id}: {self.place}, {self.num_tokens} tokens ({self.num_prompt_tokens} of them prompt), "
            f"{self.stored} stored, {self.processed} processed, preempted {self.num_preemptions} times"
        ]
        if self.queue_position is not None:
            lines.append(f"  {self.queue_position} wait before it")
        if self.blocks:
            copy = "; its next token makes a copy first" if self.copies_before_writing else ""
            lines.append(f"  blocks {list(self.blocks)}: {self.shared_blocks} shared, {self.unfilled_slots} slots left")
            lines[-1] += copy
        if self.relatives:
            lines.append(f"  may share with {', '.join(self.relatives)}")
        return "\n".join(lines)


def take_snapshot(ledger: KVLedger, roster: Roster, block_bytes: int | None) -> Snapshot:
    """Counts anew; a pass over pool and tables."""
    allocator, tables = ledger.allocator, ledger.tables
    entries = tables.blocks_of(roster.running)
    return Snapshot(
        num_blocks=allocator.num_blocks,
        block_size=tables.block_size,
        free=allocator.num_free,
        referenced=allocator.num_referenced,
        fenced=allocator.num_fenced,
        reserved=allocator.num_reserved,
        shared=allocator.num_shared,
        table_entries=entries.size,
        named=np.unique(entries).size,
        live_tokens=_live_tokens(ledger, roster.running, entries),
        running=roster.running.size,
        waiting=len(roster.waiting),
        steps_in_flight=len(allocator.steps_in_flight),
        preemptions=roster.num_preemptions,
        swapped=roster.num_swapped,
        parked_blocks=roster.swap.allocator.num_referenced if roster.swap else 0,
        finished=roster.num_finished,
        block_bytes=block_bytes,
    )


def _live_tokens(ledger: KVLedger, rows: IntArray, entries: IntArray) -> int:
    """Filled slots of `entries`, the blocks of `rows`: of a shared block, as many as whoever filled most of it."""
    tables, size = ledger.tables, ledger.tables.block_size
    first = tables.first_block[rows]
    counts = tables.num_blocks[rows] - first
    column = ragged_arange(counts) + np.repeat(first, counts)
    filled = np.clip(np.repeat(ledger.stored[rows], counts) - column * size, 0, size)
    most = np.zeros(ledger.allocator.num_blocks, np.int64)
    np.maximum.at(most, entries, filled)
    return int(most.sum())


def report(ledger: KVLedger, roster: Roster, sequence: Sequence) -> SequenceReport:
    """See `Scheduler.explain`."""
    row, tables = sequence.row, ledger.tables
    blocks = tables.blocks_of(row) if row >= 0 else np.empty(0, np.int64)
    stored = int(ledger.stored[row]) if row >= 0 else 0
    place = "running" if row >= 0 else "waiting" if sequence.parked is None else "in host memory"
    members = sequence.family.members if sequence.family else ()
    return SequenceReport(
        request_id=sequence.request_id,
        place=place,
        queue_position=None if row >= 0 else list(roster.waiting).index(sequence),
        num_tokens=int(roster.tokens_of(sequence).size),
        num_prompt_tokens=sequence.prompt_len,
        stored=stored,
        processed=int(ledger.processed[row]) if row >= 0 else 0,
        blocks=tuple(blocks.tolist()),
        shared_blocks=int(np.count_nonzero(ledger.allocator.refcounts(blocks) > 1)),
        copies_before_writing=row >= 0
        and int(ledger.demand(np.array([row]), np.array([1]))[0]) > 0
        and stored % tables.block_size > 0,
        unfilled_slots=blocks_for(stored, tables.block_size) * tables.block_size - stored,
        relatives=tuple(member.request_id for member in members if member is not sequence),
        num_preemptions=sequence.num_preemptions,
    )
