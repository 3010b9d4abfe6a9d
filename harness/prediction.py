"""A first time model of a kernel launch: a roofline over the virtual GPU's counters, wave by wave.

A pure function of counted work, resources, grid and device facts. Nothing in it is fitted to a measurement, so its
times are for ranking candidates, and say so. Per step (kernel launch):

    time = launch + ramp + sum over waves of max(memory, L2, shared memory, issue, tensor cores)

The grid is counted in units of its busiest block, `work blocks` = instructions / those of the busiest block: an empty
split costs little, and a batch of unequal lengths ends with its longest. `SMs x blocks per SM` of them run together (a
wave); the last wave has what is left. Within a wave:

    memory   DRAM bytes / min(peak, bytes in flight / latency): Little's law. Peak is DRAM_SHARE of the data sheet.
             DRAM bytes are the unique bytes of all slots, and what is read again in the share (1 - L2 / unique bytes)
             that the L2 cannot hold; workspaces stay in the L2 where they fit into half of it.
    L2       sectors of 32 bytes over what an SM can take in.
    shared   passes of shared memory (128 bytes each) at one a clock.
    issue    issue slots of the machine code (else instructions of the PTX) at one a clock and partition, or fewer where
             there are too few warps to hide the latency of dependent instructions; or the slowest pipe's (special
             functions, conversions, integers, ...), by PTX instructions.
    tensor   multiply-adds of the matrix instructions over the documented rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagedtune.kernels.device import Device

from .occupancy import PARTITIONS, WARP_SIZE, Limit, Occupancy, occupancy

UNCERTAINTY = 0.3  # of a predicted time, either way: stated, not measured, as nothing here was fitted to silicon
DRAM_LATENCY_US = 0.7  # loaded, with the trip through the L2; published microbenchmarks have 0.6 to 0.8
DRAM_SHARE = 0.92  # of the data sheet's bandwidth that plain reads reach at best
DEFAULT_L2_BYTES = 40 << 20  # where the facts have none: the smallest of the described data-centre GPUs
L2_BYTES_PER_CLOCK = 40  # that an SM takes in; A100 white paper: 5120 bytes a clock over 108 SMs
LAUNCH_US = 1.5  # from one kernel of a graph to the next
RAMP_LATENCIES = 2  # dependent trips to memory before a block's keys arrive: lengths, then the block table
DEPENDENT_CLOCKS = 4.0  # from an arithmetic instruction to its dependent one, sm_80 to sm_90
PARALLEL_INSTRUCTIONS = 2.0  # independent ones in a row: assumed
# Multiply-adds a clock and SM with fp16 or bf16 operands, from the data sheets' dense peaks. `mma.sync` reaches about
# 62 % of the peak of sm_90, which is that of `wgmma`.
TENSOR_RATES: Mapping[int, float] = {80: 1024, 86: 512, 87: 512, 89: 512, 90: 1270, 100: 2048, 103: 2048, 120: 512}
TENSOR_KINDS: Mapping[str, float] = {
    "f16": 1.0,
    "bf16": 1.0,
    "tf32": 0.5,
    "e4m3": 2.0,
    "e5m2": 2.0,
    "s8": 2.0,
    "u8": 2.0,
}
# Lanes a clock and SM, CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions".
_COMMON = {"integer": 64.0, "predicate": 64.0, "special_function": 16.0, "warp": 32.0, "convert": 64.0, "global": 32.0,
           "shared": 32.0, "local": 32.0, "async": 32.0, "atomic": 32.0}  # fmt: skip
PIPES: Mapping[int, Mapping[str, float]] = {
    80: {**_COMMON, "float": 64.0, "half": 256.0, "convert": 16.0},
    86: {**_COMMON, "float": 128.0, "half": 128.0},
    87: {**_COMMON, "float": 128.0, "half": 128.0},
    89: {**_COMMON, "float": 128.0, "half": 128.0},
    90: {**_COMMON, "float": 128.0, "half": 256.0},
    100: {**_COMMON, "float": 128.0, "half": 256.0},
    103: {**_COMMON, "float": 128.0, "half": 256.0},
    120: {**_COMMON, "float": 128.0, "half": 128.0},
}
# PTX instructions that need no slot: ptxas renames registers, and parameters are operands.
FREE = frozenset({"move", "param"})
NEEDED_FACTS = ("capability", "num_units", "registers_per_unit", "shared_bytes_per_block", "shared_bytes_per_unit",
                "bandwidth_gb_s", "boost_clock_mhz")  # fmt: skip


@dataclass(frozen=True)
class StepWork:
    """What one kernel launch does and takes.

    Args:
        entry: kernel.
        blocks, threads: of the grid, and of a block.
        registers: of a thread.
        shared_bytes: of a block, static and dynamic.
        instructions: warp instructions of the PTX by class.
        slots: issue slots of the binary; 0 where its machine code is not known.
        busiest: warp instructions of the busiest block.
        read_sectors, write_sectors: 32-byte sectors.
        unique_bytes: distinct bytes of slots that are read or written.
        workspace_bytes: distinct bytes of workspaces that are read or written.
        shared_passes: passes of shared memory, conflicts included.
        tensor: multiply-adds of matrix instructions by operand type.
        bytes_in_flight: that one block has asked of memory at a time.
    """

    entry: str
    blocks: int
    threads: int
    registers: int
    shared_bytes: int
    instructions: Mapping[str, float]
    busiest: float
    read_sectors: float
    write_sectors: float
    unique_bytes: float
    workspace_bytes: float
    shared_passes: float
    tensor: Mapping[str, float]
    bytes_in_flight: float
    slots: float = 0.0

    @property
    def num_instructions(self) -> float:
        """Warp instructions of all classes."""
        return sum(self.instructions.values())

    @property
    def work_blocks(self) -> float:
        """Blocks as if each had the work of the busiest one."""
        if not self.busiest:
            return float(self.blocks)
        return min(float(self.blocks), max(1.0, self.num_instructions / self.busiest))


@dataclass(frozen=True)
class StepPrediction:
    """The terms of one step, each in microseconds as if it were alone, summed over the waves.

    Args:
        entry: kernel.
        total_us: of the step; below the sum of the terms, as those of a wave overlap.
        launch_us, ramp_us: fixed.
        memory_us, l2_us, shared_us, issue_us, tensor_us: see the module.
        waves: work blocks over the blocks that run together.
        blocks_per_unit: on one SM; `limit` keeps more from fitting.
        work_blocks: see `StepWork.work_blocks`.
        dram_bytes: from memory.
        gb_s: that the blocks of a full wave can draw, after Little's law.
        bound: name of the largest term.
    """

    entry: str
    total_us: float
    launch_us: float
    ramp_us: float
    memory_us: float
    l2_us: float
    shared_us: float
    issue_us: float
    tensor_us: float
    waves: float
    blocks_per_unit: int
    limit: Limit
    work_blocks: float
    dram_bytes: float
    gb_s: float
    bound: str


@dataclass(frozen=True)
class Prediction:
    """Time of one launch of a plan, in microseconds: never a measurement.

    Args:
        total_us: of all steps.
        low_us, high_us: within the stated uncertainty of the model.
        steps: in order.
    """

    total_us: float
    low_us: float
    high_us: float
    steps: tuple[StepPrediction, ...]

    @property
    def text(self) -> str:
        """The terms in one line."""
        return "; ".join(describe(step) for step in self.steps)


def describe(step: StepPrediction) -> str:
    """One step's terms for people, e.g. `attention_split 62.0 µs: memory 58.0, issue 21.3, ...`."""
    terms = {name: value for name, value in _terms(step).items() if value >= 0.05}
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    texts = ", ".join(f"{name} {value:.1f}" for name, value in ordered)
    return (
        f"{step.entry} {step.total_us:.1f} µs ({step.bound}-bound): {texts}; {step.waves:.2f} waves of "
        f"{step.blocks_per_unit} blocks an SM (limit: {step.limit}), a full wave draws {step.gb_s:,.0f} GB/s"
    )


