"""Which kernels and configs an emulated table has, and their figures: the work behind `bench --emulated`.

Rule of choice for a variant: its default config, and the best BEST of up to CANDIDATES - 1 neighbours. Neighbours are
accepted configs of its space that differ from the default in one tunable, then in two, taken in turn over the tunables.
Best is: fewest bars missed, then the least time by the time model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from typing import Any

from pagedtune.harness.external import load_variant
from pagedtune.harness.worker import WorkerError
from pagedtune.kernels.serial import to_jsonable
from pagedtune.kernels.variant import Config, Variant

from .bench_run import Choice
from .emulated_bars import Bars
from .emulated_jobs import default_config
from .emulated_peer import Cell
from .peers_emulated import PEERS
from .workers import WorkerPool, failure_of

JOBS = "pagedtune.tuner.emulated_jobs"
LIMIT_S = 300.0  # of one kernel; the longest take a tenth of it on a quiet core
CANDIDATES = 12
BEST = 2
Say = Callable[[int, int], None]  # kernels that are done, and all


@dataclass(frozen=True)
class Row:
    """One kernel of a table.

    Args:
        cell: index of the cell.
        name: of the variant or peer.
        config: tunables.
        is_peer: whether it is another project's.
        is_default: whether an untuned user gets it.
        answer: what the job gave, None before it ran or where it failed.
        reason: why there are no figures, or "".
    """

    cell: int
    name: str
    config: dict[str, Any]
    is_peer: bool = False
    is_default: bool = False
    answer: dict[str, Any] | None = None
    reason: str = ""

    @property
    def figures(self) -> dict[str, Any]:
        """By field of `Figures`; empty without an answer."""
        found: dict[str, Any] = self.answer["figures"] if self.answer else {}
        return found


def own_rows(index: int, cell: Cell, choices: Sequence[Choice], candidates: int = CANDIDATES) -> list[Row]:
    """Candidates of the named variants in one cell. A choice with tunables is taken as it is.

    Raises:
        ValueError: an unknown variant or tunable.
    """
    rows = []
    for choice in choices:
        variant = load_variant(choice.ref)
        reject = variant.reject(cell.problem, cell.pool_format, default := default_config(cell, variant), cell.device)
        if choice.config:
            config = variant.config_from({**default.as_dict(), **choice.config})
            rows.append(Row(index, choice.ref, to_jsonable(config.as_dict())))
            continue
        rows.append(Row(index, choice.ref, to_jsonable(default.as_dict()), is_default=True, reason=reject or ""))
        around = islice(neighbours(cell, variant, default), candidates - 1)
        rows += [Row(index, choice.ref, to_jsonable(c.as_dict())) for c in around]
    return rows


def neighbours(cell: Cell, variant: Variant, default: Config) -> Iterator[Config]:
    """Accepted configs near `default`, nearest first, in turn over the tunables that differ."""
    groups: dict[tuple[str, ...], list[Config]] = {}
    base = default.as_dict()
    for config in variant.space(cell.problem, cell.pool_format, cell.device):
        differ = tuple(name for name, value in config.as_dict().items() if value != base[name])
        if 1 <= len(differ) <= 2 and variant.reject(cell.problem, cell.pool_format, config, cell.device) is None:
            groups.setdefault(differ, []).append(config)
    for size in (1, 2):
        turns = zip_longest(*(group for differ, group in groups.items() if len(differ) == size))
        yield from (config for config in chain.from_iterable(turns) if config is not None)


def peer_rows(index: int, cell: Cell) -> list[Row]:
    """Every peer with every config; the engine's own first."""
    rows = []
    for peer in PEERS:
        if reason := peer.reject(cell):
            rows.append(Row(index, peer.name, {}, True, True, reason=reason))
            continue
        configs = peer.configs(cell)
        rows += [Row(index, peer.name, dict(c), True, c == configs[0]) for c in configs]
    return rows


def run_rows(pool: WorkerPool, cells: Sequence[Cell], rows: Sequence[Row], check: bool, say: Say) -> list[Row]:
    """The rows with their answers, in order; a failure becomes the row's reason."""
    done = {k: row for k, row in enumerate(rows) if row.reason}
    say(len(done), len(rows))
    for is_peer, job in ((False, "measure_variant"), (True, "measure_peer")):
        items = [k for k, row in enumerate(rows) if row.is_peer is is_peer and k not in done]
        for k, answer in pool.map(f"{JOBS}:{job}", items, lambda k: _payload(cells, rows[k], check), LIMIT_S):
            if isinstance(answer, WorkerError):
                done[k] = replace(rows[k], reason=failure_of(answer)[1].strip().splitlines()[-1])
            else:
                done[k] = replace(rows[k], answer=answer)
            say(len(done), len(rows))
    return [done[k] for k in range(len(rows))]


def _payload(cells: Sequence[Cell], row: Row, check: bool) -> dict[str, Any]:
    cell = cells[row.cell]
    what = {"peer" if row.is_peer else "variant": row.name, "config": row.config}
    fields = {n: to_jsonable(getattr(cell, n)) for n in ("problem", "pool_format", "workload", "device")}
    return {**fields, **what, "check": check}


def best_rows(rows: Sequence[Row], bars: Bars, best: int = BEST) -> list[Row]:
    """Of each cell and variant the default and the best rows, in order; peers all."""
    kept: list[Row] = []
    for key in dict.fromkeys((row.cell, row.name) for row in rows):
        own = [row for row in rows if (row.cell, row.name) == key]
        ranked = sorted((row for row in own if row.answer), key=lambda row: rank(row, bars))
        chosen = [row for row in own if row.is_peer or row.is_default]
        chosen += [row for row in ranked if row not in chosen][:best]
        kept += chosen or own[:1]
    return kept


def rank(row: Row, bars: Bars) -> tuple[int, float]:
    """What rows are ordered by: bars missed, then the time model's microseconds."""
    return len(bars.missed(row.figures)), row.figures["predicted_us"]


def tabulate(
    pool: WorkerPool, cells: Sequence[Cell], rows: Sequence[Row], bars: Bars, say: Say
) -> tuple[list[Row], int]:
    """All candidates' figures, then the chosen ones again with the check of their counts; and how many were seen."""
    own, peers = ([row for row in rows if row.is_peer is kind] for kind in (False, True))
    first = run_rows(pool, cells, own, False, lambda done, total: say(done, total + len(peers)))
    chosen = [replace(row, answer=None) for row in best_rows(first, bars)]
    seen = len(own)
    final = run_rows(pool, cells, [*chosen, *peers], True, lambda done, total: say(seen + done, seen + total))
    return sorted(final, key=lambda row: (row.cell, row.is_peer)), seen
