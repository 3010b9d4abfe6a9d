"""The gate: runs a variant on a case and says whether the answer is right, and if not, what is wrong with it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from pagedtune.kernels.device import Device
from pagedtune.kernels.record import Status
from pagedtune.kernels.variant import Config, Op, Variant

from . import properties
from .case import Case, Hazard
from .judges import AttentionJudge, CacheJudge, Judge
from .machines import MachineFor, machine_for
from .memory import Poison
from .runs import Run, Runner
from .verdicts import CaseResult, Check, Fault


def run_case(
    variant: Variant, config: Config, case: Case, device: Device, machines: MachineFor = machine_for
) -> CaseResult:
    """Runs one case in this process. A wrong answer is a result.

    Every launch of the candidate that is compared with the oracle comes before the oracle is computed, in memory that
    never held the answer.

    Args:
        machines: makes what runs the variant's binaries; the virtual GPU or this CPU without.

    Raises:
        ValueError: the variant computes another op than the case.
        Exception: whatever the variant's own `build`, `plan` and kernels raise.
    """
    if variant.op is not case.op:
        raise ValueError(f"{variant.name} computes {variant.op}, the case is of {case.op}")
    started = time.perf_counter()
    rejection = variant.reject(case.problem, case.pool_format, config, device)
    if rejection is not None:
        return CaseResult(case.key, Status.REJECTED, rejection)
    checks: dict[str, float] = {}
    status, reason, failed = Status.PASSED, "", ""
    try:
        with _one_thread():
            _examine(variant, config, case, device, machines, checks)
    except Fault as fault:
        checks[fault.check] = max(fault.ratio, checks.get(fault.check, 0.0))
        status, reason, failed = fault.status, f"{fault.check}: {fault}", fault.check.value
    except PoolUnavailable as error:
        status, reason = Status.NOT_RUN, str(error)
    ratio = max(checks.values(), default=0.0)
    return CaseResult(case.key, status, reason, ratio, checks, time.perf_counter() - started, failed)


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch on one thread: the gate's tensors are small, and waking threads for them takes many times their time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PoolUnavailable(Exception):
    """This machine does not give the address space of a high pool or of rows far apart."""


def first_failure(variant: Variant, config: Config, cases: Iterable[Case], device: Device) -> CaseResult | None:
    """The result of the first case that the variant does not pass, None if it passes all; rejected ones are left out.

    Raises:
        Exception: as `run_case`.
    """
    for case in cases:
        result = run_case(variant, config, case, device)
        if result.status not in (Status.PASSED, Status.REJECTED):
            return result
    return None


def _examine(
    variant: Variant, config: Config, case: Case, device: Device, machines: MachineFor, checks: dict[str, float]
) -> None:
    """Fills `checks` with the worst ratio of each check; raises Fault at the first that fails."""
    artifacts = variant.build(case.problem, case.pool_format, config, device)
    plan = variant.plan(case.problem, case.pool_format, config, case.bounds)
    judge: Judge = AttentionJudge(case) if case.op is Op.ATTENTION else CacheJudge(case)
    runner = Runner(case, plan, machines(device, artifacts), judge)
    if variant.properties.graph_safe:
        properties.check_graph_safe(plan)
        checks[Check.GRAPH_SAFE] = 0.0
    try:
        runs = [runner.first(Poison.NAN), runner.first(Poison.FINITE)]
    except OSError as error:
        if {Hazard.HIGH_POOL, Hazard.HIGH_STAGING, Hazard.HIGH_ROWS} & set(case.hazards):
            raise PoolUnavailable(f"no address space for memory above 2^32 elements: {error}") from error
        raise
    # The third launch finds the workspaces as the first one left them.
    runs.append(runner.again(runs[0]))
    checks |= dict.fromkeys((Check.INPUTS, Check.GUARDS, Check.WRITTEN), 0.0)
    judge.expect(runs[0].before, variant.numerics(case.problem, case.pool_format))
    for run in runs if not variant.properties.deterministic else runs[:1]:
        _merge(checks, judge.compare(run))
    _merge(checks, judge.compare_workspaces(plan, runs[0]))
    _check_promises(variant, runner, runs, checks)


def _check_promises(variant: Variant, runner: Runner, runs: list[Run], checks: dict[str, float]) -> None:
    if variant.properties.deterministic:
        properties.check_poison(runs[0], runs[1])
        properties.check_deterministic([runs[0], runs[2], *properties.repeats(runner, runs[0])])
        checks |= dict.fromkeys((Check.POISON, Check.DETERMINISTIC), 0.0)
    if variant.properties.batch_invariant and variant.op is Op.ATTENTION:
        properties.check_batch_invariant(runner, runs[0])
        checks[Check.BATCH_INVARIANT] = 0.0


def _merge(checks: dict[str, float], found: dict[str, float]) -> None:
    for check, ratio in found.items():
        checks[check] = max(ratio, checks.get(check, 0.0))