def _terms(step: StepPrediction) -> dict[str, float]:
    return {
        "memory": step.memory_us,
        "L2": step.l2_us,
        "shared": step.shared_us,
        "issue": step.issue_us,
        "tensor": step.tensor_us,
        "launch": step.launch_us,
        "ramp": step.ramp_us,
    }


def missing_facts(device: Device) -> tuple[str, ...]:
    """Facts that the model needs and `device` lacks."""
    return tuple(name for name in NEEDED_FACTS if not getattr(device, name))


def predict(steps: Sequence[StepWork], device: Device) -> Prediction:
    """The time of one launch of all `steps` on `device`, with cold KV.

    Raises:
        ValueError: the device lacks facts or is of an unknown capability, or a kernel does not fit on it.
    """
    missing = missing_facts(device)
    if missing:
        raise ValueError(f"no time can be predicted for {device.name}: its facts lack {', '.join(missing)}")
    if device.capability not in PIPES:
        raise ValueError(
            f"no throughputs are known for compute capability {device.capability / 10}: add them to PIPES and "
            "TENSOR_RATES from the CUDA C++ Programming Guide and the data sheet"
        )
    done = tuple(_step(step, device) for step in steps)
    total = sum(step.total_us for step in done)
    return Prediction(total, total * (1 - UNCERTAINTY), total * (1 + UNCERTAINTY), done)


