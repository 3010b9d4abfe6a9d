"""How emulated figures look: a table for people, Markdown for the results folder, plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pagedtune.harness.environment import environment
from pagedtune.harness.kernel_figures import least_of, little_bytes
from pagedtune.kernels.serial import to_jsonable

from .emulated_bars import Bars
from .emulated_bench import Row
from .emulated_peer import Cell
from .emulated_reasons import reasons

EVIDENCE = "emulated on the virtual GPU and read from the binaries; nothing was measured on a GPU"
MARK = "!"
NOTED_ERROR = 2.0**-7  # of an answer: two roundings to bf16 of the largest value

Format = Callable[[Mapping[str, Any]], str]


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.0%}"


# Heading, field whose bar it shows, format.
COLUMNS: tuple[tuple[str, str, Format], ...] = (
    ("KV x", "", lambda f: f"{f['kv_ratio']:.3f}"),
    ("all x", "sector_ratio", lambda f: f"{f['sector_ratio']:.3f}"),
    ("loop", "", lambda f: str(f["loop_instructions"] or "?")),
    ("/KiB", "", lambda f: "?" if f["loop_per_kib"] is None else f"{f['loop_per_kib']:.0f}"),
    ("issue", "issue_share", lambda f: _share(f["issue_share"])),
    ("confl.", "loop_conflicts", lambda f: f"{f['loop_conflicts']:,}"),
    ("regs", "", lambda f: str(f["registers"])),
    ("spill", "spills", lambda f: str(f["spills"] or f["local_instructions"])),
    ("shared", "", lambda f: f"{f['shared_bytes'] / 1024:.1f}"),
    ("CTAs", "", lambda f: str(f["blocks_per_unit"])),
    ("flight", "flight_unit", lambda f: f"{f['flight_unit'] / 1024:.1f}"),
    ("waves", "", lambda f: f"{f['waves']:.2f}"),
    ("full", "", lambda f: f"{f['wave_share']:.0%}"),
    ("model", "", lambda f: f"{f['predicted_us']:.0f}"),
)
LEGEND = (
    "KV x, all x: sectors of K and V, and of everything, over the least possible. loop: machine instructions of one "
    "time round the main loop; /KiB: issued in it for each KiB of KV. issue: all machine instructions over the slots "
    "that the device has at its bandwidth roofline. confl.: extra passes of shared memory in the main loop, over the "
    "batch. regs: of a thread. spill: bytes of stack, or local loads and stores. shared: KiB of a block. CTAs: that "
    "fit on an SM. flight: most KiB that an SM has in flight (its blocks x the most of one). waves: of work; full: "
    "the share of their places with work. model: microseconds PREDICTED by the time model (its stated uncertainty is "
    f"30 % either way). {MARK}: misses its bar. ?: not known, as the loop was not found in the binary."
)


def label(row: Row) -> str:
    """A kernel as a user may name it; `*` for what an untuned user gets."""
    inner = ",".join(f"{name}={value}" for name, value in row.config.items())
    return row.name + (f"[{inner}]" if inner else "") + (" *" if row.is_default else "")


def short(row: Row, rows: Sequence[Row]) -> str:
    """As `label`, but of our own configs only what differs from the table's default one."""
    default = next((r.config for r in rows if r.name == row.name and r.is_default), None)
    if row.is_peer or default is None:
        return label(row)
    differ = ",".join(f"{name}={value}" for name, value in row.config.items() if value != default.get(name))
    return f"{row.name} *" if row.is_default else f"{row.name}[{differ}]"


def title(cell: Cell) -> str:
    """What a table is about."""
    batch = f"batch {cell.workload.num_seqs} x {cell.length:,} tokens"
    return f"{cell.device.name}: {cell.problem.key}, {cell.pool_format.key}, {batch}"


def cells_of(row: Row, bars: Bars) -> list[str]:
    """The texts of all columns; empty where there are no figures."""
    if not row.answer:
        return ["" for _ in COLUMNS]
    missed = bars.missed(row.figures)
    return [form(row.figures) + (MARK if bar and bar in missed else "") for _, bar, form in COLUMNS]


