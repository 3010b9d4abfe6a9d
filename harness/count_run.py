"""One run of a plan on the virtual GPU, as counts by name; kept in the user's cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch

from pagedtune.kernels.artifact import Artifact, cache_dir, content_key, publish
from pagedtune.kernels.device import Device
from pagedtune.kernels.launch import KernelStep, LaunchPlan
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Op

from .cache_tensors import cache_tensors, permuted_table, random_values
from .issue_slots import issue_slots
from .occupancy import by_entry
from .sass import SassError
from .vgpu.report import StepReport
from .vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions

Counts = dict[str, float]  # one step's counts by name


@dataclass(frozen=True)
class Run:
    """What is run.

    Args:
        artifacts, plan: of the candidate, for `problem`.
        problem, pool_format: of the tensors.
        lengths, query_lens: of each sequence.
        device: whose limits hold.
        op: what the plan computes.
    """

    artifacts: tuple[Artifact, ...]
    plan: LaunchPlan
    problem: Problem
    pool_format: PoolFormat
    lengths: tuple[int, ...]
    query_lens: tuple[int, ...]
    device: Device
    op: Op = Op.ATTENTION

    @property
    def key(self) -> str:
        """Content key: equal keys mean equal counts."""
        return content_key(
            {
                "artifacts": [a.key for a in self.artifacts],
                "steps": repr(self.plan.steps),
                "format": self.pool_format.key,
                "problem": self.problem.key,
                "lengths": [self.lengths, self.query_lens],
                "op": self.op.value,
                "code": _code_key(),
            }
        )


def block_threads(step: KernelStep) -> int:
    """Threads of a block."""
    return step.block[0] * step.block[1] * step.block[2]


def run_counts(run: Run) -> list[Counts]:
    """Counts by step of one run on the virtual GPU, or of an earlier one: they are kept in the cache.

    Raises:
        VirtualGpuError: the kernel is faulty.
    """
    path = cache_dir() / "counts" / f"{run.key}.json"
    try:
        found: list[Counts] = json.loads(path.read_text())
        return found
    except (OSError, ValueError):
        pass
    counts = _count(run)
    publish(json.dumps(counts).encode(), path)
    return counts


@lru_cache(maxsize=1)
def _code_key() -> str:
    """Key over the source of the virtual GPU and of this counting."""
    folder = Path(__file__).parent
    files = [*sorted((folder / "vgpu").rglob("*")), Path(__file__), folder / "cache_tensors.py"]
    return content_key({p.name: p.read_text() for p in files if p.suffix in (".py", ".cpp", ".h")})


def _count(run: Run) -> list[Counts]:
    gpu = _virtual_gpu(run.artifacts, run.device)
    make = random_tensors if run.op is Op.ATTENTION else partial(cache_tensors, run.op)
    tensors = make(run.problem, run.pool_format, run.lengths, run.query_lens)
    gpu.prepare(run.plan.bind(tensors | run.plan.allocate_workspaces()))()
    artifacts = by_entry(run.artifacts)
    return [counts_of(report, set(run.plan.workspaces), artifacts[report.entry]) for report in gpu.report.steps]


@lru_cache(maxsize=4)  # decoding takes longer than a small run
def _cached_gpu(keys: tuple[str, ...], device: Device, holder: _Holder) -> VirtualGpu:
    options = VirtualGpuOptions(
        num_threads=1,
        quantum=1,  # warps take turns: else one has waited for its copies before the next asks for its own
        check_races=False,  # the gate does
        shared_bytes=device.shared_bytes_per_block,
        capability=device.capability,
    )
    return VirtualGpu(holder.artifacts, options)


class _Holder:
    """Artifacts that take no part in a cache key."""

    def __init__(self, artifacts: tuple[Artifact, ...]) -> None:
        self.artifacts = artifacts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Holder)

    def __hash__(self) -> int:
        return 0


def _virtual_gpu(artifacts: tuple[Artifact, ...], device: Device) -> VirtualGpu:
    return _cached_gpu(tuple(a.key for a in artifacts), device, _Holder(artifacts))


def counts_of(report: StepReport, workspaces: set[str], artifact: Artifact) -> Counts:
    """One step's counts; `workspaces` names those of its plan, `artifact` holds its binary."""
    counters = report.counters
    unique: dict[str, float] = {"slots": 0.0, "workspaces": 0.0}
    for touched in (counters.unique_read_bytes, counters.unique_written_bytes):
        for name, num_bytes in touched.items():
            unique["workspaces" if set(name.split("+")) & workspaces else "slots"] += num_bytes
    shared = [s for s in report.sites if ".shared" in s.instruction and not s.sectors]
    counts: Counts = {
        "busiest": float(counters.busiest_block),
        "slots": _slots(report, artifact),
        "in_flight": float(counters.bytes_in_flight_max),
        "sectors.read": float(counters.read_sectors),
        "sectors.write": float(counters.write_sectors),
        "shared.passes": sum(max(s.executed, s.bytes / 128) for s in shared) + counters.bank_conflicts,
        **{f"bytes.{name}": num_bytes for name, num_bytes in unique.items()},
        **{f"instructions.{name}": float(n) for name, n in counters.instructions.items()},
    }
    for site in report.sites:
        if site.executed and site.instruction.startswith("mma"):
            kind, work = matrix_work(site.instruction)
            counts[f"tensor.{kind}"] = counts.get(f"tensor.{kind}", 0.0) + work * site.executed
    return counts


