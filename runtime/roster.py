"""Who is live, who runs in which row, who waits, and how the recent ones ended: every way in and out."""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np

from .allocator import BlockAllocator
from .block_tables import BlockTables
from .errors import InvalidRequest, RequestFinished, UnknownRequest
from .rows import RunningRows
from .sequence import Finished, FinishReason, Request, Sequence

REMEMBERED = 1024  # ended requests whose id still gets a precise error


class Roster:
    """Live requests. Leaving, whichever way, gives back row and blocks together.

    Args:
        allocator: blocks that leaving sequences give back.
        tables: rows that they give up.

    Attributes:
        rows: state of the running sequences by row.
        running: int64: rows in order of admission.
        waiting: sequences that do not run, next one first.
        live: every request added and not ended, by id.
        num_preemptions, num_finished: since the start.
    """

    def __init__(self, allocator: BlockAllocator, tables: BlockTables) -> None:
        self._allocator, self._tables = allocator, tables
        self.rows = RunningRows(tables.max_num_seqs, tables.max_blocks * tables.block_size + 1)
        self.running = np.empty(0, np.int64)
        self.waiting: deque[Sequence] = deque()
        self.live: dict[str, Sequence] = {}
        self.num_preemptions = self.num_finished = 0
        self._ended: OrderedDict[str, FinishReason] = OrderedDict()

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            InvalidRequest: its id is that of a live request.
        """
        if request.request_id in self.live:
            raise InvalidRequest(f"request {request.request_id!r} is live already: ids must be unique among live ones")
        sequence = Sequence.of(request)
        self.live[request.request_id] = sequence
        self.waiting.append(sequence)

    def find(self, request_id: str) -> Sequence:
        """The live request of this id.

        Raises:
            RequestFinished: it has ended, and is among the last 1024 that did.
            UnknownRequest: none of this id is known.
        """
        sequence = self.live.get(request_id)
        if sequence is not None:
            return sequence
        if request_id in self._ended:
            raise RequestFinished(f"request {request_id!r} has ended already: {self._ended[request_id]}")
        raise UnknownRequest(
            f"request {request_id!r} is unknown: never added, or ended before the last {REMEMBERED} requests that did"
        )

    def enter(self) -> int:
        """Gives the first waiting sequence a row, and returns the row. If that fails, it still waits."""
        row = self.rows.admit(self.waiting[0])
        self.waiting.popleft()
        self.running = np.append(self.running, row)
        return row

    def preempt(self, row: int) -> str:
        """Sends a running sequence back to the head of the queue, to be computed anew; returns its id."""
        sequence = self.live[self.rows.request_ids[row]]
        self._leave(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)
        return sequence.request.request_id

    def end(self, sequence: Sequence, reason: FinishReason) -> Finished:
        """Ends a request, running or waiting."""
        if sequence.row >= 0:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
        request = sequence.request
        del self.live[request.request_id]
        self._ended.pop(request.request_id, None)
        self._ended[request.request_id] = reason
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        self.num_finished += 1
        output = tuple(sequence.tokens[len(request.prompt) :].tolist())
        return Finished(request.request_id, output, reason, sequence.num_preemptions)

    def _leave(self, sequence: Sequence) -> None:
        row = sequence.row
        self._allocator.free(self._tables.clear(row))
        self.rows.vacate(sequence)
        self.running = self.running[self.running != row]
