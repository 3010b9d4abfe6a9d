"""The invariants of a scheduler, derived anew."""

from __future__ import annotations

import numpy as np

from .arrays import true_at
from .block_tables import BlockTables
from .errors import Invariant, InvariantViolation
from .kv_ledger import KVLedger
from .roster import Roster
from .rows import NO_TICKET


def check_scheduler(ledger: KVLedger, roster: Roster) -> None:
    """Checks pool, tables, rows and queue against each other.

    Raises:
        InvariantViolation: the first invariant that does not hold.
    """
    allocator, tables = ledger.allocator, ledger.tables
    tables.check()
    references = tables.count_references(allocator.num_blocks) + ledger.pending_references
    if roster.sharing is not None:
        references += roster.sharing.references()
        roster.sharing.check()
    allocator.check(references)
    ledger.check()
    _check_rows(roster)
    _check_coverage(tables, roster)
    _check_progress(roster, len(allocator.steps_in_flight))
    _check_parked(roster)


def _check_rows(roster: Roster) -> None:
    state, running = roster.rows, roster.running
    taken = true_at(state.ticket != NO_TICKET)
    if not np.array_equal(np.sort(running), taken):
        raise InvariantViolation(Invariant.ROWS, f"rows {running.tolist()} run, rows {taken.tolist()} are taken")
    by_row = {sequence.row: request_id for request_id, sequence in roster.live.items() if sequence.row >= 0}
    named = {row: state.request_ids[row] for row in running.tolist()}
    if by_row != named:
        raise InvariantViolation(Invariant.ROWS, f"live requests have rows {by_row}, rows name {named}")
    queued = sorted(sequence.request.request_id for sequence in roster.waiting)
    rowless = sorted(request_id for request_id, sequence in roster.live.items() if sequence.row < 0)
    if queued != rowless:
        raise InvariantViolation(Invariant.ROWS, f"{queued} wait, but {rowless} are live without a row")


def _check_coverage(tables: BlockTables, roster: Roster) -> None:
    stored = roster.rows.num_scheduled
    needed = (stored + tables.block_size - 1) // tables.block_size
    wrong = true_at(needed != tables.num_blocks)
    if wrong.size:
        row = int(wrong[0])
        detail = f"row {row} names {tables.num_blocks[row]} blocks, its {stored[row]} tokens need {needed[row]}"
        raise InvariantViolation(Invariant.COVERAGE, detail)


def _check_progress(roster: Roster, steps_in_flight: int) -> None:
    state = roster.rows
    too_far = state.num_scheduled > state.num_tokens + state.num_pending + state.num_drafts
    wrong = true_at(too_far | (state.num_pending < 0) | (state.num_pending > steps_in_flight))
    if wrong.size:
        row = int(wrong[0])
        raise InvariantViolation(
            Invariant.ROWS,
            f"row {row} has {state.num_tokens[row]} tokens, {state.num_pending[row]} to come from "
            f"{steps_in_flight} steps in flight and {state.num_scheduled[row]} scheduled",
        )


def _check_parked(roster: Roster) -> None:
    """Host memory is held by sequences that wait, each block by one."""
    parked = [sequence for sequence in roster.live.values() if sequence.parked is not None]
    running = [sequence.request_id for sequence in parked if sequence.row >= 0]
    if running:
        raise InvariantViolation(Invariant.ROWS, f"{running} run and are in host memory at once")
    if roster.swap is None:
        return
    named = [sequence.parked.host_blocks for sequence in parked if sequence.parked is not None]
    blocks = np.concatenate(named) if named else np.empty(0, np.int64)
    roster.swap.allocator.check(np.bincount(blocks, minlength=roster.swap.allocator.num_blocks))
