"""Why the best config of a variant misses a bar, and what the next design would be: text for the results page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagedtune.harness.kernel_figures import slots_at_roofline
from pagedtune.kernels.split_simt_plan import num_rows

from .emulated_bars import Bars
from .emulated_bench import Row, rank
from .emulated_peer import Cell

NAMES = {
    "sector_ratio": "sectors",
    "loop_conflicts": "bank conflicts",
    "spills": "spills",
    "flight_unit": "bytes in flight",
    "issue_share": "issue slots",
}
# Instructions that make an element fp32, by its bytes: 8-bit ones become halves two at a time, and then one by one.
CONVERSION = {4: 0.0, 2: 1.0, 1: 1.5}
UNKNOWN = "not looked into yet"
Reason = Callable[[Cell], str]


def reasons(cell: Cell, rows: Sequence[Row], bars: Bars) -> list[str]:
    """A sentence for each bar that the best shown config of each of our variants misses; peers have none."""
    found = []
    for name in dict.fromkeys(row.name for row in rows if not row.is_peer):
        own = [row for row in rows if row.name == name and row.answer]
        if not own:
            continue
        best = min(own, key=lambda row: rank(row, bars))
        for bar in bars.missed(best.figures):
            why = _REASONS.get((name, bar))
            found.append(f"{name} misses the bar of {NAMES[bar]} with its best config: {why(cell) if why else UNKNOWN}")
    return found


def _paged_sectors(cell: Cell) -> str:
    return (
        f"a block works for one query head, so the {cell.problem.gqa_ratio} heads of a group each read its keys and "
        "values. Next: the group as rows of one block, which is cuda_split_mma."
    )


def _paged_flight(_: Cell) -> str:
    return (
        "it neither splits a sequence nor loads ahead: a warp waits for each row that it reads. It is the plain kernel "
        "that the others are compared with. Next: splits and a pipeline, which is cuda_split_simt."
    )


def _paged_issue(_: Cell) -> str:
    return (
        "each key is summed over the lanes of a warp by shuffles, for one query head at a time. Next: several keys of "
        "a lane at once and all heads of a group, which is cuda_split_simt."
    )


def _simt_rows(cell: Cell) -> tuple[int, int]:
    rows = num_rows(cell.problem, cell.pool_format)
    return rows, -(-cell.problem.gqa_ratio // rows)


def _simt_sectors(cell: Cell) -> str:
    rows, blocks = _simt_rows(cell)
    if blocks == 1:
        return (
            "every warp reads the query rows for itself, and each split its partials: more splits than the default "
            "fill the device no better. Next: query rows in shared memory."
        )
    return (
        f"queries and outputs of {rows} rows fill the registers, so {blocks} blocks share the {cell.problem.gqa_ratio} "
        "heads of a group and each reads all keys and values. Next: query rows in shared memory, which makes room for "
        "twice the rows; but at this ratio the tensor cores of cuda_split_mma do the same work in a fraction of the "
        "instructions, and its bars are met."
    )


def _simt_issue(cell: Cell) -> str:
    rows, blocks = _simt_rows(cell)
    size = cell.pool_format.kv_dtype.itemsize
    convert = CONVERSION[size]
    least = blocks * (rows + convert) * 1024 / size / 32
    share = least / slots_at_roofline(cell.device, 1024)
    each = f" in each of {blocks} blocks" if blocks > 1 else ""
    return (
        f"with fp32 sums every element costs a multiply-add for each of {rows} rows and {convert:g} instructions to "
        f"become fp32{each}: {least:.0f} warp instructions a KiB, or {share:.0%} of the slots, before anything else. A "
        "multiply-add with 16-bit factors and an fp32 sum, which would save the conversion, needs compute capability "
        "10.0. Next: tensor cores, which is cuda_split_mma; this kernel is for ratios of 1 and 2."
    )


def _triton_sectors(_: Cell) -> str:
    return (
        "the partials of its splits, and with less than one token per thread a lookup of the block table by every "
        "thread that loads a part of a row. Next: partials of fewer splits, tiles of 32 tokens per warp."
    )


_REASONS: dict[tuple[str, str], Reason] = {
    ("cuda_paged", "sector_ratio"): _paged_sectors,
    ("cuda_paged", "flight_unit"): _paged_flight,
    ("cuda_paged", "issue_share"): _paged_issue,
    ("cuda_split_simt", "sector_ratio"): _simt_sectors,
    ("cuda_split_simt", "issue_share"): _simt_issue,
    ("triton_split", "sector_ratio"): _triton_sectors,
}
