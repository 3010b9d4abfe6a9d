"""What report.md says, and the plots beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pandas as pd
import pytest

from pagedtune.kernels.bounds import Bucket
from pagedtune.kernels.record import Record, Status, TimeEvidence, Verdict
from pagedtune.kernels.serial import to_jsonable
from pagedtune.tuner.cli import main
from pagedtune.tuner.frames import best_per_variant, evidence_kinds, of_kind, timed_frame, winners_of
from pagedtune.tuner.plots import Scope, make_plots
from pagedtune.tuner.report import make_report, write_report
from pagedtune.tuner.report_sections import markdown_table
from pagedtune.tuner.select import decide_all

MakeCell = Callable[..., list[Record]]


@pytest.fixture
def records(cell: MakeCell) -> list[Record]:
    """Two models, two block sizes, two contexts; `fast` beats `eager` by four."""
    return [
        record
        for model, heads in (("llama", (32, 8)), ("small", (9, 3)))
        for block_size in (16, 64)
        for context in (1024, 4096)
        for record in cell(
            [("fast", {"splits": 2}, context / 4 - block_size), ("eager", {}, context - 4.0 * block_size)],
            model=model,
            heads=heads,
            block_size=block_size,
            context=context,
            seed=block_size + context,
        )
    ]


@pytest.fixture
def frame(records: list[Record], device: str) -> pd.DataFrame:
    """All candidates with a time."""
    return timed_frame(decide_all(records, device), 30.0)


def test_the_frame_has_a_row_per_candidate_and_cell(frame: pd.DataFrame) -> None:
    assert len(frame) == 16
    assert list(winners_of(frame)["variant"]) == ["fast"] * 8
    row = winners_of(frame).query("model == 'llama' and block_size == 16 and context == 1024").iloc[0]
    assert row["gb_s"] == pytest.approx(16e6 / row["median_us"] / 1e3)
    assert row["stream_share"] == pytest.approx(row["gb_s"] / 30.0)
    assert row["low_gb_s"] <= row["gb_s"] <= row["high_gb_s"]


def test_the_best_candidate_of_a_variant_is_the_fastest(cell: MakeCell, device: str) -> None:
    made = cell([("fast", {"splits": 1}, 120.0), ("fast", {"splits": 2}, 100.0), ("eager", {}, 400.0)])
    best = best_per_variant(timed_frame(decide_all(made, device), None))
    assert sorted(best["candidate"]) == ["eager[]", "fast[splits=2]"]
    assert best["stream_share"].isna().all()


def test_measured_and_predicted_times_are_kept_apart(cell: MakeCell, device: str) -> None:
    made = cell([("fast", {}, 100.0)]) + cell([("fast", {}, 90.0)], context=4096, evidence=TimeEvidence.PREDICTED)
    frame = timed_frame(decide_all(made, device), 30.0)
    assert evidence_kinds(frame) == [(TimeEvidence.MEASURED, "cold"), (TimeEvidence.PREDICTED, "cold")]
    assert list(of_kind(frame, TimeEvidence.PREDICTED, "cold")["context"]) == [4096]
    names = {p.name for kind in evidence_kinds(frame) for p in make_plots(of_kind(frame, *kind), scope(*kind))}
    assert {"cold-stream", "predicted-cold-stream"} <= names


def scope(evidence: TimeEvidence = TimeEvidence.MEASURED, mode: str = "cold") -> Scope:
    return Scope("cpu, Test CPU", evidence, mode, 30.0)


def test_every_plot_is_a_picture_that_states_device_mode_and_samples(frame: pd.DataFrame, tmp_path: Path) -> None:
    plots = make_plots(frame, scope())
    assert {p.name for p in plots} == {
        "cold-context-llama-bf16",
        "cold-context-small-bf16",
        "cold-block-size-llama",
        "cold-block-size-small",
        "cold-gqa",
        "cold-stream",
    }
    for plot in plots:
        assert "cpu, Test CPU; measured, mode cold; 20 samples a point" in plot.text
        path = tmp_path / "plot.png"
        path.write_bytes(plot.png)
        pixels = matplotlib.image.imread(path)
        assert min(pixels.shape[:2]) > 200
        assert pixels[..., :3].std() > 0.05, "an empty picture"


def test_the_same_frame_gives_the_same_pictures(frame: pd.DataFrame) -> None:
    assert [p.png for p in make_plots(frame, scope())] == [p.png for p in make_plots(frame, scope())]


def test_missing_data_are_a_statement_and_no_empty_plot(cell: MakeCell, device: str) -> None:
    frame = timed_frame(decide_all(cell([("fast", {}, 100.0)]), device), None)
    plots = make_plots(frame, Scope("cpu", TimeEvidence.MEASURED, "cold", None))
    assert [bool(p.png) for p in plots] == [False] * 4
    assert all(p.text.startswith("Not plotted: ") for p in plots)
    assert "more than one block size" in plots[1].text
    assert "different GQA ratios" in plots[2].text


def test_the_report_starts_with_the_verdict(records: list[Record], device: str) -> None:
    report = make_report(records, device, "pagedtune report")
    lines = report.markdown.split("\n\n")
    assert lines[0] == "# pagedtune on cpu"
    assert lines[1] == report.verdict
    assert "`fast` won 8 of 8 cells" in report.verdict
    assert "over `eager`: 4.00× geometric mean" in report.verdict
    assert "8 proven on the device, times measured" in report.verdict


def test_the_report_names_what_was_not_run_and_why(cell: MakeCell, device: str) -> None:
    made = cell([("fast", {}, 100.0), ("eager", {}, 400.0)])
    blank = {"timing": None, "time_evidence": TimeEvidence.NONE, "verdict": Verdict.NONE, "stage": "gate"}
    made.append(
        replace(made[0], variant="*", status=Status.NOT_RUN, reason="no budget", bucket=Bucket(1, 4096), **blank)
    )
    made.append(replace(made[0], variant="bad", status=Status.CRASHED, reason="SIGSEGV | here", **blank))
    text = make_report(made, device, "pagedtune report").markdown
    assert "| 1 | not_run | \\* | no budget |" in text
    assert "| 1 | crashed | bad | SIGSEGV \\| here |" in text
    assert "1 candidates failed" in text


def test_without_a_winner_the_report_says_so(cell: MakeCell, device: str) -> None:
    made = cell([("fast", {}, 100.0)])
    only = replace(
        made[0],
        timing=None,
        time_evidence=TimeEvidence.NONE,
        verdict=Verdict.NONE,
        status=Status.TIMEOUT,
        reason="30 s",
    )
    report = make_report([only], device, "pagedtune report")
    assert "No cell has a winner" in report.verdict
    assert report.plots == ()
    assert "| 1 | timeout | fast | 30 s |" in report.markdown


def test_disturbed_winners_and_foreign_records_are_mentioned(cell: MakeCell, device: str) -> None:
    note = "20 of 20 samples were taken while others used the cores (up to 50%); stopped at ± 3.0%, short of ± 0.5%"
    made = cell([("fast", {}, 100.0)], note=note) + cell([("fast", {}, 50.0)], device="cpu|Other|4|avx512")
    text = make_report(made, device, "pagedtune report").markdown
    assert "1 of 1 winners: others used the cores" in text
    assert "1 of 1 winners: the time budget ended short" in text
    assert "1 records of other machines" in text


def test_the_command_writes_the_report_and_removes_old_plots(
    records: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results" / "cpu"
    (folder / "plots").mkdir(parents=True)
    (folder / "plots" / "cold-context-gone-bf16.png").write_bytes(b"old")
    (folder / "records.jsonl").write_text("".join(json.dumps(to_jsonable(r)) + "\n" for r in records))
    assert main(["report", "--results", str(tmp_path / "results")]) == 0
    text = (folder / "report.md").read_text()
    pictures = {p.name for p in (folder / "plots").iterdir()}
    assert "cold-context-gone-bf16.png" not in pictures
    assert pictures == {part.split(")")[0] for part in text.split("](plots/")[1:]}
    assert f"pagedtune report --device cpu --results {tmp_path / 'results'}" in text
    assert "`fast`" not in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_a_usage_error(records: list[Record], device: str, tmp_path: Path) -> None:
    (tmp_path / "plots").write_text("a file in the way")
    with pytest.raises(OSError):
        write_report(make_report(records, device, "pagedtune report"), tmp_path)
    assert not (tmp_path / "report.md").exists()


def test_without_records_the_command_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--results", str(tmp_path)]) == 2
    assert "pagedtune tune" in capsys.readouterr().err


def test_tables_keep_their_columns_whatever_the_cells_hold() -> None:
    text = markdown_table(("a", "b"), [["x|y", "two\nlines"]], right_from=1)
    assert text.splitlines() == ["| a | b |", "| --- | --: |", "| x\\|y | two lines |"]
