"""Tuning for a GPU that is not here: who is proven, who gets a time, and that such a time is never a measured one."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from quiet import Quiet
from rich.console import Console

from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.record import Record, Status, TimeEvidence, Timing, Verdict
from pagedtune.kernels.serial import to_jsonable
from pagedtune.tuner import devices
from pagedtune.tuner.bench import Jobs
from pagedtune.tuner.cell_predicted import FINALISTS
from pagedtune.tuner.cli import main
from pagedtune.tuner.configs import Configs, SweepFile
from pagedtune.tuner.devices import default_sweep, find_device
from pagedtune.tuner.errors import UsageError
from pagedtune.tuner.run import TuneResult, tune
from pagedtune.tuner.select import decide_all, select
from pagedtune.tuner.setup import TuneOptions
from pagedtune.tuner.space import cells_of
from pagedtune.tuner.store import open_store
from pagedtune.tuner.tables import show_winners

HERE = Path(__file__).parent
GPU = Device("h100", DeviceKind.CUDA, "NVIDIA H100 80GB HBM3", capability=90, num_units=132, bandwidth_gb_s=3350.0)
SWEEP = {
    "description": "test",
    "models": ["smollm2-135m"],
    "dtypes": ["bf16"],
    "block_sizes": [16],
    "layouts": ["nhd"],
    "buckets": [{"num_seqs": 1, "context_len": 128, "weight": 1.0}],
    "workloads": ["uniform"],
}
MakeRecord = Callable[..., Record]


@pytest.fixture(scope="module", autouse=True)
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(HERE), *sys.path])
        patch.setattr(devices, "probe_nvidia", lambda: None)
        patch.setenv("PAGEDTUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[TuneResult, TuneResult]:
    """The same tune twice."""
    plan = SweepFile.model_validate(SWEEP, strict=False)
    options = TuneOptions(
        device=GPU,
        cells=cells_of(Configs(), plan),
        variants=(f"{HERE / 'fake_gpu.py'}:ManyGpu",),
        sweep=plan,
        sweep_name="test",
        folder=tmp_path_factory.mktemp("predicted") / "h100",
        budget_s=60.0,
        present=False,
        jobs=replace(Jobs(), check="fake_jobs:check", predict="fake_gpu:predict"),
    )
    return tune(options, Quiet()), tune(options, Quiet())


def outcome(result: TuneResult, kind: str, us: float, stage: str) -> Record:
    found = [r for r in result.records if r.config == {"kind": kind, "us": us} and r.stage == stage]
    return found[-1]


def test_only_what_was_proven_has_a_time(runs: tuple[TuneResult, TuneResult]) -> None:
    first = runs[0]
    timed = [r for r in first.records if r.timing is not None]
    assert sorted(r.config["us"] for r in timed) == [100.0, 100.5, 101.5, 200.0]  # the finalists and the default
    assert len(timed) == FINALISTS + 1
    for record in timed:
        assert (record.verdict, record.time_evidence) == (Verdict.EMULATED, TimeEvidence.PREDICTED)
        assert record.timing is not None
        assert record.timing.mode == "predicted"
        assert record.timing.samples_us == ()
        assert record.timing.ci_us == pytest.approx((record.config["us"] * 0.7, record.config["us"] * 1.3))
    assert {r.verdict for r in first.records} == {Verdict.EMULATED, Verdict.NONE}


def test_every_other_candidate_says_why_it_has_none(runs: tuple[TuneResult, TuneResult]) -> None:
    first = runs[0]
    for kind, us, stage, status, reason in (
        ("wrong", 1.0, "gate", Status.WRONG, "row 3 is off"),
        ("uncounted", 2.0, "screen", Status.NOT_RUN, "not regular enough"),
        ("dies", 3.0, "screen", Status.CRASHED, "SIGABRT"),
        ("refused", 1.0, "gate", Status.REJECTED, "not this one"),
        ("unbuildable", 1.0, "gate", Status.BUILD_FAILED, "the compiler says no"),
        ("good", 150.0, "screen", Status.NOT_RUN, "not proven: predicted at 1.50 times the best proven candidate"),
        ("good", 160.0, "screen", Status.NOT_RUN, "not proven: predicted at 1.60 times"),
    ):
        record = outcome(first, kind, us, stage)
        assert record.status is status
        assert reason in record.reason


def test_the_winner_is_predicted_and_ties_are_broken_by_a_rule(runs: tuple[TuneResult, TuneResult]) -> None:
    """100.5 comes before 100.0 in the space, and both are within 1 %; 101.5 is not."""
    (entry,) = runs[0].table.entries
    assert entry.config == {"kind": "good", "us": 100.5}
    assert entry.ties == ("many_gpu[kind=good,us=100.0]",)
    assert (entry.verdict, entry.time_evidence) == (Verdict.EMULATED, TimeEvidence.PREDICTED)
    assert entry.speedup_default == pytest.approx(200.0 / 100.5)
    assert entry.speedup_eager is None


def test_a_second_run_repeats_nothing(runs: tuple[TuneResult, TuneResult]) -> None:
    first, second = runs
    assert to_jsonable(second.table) == to_jsonable(first.table)
    assert not [r for r in second.new if r.status is not Status.NOT_RUN]


def predicted(record: Record, us: float) -> Record:
    timing = Timing("predicted", (), us, (us * 0.7, us * 1.3), 1000)
    return replace(record, verdict=Verdict.EMULATED, time_evidence=TimeEvidence.PREDICTED, timing=timing)


def test_a_measured_time_decides_alone(make_record: MakeRecord) -> None:
    """However fast the prediction, and whichever came last."""
    measured = make_record("slow", stage="screen", samples=[100.0])
    guess = predicted(make_record("fast", stage="screen", at="2027-01-01T00:00:00.000000+00:00"), 1.0)
    for records in ([measured, guess], [guess, measured]):
        (decision,) = decide_all(records, measured.device).values()
        assert [r.record.variant for r in decision.ranking] == ["slow"]
    assert select([guess], guess.device).entries[0].time_evidence is TimeEvidence.PREDICTED


def test_the_two_kinds_share_no_table(make_record: MakeRecord) -> None:
    records = [
        make_record("fast", stage="screen", samples=[100.0]),
        predicted(make_record("fast", stage="screen", block_size=32), 50.0),
    ]
    console = Console(width=120, file=io.StringIO())
    show_winners(console, select(records, records[0].device), records)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    measured, guessed = text.index("95% CI"), text.index("predicted, not measured")
    assert measured < guessed
    assert "predicted µs" in text[guessed:]
    assert "95% CI" not in text[guessed:]
    assert "emulated" in text[guessed:]


def write(folder: Path, records: list[Record]) -> Path:
    with open_store(folder) as store:
        store.append(*records)
    return folder


def test_predicted_and_measured_sets_are_not_compared(
    make_record: MakeRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make_record("fast", stage="screen", samples=[100.0])
    before, after = write(tmp_path / "a", [one]), write(tmp_path / "b", [predicted(one, 90.0)])
    assert main(["compare", str(before), str(after)]) == 2
    error = capsys.readouterr().err
    assert "first set are measured, those of the second predicted" in error
    assert "never set against one" in error


def test_two_predictions_are_compared_and_say_so(
    make_record: MakeRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make_record("fast", stage="screen")
    before, after = write(tmp_path / "a", [predicted(one, 100.0)]), write(tmp_path / "b", [predicted(one, 90.0)])
    assert main(["compare", str(before), str(after)]) == 0
    out = capsys.readouterr().out
    assert "predicted before µs" in " ".join(out.split())
    assert "predicted, not measured" in out
    assert main(["compare", str(after), str(before)]) == 1  # slower by the model


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "l40s"])
def test_every_described_gpu_can_be_predicted_for(name: str) -> None:
    found = find_device(name, Configs(), may_predict=True)
    assert (found.device.name, found.timed) == (name, False)
    assert "predicted by a model" in found.note
    assert default_sweep(name, Configs()) == "gpu"


def test_the_gpu_sweep_has_three_models_in_two_dtypes() -> None:
    sweep = Configs().sweep("gpu")
    cells = cells_of(Configs(), sweep)
    assert len({cell.model for cell in cells}) == 3
    assert {cell.problem.q_dtype.value for cell in cells} == {"bf16", "fp16"}
    assert {cell.bucket.max_num_seqs for cell in cells} == {1, 8, 64}


def test_a_gpu_without_its_facts_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for group in ("models", "sweeps"):
        (tmp_path / group).symlink_to(Configs().folder / group)
    (tmp_path / "gpus").mkdir()
    text = (Configs().folder / "gpus" / "h100.yaml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("bandwidth_gb_s", "boost_clock_mhz"))]
    (tmp_path / "gpus" / "mine.yaml").write_text("\n".join(lines))
    assert main(["tune", "--device", "mine", "--configs", str(tmp_path), "--results", str(tmp_path / "r")]) == 2
    error = capsys.readouterr().err
    assert "mine.yaml lacks bandwidth_gb_s, boost_clock_mhz" in error
    assert "with their source" in error


def test_bench_still_needs_the_device() -> None:
    with pytest.raises(UsageError, match=r"h100 is not in this machine .*pagedtune tune --device h100"):
        find_device("h100", Configs())
