"""Stages `build` and `gate`: the cases of all attention variants, compiled on all cores, then judged on the device."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from typing import Any

from pagedtune.harness.case import Case, Hazard, Level
from pagedtune.harness.gate import run_case
from pagedtune.harness.gpu_day.child import run_in_child, time_limit
from pagedtune.harness.gpu_day.session import Session
from pagedtune.harness.listing import list_cases
from pagedtune.kernels.catalogue import find_variant, variants_for
from pagedtune.kernels.cuda_driver import DriverError
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.record import Status
from pagedtune.kernels.serial import from_jsonable, to_jsonable
from pagedtune.kernels.variant import BuildError, Config, Op

VARIANTS = tuple(variant.name for variant in variants_for(DeviceKind.CUDA, Op.ATTENTION))
DRY_CASES = 3  # of each variant
CASE_S = 30.0  # of one case, its compilation included: a kernel that never ends costs this much, not the whole stage
MIN_BATCH_S = 3.0  # with less time left no further case is begun


@dataclass(frozen=True)
class Planned:
    """One case of one variant. `config` is by name, `rejected` the variant's own reason not to run it."""

    variant: str
    case: Case
    config: dict[str, Any]
    rejected: str | None

    def configured(self) -> Config:
        """The config as the variant takes it."""
        return find_variant(self.variant).config_from(self.config)


def planned_cases(device: Device, dry: bool, seed: int = 0) -> list[Planned]:
    """The cases in the order in which they run: by lot, so that any part of them is a fair part; variants in turn.

    Not those whose rows lie 2^32 elements apart: a host has addresses for that, a device would need the memory.
    """
    by_variant = [_cases_of(name, device, dry, seed) for name in VARIANTS]
    return [planned for planned in chain(*zip_longest(*by_variant)) if planned is not None]


def _cases_of(name: str, device: Device, dry: bool, seed: int) -> list[Planned]:
    level = Level.TINY if dry else Level.CORNER
    found = list_cases({"variant": name, "device": to_jsonable(device), "level": level, "settings": {}})["cases"]
    planned = [Planned(name, from_jsonable(Case, c["case"]), c["config"], c["rejected"]) for c in found]
    random.Random(seed).shuffle(planned)
    accepted = [each for each in planned if each.rejected is None and Hazard.HIGH_ROWS not in each.case.hazards]
    return accepted[:DRY_CASES] if dry else accepted


def build(session: Session, others: Sequence[tuple[str, Any]] = ()) -> dict[str, Any]:
    """Compiles what the gate will run, until the time is up; what is missing then is compiled when it is needed.

    Args:
        others: more to build first: a variant's name, and arguments of its `build` but the device.
    """
    wanted = [*others, *((p.variant, (p.case.problem, p.case.pool_format, p.configured())) for p in _plan(session))]
    unique = list(dict.fromkeys(wanted))
    with suppress(ImportError):  # before the fork, once for all builders
        import triton  # noqa: F401

    num_builders = min(len(os.sched_getaffinity(0)), len(unique))
    with multiprocessing.get_context("fork").Pool(num_builders) as pool:
        results = pool.imap_unordered(_build_one, [(name, args, session.device) for name, args in unique])
        done, failures = _collect(session, results, len(unique))
        pool.terminate()
    counts = {"wanted": len(unique), "built": done, "failed": len(failures)}
    session.journal.add("build", **counts, builders=num_builders, failures=failures[:20])
    return counts


def _plan(session: Session) -> list[Planned]:
    return planned_cases(session.device, session.dry, session.seed)


def _collect(session: Session, results: Any, count: int) -> tuple[int, list[str]]:
    done, failures = 0, []
    for _ in range(count):
        try:
            problem = results.next(timeout=max(0.1, session.left_s - 1))
        except multiprocessing.TimeoutError:
            break
        if problem:
            failures.append(problem)
        else:
            done += 1
    return done, failures


def _build_one(job: tuple[str, Any, Device]) -> str:
    """The reason why something could not be built, or empty."""
    name, (problem, pool_format, config), device = job
    try:
        find_variant(name).build(problem, pool_format, config, device)
    except BuildError as error:
        return f"{name}: {str(error).splitlines()[0]}"
    except Exception as error:  # noqa: BLE001 - the gate will meet it again, and name the case
        return f"{name}: {type(error).__name__}: {error}"
    return ""


def gate(session: Session) -> dict[str, Any]:
    """Runs the cases, a fresh process after each that breaks the context; as many as the time allows."""
    planned = _plan(session)
    while len(session.journal.lines("gate")) < len(planned) and session.left_s > MIN_BATCH_S:
        first = len(session.journal.lines("gate"))
        ended = run_in_child(partial(_batch, session, planned[first:]), session.left_s - 1, nested=True)
        reached = len(session.journal.lines("gate"))
        if ended.status == "stuck" and reached < len(planned):
            _record(session, planned[reached], Status.TIMEOUT, f"{ended.message}, {CASE_S:.0f} s")
        elif ended.status in ("crashed", "timeout") and reached < len(planned) and session.left_s > MIN_BATCH_S:
            _record(session, planned[reached], Status.CRASHED, ended.message)
        elif ended.status == "raised" and reached == first:
            raise RuntimeError(ended.message)  # it is not about a case
        elif ended.status == "timeout":
            break
    return _counts(session, len(planned))


def _counts(session: Session, total: int) -> dict[str, Any]:
    statuses = [line["status"] for line in session.journal.lines("gate")]
    return {"planned": total, "run": len(statuses), **{s: statuses.count(s) for s in sorted(set(statuses))}}


def _batch(session: Session, planned: Sequence[Planned]) -> None:
    with session.open() as context:
        machines = session.machines(context)
        for each in planned:
            if session.left_s < MIN_BATCH_S:
                return
            try:
                variant, config = find_variant(each.variant), each.configured()
                with time_limit(CASE_S):
                    result = run_case(variant, config, each.case, session.device, machines)
            except BuildError as error:
                _record(session, each, Status.BUILD_FAILED, str(error))
                continue
            except DriverError as error:
                _record(session, each, Status.CRASHED, str(error))
                return  # perhaps the context is lost: the next case gets a fresh one
            except Exception as error:  # noqa: BLE001 - a case that raises is a result
                _record(session, each, Status.CRASHED, f"{type(error).__name__}: {error}")
                continue
            _record(session, each, result.status, result.reason, result.error_ratio, result.duration_s)


def _record(
    session: Session, each: Planned, status: str, reason: str, error_ratio: float = 0.0, duration_s: float = 0.0
) -> None:
    session.journal.add(
        "gate",
        variant=each.variant,
        case=each.case.key,
        config=each.configured().key,
        status=status,
        reason=reason[:600],
        error_ratio=error_ratio,
        duration_s=round(duration_s, 4),
    )
