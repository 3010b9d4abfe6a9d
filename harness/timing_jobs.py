"""The job that times candidates of one cell, for the worker process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from pagedtune.harness.cpu_sampler import CpuCandidate, CpuSampler, no_garbage_collection
from pagedtune.harness.device_lock import DeviceBusy, device_lock
from pagedtune.harness.external import load_variant
from pagedtune.harness.roofline import FLOOR_SLACK, floor_us
from pagedtune.harness.statistics import bootstrap_ci, lower_quartile, median
from pagedtune.harness.stream import stream_curve
from pagedtune.harness.timing import Measured, final, screen
from pagedtune.harness.timing_sets import COLD, DoesNotFit, Extent, TimingSets, extent, make_sets
from pagedtune.harness.timing_verify import Expected, expected_output, find_fault
from pagedtune.kernels.bounds import bucket_of
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.memory import HUGE_PAGE_BYTES, huge_fraction, huge_page_mode
from pagedtune.kernels.native import NativeExecutor
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import Status, Timing
from pagedtune.kernels.serial import from_jsonable, to_jsonable
from pagedtune.kernels.variant import BuildError, Config, Op, Variant
from pagedtune.kernels.workload import Workload

STAGES: Mapping[str, Callable[[CpuSampler, int, float, int], list[Measured]]] = {"screen": screen, "final": final}
LOCK_TIMEOUT_S = 600.0
MIN_HUGE_FRACTION = 0.9


@dataclass(frozen=True)
class Failure:
    """A candidate that was not timed, and why."""

    status: Status
    reason: str


@dataclass(frozen=True)
class Cell:
    """What is timed: the payload of `time_cell`, checked."""

    problem: Problem
    pool_format: PoolFormat
    workload: Workload
    device: Device
    candidates: tuple[tuple[Variant, Config], ...]
    mode: str
    stage: str
    budget_s: float
    seed: int

    @classmethod
    def parse(cls, payload: Mapping[str, Any]) -> Cell:
        """The cell that `payload` describes.

        Raises:
            ValueError: it does not describe one; the message names the key.
        """
        if payload["stage"] not in STAGES:
            raise ValueError(f"stage={payload['stage']!r} must be one of {', '.join(STAGES)}")
        variants = [(load_variant(c["variant"]), c["config"]) for c in payload["candidates"]]
        if not variants:
            raise ValueError("candidates is empty: give at least one")
        return cls(
            from_jsonable(Problem, payload["problem"]),
            from_jsonable(PoolFormat, payload["pool_format"]),
            from_jsonable(Workload, payload["workload"]),
            from_jsonable(Device, payload["device"]),
            tuple((variant, variant.config_from(config)) for variant, config in variants),
            mode=payload.get("mode", COLD),
            stage=payload["stage"],
            budget_s=float(payload["budget_s"]),
            seed=int(payload.get("seed", 0)),
        )


def time_cell(payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Times the candidates of one cell against each other; the first one is the incumbent.

    The payload has `problem`, `pool_format`, `workload`, `device` (JSON of the dataclasses), `candidates` (a list of
    `{"variant": ref, "config": {...}}`), `mode` (`cold` or `hot`), `stage` (`screen` or `final`), `budget_s` (seconds
    of sampling after warm-up, and without waiting for the device) and `seed`.

    Returns:
        For each candidate a `Timing` as JSON, or `{"status": ..., "reason": ...}` of a `Status`.
    """
    cell = Cell.parse(payload)
    return [to_jsonable(result) for result in time_candidates(cell)]


def time_candidates(cell: Cell) -> list[Timing | Failure]:
    """See `time_cell`."""
    everyone = len(cell.candidates)
    if cell.device.kind is not DeviceKind.CPU:
        return [Failure(Status.NOT_RUN, f"no timer for {cell.device.kind} devices here")] * everyone
    try:
        size = extent(cell.problem, cell.pool_format, cell.workload, cell.device, cell.mode)
        with device_lock(cell.device, LOCK_TIMEOUT_S), no_garbage_collection():
            return _time_on_cpu(cell, size)
    except (DoesNotFit, DeviceBusy) as error:
        return [Failure(Status.NOT_RUN, str(error))] * everyone


def _time_on_cpu(cell: Cell, size: Extent) -> list[Timing | Failure]:
    torch.set_num_threads(cell.device.num_units)
    sets = _sets(cell.problem, cell.pool_format, cell.workload, size, cell.seed)
    prepared = [_guarded(partial(_prepare, cell, sets, v, c)) for v, c in cell.candidates]
    ready = [p for p in prepared if isinstance(p, _Prepared)]
    if not ready:
        return [p for p in prepared if isinstance(p, Failure)]
    expected = _expected(cell.problem, cell.pool_format, cell.workload, size, cell.seed)
    sampler = CpuSampler([p.candidate for p in ready], cell.device.num_units)
    try:
        sampler.warm_up()
        measured = iter(STAGES[cell.stage](sampler, len(ready), cell.budget_s, cell.seed))
    finally:
        sampler.close()
    notes = [note for note in (size.note, _page_note(sets)) if note]
    return [
        p if isinstance(p, Failure) else _conclude(cell, size, notes, _Timed(p, next(measured), expected))
        for p in prepared
    ]


