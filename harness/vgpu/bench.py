"""Speed of the virtual GPU, every check on: `python -m pagedtune.harness.vgpu.bench` (`make bench-vgpu`).

`triton_split` in bf16, 64 blocks of 128 threads on one core; then what a launch of a tiny case and the decoding of its
PTX cost. Each figure with its spread. Wall-clock speeds fall with the load of the machine, those per second of CPU time
much less.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.launch import BoundPlan
from pagedtune.kernels.native import usable_cores
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.triton_split import TritonSplit, TritonSplitConfig
from pagedtune.kernels.variant import Op
from pagedtune.kernels.workload import Workload

from ..case import Case
from ..inputs import AttentionInputs
from ..memory import Poison
from .virtual_gpu import VirtualGpu, VirtualGpuOptions, load_program

LARGE = (Workload.uniform(8, 2048), Problem(32, 8, 128), TritonSplitConfig(1, 64, 256, 4, 2))
TINY = (Workload((5, 37, 20)), Problem(8, 2, 64), TritonSplitConfig(4, 32, 32))
TARGET = Device("h100", DeviceKind.CUDA, capability=90, num_units=132)
LAUNCHES = 20  # of the tiny case, for one sample


@dataclass(frozen=True)
class Spread:
    """Samples of one figure."""

    name: str
    unit: str
    samples: tuple[float, ...]

    def __str__(self) -> str:
        low, middle, high = min(self.samples), statistics.median(self.samples), max(self.samples)
        return f"{self.name:42s} {low:9.1f} {middle:9.1f} {high:9.1f}  {self.unit}"


def _prepare(workload: Workload, problem: Problem, config: TritonSplitConfig) -> tuple[VirtualGpu, BoundPlan, Path]:
    variant, pool_format = TritonSplit(), PoolFormat(16, DType.BF16)
    case = Case(Op.ATTENTION, problem, pool_format, workload)
    artifacts = variant.build(problem, pool_format, config, TARGET)
    plan = variant.plan(problem, pool_format, config, case.bounds)
    inputs = AttentionInputs(case).make(plan, Poison.NAN)
    ptx = artifacts[0].ptx_path
    if ptx is None:
        raise ValueError(f"{artifacts[0].path} has no PTX")
    return VirtualGpu(artifacts, VirtualGpuOptions(num_threads=1)), plan.bind(inputs.tensors), ptx


def _timed(function: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(repeat: int) -> list[Spread]:
    """All figures, each with `repeat` samples after one run that does not count."""
    gpu, bound, _ = _prepare(*LARGE)
    launch = gpu.prepare(bound)
    launch()
    counters = gpu.report.steps[0].counters
    kv_bytes = LARGE[0].total_context * PoolFormat(16, DType.BF16).bytes_per_token(LARGE[1])
    pairs = [_timed(launch) for _ in range(repeat)]
    wall, cpu = [w for w, _ in pairs], [c for _, c in pairs]
    lanes = counters.lane_instructions
    figures = [
        Spread("lane instructions", "million/s", tuple(lanes / s / 1e6 for s in wall)),
        Spread("lane instructions per CPU second", "million/s", tuple(lanes / s / 1e6 for s in cpu)),
        Spread("KV read", "MB/s", tuple(kv_bytes / s / 1e6 for s in wall)),
        Spread("KV read per CPU second", "MB/s", tuple(kv_bytes / s / 1e6 for s in cpu)),
    ]
    gpu, bound, path = _prepare(*TINY)
    gpu.prepare(bound)()

    def tiny() -> None:
        for _ in range(LAUNCHES):
            gpu.prepare(bound)()

    text = path.read_text()
    steps = len(bound.plan.steps)
    tiny_cpu = [_timed(tiny)[1] for _ in range(repeat)]
    decode = [_timed(lambda k=k: load_program(f"{text}//{k}", "attention_split"))[1] for k in range(repeat)]  # type: ignore[misc]
    figures += [
        Spread("a launch of a tiny case, CPU time", "ms", tuple(1e3 * s / LAUNCHES / steps for s in tiny_cpu)),
        Spread(f"decoding its PTX ({len(text)} bytes), CPU time", "ms", tuple(1e3 * s for s in decode)),
    ]
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the figures; with --out, writes them as JSON too."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--repeat", type=int, default=5, help="samples of each figure (default: 5)")
    parser.add_argument("--out", type=Path, help="write the samples to this JSON file")
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat} must be at least 1")
    load = os.getloadavg()[0]
    figures = measure(options.repeat)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{'':42s} {'min':>9s} {'median':>9s} {'max':>9s}")
    print("\n".join(str(figure) for figure in figures))
    print(
        f"{options.repeat} samples each, one thread, {usable_cores()} cores, load {load:.1f} before, "
        f"{os.getloadavg()[0]:.1f} after; peak memory {peak_mb:.0f} MB, Python and torch included"
    )
    if options.out:
        data = {"cores": usable_cores(), "load": load, "peak_mb": peak_mb, "figures": [vars(f) for f in figures]}
        options.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
