"""`make gpu-day`, dry: every stage runs on the stand-in, and no line of it can be taken for a measurement."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from pagedtune.harness.gpu_day import facts
from pagedtune.harness.gpu_day.__main__ import main
from pagedtune.harness.gpu_day.gate import VARIANTS
from pagedtune.harness.gpu_day.journal import Journal
from pagedtune.harness.gpu_day.session import data_sheet, sheet_device
from pagedtune.harness.gpu_day.summary import MAX_LINES, summarise
from pagedtune.harness.gpu_day.tools import parse_ncu
from pagedtune.harness.nvidia import probe_nvidia

STAGES = ("facts", "bandwidth", "build", "gate", "timings", "counters", "sanitizer")
# Not on the machine that it is made for.
ABSENT = ("yaml", "pydantic", "typer", "rich", "pandas", "matplotlib", "psutil")


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def gpu_day(*arguments: str, absent: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    code = f"import runpy, sys\nsys.modules.update(dict.fromkeys({list(absent)!r}))\n"
    return run_python(code + "runpy.run_module('pagedtune.harness.gpu_day', run_name='__main__')", *arguments)


@pytest.fixture(scope="module")
def dry_day(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("gpu_day")
    return gpu_day("--dry", "--budget", "220", "--results", str(folder), absent=ABSENT), folder


def lines_of(folder: Path, stage: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / f"{stage}.jsonl").read_text().splitlines()]


def test_a_dry_day_runs_every_stage_to_its_end(dry_day: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, folder = dry_day
    assert done.returncode == 0, done.stdout + done.stderr
    stages = lines_of(folder, "stages")
    assert [(line["name"], line["status"]) for line in stages] == [(name, "done") for name in STAGES]
    gate = lines_of(folder, "gate")
    assert [line["status"] for line in gate] == ["passed"] * 3 * len(VARIANTS), gate
    assert {line["variant"] for line in gate} == set(VARIANTS)
    assert lines_of(folder, "sanitizer")[0]["cases_exit"] == 0


def test_every_line_of_a_dry_day_says_so_and_holds_no_time(
    dry_day: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, folder = dry_day
    printed = done.stdout.splitlines()
    assert 0 < len(printed) <= MAX_LINES
    assert all(line.startswith("DRY ") for line in printed)
    assert (folder / "summary.txt").read_text() == done.stdout
    lines = [line for path in folder.glob("*.jsonl") for line in lines_of(folder, path.stem)]
    assert {(line["evidence"], line["dry"]) for line in lines} == {("emulated", "DRY: nothing here was measured")}
    timed = [line for line in lines if "time_us" in line]
    assert {line["stage"] for line in timed} == {"bandwidth", "timings"}
    assert all(line["time_us"] is None and line.get("gb_s") is None for line in timed)
    assert all("no time" in str(line["reason"]) for line in timed)


def test_the_virtual_counters_are_those_of_the_timed_problem(
    dry_day: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    """Each KV byte is live and read: 2 sequences of 40 tokens, 2 KV heads of 64, K and V in bf16."""
    _, folder = dry_day
    for line in lines_of(folder, "counters"):
        assert line["kv_bytes"] == 2 * 40 * 2 * 64 * 2 * 2
        virtual = line["virtual"]
        assert isinstance(virtual, dict)
        assert sum(step["unique_read_bytes"] for step in virtual.values()) >= line["kv_bytes"]
        assert line["ncu"] is None
        assert line["reason"] == "the device is emulated"


@pytest.mark.parametrize(
    ("stage", "status", "code"),
    [
        ("gate", "wrong", 1), ("gate", "rejected", 0), ("gate", "not_run", 0), ("timings", "crashed", 1),
        ("timings", "too_fast", 1), ("timings", "not_run", 0), ("sanitizer", "errors", 1), ("sanitizer", "skipped", 0),
    ],
)  # fmt: skip
def test_the_exit_code_tells_of_any_line_that_failed(
    stage: str, status: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_stages(stages: object, device: object, journal: Journal, *_: object) -> bool:
        journal.add(stage, status=status, variant="v", case="c", cell="c", tool="t", reason="", error_ratio=0.0)
        return True

    monkeypatch.setattr("pagedtune.harness.gpu_day.__main__._run_stages", run_stages)
    assert main(["--dry", "--results", str(tmp_path)]) == code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--results", "results/h100"], "do not belong into results/"),
        (["--stages", "facts,gates"], "no stage gates: there are facts, bandwidth"),
    ],
)
def test_a_dry_run_may_not_write_into_results_and_stages_have_names(
    arguments: list[str], message: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(SystemExit) as caught:
        main(["--dry", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(probe_nvidia() is not None, reason="this machine has an NVIDIA GPU")
def test_without_a_gpu_it_says_what_is_missing() -> None:
    done = gpu_day()
    assert done.returncode == 2
    assert "no GPU can be used here" in done.stderr
    assert "--dry" in done.stderr


def test_the_make_target_needs_no_environment(root: Path) -> None:
    command = ["make", "-n", "gpu-day", "DRY=1", "BUDGET=40", "GPU_DAY_PYTHON=some-python"]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert "setup.sh" not in shown
    assert "some-python" in shown
    assert '--dry --budget "40"' in shown


CHILD = "from pagedtune.harness.gpu_day.child import run_in_child\nimport os, time, json, subprocess\n"


def ended(function: str, limit_s: float = 30.0) -> dict[str, object]:
    code = f"{CHILD}{function}\nprint(json.dumps(vars(run_in_child(work, {limit_s}))))"
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_stage_gives_its_value_or_its_exception() -> None:
    assert ended("def work(): return {'a': [1, 'x' * 200_000]}")["value"] == {"a": [1, "x" * 200_000]}
    raised = ended("def work(): return 1 // 0")
    assert raised["status"] == "raised"
    assert "ZeroDivisionError" in str(raised["message"])


def test_a_stage_that_crashes_or_hangs_is_a_result() -> None:
    assert ended("def work(): os.kill(os.getpid(), 11)")["status"] == "crashed"
    hung = ended("def work(): time.sleep(60)", 0.5)
    assert hung["status"] == "timeout"
    assert 0.4 < float(str(hung["seconds"])) < 30


def test_what_a_hung_stage_has_started_ends_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    ended(
        f"def work():\n child = subprocess.Popen(['sleep', '60'])\n open({str(note)!r}, 'w').write(str(child.pid))\n"
        " time.sleep(60)",
        2.0,
    )
    state = Path(f"/proc/{note.read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"  # unreaped by whoever got it


def test_lines_of_another_day_and_half_lines_do_not_count(tmp_path: Path) -> None:
    today, yesterday = (Journal(tmp_path, run, "on-device") for run in ("b", "a"))
    yesterday.add("gate", status="wrong")
    today.add("gate", status="passed")
    with (tmp_path / "gate.jsonl").open("a") as file:
        file.write('{"run": "b", "status": "wro')
    assert [line["status"] for line in today.lines("gate")] == ["passed"]
    assert "dry" not in today.lines("gate")[0]


def test_data_sheets_are_read_as_yaml_reads_them(root: Path) -> None:
    for path in (root / "configs" / "gpus").glob("*.yaml"):
        expected = {k: str(v) for k, v in yaml.safe_load(path.read_text()).items()}
        assert data_sheet(path.stem) == expected
    assert sheet_device("h200").bandwidth_gb_s == 4800
    with pytest.raises(ValueError, match="does not describe an NVIDIA GPU"):
        sheet_device("cpu")


def test_a_device_that_is_not_as_its_sheet_says() -> None:
    from dataclasses import replace

    device, sheet = sheet_device("h100"), data_sheet("h100")
    assert facts.compare(device, sheet) == []
    other = replace(device, num_units=114, memory_bytes=80_000_000_000, bandwidth_gb_s=3352.0)
    assert facts.compare(other, sheet) == [
        "num_units: the driver says 114, configs/gpus/h100.yaml says 132",
        "memory_bytes: the driver says 80000000000, configs/gpus/h100.yaml says 85899345920",
    ]
    assert facts.compare(device, {}) == ["configs/gpus has no h100.yaml: nothing to compare with"]


def test_ncu_output_is_read_by_kernel_and_metric() -> None:
    text = (
        "==PROF== Connected to process 7\n"
        '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","7","attention_paged(const void *, long)","Command line","dram__bytes_read.sum","Mbyte","1,033.5"\n'
        '"0","7","attention_paged(const void *, long)","Command line","smsp__inst_executed.sum","inst","12,000"\n'
        '"0","7","attention_paged(const void *, long)","Command line","odd__metric.sum","inst","n/a"\n'
    )
    assert parse_ncu(text) == {
        "attention_paged": {"dram__bytes_read.sum [Mbyte]": 1033.5, "smsp__inst_executed.sum": 12000.0}
    }
    assert parse_ncu("==ERROR== ERR_NVGPUCTRPERM") == {}


def test_the_summary_of_a_long_bad_day_stays_short(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "day", "on-device")
    for index in range(100):
        journal.add(
            "gate", variant="cuda_paged", case=f"case {index}", status="wrong", reason="off\nby one", error_ratio=2
        )
        journal.add("timings", cell=f"cell {index}", candidate="c", status="passed", time_us=10.0, gb_s=3.0, ratio=None)
    lines = summarise(journal).splitlines()
    assert len(lines) == MAX_LINES
    assert lines[-1] == f"... and {len(_all_lines(journal)) - MAX_LINES + 1} lines more in {tmp_path}"
    assert "gate cuda_paged: 100 cases, 100 wrong; worst error of a passed one 0.00 of its bound" in lines
    assert sum(line.startswith("  wrong: cuda_paged case") for line in lines) == 6


def _all_lines(journal: Journal) -> list[str]:
    """One head line, one of the gate and six failures, the head of the table and a line for each cell."""
    return [""] * (1 + 1 + 6 + 1 + 100)
