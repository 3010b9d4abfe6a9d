"""What a decode kernel's binary and counters say of it on a device, beside the least that any kernel needs.

Nothing here is a measurement. Sectors, conflicts and trips come from the virtual GPU, machine instructions from the
binary, blocks per SM from its resources. Counts of a batch are those of a smaller one times a factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pagedtune.kernels.device import Device
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.workload import Workload

from .count_run import Counts, counts_of
from .count_target import work_of
from .issue_slots import IssueSlots, count_slots
from .kernel_counts import MAXIMA
from .observation import Seen
from .occupancy import MAX_STACK, PARTITIONS, occupancy
from .prediction import DRAM_LATENCY_US, StepWork, predict
from .ptx_blocks import PtxBlocks
from .roofline import kv_bytes
from .sass import disassemble
from .vgpu.report import SiteReport

SECTOR_BYTES = 32
POOLS = frozenset({"k_cache", "v_cache"})
INDEX_BYTES = 4  # of an entry of the block table, and of a length


@dataclass(frozen=True)
class Least:
    """Sectors that any kernel must move for a batch: each byte once, each sector whole.

    Args:
        kv: keys and values of all contexts.
        all: those, queries, outputs, block tables and lengths.
        kv_bytes: bytes behind `kv`.
    """

    kv: int
    all: int
    kv_bytes: int


def least_of(problem: Problem, pool_format: PoolFormat, workload: Workload) -> Least:
    """The hand count for a batch."""
    kv = kv_bytes(problem, pool_format, workload)
    rows = workload.num_tokens * problem.num_q_heads * problem.q_dtype.itemsize
    entries = workload.num_blocks(pool_format.block_size) + workload.num_seqs
    others = (rows * problem.head_dim, rows * problem.head_dim_v, entries * INDEX_BYTES)
    sectors = _sectors(kv)
    return Least(sectors, sectors + sum(_sectors(n) for n in others), kv)


def _sectors(num_bytes: int) -> int:
    return -(-num_bytes // SECTOR_BYTES)


@dataclass(frozen=True)
class Figures:
    """All columns for one kernel in one cell. Per-block and per-SM figures are those of the kernel that reads the KV.

    Args:
        entries: kernels, in order.
        kv_ratio, sector_ratio: sectors of KV, and of everything read and written, over the least possible.
        loop_instructions: machine instructions of one time round the main loop, 0 where it is not known.
        loop_trips: times round it, over all warps of the batch.
        loop_per_kib: instructions issued in it for each KiB of KV.
        issue_share: machine instructions of all kernels over the issue slots that the device has while it reads the
            KV at its full bandwidth; None where the main loop was not found in the binary.
        loop_conflicts: extra passes of shared memory in the main loop and the loops around it, over the batch.
        conflicts: the same of all kernels.
        registers: of a thread. spills: bytes of stack beyond what is harmless, of any kernel.
        local_instructions: loads and stores of local memory that are issued over the batch.
        shared_bytes: of a block. threads: of a block. blocks: of the grid. blocks_per_unit: that fit on an SM.
        limit: what keeps more from fitting.
        flight_block: most bytes that a block has in flight. flight_mean: averaged over its instructions.
        flight_unit: `flight_block` times the blocks that an SM gets.
        waves: blocks, each with the work of the busiest one, over those that run together.
        wave_share: share of the waves' places that have work: waves over the next whole number.
        predicted_us, predicted_step: the time model's, never a measurement.
        doubt: which loops were not found in the binary, or "".
    """

    entries: tuple[str, ...]
    kv_ratio: float
    sector_ratio: float
    loop_instructions: int
    loop_trips: int
    loop_per_kib: float | None
    issue_share: float | None
    loop_conflicts: int
    conflicts: int
    registers: int
    spills: int
    local_instructions: int
    shared_bytes: int
    threads: int
    blocks: int
    blocks_per_unit: int
    limit: str
    flight_block: int
    flight_mean: float
    flight_unit: float
    waves: float
    wave_share: float
    predicted_us: float
    predicted_step: str
    doubt: str


def little_bytes(device: Device) -> float:
    """Bytes that each SM must have in flight to draw the full bandwidth: Little's law, at 700 ns."""
    return (device.bandwidth_gb_s or 0.0) * 1e3 * DRAM_LATENCY_US / device.num_units


def slots_at_roofline(device: Device, num_bytes: int) -> float:
    """Warp instructions that a device can issue while it reads `num_bytes` at full bandwidth."""
    seconds = num_bytes / ((device.bandwidth_gb_s or 0.0) * 1e9)
    return device.num_units * PARTITIONS * (device.boost_clock_mhz or 0.0) * 1e6 * seconds


