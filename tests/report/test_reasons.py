"""The model's reasons: parts that add up, and the difference between two candidates told by its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from pagedtune.harness.occupancy import Limit
from pagedtune.harness.prediction import StepPrediction
from pagedtune.kernels.record import Record, Status, TimeEvidence, Verdict
from pagedtune.tuner.reasons import bests_of, bound_text, budget_of, loss_text
from pagedtune.tuner.report import make_report

MakeCell = Callable[..., list[Record]]


def _step(entry: str, body: float, bound: str = "memory", launch: float = 1.5, ramp: float = 1.4) -> dict[str, Any]:
    total = launch + ramp + body
    return asdict(
        StepPrediction(entry, total, launch, ramp, body, 0, 0, 0, 0, 0.9, 2, Limit.SHARED, 200, 1e6, 3000.0, bound)
    )


@pytest.fixture
def records(cell: MakeCell) -> list[Record]:
    """One kernel that wins, two kernels that lose, and a third that was not proven."""
    made = cell([("one", {}, 12.9), ("two", {}, 17.4)], evidence=TimeEvidence.PREDICTED)
    steps = {"one": [_step("split", 10.0)], "two": [_step("split", 10.6, "issue"), _step("merge", 1.0, "L2")]}
    counted = [replace(r, counters={"predicted": steps[r.variant]}) for r in made]
    unproven = replace(
        counted[0],
        variant="three",
        status=Status.NOT_RUN,
        verdict=Verdict.NONE,
        timing=None,
        time_evidence=TimeEvidence.NONE,
        reason="not proven",
        counters={"predicted": [_step("split", 12.0)]},
    )
    return [*counted, unproven]


def test_the_parts_add_up_to_the_time(records: list[Record]) -> None:
    one, two = (budget_of(r) for r in records[:2])
    assert one is not None
    assert two is not None
    assert (one.total, two.total) == (pytest.approx(12.9), pytest.approx(17.4))
    assert two.main.entry == "split"
    assert budget_of(replace(records[0], counters={})) is None
    assert bound_text(one) == "memory: 10.0 of 12.9 µs; 0.90 waves of 2 blocks an SM; 3,000 GB/s a full wave"


def test_a_loss_is_told_by_its_parts_the_largest_first(records: list[Record]) -> None:
    bests = bests_of(records)
    (cell,) = bests.values()
    assert loss_text(cell["two"], cell["one"]) == (
        "two 1.35×: body +1.6 µs (issue-bound, 0.90 waves, 3,000 GB/s), launches +1.5 µs (2 kernels, not 1), "
        "ramp +1.4 µs (2 kernels, not 1)"
    )
    assert loss_text(cell["one"], cell["one"]) == "one 1.00×: the same in every part"


def test_the_report_gives_the_reasons_of_predicted_winners(records: list[Record], device: str) -> None:
    text = make_report(records, device, "pagedtune report").markdown
    assert "## Why: the model's reasons" in text
    row = next(line for line in text.splitlines() if "memory: 10.0 of" in line)
    assert row.index("three 1.16×") < row.index("two 1.35×")


def test_measured_winners_need_no_model(cell: MakeCell, device: str) -> None:
    assert "the model's reasons" not in make_report(cell([("one", {}, 12.9)]), device, "pagedtune report").markdown
