"""The summary of a day: at most sixty lines, from the files that the stages wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from pagedtune.harness.gpu_day.journal import Journal

MAX_LINES = 60
MAX_FAILURES = 6
WIDTH = 160
Lines = Iterator[str]


def summarise(journal: Journal) -> str:
    """The text; in a dry run every line begins with DRY."""
    lines = [*_head(journal), *_stages(journal), *_gate(journal), *_bandwidth(journal), *_timings(journal)]
    lines += [*_counters(journal), *_sanitizer(journal)]
    if len(lines) > MAX_LINES:
        rest = len(lines) - MAX_LINES + 1
        lines = [*lines[: MAX_LINES - 1], f"... and {rest} lines more in {journal.folder}"]
    prefix = "DRY " if journal.dry else ""
    return "\n".join(f"{prefix}{line}"[:WIDTH] for line in lines) + "\n"


def _head(journal: Journal) -> Lines:
    what = "EMULATED by the stand-in driver: no time, no silicon" if journal.dry else "on the device"
    yield f"gpu-day {journal.run}, {what}; files in {journal.folder}"
    for line in journal.lines("facts"):
        device, machine = line["device"], line["machine"]
        packages = ", ".join(f"{k} {v}" for k, v in machine["packages"].items() if v)
        facts = f"sm_{device['capability']}, {device['num_units']} SMs, driver {line['driver']}"
        yield f"device: {device['product']}, {facts}"
        yield f"machine: Python {machine['python']}, {machine['cores']} cores, {packages}"
        if line["nvml"]:
            state = line["nvml"]
            clocks = f"SM {state['sm_clock_mhz']} of {state['max_sm_clock_mhz']} MHz"
            yield f"clocks: {clocks}, held back by {', '.join(state['held_back_by'] or ()) or 'nothing'}"
        for contradiction in line["contradictions"][:MAX_FAILURES]:
            yield f"contradiction: {contradiction}"


def _stages(journal: Journal) -> Lines:
    for line in journal.lines("stages"):
        told = ", ".join(f"{k} {v}" for k, v in (line["value"] or {}).items())
        yield f"{line['name']:<10} {line['status']:<8} {line['seconds']:6.1f} s  {told or line['message']}"


def _gate(journal: Journal) -> Lines:
    lines = journal.lines("gate")
    for variant in sorted({line["variant"] for line in lines}):
        mine = [line for line in lines if line["variant"] == variant]
        counts = Counter(line["status"] for line in mine)
        worst = max((line["error_ratio"] for line in mine if line["status"] == "passed"), default=0.0)
        yield (
            f"gate {variant}: {len(mine)} cases, {', '.join(f'{n} {s}' for s, n in sorted(counts.items()))}; "
            f"worst error of a passed one {worst:.2f} of its bound"
        )
    failures = [line for line in lines if line["status"] not in ("passed", "rejected", "not_run")]
    for line in failures[:MAX_FAILURES]:
        reason = line["reason"].splitlines()[0] if line["reason"] else ""
        yield f"  {line['status']}: {line['variant']} {line['case']}: {reason}"


def _bandwidth(journal: Journal) -> Lines:
    for kind in ("copy", "read"):
        lines = [line for line in journal.lines("bandwidth") if line["kind"] == kind]
        rates = ", ".join(f"{line['bytes'] >> 20} MiB {_number(line['gb_s'], '.0f')}" for line in lines)
        if rates:
            yield f"{kind} ceiling (GB/s, cold): {rates}"


def _timings(journal: Journal) -> Lines:
    lines = journal.lines("timings")
    if any(line.get("time_us") is not None for line in lines):
        yield f"{'cold graph replay':<20} {'candidate':<60} {'us':>8} {'GB/s':>6} {'to first':>8}"
    for line in lines:
        if line["status"] == "not_run" or line.get("time_us") is None:
            label = line.get("candidate", "")
            yield f"{line['cell']:<20} {label:<60.60} {line['status']}, no time: {line.get('reason', '')}"
        else:
            label, ratio = line["candidate"], _number(line["ratio"], ".3f")
            mark = "" if line["status"] == "passed" else f" {line['status']}"
            yield f"{line['cell']:<20} {label:<60.60} {line['time_us']:8.1f} {line['gb_s']:6.0f} {ratio:>8}{mark}"


def _counters(journal: Journal) -> Lines:
    for line in journal.lines("counters"):
        told = f"virtual GPU: {_emulated(line)}; ncu: {_measured(line)}"
        yield f"counters {line['candidate'].split()[0]}, {line['cell']}: {told}"


def _emulated(line: dict[str, Any]) -> str:
    if line["virtual"] is None:
        return _none(line["virtual_reason"])
    sums = (sum(step[name] for step in line["virtual"].values()) for name in ("read_sectors", "warp_instructions"))
    return "{} read sectors, {} PTX warp instructions".format(*sums)


def _none(reason: str) -> str:
    return f"none ({reason.splitlines()[0] if reason else 'no reason given'})"


def _measured(line: dict[str, Any]) -> str:
    if not line["ncu"]:
        return _none(line["reason"])
    names = ("lts__t_sectors_srcunit_tex_op_read.sum", "smsp__inst_executed.sum")
    sums = (sum(step.get(name, 0.0) for step in line["ncu"].values()) for name in names)
    return "{:.0f} L2 read sectors, {:.0f} SASS warp instructions".format(*sums)


def _sanitizer(journal: Journal) -> Lines:
    for line in journal.lines("sanitizer"):
        yield f"compute-sanitizer {line['tool'] or ''}: {line['status']} {line.get('reason', '')}".rstrip()


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