def _slots(report: StepReport, artifact: Artifact) -> float:
    """Issue slots of the binary; 0 where its machine code cannot be read."""
    try:
        return float(issue_slots(artifact.path, report.entry, report).total)
    except SassError:
        return 0.0


def matrix_work(opcode: str) -> tuple[str, int]:
    """Operand type and multiply-adds of one matrix instruction, e.g. of `mma.sync.aligned.m16n8k16...`.

    Raises:
        ValueError: the opcode names no shape.
    """
    parts = opcode.split(".")
    shape = next((p for p in parts if p.startswith("m") and "n" in p and "k" in p and p[1:2].isdigit()), None)
    if shape is None:
        raise ValueError(f"{opcode} names no shape")
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    return parts[-3], int(m) * int(n) * int(k)  # types come last: D, A, B, C


def random_tensors(
    problem: Problem, pool_format: PoolFormat, lengths: Sequence[int], query_lens: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Slots of a batch with random values over permuted blocks."""
    g = torch.Generator().manual_seed(0)
    counts = [-(-n // pool_format.block_size) for n in lengths]
    total, rows = sum(counts), sum(query_lens)
    table = permuted_table(torch.randperm(total, generator=g), counts).int()
    dtype = problem.q_dtype.torch
    tensors = {
        "q": random_values((rows, problem.num_q_heads, problem.head_dim), dtype, g),
        "k_cache": random_values(pool_format.k_shape(total, problem), pool_format.kv_dtype.torch, g),
        "v_cache": random_values(pool_format.v_shape(total, problem), pool_format.kv_dtype.torch, g),
        "block_table": table,
        "context_lens": torch.tensor(lengths, dtype=torch.int32),
        "query_start_loc": torch.tensor(np.concatenate([[0], np.cumsum(query_lens)]), dtype=torch.int32),
        "out": torch.zeros((rows, problem.num_q_heads, problem.head_dim_v), dtype=dtype),
        "lse": torch.zeros((rows, problem.num_q_heads)),
    }
    if problem.sinks:
        tensors["sinks"] = torch.zeros(problem.num_q_heads)
    if problem.alibi:
        tensors["alibi_slopes"] = torch.full((problem.num_q_heads,), 0.1)
    scales = pool_format.scale_shape(total, problem)
    if scales is not None:
        tensors |= {"k_scale": torch.ones(scales), "v_scale": torch.ones(scales)}
    return tensors