# The stages of one cell follow each other in one process: they share the pool and the oracle's answer.
@lru_cache(maxsize=1)
def _sets(problem: Problem, pool_format: PoolFormat, workload: Workload, size: Extent, seed: int) -> TimingSets:
    return make_sets(problem, pool_format, workload, size, seed)


@lru_cache(maxsize=1)
def _expected(problem: Problem, pool_format: PoolFormat, workload: Workload, size: Extent, seed: int) -> Expected:
    return expected_output(problem, pool_format, _sets(problem, pool_format, workload, size, seed))


@dataclass(frozen=True)
class _Prepared:
    """A candidate that is ready to run."""

    candidate: CpuCandidate
    deterministic: bool


@dataclass(frozen=True)
class _Timed:
    """A candidate after the clock has stopped."""

    prepared: _Prepared
    measured: Measured
    expected: Expected


def _guarded(prepare: Callable[[], _Prepared | Failure]) -> _Prepared | Failure:
    """The candidate, or its failure as data: foreign code must not end the timing of the others."""
    try:
        return prepare()
    except BuildError as error:
        return Failure(Status.BUILD_FAILED, str(error))
    except Exception as error:  # noqa: BLE001  part of the worker boundary: a variant may raise anything
        return Failure(Status.CRASHED, f"{type(error).__name__}: {error}")


def _prepare(cell: Cell, sets: TimingSets, variant: Variant, config: Config) -> _Prepared | Failure:
    """Builds and plans for the largest bounds of the bucket, as at run time, and launches once."""
    problem, pool_format = cell.problem, cell.pool_format
    if variant.op is not Op.ATTENTION:
        return Failure(Status.NOT_RUN, f"{variant.name} computes {variant.op}; only attention is timed")
    reason = variant.reject(problem, pool_format, config, cell.device)
    if reason is not None:
        return Failure(Status.REJECTED, reason)
    executor = NativeExecutor(variant.build(problem, pool_format, config, cell.device))
    plan = variant.plan(problem, pool_format, config, bucket_of(cell.workload.bounds).bounds)
    candidate = CpuCandidate(plan, executor, sets, sets.poisoned_outputs(), plan.allocate_workspaces())
    candidate.launch(0)()
    return _Prepared(candidate, variant.properties.deterministic)


def _conclude(cell: Cell, size: Extent, notes: Sequence[str], entry: _Timed) -> Timing | Failure:
    """The timing, unless the timed launches were wrong or faster than memory."""
    fault = find_fault(entry.prepared.candidate, entry.expected, cell.problem.q_dtype, entry.prepared.deterministic)
    if fault is not None:
        return Failure(Status.WRONG, fault)
    measured = entry.measured
    times = measured.times_us
    too_fast = _beats_the_floor(cell.device, size, lower_quartile(times))
    if too_fast is not None:
        return Failure(Status.TOO_FAST, too_fast)
    return Timing(
        mode=cell.mode,
        samples_us=tuple(round(t, 4) for t in times),
        median_us=median(times),
        ci_us=bootstrap_ci(times, cell.seed),
        kv_bytes=size.set_bytes,
        rejected=measured.rejected,
        note="; ".join((*notes, *measured.notes)),
        pair_ratios=tuple(round(r, 6) for r in measured.ratios),
        ratio_ci=bootstrap_ci(measured.ratios, cell.seed) if measured.ratios else None,
    )


def _beats_the_floor(device: Device, size: Extent, time_us: float) -> str | None:
    """Why a time is not believed. The curve is measured anew first: it may stem from a busier moment."""
    ceiling_gb_s = stream_curve(device).ceiling_gb_s(size.working_set_bytes)
    if time_us >= floor_us(size.set_bytes, ceiling_gb_s):
        return None
    ceiling_gb_s = stream_curve(device, refresh=True).ceiling_gb_s(size.working_set_bytes)
    floor = floor_us(size.set_bytes, ceiling_gb_s)
    if time_us >= floor:
        return None
    return (
        f"{time_us:.1f} us is below the floor of {floor:.1f} us: {size.set_bytes} KV bytes cannot be read faster than "
        f"at {ceiling_gb_s:.1f} GB/s with {FLOOR_SLACK - 1:.0%} allowance (working set {size.working_set_bytes} bytes)"
    )


def _page_note(sets: TimingSets) -> str:
    """Says so where the pool is not on huge pages: its times are then those of another pool."""
    pool = sets.shared["k_cache"]
    if pool.numel() * pool.element_size() < 2 * HUGE_PAGE_BYTES:
        return ""
    fraction = huge_fraction(pool)
    if fraction is None or fraction >= MIN_HUGE_FRACTION:
        return ""
    return f"only {fraction:.0%} of the pool on huge pages (policy {huge_page_mode()})"
