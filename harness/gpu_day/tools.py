"""Stages `counters` and `sanitizer`: what NVIDIA's own tools say, beside what the virtual GPU says."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from pagedtune.harness.gpu_day.cells import COUNTED, DRY_COUNTED, Candidate, Cell
from pagedtune.harness.gpu_day.facts import tool
from pagedtune.harness.gpu_day.gate import VARIANTS
from pagedtune.harness.gpu_day.one_case import counted
from pagedtune.harness.gpu_day.session import Session
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions
from pagedtune.kernels.device import Device

ONE_CASE = "pagedtune.harness.gpu_day.one_case"
# From what every GPU since Volta has to what some drop; the first list that `ncu` takes is used.
METRICS = (
    (
        "lts__t_sectors_srcunit_tex_op_read.sum",
        "lts__t_sectors_srcunit_tex_op_write.sum",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
        "l1tex__data_bank_conflicts_pipe_lsu.sum",
        "dram__bytes_read.sum",
        "smsp__inst_executed.sum",
    ),
    ("lts__t_sectors_srcunit_tex_op_read.sum", "dram__bytes_read.sum", "smsp__inst_executed.sum"),
)
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck")
# Values as they are, not scaled to a unit that fits; the clocks are nobody's business but their owner's, and no count
# hangs on them.
NCU_OPTIONS = ("--csv", "--print-units", "base", "--clock-control", "none")
SANITIZED_CASES = tuple(str(number) for number in range(len(VARIANTS)))  # the first ones are of one variant each
ERROR_EXIT = 86
EMULATED = "the device is emulated"


def counters(session: Session) -> dict[str, Any]:
    """Counts one launch of each variant on the virtual GPU, and with `ncu` on the device."""
    profiler = None if session.dry else tool("ncu")
    missing = EMULATED if session.dry else "ncu is not installed"
    for name in VARIANTS:
        candidate = counted(session.device, name, session.dry)
        cell = DRY_COUNTED if session.dry else COUNTED
        measured, reason = _profile(session, profiler, name) if profiler else (None, missing)
        virtual, why_not = _emulate(session, cell, candidate)
        session.journal.add(
            "counters",
            cell=cell.name,
            candidate=candidate.label,
            kv_bytes=cell.kv_bytes,
            virtual=virtual,
            virtual_reason=why_not,
            ncu=measured,
            reason=reason,
        )
    return {"variants": len(VARIANTS), "ncu": profiler or missing}


def _emulate(session: Session, cell: Cell, candidate: Candidate) -> tuple[dict[str, dict[str, int]] | None, str]:
    """`virtual_counters`, and why there are none: a machine with a GPU need not have the C++ compiler that they take,
    and its Triton may use an instruction that the virtual GPU lacks. `ncu`'s counters count all the same."""
    try:
        return virtual_counters(cell, candidate, session.device), ""
    except Exception as error:  # noqa: BLE001 - no emulation is no reason to have no measurement
        return None, f"{type(error).__name__}: {error}"[:600]


def virtual_counters(cell: Cell, candidate: Candidate, device: Device) -> dict[str, dict[str, int]]:
    """Counters of the virtual GPU by kernel."""
    artifacts = candidate.variant.build(cell.problem, cell.pool_format, candidate.config, device)
    plan = candidate.variant.plan(cell.problem, cell.pool_format, candidate.config, cell.bounds)
    gpu = VirtualGpu(artifacts, VirtualGpuOptions(check_races=False))
    gpu.prepare(plan.bind(_host_tensors(cell) | plan.allocate_workspaces()))()
    return {
        step.entry: {
            "read_sectors": step.counters.read_sectors,
            "write_sectors": step.counters.write_sectors,
            "unique_read_bytes": sum(step.counters.unique_read_bytes.values()),
            "warp_instructions": sum(step.counters.instructions.values()),
            "bank_conflicts": step.counters.bank_conflicts,
            "matrix_operations": step.counters.matrix_operations,
        }
        for step in gpu.report.steps
    }


