"""Everything before the budget starts to run: candidates listed, refusals recorded, binaries built."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pagedtune.harness.external import is_foreign
from pagedtune.harness.worker import JobRaised, WorkerError
from pagedtune.kernels.device import Device
from pagedtune.kernels.record import Status
from pagedtune.kernels.serial import to_jsonable
from pagedtune.kernels.variant import Op

from .bench import Jobs
from .configs import SweepFile
from .errors import UsageError
from .progress import Progress
from .records import BuildKey, Builds, Built, History, RunFacts, build_key, harness_key
from .space import Cell, Space, VariantRef, space_of
from .store import Store
from .workers import WorkerPool, failure_of

LIST_LIMIT_S = 60.0  # importing a variant and listing its configs
BUILD_LIMIT_S = 400.0  # above the compiler's own limit, which gives the better message


@dataclass(frozen=True)
class TuneOptions:
    """What to tune and for how long.

    Args:
        device: where; cells: what; variants: with what, by reference.
        sweep: the sweep that the cells come from, and its name.
        folder: e.g. `results/cpu`; fresh: start without the records found there.
        budget_s: for all cells together, after set-up.
        present: whether the device is in this machine; where it is not, kernels are proven on the virtual GPU and
            times predicted.
        environment: versions and host, for the records; seed: of inputs and orders.
    """

    device: Device
    cells: tuple[Cell, ...]
    variants: tuple[str, ...]
    sweep: SweepFile
    sweep_name: str
    folder: Path
    budget_s: float
    fresh: bool = False
    present: bool = True
    environment: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    jobs: Jobs = field(default_factory=Jobs)


def list_spaces(pool: WorkerPool, options: TuneOptions) -> list[Space]:
    """The candidates of every cell whose op any of the variants computes.

    Raises:
        UsageError: a variant does not load or list its configs, is for other devices, or none accepts any cell.
    """
    wanted = {_listing_key(cell): cell for cell in options.cells}
    listings: dict[tuple[str, ...], list[tuple[VariantRef, Any]]] = {key: [] for key in wanted}
    names: dict[str, str] = {}
    for ref in options.variants:  # one after the other: a worker is renewed between variants of different authors
        variant = _identify(pool, ref, options)
        if variant.name in names:
            raise UsageError(f"{names[variant.name]} and {ref} are both called {variant.name!r}: rename one of them")
        names[variant.name] = ref
        for key, cell in wanted.items():
            if cell.op is variant.op:
                listings[key].append((variant, _list_space(pool, variant, cell, options)))
    named = [cell for cell in options.cells if listings[_listing_key(cell)]]
    spaces = [space_of(cell, listings[_listing_key(cell)]) for cell in named]
    if not any(space.accepted for space in spaces):
        reasons = sorted({reason for space in spaces for _, reason in space.rejected})
        raise UsageError(
            f"no variant accepts any cell of this sweep: {'; '.join(reasons[:3]) or 'there is no variant'}; "
            "`pagedtune variants` shows what there is"
        )
    return spaces


def _listing_key(cell: Cell) -> tuple[str, ...]:
    """What a list of candidates depends on."""
    return cell.op.value, cell.problem.key, cell.pool_format.key


def _identify(pool: WorkerPool, ref: str, options: TuneOptions) -> VariantRef:
    found = _ask(pool, ref, options.jobs.identify, {"variant": ref})
    if is_foreign(ref) and not is_foreign(found["name"]):
        raise UsageError(
            f"{ref} is called {found['name']!r}, as a variant of the catalogue: its records would mix with that one's; "
            "set its class attribute `name` to another"
        )
    ops = list(dict.fromkeys(cell.op for cell in options.cells))
    if found["device_kind"] != options.device.kind.value or found["op"] not in ops:
        raise UsageError(
            f"variant {found['name']} computes {found['op']} on {found['device_kind']}; this tune is about "
            f"{', '.join(ops)} on {options.device.kind}: name another --variant"
        )
    return VariantRef(ref, found["name"], found["source"], Op(found["op"]))


def _list_space(pool: WorkerPool, variant: VariantRef, cell: Cell, options: TuneOptions) -> Any:
    return _ask(pool, variant.ref, options.jobs.space, {"variant": variant.ref, **_where(cell, options)})


def _ask(pool: WorkerPool, ref: str, job: str, payload: Any) -> Any:
    try:
        return pool.call(job, payload, LIST_LIMIT_S)
    except WorkerError as error:
        message = error.message if isinstance(error, JobRaised) else f"variant {ref}: {error.reason}"
        raise UsageError(message) from error


def _where(cell: Cell, options: TuneOptions) -> dict[str, Any]:
    return {
        "problem": to_jsonable(cell.problem),
        "pool_format": to_jsonable(cell.pool_format),
        "device": to_jsonable(options.device),
        "buckets": [to_jsonable(b) for b in dict.fromkeys(c.bucket for c in options.cells if c.op is cell.op)],
    }


def run_facts(options: TuneOptions) -> RunFacts:
    run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    settings = {"sweep": options.sweep_name, "seed": options.seed}
    code = harness_key() if options.present else harness_key(virtual=True)
    return RunFacts(run_id, options.device, options.environment, settings, code, options.present)


def record_rejected(store: Store, history: History, facts: RunFacts, spaces: Iterable[Space]) -> None:
    records = [
        facts.record(space.cell, candidate, Built(), "gate", (Status.REJECTED, reason))
        for space in spaces
        for candidate, reason in space.rejected
    ]
    for record in store.append(*(r for r in records if not history.knows(r))):
        history.add(record)


def build_all(pool: WorkerPool, progress: Progress, options: TuneOptions, spaces: Sequence[Space]) -> Builds:
    """Builds every candidate once per problem and format, in parallel; a build is in the cache the next time."""
    wanted = {build_key(s.cell, c): (s.cell, c) for s in spaces for c in s.accepted}
    progress.phase("build", len(wanted))

    def payload_of(key: BuildKey) -> dict[str, Any]:
        cell, candidate = wanted[key]
        return {"variant": candidate.variant.ref, "config": dict(candidate.config), **_where(cell, options)}

    # Neighbours in a space often share a binary: shuffled, two workers seldom compile the same one at once.
    # Variants from outside the catalogue come one after the other: each needs workers of its own.
    def rank(key: BuildKey) -> tuple[str, bytes]:
        ref = wanted[key][1].variant.ref
        return ref if is_foreign(ref) else "", hashlib.sha256("|".join(key).encode()).digest()

    order = sorted(wanted, key=rank)
    built: dict[BuildKey, Built] = {}
    for key, answer in pool.map(options.jobs.build, order, payload_of, BUILD_LIMIT_S):
        progress.step(f"{wanted[key][1].variant.name} for {key[1]} in {key[2]}")
        built[key] = _built(answer)
    return built


def _built(answer: Any) -> Built:
    if isinstance(answer, WorkerError):
        return Built(failure=failure_of(answer))
    if answer["rejected"] is not None:
        return Built(tuple(answer["artifact_keys"]), answer["resources"], failure=(Status.REJECTED, answer["rejected"]))
    return Built(tuple(answer["artifact_keys"]), answer["resources"], answer["workspace_bytes"])
