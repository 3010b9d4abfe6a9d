"""One case on the virtual GPU: faults, counters, machine instructions, and the error against the oracle."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.device import Device
from pagedtune.kernels.variant import Config, Variant

from . import oracle, yardstick
from .case import Case
from .compare import check_lse, check_out, make_bound
from .inputs import AttentionInputs
from .issue_slots import IssueSlots, issue_slots
from .memory import Poison
from .sass import SassError
from .verdicts import Fault
from .vgpu.report import Counters, RunReport, StepReport
from .vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions

SECTOR_BYTES = 32

# Orders in which warps, blocks and asynchronous copies may proceed.
SCHEDULES: Mapping[str, VirtualGpuOptions] = {
    "plain": VirtualGpuOptions(),
    "reverse": VirtualGpuOptions(reverse_warps=True, reverse_ctas=True),
    "interleaved": VirtualGpuOptions(quantum=1),
    "adverse": VirtualGpuOptions(reverse_warps=True, reverse_ctas=True, async_early=True, quantum=3, shuffle_seed=7),
}


@dataclass(frozen=True)
class Emulation:
    """What one run tells.

    Args:
        report: faults and counters.
        slots: by step of the report, machine instructions; None where the binary cannot be read.
        unread: why not, or "".
        ratios: worst error over its bound by check; empty where the answer was not compared.
        failure: the first check that failed, or "".
        build_seconds: compiling, or finding it compiled.
        run_seconds: in the virtual GPU, all launches and their preparation.
        kv_bytes: K and V of all contexts.
    """

    report: RunReport
    slots: tuple[IssueSlots | None, ...]
    unread: str
    ratios: Mapping[str, float]
    failure: str
    build_seconds: float
    run_seconds: float
    kv_bytes: int

    @property
    def passed(self) -> bool:
        """Whether there is no fault and the answer is the oracle's."""
        return self.report.clean and not self.failure


def emulate(variant: Variant, config: Config, case: Case, device: Device, options: VirtualGpuOptions) -> Emulation:
    """Builds, runs and judges one attention case as on `device`.

    Raises:
        BuildError: it does not compile.
        PtxError: the PTX has an instruction that the virtual GPU lacks.
        ValueError: the plan does not fit the binary or the device.
    """
    started = time.perf_counter()
    artifacts = variant.build(case.problem, case.pool_format, config, device)
    build_seconds = time.perf_counter() - started
    plan = variant.plan(case.problem, case.pool_format, config, case.bounds)
    source = AttentionInputs(case)
    inputs = source.make(plan, Poison.NAN)
    before = inputs.snapshot()
    options = replace(
        options, raise_faults=False, capability=device.capability, shared_bytes=device.shared_bytes_per_block
    )
    started = time.perf_counter()
    gpu = VirtualGpu(artifacts, options)
    gpu.prepare(plan.bind(inputs.tensors))()
    run_seconds = time.perf_counter() - started
    ratios: dict[str, float] = {}
    failure = ""
    if gpu.report.clean:
        data = source.data(before)
        answer = oracle.attention(data)
        numerics = variant.numerics(case.problem, case.pool_format)
        bound = make_bound(data, answer, yardstick.measure(data, numerics, answer))
        try:
            ratios |= check_out(inputs.slots["out"].view, bound)
            ratios |= check_lse(inputs.slots["lse"].view, bound) if "lse" in inputs.slots else {}
        except Fault as fault:
            ratios[fault.check], failure = fault.ratio, f"{fault.check}: {fault}"
    slots, unread = _slots(artifacts, gpu.report.steps)
    kv_bytes = case.workload.total_context * case.pool_format.bytes_per_token(case.problem)
    return Emulation(gpu.report, slots, unread, ratios, failure, build_seconds, run_seconds, kv_bytes)


def _slots(artifacts: tuple[Artifact, ...], steps: tuple[StepReport, ...]) -> tuple[tuple[IssueSlots | None, ...], str]:
    found: list[IssueSlots | None] = []
    unread = ""
    for step in steps:
        path = next(a.path for a in artifacts if step.entry in a.abi)
        try:
            found.append(issue_slots(path, step.entry, step))
        except SassError as error:
            found.append(None)
            unread = str(error)
    return tuple(found), unread


def least_sectors(counters: Counters) -> tuple[int, int]:
    """Sectors that reads and writes need if each byte moves once and each sector is used whole."""
    touched = (counters.unique_read_bytes, counters.unique_written_bytes)
    read, written = (sum(-(-n // SECTOR_BYTES) for n in by_name.values()) for by_name in touched)
    return read, written