def _host_tensors(cell: Cell) -> dict[str, torch.Tensor]:
    problem, pool_format = cell.problem, cell.pool_format
    blocks = -(-cell.context_len // pool_format.block_size)
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(cell.num_seqs * blocks, generator=generator).to(torch.int32).view(cell.num_seqs, blocks)
    rows = (cell.num_seqs, problem.num_q_heads)
    return {
        "q": torch.randn(*rows, problem.head_dim, generator=generator).to(problem.q_dtype.torch),
        "k_cache": torch.ones(pool_format.k_shape(table.numel(), problem), dtype=pool_format.kv_dtype.torch),
        "v_cache": torch.ones(pool_format.v_shape(table.numel(), problem), dtype=pool_format.kv_dtype.torch),
        "block_table": table,
        "context_lens": torch.full((cell.num_seqs,), cell.context_len, dtype=torch.int32),
        "query_start_loc": torch.arange(cell.num_seqs + 1, dtype=torch.int32),
        "out": torch.zeros(*rows, problem.head_dim_v, dtype=problem.q_dtype.torch),
        "lse": torch.zeros(rows),
    }


def _profile(session: Session, profiler: str, name: str) -> tuple[dict[str, dict[str, float]] | None, str]:
    """Metrics by kernel, and why there are none."""
    reason = ""
    for metrics in METRICS:
        command = [profiler, *NCU_OPTIONS, "--metrics", ",".join(metrics), *_python("counted", name)]
        code, text = _run(command, session.left_s - 1)
        found = parse_ncu(text)
        if found:
            return found, ""
        reason = f"ncu ended with {code}: {_tail(text)}"
    return None, reason


def parse_ncu(text: str) -> dict[str, dict[str, float]]:
    """Metrics by kernel name from `ncu --csv`, a header and one line for each kernel and metric; others are skipped."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return {}
    found: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        value = (row.get("Metric Value") or "").replace(",", "")
        try:
            number = float(value)
        except ValueError:
            continue
        unit = row.get("Metric Unit") or ""
        label = f"{row['Metric Name']} [{unit}]" if unit not in ("", "sector", "inst") else row["Metric Name"]
        found.setdefault(row["Kernel Name"].split("(")[0], {})[label] = number
    return found


def sanitizer(session: Session) -> dict[str, Any]:
    """Runs a gate case of each variant under each tool of compute-sanitizer; in a dry run, without it."""
    program = None if session.dry else tool("compute-sanitizer")
    if session.dry:
        code, text = _run(_python("--dry", session.device.name, "gate", *SANITIZED_CASES), session.left_s - 1)
        session.journal.add(
            "sanitizer", tool=None, status="skipped", reason=EMULATED, cases_exit=code, tail=_tail(text)
        )
        return {"skipped": EMULATED, "cases_exit": code}
    if program is None:
        session.journal.add("sanitizer", tool=None, status="skipped", reason="compute-sanitizer is not installed")
        return {"skipped": "compute-sanitizer is not installed"}
    found = {}
    for name in SANITIZER_TOOLS:
        options = ["--tool", name, "--error-exitcode", str(ERROR_EXIT), "--print-limit", "20"]
        code, text = _run([program, *options, *_python("gate", *SANITIZED_CASES)], session.left_s - 1)
        found[name] = {0: "clean", ERROR_EXIT: "errors", None: "timeout"}.get(code, "failed")
        session.journal.add("sanitizer", tool=name, status=found[name], exit=code, tail=_tail(text))
    return found


def _python(*arguments: str) -> list[str]:
    return [sys.executable, "-m", ONE_CASE, *arguments]


def _run(command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Exit status (None if it had to be ended) and all output."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=max(1.0, limit_s), check=False
        )
    except subprocess.TimeoutExpired as error:
        text = error.stdout or b""
        return None, text.decode(errors="replace") if isinstance(text, bytes) else text
    return done.returncode, done.stdout


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-8:])[-1500:]
