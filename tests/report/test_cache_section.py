"""Cache operations in a report: a section of their own with the model's reasons, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from pagedtune.harness.occupancy import Limit
from pagedtune.harness.prediction import StepPrediction
from pagedtune.kernels.bounds import Bucket
from pagedtune.kernels.record import Record, TimeEvidence
from pagedtune.kernels.variant import Op
from pagedtune.tuner.report import Report, make_report

MakeCell = Callable[..., list[Record]]
KV_BYTES = 16_000_000  # of each cell in these records


def _step(entry: str, body: float, bound: str) -> dict[str, Any]:
    total = 2.9 + body
    return asdict(
        StepPrediction(entry, total, 1.5, 1.4, body, 0, 0, 0, 0, 0.9, 2, Limit.SHARED, 200, 1e6, 3000.0, bound)
    )


def _of(op: Op, records: list[Record], bodies: dict[str, tuple[float, str]], bucket: Bucket, name: str) -> list[Record]:
    return [
        replace(
            r,
            op=op.value,
            bucket=bucket,
            workload=name,
            counters={"predicted": [_step(op.value, *bodies[r.variant])]},
        )
        for r in records
    ]


@pytest.fixture
def attention(cell: MakeCell) -> list[Record]:
    return cell([("one", {}, 12.9), ("two", {}, 17.4)], evidence=TimeEvidence.PREDICTED)


@pytest.fixture
def cache(cell: MakeCell) -> list[Record]:
    """Two writes and a block copy; `cuda` wins the writes, `triton` the copy."""
    bodies = {"cuda": (5.1, "memory"), "triton": (7.1, "issue")}
    times = [("triton", {"num_warps": 4}, 10.0), ("cuda", {"num_warps": 8}, 8.0)]
    chunk, decode = (cell(times, seed=n, spread=0.0, evidence=TimeEvidence.PREDICTED) for n in (1, 2))
    copies = cell([("triton", {}, 8.0), ("cuda", {}, 10.0)], seed=3, spread=0.0, evidence=TimeEvidence.PREDICTED)
    swapped = {"cuda": (7.1, "issue"), "triton": (5.1, "memory")}
    return [
        *_of(Op.KV_WRITE, chunk, bodies, Bucket(2048, 128), "chunk"),
        *_of(Op.KV_WRITE, decode, bodies, Bucket(64, 128), "decode"),
        *_of(Op.COPY_BLOCKS, copies, swapped, Bucket(64, 128), "pairs"),
    ]


def report(records: list[Record], device: str) -> Report:
    return make_report(records, device, "pagedtune report")


def sections(markdown: str) -> dict[str, str]:
    parts = markdown.split("\n## ")
    return {part.partition("\n")[0]: part for part in parts[1:]}


def test_the_section_has_a_row_for_each_cell_with_its_reason(
    attention: list[Record], cache: list[Record], device: str
) -> None:
    text = sections(report([*attention, *cache], device).markdown)["Cache operations"]
    rows = [line for line in text.splitlines() if line.startswith("| llama")]
    assert len(rows) == 3
    assert [row.split(" | ")[3] for row in rows] == ["write 64 decoded", "write chunk of 2,048", "copy 64 blocks"]
    assert [row.split(" | ")[5] for row in rows] == ["cuda", "cuda", "triton"]
    for row in rows:
        assert " 8.00 | 2,000 | " in row  # 16 MB in 8 µs
        assert "memory: 5.1 of 8.0 µs" in row
        assert " 1.25×: body +2.0 µs (issue-bound" in row
    assert "num_warps=8" in rows[0]


def test_nothing_else_changes(attention: list[Record], cache: list[Record], device: str) -> None:
    alone, both = (sections(report(records, device).markdown) for records in (attention, [*attention, *cache]))
    assert set(both) - set(alone) == {"Cache operations"}
    for name in ("Predicted winners", "Pool format per model", "Figures", "Environment"):
        assert both[name] == alone[name]


def test_the_verdict_counts_them_apart(attention: list[Record], cache: list[Record], device: str) -> None:
    first, second = report([*attention, *cache], device).verdict.rsplit("\n\n", 1)
    assert first == report(attention, device).verdict
    assert "`one` won 1 of 1 cells by predicted time" in first
    assert second.startswith("Cache operations: `cuda` won 2, `triton` won 1 of 3 cells by predicted time")


def test_without_attention_they_are_all_there_is(cache: list[Record], device: str) -> None:
    made = report(cache, device)
    assert made.verdict.startswith("Cache operations: ")
    assert "No cell has a winner" not in made.markdown
    assert "Predicted winners" not in made.markdown
