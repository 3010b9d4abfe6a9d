"""Two result sets side by side: outcomes, exit codes, and what is said about the difference."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedtune.kernels.record import Record, Status, TimeEvidence, Timing, Verdict
from pagedtune.kernels.serial import to_jsonable
from pagedtune.tuner.cli import main
from pagedtune.tuner.compare import Outcome, compare, environment_differences, judge, latest_times, load_set
from pagedtune.tuner.errors import UsageError

MakeCell = Callable[..., list[Record]]
MakeTiming = Callable[..., Timing]
ONE = [("fast", {"splits": 2}, 100.0)]


def write(folder: Path, records: Sequence[Record]) -> Path:
    (folder / "cpu").mkdir(parents=True)
    text = "".join(json.dumps(to_jsonable(r)) + "\n" for r in records)
    (folder / "cpu" / "records.jsonl").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("after_us", "half_width", "expected"),
    [
        (110.0, 0.002, Outcome.SLOWER),
        (102.5, 0.002, Outcome.SLOWER),
        (90.0, 0.002, Outcome.FASTER),
        (100.3, 0.002, Outcome.SAME),
        (101.9, 0.002, Outcome.UNCLEAR),  # apart, but below the threshold of 2 %
        (110.0, 0.10, Outcome.UNCLEAR),  # the intervals overlap
        (100.0, 0.10, Outcome.UNCLEAR),  # too wide to call it the same
    ],
)
def test_the_outcome_of_two_times(timing: MakeTiming, after_us: float, half_width: float, expected: Outcome) -> None:
    assert judge(timing(100.0), timing(after_us, half_width), 0.02)[0] is expected


@pytest.mark.parametrize("disturbed", ["before", "after"])
def test_a_disturbed_time_confirms_nothing(timing: MakeTiming, disturbed: str) -> None:
    note = "20 of 20 samples were taken while others used the cores (up to 40%)"
    before = timing(100.0, note=note if disturbed == "before" else "")
    after = timing(150.0, note=note if disturbed == "after" else "")
    outcome, why = judge(before, after, 0.02)
    assert outcome is Outcome.UNCLEAR
    assert "others used" in why


@given(
    times=st.tuples(st.floats(1, 1e5), st.floats(1, 1e5)),
    widths=st.tuples(st.floats(0, 0.3), st.floats(0, 0.3)),
    threshold=st.floats(0.005, 0.5),
)
def test_slower_one_way_is_faster_the_other_way(
    times: tuple[float, float], widths: tuple[float, float], threshold: float
) -> None:
    first, second = (Timing("cold", (t,), t, (t * (1 - w), t * (1 + w)), 1) for t, w in zip(times, widths, strict=True))
    mirror = {Outcome.SLOWER: Outcome.FASTER, Outcome.FASTER: Outcome.SLOWER}
    there, back = judge(first, second, threshold)[0], judge(second, first, threshold)[0]
    if there in mirror and abs(times[1] / times[0] / (1 + threshold) - 1) > 1e-9:
        assert back is mirror[there] or abs(times[0] / times[1] / (1 + threshold) - 1) < 1e-9
    if there is Outcome.SLOWER:
        assert second.ci_us[0] > first.ci_us[1]


def test_pairs_are_made_by_cell_config_mode_and_evidence(cell: MakeCell) -> None:
    before = cell(ONE) + cell(ONE, context=4096)
    after = cell([("fast", {"splits": 2}, 120.0)]) + cell([("fast", {"splits": 4}, 50.0)], context=4096)
    result = compare(before, after)
    assert [(c.outcome, round(c.ratio, 2)) for c in result.changes] == [(Outcome.SLOWER, 1.2)]
    assert len(result.only_before) == len(result.only_after) == 1
    assert result.mean_ratio == pytest.approx(1.2)


def test_measured_times_are_never_compared_with_predicted_ones(cell: MakeCell) -> None:
    with pytest.raises(UsageError, match="never set against one"):
        compare(cell(ONE), cell(ONE, evidence=TimeEvidence.PREDICTED))


def test_the_last_finals_count(cell: MakeCell) -> None:
    old, new = cell(ONE)[0], replace(cell([("fast", {"splits": 2}, 80.0)])[0], recorded_at="2026-02-01T00:00:00+00:00")
    screen = replace(cell([("fast", {"splits": 2}, 10.0)])[0], stage="screen", recorded_at="2026-03-01T00:00:00+00:00")
    (chosen,) = latest_times([new, screen, old]).values()
    assert chosen is new


def test_a_candidate_that_fails_now_is_named(cell: MakeCell) -> None:
    before = cell([*ONE, ("other", {}, 200.0)])
    bad = replace(
        before[1],
        status=Status.WRONG,
        verdict=Verdict.NONE,
        time_evidence=TimeEvidence.NONE,
        timing=None,
        reason="row 3 is off",
        recorded_at="2026-02-01T00:00:00+00:00",
    )
    result = compare(before, [before[0], bad])
    assert result.broken == (f"{bad.cell_key} other[]: wrong, row 3 is off",)
    assert result.count(Outcome.SAME) == 1


def test_lasting_facts_that_differ_are_shown_and_the_load_is_not(cell: MakeCell) -> None:
    before = cell(ONE, environment={"compiler": "g++ 12", "torch": "2.13", "load_1min": 0.1})
    after = cell(ONE, environment={"compiler": "g++ 13", "torch": "2.13", "load_1min": 2.5, "libc": "2.36"})
    assert environment_differences(before, after) == {"compiler": ("g++ 12", "g++ 13"), "libc": ("-", "2.36")}


@pytest.mark.parametrize("threshold", [0.004, 1.0, -1.0, float("nan")])
def test_a_threshold_that_means_nothing_is_refused(cell: MakeCell, threshold: float) -> None:
    with pytest.raises(UsageError, match="threshold"):
        compare(cell(ONE), cell(ONE), threshold)


def test_exit_code_1_on_a_confirmed_slow_down_only(
    cell: MakeCell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write(tmp_path / "a", cell(ONE))
    slow = write(tmp_path / "b", cell([("fast", {"splits": 2}, 130.0)], environment={"compiler": "g++ 13"}))
    wide = write(tmp_path / "c", cell([("fast", {"splits": 2}, 100.5)], spread=0.3))
    assert main(["compare", str(base), str(slow)]) == 1
    printed = capsys.readouterr().out
    assert "1 slower" in printed
    assert "compiler: g++ 12 -> g++ 13" in printed
    assert main(["compare", str(slow), str(base)]) == 0
    assert "fast[splits=2]" in capsys.readouterr().out
    assert main(["compare", str(base), str(wide)]) == 0
    printed = capsys.readouterr().out
    assert "1 unclear" in printed
    assert "--all shows the 1 unchanged and unclear" in printed
    assert "overlap" not in printed
    assert main(["compare", str(base), str(wide), "--all"]) == 0
    assert "overlap" in capsys.readouterr().out


def test_json_has_every_pair(cell: MakeCell, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write(tmp_path / "a", cell(ONE))
    assert main(["compare", str(base), str(base / "cpu" / "records.jsonl"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["counts"] == {"slower": 0, "faster": 0, "same": 1, "unclear": 0}
    assert data["changes"][0]["ratio"] == 1.0


@pytest.mark.parametrize("name", ["nothing", "a/cpu/other.jsonl"])
def test_a_path_without_records_is_a_usage_error(
    cell: MakeCell, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    base = write(tmp_path / "a", cell(ONE))
    (base / "cpu" / "other.jsonl").write_text("")
    assert main(["compare", str(base), str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_several_devices_must_be_told_apart(cell: MakeCell, tmp_path: Path) -> None:
    base = write(tmp_path / "a", cell(ONE))
    (base / "h100").mkdir()
    (base / "h100" / "records.jsonl").write_text((base / "cpu" / "records.jsonl").read_text())
    with pytest.raises(UsageError, match="cpu, h100"):
        load_set(base)
    assert len(load_set(base / "cpu")) == 1
