"""Stage `bandwidth`: how fast this memory can be copied and read, by size, with a cold cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from pagedtune.harness.cuda_context import CudaContext, Timer
from pagedtune.harness.gpu_day.device_tensors import DeviceTensors
from pagedtune.harness.gpu_day.session import Session, introduce
from pagedtune.harness.statistics import bootstrap_ci, median
from pagedtune.kernels.artifact import Artifact, KernelAbi
from pagedtune.kernels.build_nvrtc import CudaKernel, build_nvrtc
from pagedtune.kernels.cuda_executor import CudaExecutor
from pagedtune.kernels.device import Device
from pagedtune.kernels.launch import Access, CType, KernelStep, LaunchPlan, ScalarArg, SlotArg, SlotSpec

SOURCE = Path(__file__).parent / "read.cu"
SIZES_MIB = (8, 32, 128, 512, 2048)
DRY_SIZES_MIB = (1,)
THREADS, VECTOR_BYTES = 512, 16
BLOCKS_PER_UNIT = 4  # 2048 threads: as many as a multiprocessor holds
COLD_FACTOR = 5  # times the last-level cache between two uses of the same bytes
ASSUMED_L2_BYTES = 128 << 20  # where the driver does not tell
WARM_UP_S = 0.3
NUM_SAMPLES = 30
MIN_SAMPLE_BYTES = 256 << 20  # of one sample: short ones would show the events' own time
NO_TIME = "emulated: the stand-in device has no time"


def run(session: Session) -> dict[str, Any]:
    """Measures each size, the copies first."""
    best: dict[str, float] = {}
    with session.open() as context:
        kernel = read_kernel(session.device)
        introduce(context, (kernel,))
        for mib in DRY_SIZES_MIB if session.dry else SIZES_MIB:
            for kind, gb_s in _measure_size(session, context, kernel, mib << 20).items():
                best[kind] = max(gb_s, best.get(kind, 0.0))
    return {f"best_{kind}_gb_s": round(gb_s, 1) for kind, gb_s in best.items()}


def read_kernel(device: Device) -> Artifact:
    """The reading kernel.

    Raises:
        BuildError: NVRTC is missing or refused.
    """
    abi = {"read_all": KernelAbi((CType.POINTER, CType.I64, CType.POINTER), {0: VECTOR_BYTES})}
    return build_nvrtc(CudaKernel(SOURCE, abi), device.capability)


def _measure_size(session: Session, context: CudaContext, kernel: Artifact, num_bytes: int) -> dict[str, float]:
    """Best rates by kind, in 10^9 bytes/s."""
    spread = (session.device.l2_bytes or ASSUMED_L2_BYTES) * COLD_FACTOR
    num_buffers = 2 if session.dry else max(2, -(-spread // num_bytes))
    tensors = DeviceTensors(context)
    buffers = [tensors.empty((num_bytes,), torch.uint8) for _ in range(num_buffers)]
    for buffer in buffers:
        tensors.memory(buffer).fill(0x5A)
    reads = read_launches(context, session.device, kernel, tensors, buffers)
    pairs = zip(buffers, buffers[1:] + buffers[:1], strict=True)
    copies: list[Callable[[], None]] = [partial(_copy, context, tensors, a, b) for a, b in pairs]
    found = {}
    for kind, launches, traffic in (("copy", copies, 2 * num_bytes), ("read", reads, num_bytes)):
        number = 1 if session.dry else max(1, MIN_SAMPLE_BYTES // num_bytes)
        times_us = sample(session, context, launches, number)
        line: dict[str, Any] = {"kind": kind, "bytes": num_bytes, "buffers": num_buffers, "traffic_bytes": traffic}
        if times_us:
            found[kind] = traffic / min(times_us) / 1e3
            low, high = bootstrap_ci(times_us)
            line |= {"time_us": median(times_us), "ci_us": [low, high], "gb_s": traffic / median(times_us) / 1e3}
        else:
            line |= {"time_us": None, "gb_s": None, "reason": NO_TIME}
        session.journal.add("bandwidth", **line)
    tensors.free()
    return found


def read_launches(
    context: CudaContext, device: Device, kernel: Artifact, tensors: DeviceTensors, buffers: list[torch.Tensor]
) -> list[Callable[[], None]]:
    """One launch of the reading kernel for each buffer."""
    executor = CudaExecutor((kernel,), context.driver, lambda: context.stream, tensors.address)
    num_bytes = buffers[0].numel()
    num_blocks = max(1, min(device.num_units * BLOCKS_PER_UNIT, num_bytes // VECTOR_BYTES // THREADS))
    sink = tensors.empty((num_blocks,), torch.int32)
    args = (SlotArg("data"), ScalarArg(num_bytes // VECTOR_BYTES, CType.I64), SlotArg("sink"))
    slots = {
        "data": SlotSpec(torch.uint8, (num_bytes,), Access.IN),
        "sink": SlotSpec(torch.int32, (num_blocks,), Access.OUT),
    }
    plan = LaunchPlan((KernelStep("read_all", (num_blocks, 1, 1), args, (THREADS, 1, 1)),), slots)
    return [executor.prepare(plan.bind({"data": buffer, "sink": sink})) for buffer in buffers]


def _copy(context: CudaContext, tensors: DeviceTensors, source: torch.Tensor, target: torch.Tensor) -> None:
    args = (tensors.address(target), tensors.address(source), source.numel(), context.stream)
    context.call("cuMemcpyDtoDAsync", *args, doing="copying on the device")


def in_turn(launches: Sequence[Callable[[], None]], number: int) -> Callable[[], None]:
    """A function that makes `number` launches, going round all of them."""

    def run() -> None:
        for index in range(number):
            launches[index % len(launches)]()

    return run


def sample(
    session: Session, context: CudaContext, launches: list[Callable[[], None]], launches_per_sample: int
) -> list[float]:
    """Times of one launch in microseconds, as a graph that goes round all of `launches`; none without a device."""
    number = -(-launches_per_sample // len(launches)) * len(launches)
    graph = context.capture(in_turn(launches, number))
    end_s = time.monotonic() + (0.0 if session.dry else WARM_UP_S)
    for repetition in count():
        if repetition and time.monotonic() >= end_s:
            break
        graph.replay()
        context.synchronise()
    times_us: list[float] = []
    timer = Timer(context)
    for _ in range(1 if session.dry else NUM_SAMPLES):
        elapsed = timer.around(graph)
        if elapsed is not None:
            times_us.append(elapsed / number)
    return times_us
