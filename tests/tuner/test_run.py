"""The pipeline with a fake gate and a fake timer: what becomes of every kind of candidate, and of a second run."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from quiet import Quiet

from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.record import Record, Status, Verdict
from pagedtune.kernels.serial import to_jsonable
from pagedtune.tuner import budget, setup
from pagedtune.tuner.bench import Jobs
from pagedtune.tuner.configs import Configs, SweepFile
from pagedtune.tuner.errors import UsageError
from pagedtune.tuner.run import TuneResult, tune
from pagedtune.tuner.select import select
from pagedtune.tuner.setup import TuneOptions
from pagedtune.tuner.space import cells_of

HERE = Path(__file__).parent
DEVICE = Device("cpu", DeviceKind.CPU, "some", num_units=1, isa="avx2", bandwidth_gb_s=10.0)
SWEEP = {
    "description": "test",
    "models": ["smollm2-135m"],
    "dtypes": ["bf16"],
    "block_sizes": [16],
    "layouts": ["nhd"],
    "buckets": [{"num_seqs": 1, "context_len": 128, "weight": 1.0}],
    "workloads": ["uniform"],
    "candidate_limit_s": 5.0,
}
Tune = Callable[..., TuneResult]


def tuner_in(folder: Path) -> Tune:
    """Tunes one class of `fake_variants.py`; keywords change the sweep, `budget_s` and `fresh` the run."""

    def go(variant: str, budget_s: float = 60.0, fresh: bool = False, **sweep: object) -> TuneResult:
        plan = SweepFile.model_validate({**SWEEP, **sweep}, strict=False)
        options = TuneOptions(
            device=DEVICE,
            cells=cells_of(Configs(), plan),
            variants=(f"{HERE / 'fake_variants.py'}:{variant}",),
            sweep=plan,
            sweep_name="test",
            folder=folder / "results" / "cpu",
            budget_s=budget_s,
            fresh=fresh,
            jobs=replace(Jobs(), check="fake_jobs:check", time="fake_jobs:time_cell"),
        )
        return tune(options, Quiet())

    return go


@pytest.fixture(scope="module", autouse=True)
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers find `fake_jobs`, and locks lie in a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(HERE), *sys.path])
        patch.setattr(setup, "harness_key", lambda: "fixed")  # whatever is edited while the tests run
        patch.setenv("PAGEDTUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def run(tmp_path: Path) -> Tune:
    """`tuner_in` a folder of the test's own."""
    return tuner_in(tmp_path)


