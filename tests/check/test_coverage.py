"""What a check counts as covered, and its JUnit report."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from rich.console import Console

from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.checking import Listing, Outcome, Planned
from pagedtune.harness.coverage import DIMENSIONS, Coverage, Tally, coverage_of, missing, shortfall
from pagedtune.harness.junit import junit_xml
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import Status
from pagedtune.kernels.variant import Op
from pagedtune.kernels.workload import Workload
from pagedtune.tuner.check_view import show_coverage, show_failures, show_missing


def case(block_size: int = 16, hazards: tuple[Hazard, ...] = (), dtype: DType = DType.BF16, seed: int = 0) -> Case:
    return Case(
        Op.ATTENTION,
        Problem(8, 2, 64, q_dtype=dtype, window=7),
        PoolFormat(block_size, dtype, Layout.HND),
        Workload.uniform(2, 33),
        Family.NEEDLE,
        hazards,
        seed,
    )


def outcome(status: Status, ratio: float | None = None, reason: str = "", made: Case | None = None) -> Outcome:
    planned = Planned("k.py:Mine", "mine", Op.ATTENTION, made or case(), {"tile": 4})
    return Outcome(planned, status, reason, ratio, 0.25)


def only(outcomes: list[Outcome]) -> Coverage:
    (coverage,) = coverage_of(outcomes)
    return coverage


def test_every_dimension_of_a_case_is_counted() -> None:
    made = case(32, (Hazard.STRIDED, Hazard.REPLAY), DType.FP16)
    coverage = only([outcome(Status.PASSED, 0.5, made=made)])
    values = {dimension: set(tallies) for dimension, tallies in coverage.by_value.items()}
    assert values.keys() == DIMENSIONS.keys()
    assert values["family"] == {"needle"}
    assert values["hazard"] == {"strided", "replay"}
    assert values["feature"] == {"window"}
    assert values["q dtype"] == values["kv dtype"] == {"fp16"}
    assert values["head dim"] == {"64"}
    assert values["GQA ratio"] == {"4"}
    assert values["block size"] == {"32"}
    assert values["layout"] == {"hnd"}


def test_counts_and_the_worst_error_are_kept_apart_by_value() -> None:
    coverage = only(
        [
            outcome(Status.PASSED, 0.25, made=case(16)),
            outcome(Status.PASSED, 0.75, made=case(16)),
            outcome(Status.WRONG, 3.0, made=case(1)),
            outcome(Status.TIMEOUT, made=case(1)),
            outcome(Status.NOT_RUN, made=case(256)),
            outcome(Status.REJECTED, made=case(256)),
        ]
    )
    sizes = coverage.by_value["block size"]
    assert list(sizes) == ["1", "16", "256"]
    assert sizes["16"] == Tally(passed=2, worst=0.75)
    assert sizes["1"] == Tally(failed=2, worst=3.0)
    assert sizes["256"] == Tally(not_run=1, rejected=1)
    assert coverage.total == Tally(passed=2, failed=2, not_run=1, rejected=1, worst=3.0)


@pytest.mark.parametrize("order", [(math.nan, 0.5), (0.5, math.nan)])
def test_an_error_that_is_nan_is_the_worst(order: tuple[float, float]) -> None:
    coverage = only([outcome(Status.WRONG, ratio) for ratio in order])
    assert coverage.total.worst is not None
    assert math.isnan(coverage.total.worst)


@pytest.mark.parametrize(
    ("tally", "green"),
    [
        (Tally(), False),
        (Tally(rejected=3), False),
        (Tally(passed=1, rejected=3), True),
        (Tally(passed=1, not_run=1), False),
        (Tally(passed=1, failed=1), False),
    ],
)
def test_what_nobody_ran_is_never_green(tally: Tally, green: bool) -> None:
    assert tally.is_green == green


@pytest.mark.parametrize(
    ("statuses", "allow_missing", "words"),
    [
        ([Status.PASSED], False, ""),
        ([Status.PASSED, Status.REJECTED], False, ""),
        ([Status.REJECTED, Status.REJECTED], True, "rejects every case"),
        ([Status.PASSED, Status.NOT_RUN], False, "1 cases were not run"),
        ([Status.PASSED, Status.NOT_RUN], True, ""),
        ([Status.PASSED, Status.WRONG], True, "1 of 2 cases that ran failed"),
        ([Status.CRASHED], True, "failed"),
        ([Status.TIMEOUT], True, "failed"),
        ([Status.CORRUPTED], True, "failed"),
        ([Status.BUILD_FAILED], True, "failed"),
    ],
)
def test_what_makes_a_check_fall_short(statuses: list[Status], allow_missing: bool, words: str) -> None:
    found = shortfall(only([outcome(status) for status in statuses]), allow_missing)
    assert (words in found) if words else not found


def test_missing_cases_are_counted_by_reason() -> None:
    reasons = ["no memory", "no memory", "no budget"]
    found = missing([outcome(Status.NOT_RUN, reason=reason) for reason in reasons], Status.NOT_RUN)
    assert found == {("mine", Op.ATTENTION, "no memory"): 2, ("mine", Op.ATTENTION, "no budget"): 1}


def parse(outcomes: list[Outcome], listings: list[Listing], allow_missing: bool = False) -> ElementTree.Element:
    return ElementTree.fromstring(junit_xml(outcomes, listings, allow_missing))


def test_junit_has_one_case_per_outcome_and_the_right_counts() -> None:
    statuses = (Status.PASSED, Status.WRONG, Status.CORRUPTED, Status.CRASHED, Status.TIMEOUT, Status.REJECTED)
    made = [outcome(status, reason=f"because {status}") for status in statuses]
    root = parse(made, [Listing("bad.py:X", "bad.py:X", None, broken="bad.py does not import")])
    counts = {name: root.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "7", "failures": "2", "errors": "3", "skipped": "1"}
    (suite,) = root.findall("testsuite[@name='mine.attention']")
    assert suite.get("tests") == "6"
    assert [child.tag for found in suite for child in found] == ["failure", "failure", "error", "error", "skipped"]
    first, second = suite.findall("testcase")[:2]
    assert first.get("name") == case().key
    assert first.get("time") == "0.250"
    assert (second[0].get("type"), second[0].get("message")) == ("wrong", "because wrong")


@pytest.mark.parametrize(("allow_missing", "tag"), [(False, "error"), (True, "skipped")])
def test_a_case_that_did_not_run_is_red_in_junit_unless_that_is_accepted(allow_missing: bool, tag: str) -> None:
    (found,) = parse([outcome(Status.NOT_RUN, reason="no memory")], [], allow_missing).iter("testcase")
    assert [child.tag for child in found] == [tag]


def test_junit_survives_text_that_xml_cannot_hold() -> None:
    root = parse([outcome(Status.CRASHED, reason='a\x00b\x1b[31m <&> "é" \ud800')], [])
    (error,) = root.iter("error")
    assert error.get("message") == 'a�b�[31m <&> "é" �'


def shown(outcomes: list[Outcome]) -> str:
    console = Console(width=100, record=True, highlight=False, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        show_coverage(console, coverage_of(outcomes))
        show_missing(console, outcomes)
        show_failures(console, outcomes, [], "--device cpu --cases tiny")
        return console.export_text(styles=False)


def test_the_table_fits_100_columns_and_shows_failures_with_a_command() -> None:
    hazards = [
        (hazard,) for hazard in Hazard if hazard not in (Hazard.SKIPPED_TOKENS, Hazard.HIGH_STAGING, Hazard.HIGH_ROWS)
    ]
    needy = {Hazard.SATURATED_CAP, Hazard.LIVE_NAN, Hazard.NAN_SCORES, Hazard.FAR_QUERIES}
    needy |= {Hazard.ZERO_SCALES, Hazard.STEEP_SCALES}
    possible = [h for h in hazards if not needy & set(h) and "sinks" not in h[0]]
    made = [outcome(Status.PASSED, 0.1234, made=case(2**i % 255 + 1, h)) for i, h in enumerate(possible)]
    bad = outcome(Status.WRONG, 2.5, "element: out[0, 1, 2] is 3.0, expected 1.0", case(seed=9))
    text = shown([*made, bad, outcome(Status.REJECTED, reason="no such layout")])
    table = text.partition("REJECTED")[0]
    assert max(map(len, table.splitlines())) <= 100
    assert "needle 14/15 ✗1 –1 ≤2.5" in text or "✗1" in text
    assert "out[0, 1, 2] is 3.0" in text
    assert f"--only '{bad.planned.case.key}'" in text
    assert "mine attention: 1 x no such layout" in text
