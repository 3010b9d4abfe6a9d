"""Every bar that a variant's best config misses has its reason on the page of the results, and no other bar has one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedtune.tuner.bench_emulated import SHAPES
from pagedtune.tuner.configs import Configs
from pagedtune.tuner.emulated_bars import Bars
from pagedtune.tuner.emulated_bench import Row
from pagedtune.tuner.emulated_peer import Cell
from pagedtune.tuner.emulated_reasons import UNKNOWN, reasons
from pagedtune.tuner.emulated_view import as_markdown

BARS = Bars(25000.0, "h200")
GOOD = {
    "sector_ratio": 1.0, "loop_conflicts": 0, "spills": 0, "local_instructions": 0, "flight_unit": 30000.0,
    "issue_share": 0.2, "predicted_us": 10.0,
}  # fmt: skip


def cell(name: str) -> Cell:
    return next(s for s in SHAPES if s.name == name).cell(Configs().gpu("h100").device("h100"))


def row(name: str, is_peer: bool = False, **changed: float) -> Row:
    return Row(0, name, {}, is_peer=is_peer, answer={"figures": {**GOOD, **changed}})


def test_only_what_the_best_config_misses_has_a_reason() -> None:
    bad = row("cuda_split_simt", sector_ratio=2.0, issue_share=0.9)
    assert reasons(cell("gqa7"), [bad, row("cuda_split_simt")], BARS) == []
    found = reasons(cell("gqa7"), [bad, row("cuda_split_simt", sector_ratio=2.0)], BARS)
    assert [line.partition(":")[0] for line in found] == [
        "cuda_split_simt misses the bar of sectors with its best config"
    ]
    assert reasons(cell("gqa7"), [row("vllm_decode", is_peer=True, sector_ratio=2.0)], BARS) == []
    assert reasons(cell("gqa7"), [replace(bad, answer=None, reason="too slow")], BARS) == []


def test_reasons_are_those_of_the_shape() -> None:
    """7 heads in two blocks of 4 rows; 4 rows of 8-bit keys: 5.5 instructions x 32 elements of each lane, and at
    3.35 TB/s 132 x 4 x 1.98e9 / 3.35e12 x 1024 = 319.6 slots a KiB."""
    (sectors,) = reasons(cell("gqa7"), [row("cuda_split_simt", sector_ratio=2.0)], BARS)
    assert "2 blocks share the 7 heads" in sectors
    (issue,) = reasons(cell("fp8"), [row("cuda_split_simt", issue_share=0.73)], BARS)
    assert "176 warp instructions a KiB, or 55% of the slots" in issue


@pytest.mark.parametrize(
    ("shape", "name", "changed"),
    [
        ("gqa4", "cuda_paged", {"sector_ratio": 4.0, "flight_unit": 1900.0, "issue_share": 2.0}),
        ("long", "cuda_split_simt", {"sector_ratio": 2.0, "issue_share": 0.8}),
        ("fp8", "triton_split", {"sector_ratio": 1.05}),
    ],
)
def test_known_misses_are_explained_on_the_page(shape: str, name: str, changed: dict[str, float]) -> None:
    found = reasons(cell(shape), [row(name, **changed)], BARS)
    assert len(found) == len(changed)
    assert not any(UNKNOWN in line for line in found)
    assert all("Next: " in line for line in found)


def test_a_miss_without_a_reason_says_so_on_the_page() -> None:
    lines = reasons(cell("gqa4"), [row("triton_split", flight_unit=1.0)], BARS)
    assert lines == [f"triton_split misses the bar of bytes in flight with its best config: {UNKNOWN}"]
    empty = Row(0, "triton_split", {}, reason="too wide")
    assert UNKNOWN not in as_markdown([("a shape", cell("gqa4"), [empty])], BARS, "make it", "how")