def notes_of(rows: Sequence[Row]) -> list[str]:
    """What a reader must know of single rows."""
    notes = [f"default: {label(row)}" for row in rows if row.is_default and not row.is_peer]
    notes += [f"{short(row, rows)}: no figures: {row.reason}" for row in rows if row.reason]
    notes += [f"{short(row, rows)}: {row.figures['doubt']}" for row in rows if row.answer and row.figures["doubt"]]
    notes += [
        f"{short(row, rows)}: its answer is {row.answer['answer_error']:.1%} of the largest value off float64"
        for row in rows
        if row.answer and row.answer["answer_error"] > NOTED_ERROR
    ]
    checks = [row.answer["check"]["off"] for row in rows if row.answer and "check" in row.answer]
    if checks:
        notes.append(
            "counts of the batch are those of one sequence and its fewest KV heads, times sequences and heads; two "
            f"sequences with twice the heads were at most {max(checks):.2%} off that rule (each row's own in the JSON)"
        )
    return notes


def show(console: Console, cell: Cell, rows: Sequence[Row], bars: Bars) -> None:
    """Prints one cell's table with its legend."""
    console.print(title(cell), markup=False)
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    view.add_column("kernel", overflow="fold", min_width=18)
    for name, _, _ in COLUMNS:
        view.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        view.add_row(_breakable(short(row, rows)), *cells_of(row, bars))
    console.print(view)
    for note in [f"evidence: {EVIDENCE}", f"bars: {bars.text}", LEGEND, *notes_of(rows)]:
        console.print(note, markup=False)


def _breakable(text: str) -> str:
    """A name for a narrow column: lines break before the tunables and between them."""
    return text.replace("[", r" \[").replace(",", ", ")


def as_json(cell: Cell, rows: Sequence[Row], bars: Bars, command: str) -> dict[str, Any]:
    """One cell as plain data."""
    least = least_of(cell.problem, cell.pool_format, cell.workload)
    return {
        "evidence": "emulated",
        "note": EVIDENCE,
        "command": command,
        **{name: to_jsonable(getattr(cell, name)) for name in ("device", "problem", "pool_format", "workload")},
        "least": {"kv_sectors": least.kv, "sectors": least.all, "kv_bytes": least.kv_bytes},
        "little_bytes_per_unit": little_bytes(cell.device),
        "bars": {"text": bars.text, "flight_unit": bars.flight_unit},
        "environment": environment(),
        "rows": [
            {
                "kernel": row.name,
                "config": row.config,
                "peer": row.is_peer,
                "default": row.is_default,
                **({"reason": row.reason} if row.reason else row.answer or {}),
                **({"missed": bars.missed(row.figures)} if row.answer else {}),
            }
            for row in rows
        ],
    }


def as_markdown(tables: Sequence[tuple[str, Cell, Sequence[Row]]], bars: Bars, command: str, how: str) -> str:
    """All cells as one page; `tables` has what each is, the cell and its rows."""
    head = "| kernel | " + " | ".join(name for name, _, _ in COLUMNS) + " |"
    rule = "|---|" + "---:|" * len(COLUMNS)
    lines = [
        f"# {tables[0][1].device.name}: decode kernels without a GPU", "",
        f"Every figure here is {EVIDENCE}. The column `model` is predicted. `{command}` makes this page.", "",
        f"Bars: {bars.text}.", "", LEGEND, "", how, "",
    ]  # fmt: skip
    for what, cell, rows in tables:
        lines += [f"## {what}", "", title(cell), "", head, rule]
        lines += [f"| `{short(row, rows)}` | " + " | ".join(cells_of(row, bars)) + " |" for row in rows]
        lines += ["", *(f"- {note}" for note in [*notes_of(rows), *reasons(cell, rows, bars)]), ""]
    return "\n".join(lines)
