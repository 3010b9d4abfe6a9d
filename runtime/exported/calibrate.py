"""Settles on the user's own machine which of a cell's finalists is fastest there.

The tuner's protocol in miniature: rounds of one sample of each candidate in shuffled order, batches that the caches do
not hold, and the median of the ratios round by round. The shipped winner stays unless another is faster beyond doubt.
On a GPU a sample is the replay of a CUDA graph (`gpu_timing.py`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.bounds import Bounds
from ...kernels.device import DeviceKind
from ...kernels.dispatch import Winner
from ...kernels.eager import Eager
from ...kernels.executors import make_executor, torch_device
from ...kernels.launch import Executor, LaunchPlan
from ...kernels.native import LaunchError, NativeExecutor
from ...kernels.record import TimeEvidence
from ...kernels.variant import Config, Op, Variant
from ...kernels.workload import Workload
from ..artifact_source import ArtifactUnavailable
from .calibration_inputs import Inputs, launched, sets_beyond_cache
from .gpu_timing import GraphSampler, Run
from .manifest import Finalist, Finalists
from .overrides import CALIBRATION_SCHEMA, Calibration
from .package import Package

DEFAULT_BUDGET_S = 30.0
MIN_ROUNDS, MAX_ROUNDS = 6, 200  # below six, no interval of a median holds with 95 %
MIN_GAIN = 0.01  # what is less is a tie, and the shipped winner stays
SAMPLE_US = 500.0  # shorter launches are timed several at a time
CHECK_CONTEXT = 300  # tokens of the batch that finalists are compared on: partly filled blocks, more than one split
CHECK_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}  # of N(0, 1) values; a broken kernel is off by far more


@dataclass(frozen=True)
class Settled:
    """What calibration found for one cell.

    Args:
        cell: which.
        winner: entry for the override table; None if the budget did not suffice or nothing could run.
        rounds: rounds that were timed.
        ratio: time of the new winner over that of the shipped one; 1 where it stays.
        note: what the user should know.
    """

    cell: Finalists
    winner: Winner | None
    rounds: int = 0
    ratio: float = 1.0
    note: str = ""


@dataclass(frozen=True)
class _Candidate:
    finalist: Finalist
    variant: Variant
    config: Config
    plan: LaunchPlan
    executor: Executor
    place: torch.device
    keys: tuple[str, ...]

    def bind(self, inputs: Inputs, index: int) -> Run:
        tensors = {**inputs.tensors(index), **self.plan.allocate_workspaces(self.place)}
        return self.executor.prepare(self.plan.bind(tensors))


def calibrate(package: Package, budget_s: float = DEFAULT_BUDGET_S, seed: int = 0) -> Iterator[Settled]:
    """Settles cell after cell within `budget_s` seconds in all.

    Cells without a choice cost nothing and are left out, and so are those of cache operations, which nothing times
    here: their shipped winners stay. `calibration_of` makes the override file of the results.
    """
    cells = [cell for cell in package.finalists if cell.op == Op.ATTENTION and len(cell.candidates) > 1]
    end_s = time.monotonic() + budget_s
    for index, cell in enumerate(cells):
        share_s = (end_s - time.monotonic()) / (len(cells) - index)
        if share_s <= 0:
            yield Settled(cell, None, note="the budget ended before this cell: raise --budget")
        else:
            yield _settle(package, cell, time.monotonic() + share_s, seed)


def calibration_of(package: Package, results: Sequence[Settled]) -> Calibration:
    """The override table: what was settled now, and what was before."""
    earlier = () if package.calibration is None else package.calibration.entries
    entries = {entry.cell: entry for entry in (*earlier, *(r.winner for r in results if r.winner is not None))}
    return Calibration(CALIBRATION_SCHEMA, package.manifest.digest, package.device.fingerprint, tuple(entries.values()))


def _settle(package: Package, cell: Finalists, end_s: float, seed: int) -> Settled:
    shipped = next(e for e in package.table.entries if e.cell == _key(cell))
    candidates, notes = [], []
    for finalist in cell.candidates:
        made = _prepare(package, cell, finalist)
        fault = made if isinstance(made, str) else _fault(made, cell)
        if fault:
            notes.append(f"{finalist.variant} {finalist.config}: {fault}")
        elif not isinstance(made, str):
            candidates.append(made)
    if not candidates:
        return Settled(cell, None, note="; ".join(notes))
    times = _time(package, cell, candidates, end_s, seed)
    if len(times) < MIN_ROUNDS:
        notes.append(f"only {len(times)} rounds of at least {MIN_ROUNDS} fit into the budget: raise --budget")
        return Settled(cell, None, len(times), note="; ".join(notes))
    ratios = times / times[:, :1]
    best = _fastest(ratios)
    winner = _entry(shipped, candidates[best], times[:, best])
    return Settled(cell, winner, len(times), float(np.median(ratios[:, best])), "; ".join(notes))


def _prepare(package: Package, cell: Finalists, finalist: Finalist) -> _Candidate | str:
    """The candidate, or why it cannot run here."""
    dispatch = package.dispatch
    variant = next((v for v in dispatch.variants if v.name == finalist.variant), None)
    if variant is None or variant.name in dispatch.blocklist.names:
        return "not installed, or switched off"
    config = variant.config_from(finalist.config)
    reason = variant.reject(cell.problem, cell.pool_format, config, package.device)
    if reason is not None:
        return reason
    try:
        artifacts = package.artifacts.artifacts(variant, cell.problem, cell.pool_format, config, package.device)
        executor = make_executor(package.device.kind, artifacts)
    except (ArtifactUnavailable, LaunchError) as error:
        return str(error)
    plan = variant.plan(cell.problem, cell.pool_format, config, cell.bucket.bounds)
    keys = tuple(a.key for a in artifacts)
    return _Candidate(finalist, variant, config, plan, executor, torch_device(package.device.kind), keys)


def _fault(candidate: _Candidate, cell: Finalists) -> str:
    """How a candidate's answer differs from the plain one on this machine; empty if it does not."""
    lengths = tuple(dict.fromkeys(max(1, min(n, cell.bucket.max_context_len)) for n in (CHECK_CONTEXT, 1, 17)))
    workload = Workload(lengths[: cell.bucket.max_num_seqs])
    inputs = Inputs(cell.problem, cell.pool_format, workload, 1, device=candidate.place)
    bounds = Bounds(workload.num_seqs, max(workload.context_lens))
    given = inputs.tensors(0)
    expected = {**given, "out": given["out"].clone()}
    plain = Eager().plan(cell.problem, cell.pool_format, Config(), bounds)
    NativeExecutor().prepare(plain.bind(expected))()
    plan = candidate.variant.plan(cell.problem, cell.pool_format, candidate.config, bounds)
    try:
        candidate.executor.prepare(plan.bind({**given, **plan.allocate_workspaces(candidate.place)}))()
    except LaunchError as error:
        return str(error)
    error_size = float((launched(given) - launched(expected)).abs().max())
    tolerance = CHECK_TOLERANCE[cell.problem.q_dtype.value]
    wrong = not error_size <= tolerance
    return f"its answer is off by {error_size:.3g}, at most {tolerance:g} is rounding: not used" if wrong else ""