def _step(work: StepWork, device: Device) -> StepPrediction:
    found = occupancy(device, work.threads, work.registers, work.shared_bytes)
    if not found.blocks:
        raise ValueError(f"not one block of {work.entry} fits on {device.name}: too much of its {found.limit}")
    together = found.blocks * device.num_units
    dram = dram_bytes(work, device)
    terms: dict[str, float] = dict.fromkeys(("memory", "L2", "shared", "issue", "tensor"), 0.0)
    overlapped = 0.0
    for active, times in _waves(work.work_blocks, together):
        own = _wave(work, device, found, active, dram)
        overlapped += times * max(own.values())
        terms = {name: terms[name] + times * own[name] for name in terms}
    launch, ramp = LAUNCH_US, RAMP_LATENCIES * DRAM_LATENCY_US
    bound = max({**terms, "launch": launch + ramp}.items(), key=lambda term: term[1])[0]
    return StepPrediction(
        work.entry,
        launch + ramp + overlapped,
        launch,
        ramp,
        memory_us=terms["memory"],
        l2_us=terms["L2"],
        shared_us=terms["shared"],
        issue_us=terms["issue"],
        tensor_us=terms["tensor"],
        waves=work.work_blocks / together,
        blocks_per_unit=found.blocks,
        limit=found.limit,
        work_blocks=work.work_blocks,
        dram_bytes=dram,
        gb_s=_bandwidth(work, device, min(work.work_blocks, together)) / 1e3,
        bound=bound,
    )


def _waves(work_blocks: float, together: int) -> list[tuple[float, float]]:
    """(active blocks, how many such waves)."""
    full = math.floor(work_blocks / together)
    rest = work_blocks - full * together
    return [(active, times) for active, times in ((float(together), float(full)), (rest, 1.0)) if active * times > 0]


def _wave(work: StepWork, device: Device, found: Occupancy, active: float, dram: float) -> dict[str, float]:
    """The terms of one wave, in microseconds."""
    share = active / work.work_blocks
    clock = device.boost_clock_mhz or 0.0  # clocks in a microsecond
    units = min(active, float(device.num_units))
    busiest_unit = math.ceil(active / device.num_units) / work.work_blocks  # share of the work on the fullest SM
    sectors = (work.read_sectors + work.write_sectors) * 32
    warps = math.ceil(active / device.num_units) * math.ceil(work.threads / WARP_SIZE)
    return {
        "memory": dram * share / _bandwidth(work, device, active),
        "L2": sectors * share / (units * L2_BYTES_PER_CLOCK * clock),
        "shared": work.shared_passes * busiest_unit / clock,
        "issue": issue_clocks(work, device, warps) * busiest_unit / clock,
        "tensor": tensor_clocks(work, device) * busiest_unit / clock,
    }


def _bandwidth(work: StepWork, device: Device, active: float) -> float:
    """Bytes a microsecond that `active` blocks draw from memory."""
    peak = DRAM_SHARE * (device.bandwidth_gb_s or 0.0) * 1e3
    return max(1.0, min(peak, active * work.bytes_in_flight / DRAM_LATENCY_US))


def dram_bytes(work: StepWork, device: Device) -> float:
    """Bytes that come from memory or go to it; the rule is the module's."""
    l2 = device.l2_bytes or DEFAULT_L2_BYTES
    compulsory = work.unique_bytes + (work.workspace_bytes if work.workspace_bytes > l2 / 2 else 0.0)
    again = max(0.0, (work.read_sectors + work.write_sectors) * 32 - work.unique_bytes - work.workspace_bytes)
    missed = max(0.0, 1.0 - l2 / work.unique_bytes) if work.unique_bytes else 0.0
    return compulsory + again * missed


def issue_clocks(work: StepWork, device: Device, warps: float) -> float:
    """Clocks of one SM for all of a step's instructions, with `warps` resident."""
    issued = {name: count for name, count in work.instructions.items() if name not in FREE}
    rate = min(float(PARTITIONS), warps * PARALLEL_INSTRUCTIONS / DEPENDENT_CLOCKS)
    pipes = PIPES[device.capability]
    slowest = max((count * WARP_SIZE / pipes[name] for name, count in issued.items() if name in pipes), default=0.0)
    return max((work.slots or sum(issued.values())) / rate, slowest)


def tensor_clocks(work: StepWork, device: Device) -> float:
    """Clocks of one SM's tensor cores for all of a step's matrix instructions."""
    rate = TENSOR_RATES[device.capability]
    return sum(count / (rate * TENSOR_KINDS.get(kind, 1.0)) for kind, count in work.tensor.items())