def figures(seen: Sequence[Seen], blocks: Sequence[int], factor: float, least: Least, device: Device) -> Figures:
    """The figures of a batch from a run of a part of it.

    Args:
        seen: the run.
        blocks: of the batch's grid, by kernel.
        factor: the batch over what was run.
        least: of the batch.
        device: with bandwidth and boost clock.

    Raises:
        SassError: a binary cannot be read.
        ValueError: not one block fits.
    """
    main = max(range(len(seen)), key=lambda k: kv_sectors(seen[k]))
    slots = [count_slots(disassemble(s.artifact.path)[s.step.entry], s.report.sites) for s in seen]
    works = [_work(s, n, factor) for s, n in zip(seen, blocks, strict=True)]
    work, counters = works[main], seen[main].report.counters
    found = occupancy(device, work.threads, work.registers, work.shared_bytes)
    prediction = predict(works, device)
    waves = prediction.steps[main].waves
    loop = main_loop(slots[main], seen[main].report.sites)
    trips = round(loop.trips * factor)
    per_unit = min(float(found.blocks), work.work_blocks / device.num_units)
    issued = factor * sum(s.total for s in slots)
    entries = tuple(s.step.entry for s in seen)
    stacks = [s.artifact.resources[s.step.entry].spill_bytes for s in seen]
    return Figures(
        entries,
        kv_ratio=factor * sum(kv_sectors(s) for s in seen) / least.kv,
        sector_ratio=factor * sum(all_sectors(s) for s in seen) / least.all,
        loop_instructions=loop.instructions,
        loop_trips=trips,
        loop_per_kib=1024 * loop.instructions * trips / least.kv_bytes if loop.instructions else None,
        issue_share=issued / slots_at_roofline(device, least.kv_bytes) if loop.instructions else None,
        loop_conflicts=round(loop.conflicts * factor),
        conflicts=round(factor * sum(s.report.counters.bank_conflicts for s in seen)),
        registers=work.registers,
        spills=max((n for n in stacks if n > MAX_STACK), default=0),
        local_instructions=round(factor * sum(s.spills for s in slots)),
        shared_bytes=work.shared_bytes,
        threads=work.threads,
        blocks=work.blocks,
        blocks_per_unit=found.blocks,
        limit=str(found.limit),
        flight_block=counters.bytes_in_flight_max,
        flight_mean=counters.bytes_in_flight_mean,
        flight_unit=counters.bytes_in_flight_max * per_unit,
        waves=waves,
        wave_share=waves / math.ceil(waves) if waves else 0.0,
        predicted_us=prediction.total_us,
        predicted_step=prediction.steps[main].bound,
        doubt="; ".join(f"{s.step.entry}: {n.reason}" for s, n in zip(seen, slots, strict=True) if not n.matched),
    )


def kv_sectors(seen: Seen) -> int:
    """Sectors of the pools that a launch read."""
    return sum(site.sectors for site in seen.report.sites if POOLS.intersection(site.slot.split("+")))


def all_sectors(seen: Seen) -> int:
    """Sectors that a launch read and wrote."""
    return seen.report.counters.read_sectors + seen.report.counters.write_sectors


def _work(seen: Seen, blocks: int, factor: float) -> StepWork:
    counts: Counts = {
        name: value if name in MAXIMA else value * factor
        for name, value in counts_of(seen.report, set(seen.workspaces), seen.artifact).items()
    }
    work = work_of(seen.step, {seen.step.entry: seen.artifact}, counts)
    return StepWork(**{**vars(work), "blocks": blocks})


@dataclass(frozen=True)
class MainLoop:
    """The loop that runs most PTX instructions: machine instructions, times round, conflicts in it and around it.

    `instructions` and `trips` are 0 where it was not found in the binary.
    """

    instructions: int
    trips: float
    conflicts: int


def main_loop(slots: IssueSlots, sites: Sequence[SiteReport]) -> MainLoop:
    """The main loop of a launch: chosen by its PTX, inner loops left out, then looked up in the binary."""
    blocks = PtxBlocks(sites)
    loops, loop_of = blocks.flow.loops, blocks.flow.loop_of
    if not loops:
        return MainLoop(0, 0.0, 0)
    issued = [0] * len(loops)
    for block, loop in zip(blocks.blocks, loop_of, strict=True):
        if loop >= 0:
            issued[loop] += sum(site.executed for site in block)
    main = top = max(range(len(loops)), key=issued.__getitem__)
    while loops[top].parent >= 0:
        top = loops[top].parent
    conflicts = sum(site.conflicts for b in loops[top].blocks for site in blocks.blocks[b])
    found = next((m for m in slots.loops if m.matched and m.line == blocks.line(main)), None)
    if found is None:
        return MainLoop(0, 0.0, conflicts)
    return MainLoop(found.instructions, found.iterations / found.unroll, conflicts)
