"""The tuning pipeline, from a sweep to `winners.json`. Read top to bottom.

    set-up    load the sweep, open the records, start workers, build every candidate
    per cell  prove each candidate against the oracle, screen those that passed, finals      (see `cell.py`)
              where the device is not here: predict each, prove the best               (see `cell_predicted.py`)
    end       pure selection over all records, `winners.json`

The budget covers the cells. Every outcome is on disk before the next one begins, so a run may end at any moment.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedtune.harness.prediction_jobs import MODE
from pagedtune.kernels.artifact import publish
from pagedtune.kernels.cpu_facts import usable_cores
from pagedtune.kernels.device import DeviceKind
from pagedtune.kernels.dispatch import DispatchTable
from pagedtune.kernels.record import Record, Status
from pagedtune.kernels.serial import to_jsonable
from pagedtune.kernels.variant import Op

from .bench import Bench
from .budget import Budget
from .cell import CellRun
from .cell_predicted import PredictedRun
from .progress import Progress
from .records import History
from .select import select
from .setup import TuneOptions, build_all, list_spaces, record_rejected, run_facts
from .space import Cell, Space, candidate_key, exploration_order, thinned
from .store import open_store
from .workers import WorkerPool

CACHE_SHARE = 0.25  # of an attention cell's time for a cell of a cache operation: small kernels, few candidates
MAX_WORKERS = 4  # for building and proving; timing always has the machine to itself


@dataclass(frozen=True)
class TuneResult:
    """What a run gave.

    Args:
        table: the winners over all records of the device.
        records: all of them; new: those of this run.
        cells_reached: cells that this run came to (or found finished), of `num_cells`, which have any candidate.
        elapsed_s: time that the cells took.
    """

    table: DispatchTable
    records: tuple[Record, ...]
    new: tuple[Record, ...]
    cells_reached: int
    num_cells: int
    elapsed_s: float

    @property
    def statuses(self) -> Counter[Status]:
        """How many outcomes of each status this run recorded."""
        return Counter(record.status for record in self.new)


def tune(options: TuneOptions, progress: Progress) -> TuneResult:
    """Runs the pipeline.

    Raises:
        UsageError: the results folder cannot be used, or no variant accepts any cell.
    """
    with open_store(options.folder, options.fresh) as store:
        for note in store.notes:
            progress.note(note)
        with WorkerPool(_num_workers(options), options.jobs.names) as pool:
            progress.phase("set up", 0)
            spaces = [thinned(space, _most_candidates(options, space.cell)) for space in list_spaces(pool, options)]
            facts = run_facts(options)
            history = History(facts, store.records)
            record_rejected(store, history, facts, spaces)
            built = build_all(pool, progress, options, spaces)
            sweep = options.sweep
            bench = Bench(
                store,
                history,
                pool,
                facts,
                progress,
                built,
                options.jobs,
                sweep.mode if options.present else MODE,
                sweep.candidate_limit_s,
                options.seed,
            )
            budget = Budget(options.budget_s)
            progress.phase("tune", len(spaces), options.budget_s)
            reached = _tune_cells(bench, spaces, budget)
        result = TuneResult(
            table=select(store.records, options.device.fingerprint),
            records=tuple(r for r in store.records if r.device == options.device.fingerprint),
            new=tuple(store.records[store.num_loaded :]),
            cells_reached=reached,
            num_cells=len(spaces),
            elapsed_s=budget.elapsed_s,
        )
        write_winners(options.folder, result.table)
    return result


def _num_workers(options: TuneOptions) -> int:
    """Workers build and prove on this machine's cores, whatever is tuned for."""
    device = options.device
    return max(1, min(device.num_units if device.kind is DeviceKind.CPU else usable_cores(), MAX_WORKERS))


def _most_candidates(options: TuneOptions, cell: Cell) -> int | None:
    """Of a variant in a cell."""
    sweep = options.sweep
    if cell.op is Op.ATTENTION or sweep.max_cache_candidates is None:
        return sweep.max_candidates
    return sweep.max_cache_candidates


def _tune_cells(bench: Bench, spaces: Sequence[Space], budget: Budget) -> int:
    """Visits the cells, those without a winner first, until the budget ends; returns how many it came to."""
    decided = {entry_key(e) for e in select(bench.store.records, bench.facts.device.fingerprint).entries}
    order = sorted(spaces, key=lambda s: _entry_of(s.cell) in decided)  # stable: the sweep's order otherwise
    for index, space in enumerate(order):
        if not budget.left_s:
            _record_not_reached(bench, order[index:], budget)
            return index
        bench.progress.step(_title(space.cell))
        candidates = exploration_order(space.cell, space.accepted, _favourites(bench, space.cell))
        visit = CellRun if bench.facts.present else PredictedRun
        left = sum(_share(s.cell) for s in order[index:]) / _share(space.cell)
        visit(bench, space.cell, candidates, budget.slice_of(left)).run()
    return len(order)


def _share(cell: Cell) -> float:
    """Of the budget, relative to an attention cell's."""
    return 1.0 if cell.op is Op.ATTENTION else CACHE_SHARE


def _record_not_reached(bench: Bench, spaces: Iterable[Space], budget: Budget) -> None:
    reason = f"the budget of {budget.total_s:g} s ended before this cell; the same command goes on with it"
    records = [bench.facts.not_reached(space.cell, reason) for space in spaces]
    for record in bench.store.append(*(r for r in records if not bench.history.knows(r))):
        bench.history.add(record)


def _favourites(bench: Bench, cell: Cell) -> list[str]:
    """Configs that won in other cells, those of the same problem first."""
    entries = select(bench.store.records, bench.facts.device.fingerprint).entries
    won = sorted(entries, key=lambda e: (e.problem != cell.problem, e.bucket != cell.bucket))
    return list(dict.fromkeys(candidate_key(e.variant, e.config) for e in won))


def entry_key(entry: Any) -> tuple[object, ...]:
    """Identity of a winner's cell."""
    return entry.op, entry.model, entry.problem, entry.pool_format, entry.bucket, entry.workload


def _entry_of(cell: Cell) -> tuple[object, ...]:
    return cell.op.value, cell.model, cell.problem, cell.pool_format, cell.bucket, cell.workload.name


def _title(cell: Cell) -> str:
    op = "" if cell.op is Op.ATTENTION else f"{cell.op} "
    return f"{op}{cell.model} {cell.problem.q_dtype} {cell.pool_format.key} {cell.bucket.key}"


def write_winners(folder: Path, table: DispatchTable) -> Path:
    """Publishes `winners.json` in one piece; nothing in it but what follows from the records."""
    path = folder / "winners.json"
    text = json.dumps(to_jsonable(table), indent=1, sort_keys=True)
    publish((text + "\n").encode(), path)
    return path
