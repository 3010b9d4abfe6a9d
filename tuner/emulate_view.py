"""How `pagedtune emulate` looks, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pagedtune.harness.case import Case
from pagedtune.harness.emulation import SECTOR_BYTES, Emulation, least_sectors
from pagedtune.harness.issue_slots import IssueSlots
from pagedtune.harness.vgpu.report import SiteReport, StepReport
from pagedtune.kernels.variant import Config

HOTTEST = {"sectors": 12, "conflicts": 8, "executed": 4}  # rows of the table of instructions, by what ranks them


def show(
    console: Console,
    found: Emulation,
    variant: str,
    config: Config,
    case: Case,
    device: str,
    schedule: str,
    sites: bool,
) -> None:
    """Prints everything, the verdict last."""

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style or None, markup=False, soft_wrap=True)

    tokens = f"{case.workload.num_seqs} x {case.workload.bounds.max_context_len} tokens"
    line(f"{variant} ({config.key}) on the PTX for {device}: {case.problem.key}, {case.pool_format.key}, {tokens}")
    for step, slots in zip(found.report.steps, found.slots, strict=True):
        console.print(_counters(step, slots))
        _show_loops(line, slots)
        if sites:
            console.print(_sites(step))
    if found.unread:
        line(f"machine instructions are not known: {found.unread}")
    for note in found.report.notes:
        line(note)
    for fault in found.report.faults:
        line(f"FAULT {fault}", "red")
    if found.failure:
        line(f"WRONG {found.failure}", "red")
    _show_verdict(line, found, schedule)


def _show_loops(line: Any, slots: IssueSlots | None) -> None:
    for loop in slots.loops if slots is not None else ():
        if loop.matched:
            text = f"{loop.instructions} instructions at {loop.address:#x}, {loop.iterations:,} times round"
            text += f", unrolled {loop.unroll} times" if loop.unroll > 1 else ""
            line(f"  loop at PTX line {loop.line}: {text} ({loop.reason})")
        elif loop.iterations:
            line(f"  loop at PTX line {loop.line}: not found in the binary: {loop.reason}")


def _counters(step: StepReport, slots: IssueSlots | None) -> Table:
    c = step.counters
    view = Table(title=step.entry, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False)
    view.add_column("what", no_wrap=True)
    view.add_column("figure", overflow="fold")
    least = least_sectors(c)
    for name, sectors, lines, fewest in (
        ("read", c.read_sectors, c.read_lines, least[0]),
        ("written", c.write_sectors, c.write_lines, least[1]),
    ):
        ratio = f"{sectors / fewest:.3f} x the fewest possible ({fewest:,})" if fewest else "nothing was needed"
        view.add_row(f"sectors {name}", f"{sectors:,}, {ratio}; {lines:,} lines of 128 bytes")
    in_flight = f"at most {c.bytes_in_flight_max:,}, on average {c.bytes_in_flight_mean:,.0f}"
    view.add_row("bytes in flight per block", in_flight)
    view.add_row("bank conflicts", f"{c.bank_conflicts:,} extra passes of shared memory")
    view.add_row("matrix operations", f"{c.matrix_operations:,}")
    view.add_row("barriers", f"{c.barriers:,} warp arrivals")
    view.add_row("PTX instructions", f"{sum(c.instructions.values()):,}: {_by_class(c.instructions)}")
    if slots is not None:
        bounds = "" if slots.low == slots.high else f" (between {slots.low:,} and {slots.high:,})"
        doubt = "" if slots.matched else f"; NOT ALL LOOPS FOUND: {slots.reason}"
        view.add_row("machine instructions", f"{slots.total:,}{bounds}: {_by_class(slots.by_class)}{doubt}")
        view.add_row("spills", f"{slots.spills:,} loads and stores of local memory")
    speed = c.lane_instructions / step.seconds / 1e6 if step.seconds else 0.0
    view.add_row("emulated in", f"{step.seconds:.3f} s, {speed:.0f} million lane instructions/s")
    return view


def _by_class(counts: Any) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in sorted(counts.items(), key=lambda item: -item[1]))


def hottest(sites: Sequence[SiteReport]) -> list[SiteReport]:
    """The instructions that moved most sectors, met most conflicts or ran most often, in the order of the PTX."""
    chosen: set[int] = set()
    rows = list(sites)
    for value, count in HOTTEST.items():
        weights = [int(getattr(row, value)) for row in rows]
        ranked = sorted(range(len(rows)), key=lambda k: (-weights[k], k))
        chosen.update(k for k in ranked[:count] if weights[k])
    return [rows[k] for k in sorted(chosen)]


def _sites(step: StepReport) -> Table:
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    view.add_column("line", justify="right", no_wrap=True)
    view.add_column("instruction", no_wrap=True)
    for name in ("executed", "lanes", "sectors", "lines", "bytes", "conflicts", "until use"):
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("source", overflow="fold")
    for s in hottest(step.sites):
        numbers = (s.executed, s.lanes, s.sectors, s.lines, s.bytes, s.conflicts, _until_use(s))
        view.add_row(str(s.line), s.instruction, *(f"{n:,}" if n else "" for n in numbers), s.source or "-")
    return view


def _until_use(site: SiteReport) -> int:
    """Instructions that the block issues, on average, between asking for a byte and waiting for it."""
    return round(site.flight / (SECTOR_BYTES * site.sectors)) if site.sectors else 0


def _show_verdict(line: Any, found: Emulation, schedule: str) -> None:
    seconds = sum(step.seconds for step in found.report.steps)
    speed = f"{found.kv_bytes / seconds / 1e6:.0f} MB of KV/s" if seconds else "nothing was run"
    errors = ", ".join(f"{check} {ratio:.2f}" for check, ratio in sorted(found.ratios.items()))
    line(f"built in {found.build_seconds:.2f} s, run in {found.run_seconds:.2f} s ({speed}), schedule {schedule}")
    if errors:
        line(f"error over what is allowed: {errors}")
    elif not found.report.clean:
        line("the answer was not compared: the run has faults")
    if found.passed:
        line("PASSED: no fault, and the answer is the oracle's (evidence: emulated)", "bold green")
    else:
        line(f"FAILED: {found.report.num_faults} faults{', wrong answer' if found.failure else ''}", "bold red")


def as_json(
    found: Emulation, variant: str, config: Config, case: Case, device: str, schedule: str, sites: bool
) -> dict[str, Any]:
    """Everything as plain data; `sites` adds every instruction that ran."""
    steps = []
    for step, slots in zip(found.report.steps, found.slots, strict=True):
        read, written = least_sectors(step.counters)
        entry = {
            "entry": step.entry,
            "seconds": step.seconds,
            "counters": asdict(step.counters),
            "least_read_sectors": read,
            "least_write_sectors": written,
            "issue_slots": None if slots is None else asdict(slots),
        }
        if sites:
            entry["sites"] = [asdict(s) for s in step.sites if s.executed]
        steps.append(entry)
    return {
        "variant": variant,
        "config": config.as_dict(),
        "case": case.key,
        "device": device,
        "schedule": schedule,
        "passed": found.passed,
        "evidence": "emulated",
        "faults": [
            {**asdict(fault), "kind": fault.kind.name.lower(), "text": str(fault)} for fault in found.report.faults
        ],
        "failure": found.failure,
        "error_over_bound": {str(check): ratio for check, ratio in found.ratios.items()},
        "steps": steps,
        "kv_bytes": found.kv_bytes,
        "build_seconds": found.build_seconds,
        "run_seconds": found.run_seconds,
    }