@dataclass(frozen=True)
class Runs:
    """Two runs of the same command, and their folder."""

    first: TuneResult
    second: TuneResult
    folder: Path


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`Many` tuned twice: workers take seconds to start, so the tests share them."""
    folder = tmp_path_factory.mktemp("many")
    tune_again = tuner_in(folder)
    return Runs(tune_again("Many"), tune_again("Many"), folder / "results" / "cpu")


def outcome(records: tuple[Record, ...], kind: str, stage: str) -> Record:
    (record,) = [r for r in records if r.config.get("kind") == kind and r.stage == stage]
    return record


def test_every_failure_is_a_record_and_the_rest_is_tuned(many: Runs) -> None:
    result = many.first
    for kind, status, reason in (
        ("crash", Status.CRASHED, "SIGABRT"),
        ("raise", Status.CRASHED, "no such thing"),
        ("wrong", Status.WRONG, "a-case: row 3 is off"),
        ("unproven", Status.NOT_RUN, "nothing is proven"),
        ("refused", Status.REJECTED, "not this one"),
        ("unbuildable", Status.BUILD_FAILED, "the compiler says no"),
    ):
        record = outcome(result.records, kind, "gate")
        assert record.status is status
        assert reason in record.reason
        assert record.verdict is Verdict.NONE
    (entry,) = result.table.entries
    assert entry.config == {"kind": "good", "us": 100.0}
    assert entry.ties == ("many[kind=good,us=100.1]",)
    assert entry.speedup_default == pytest.approx(2.0)
    assert result.cells_reached == 1


def test_nothing_is_timed_that_did_not_pass(many: Runs) -> None:
    timed = [r for r in many.first.records if r.timing is not None]
    assert timed
    assert {r.config["kind"] for r in timed} == {"good"}
    assert {r.verdict for r in timed} == {Verdict.ON_DEVICE}


def test_hopeless_candidate_is_screened_but_not_in_the_finals(many: Runs) -> None:
    stages = {(r.config["us"], r.stage) for r in many.first.records if r.timing is not None}
    assert (900.0, "screen") in stages
    assert (900.0, "final") not in stages
    assert (200.0, "final") in stages  # the default config: the baseline of the speed-up


def test_candidate_that_takes_the_timer_down_fails_alone(run: Tune) -> None:
    result = run("Fragile")
    record = outcome(result.records, "fragile", "screen")
    assert record.status is Status.CRASHED
    (entry,) = result.table.entries
    assert entry.config == {"kind": "good", "us": 100.0}


@pytest.mark.slow
def test_candidate_that_hangs_ends_at_its_limit(run: Tune) -> None:
    result = run("Hanging", candidate_limit_s=1.0)
    record = outcome(result.records, "hang", "gate")
    assert record.status is Status.TIMEOUT
    assert "1 s" in record.reason
    assert result.table.entries


def test_second_run_repeats_nothing_and_decides_the_same(many: Runs) -> None:
    # Only what proves nothing is tried again: here, the candidate for which the gate has no case.
    assert {r.config["kind"] for r in many.second.new} <= {"unproven"}
    assert to_jsonable(many.second.table) == to_jsonable(many.first.table)
    keys = Counter(r.key for r in many.second.records if r.status is not Status.NOT_RUN)
    assert set(keys.values()) == {1}


def test_winners_file_is_what_the_records_give(many: Runs) -> None:
    written = json.loads((many.folder / "winners.json").read_text())
    assert written == to_jsonable(select(many.second.records, DEVICE.fingerprint))


def test_fresh_run_starts_anew(many: Runs) -> None:
    again = tuner_in(many.folder.parents[1])("Many", fresh=True)
    assert len(again.records) == len(again.new) == len(many.first.records)


def test_cells_beyond_the_budget_are_records_and_come_first_the_next_time(run: Tune) -> None:
    sizes = [16, 32, 64, 128]
    short = run("Many", budget_s=2.2, block_sizes=sizes)  # 0.2 s after the reserve: enough for one cell
    reached = {r.pool_format.block_size for r in short.records if r.timing is not None}
    missed = [r for r in short.records if r.variant == "*"]
    assert len(reached) == short.cells_reached < len(sizes)
    assert {r.pool_format.block_size for r in missed} == set(sizes) - reached
    assert all(r.status is Status.NOT_RUN and "budget" in r.reason for r in missed)
    rest = run("Many", block_sizes=sizes)
    assert len(rest.table.entries) == len(sizes)
    order = [r.pool_format.block_size for r in rest.new if r.timing is not None]
    assert order[0] not in reached


def test_variant_that_cannot_be_listed_is_a_usage_error(run: Tune) -> None:
    with pytest.raises(UsageError, match="no space today"):
        run("Unlistable")


def test_variant_with_a_name_of_the_catalogue_is_refused(run: Tune) -> None:
    with pytest.raises(UsageError, match=r"Impostor is called 'eager'.*`name`"):
        run("Impostor")


@pytest.mark.slow
def test_candidate_that_the_budget_cuts_off_is_not_condemned(run: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "GRACE_S", 0.5)
    result = run("Hanging", budget_s=4.0, candidate_limit_s=60.0)
    record = outcome(result.records, "hang", "gate")
    assert record.status is Status.NOT_RUN
    assert "budget" in record.reason


def test_unknown_class_is_a_usage_error(run: Tune) -> None:
    with pytest.raises(UsageError, match=r"has no 'Nothing'.*Many"):
        run("Nothing")