def _time(
    package: Package, cell: Finalists, candidates: Sequence[_Candidate], end_s: float, seed: int
) -> npt.NDArray[np.float64]:
    """Microseconds per launch, [rounds, candidates]; every round over batches that the caches have forgotten."""
    workload = Workload.named(cell.workload, cell.bucket.max_num_seqs, cell.bucket.max_context_len)
    num_sets = sets_beyond_cache(cell.problem, cell.pool_format, workload, package.device)
    inputs = Inputs(cell.problem, cell.pool_format, workload, num_sets, seed, candidates[0].place)
    runs = [[candidate.bind(inputs, i) for i in range(num_sets)] for candidate in candidates]
    if package.device.kind is DeviceKind.CUDA:
        return _time_graphs([GraphSampler(own) for own in runs], end_s, seed)
    rng, position = random.Random(seed), 0
    warm_us = max(_sample(own, 0, 1) for own in runs for _ in range(2))
    launches = max(1, min(num_sets, round(SAMPLE_US / warm_us)))
    rounds: list[list[float]] = []
    while len(rounds) < MAX_ROUNDS and time.monotonic() < end_s:
        times = [0.0] * len(runs)
        for index in rng.sample(range(len(runs)), len(runs)):
            times[index] = _sample(runs[index], position, launches)
            position += launches
        rounds.append(times)
    return np.array(rounds, dtype=np.float64).reshape(-1, len(runs))


def _time_graphs(samplers: Sequence[GraphSampler], end_s: float, seed: int) -> npt.NDArray[np.float64]:
    """The same on a GPU."""
    rng, rounds = random.Random(seed), list[list[float]]()
    for sampler in samplers:
        sampler.sample_us()
    while len(rounds) < MAX_ROUNDS and time.monotonic() < end_s:
        times = [0.0] * len(samplers)
        for index in rng.sample(range(len(samplers)), len(samplers)):
            times[index] = samplers[index].sample_us()
        rounds.append(times)
    return np.array(rounds, dtype=np.float64).reshape(-1, len(samplers))


def _sample(runs: Sequence[Run], position: int, launches: int) -> float:
    chosen = [runs[(position + i) % len(runs)] for i in range(launches)]
    start_ns = time.perf_counter_ns()
    for run in chosen:
        run()
    return (time.perf_counter_ns() - start_ns) / launches / 1e3


def _fastest(ratios: npt.NDArray[np.float64]) -> int:
    """The candidate that surely beats the shipped winner, which is the first, by most; else 0."""
    sure = [i for i in range(1, ratios.shape[1]) if _interval(ratios[:, i])[1] < 1 - MIN_GAIN]
    return min(sure, key=lambda i: float(np.median(ratios[:, i])), default=0)


def _interval(samples: npt.NDArray[np.float64]) -> tuple[float, float]:
    """95 % percentile-bootstrap interval of the median."""
    draws = np.random.default_rng(0).integers(0, samples.size, (1000, samples.size))
    low, high = np.quantile(np.median(samples[draws], axis=1), (0.025, 0.975))
    return float(low), float(high)


def _entry(shipped: Winner, candidate: _Candidate, times_us: npt.NDArray[np.float64]) -> Winner:
    median_us = float(np.median(times_us))
    return replace(
        shipped,
        variant=candidate.finalist.variant,
        config=candidate.config.as_dict(),
        median_us=median_us,
        ci_us=_interval(times_us),
        bandwidth_gb_s=shipped.bandwidth_gb_s * shipped.median_us / median_us,
        time_evidence=TimeEvidence.MEASURED,
        runner_up="",
        margin=None,
        ties=(),
        speedup_eager=None,
        speedup_default=None,
        artifact_keys=candidate.keys,
    )


def _key(cell: Finalists) -> tuple[object, ...]:
    return cell.op, cell.model, cell.problem, cell.pool_format, cell.bucket, cell.workload
