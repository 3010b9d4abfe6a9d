"""The command line: exit codes, one-line errors, help that teaches."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedtune.kernels.catalogue import find_variant
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.record import Record
from pagedtune.tuner import cli_tune, devices
from pagedtune.tuner.cli import main
from pagedtune.tuner.cli_show import _constraints
from pagedtune.tuner.devices import check_facts
from pagedtune.tuner.errors import UsageError
from pagedtune.tuner.store import open_store

MakeRecord = Callable[..., Record]
COMMANDS = ["devices", "variants", "check", "tune", "winners", "report", "explain", "bench", "compare", "replay"]
H100 = Device("h100", DeviceKind.CUDA, "NVIDIA H100 80GB HBM3", capability=90, num_units=132)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without an NVIDIA GPU."""
    monkeypatch.setattr(devices, "probe_nvidia", lambda: None)


@pytest.fixture
def results(tmp_path: Path, make_record: MakeRecord) -> Path:
    """Results with one cell: `slow` screened, `fast` and `eager` in the finals."""
    times = [100.0, 101.0, 100.5, 100.2, 100.1, 100.3, 100.4]
    with open_store(tmp_path / "cpu") as store:
        for name in ("fast", "eager", "slow"):
            store.append(make_record(name))
            store.append(make_record(name, stage="screen", samples=[300.0 if name == "slow" else 100.0]))
        store.append_group(
            [
                make_record("fast", stage="final", samples=times, ratios=[1.0] * 7, stream_gb_s=20.0),
                make_record("eager", stage="final", samples=[3 * t for t in times], ratios=[3.0] * 7),
            ],
            "g",
        )
    return tmp_path


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command is refused."""
    assert main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    assert f"pagedtune {command}" in capsys.readouterr().out.split("Options")[0].split("Usage", 1)[1].split("\n", 1)[1]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["tune", "--sweep", "quik"], ["unknown sweep 'quik'", "did you mean quick"]),
        (["tune", "--model", "llama-3-8"], ["unknown model", "llama-3-8b"]),
        (["tune", "--device", "h1000"], ["unknown GPU", "h100"]),
        (["tune", "--model", ""], ["--model '' names no model", "configs/models"]),
        (["tune", "--variant", ""], ["--variant '' names no variant", "pagedtune variants"]),
        (["tune", "--variant", "eagr"], ["unknown variant 'eagr'", "did you mean eager"]),
        (["tune", "--variant", "none.py:Mine"], ["no file", "none.py"]),
        (["tune", "--budget", "0"], ["--budget 0", "at least 5"]),
        (["tune", "--budget", "soon"], ["--budget", "tune --help"]),
        (["tune", "--bugdet", "9"], ["--bugdet", "tune --help"]),
        (["tune", "--configs", "nowhere"], ["nowhere", "--configs"]),
        (["frobnicate"], ["frobnicate", "pagedtune --help"]),
        (["variants", "cpu_spit"], ["unknown variant 'cpu_spit'", "cpu_split"]),
        (["variants", "zzz"], ["unknown variant 'zzz': `pagedtune variants` lists"]),
        (["bench", "cpu_split[num_splits=abc]"], ["cpu_split.num_splits", "expected int, found 'abc'"]),
        (["bench", "--batch", "0"], ["--batch", "equal to 1", "bench --help"]),
        (["bench", "--context", "0"], ["--context", "equal to 1", "bench --help"]),
        (["bench", "--block-size", "0"], ["--block-size", "equal to 1", "bench --help"]),
        (["replay", "azure_llm_2023_conv", "--pool", "-5"], ["--pool", "equal to 1", "replay --help"]),
        (["winners", "--results", "nowhere"], ["no records in nowhere", "pagedtune tune"]),
    ],
)
def test_wrong_input_is_one_line_with_what_to_do(
    capsys: pytest.CaptureFixture[str], no_gpu: None, arguments: list[str], parts: list[str]
) -> None:
    message = error_of(capsys, *arguments)
    for part in parts:
        assert part in message


def test_absent_gpu_says_what_can_and_cannot_be_done(capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    message = error_of(capsys, "bench", "--device", "h100")
    for part in ("h100 is not in this machine", "no NVIDIA GPU", "nothing can be timed", "tune --device h100"):
        assert part in message


def test_unusable_results_folder_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = error_of(capsys, "tune", "--device", "cpu", "--results", str(tmp_path / "file"))
    assert "cannot be written" in message
    assert "--results" in message


@pytest.mark.parametrize("problem", ["busy", "newer"])
def test_unusable_records_are_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None, problem: str
) -> None:
    def measure() -> Device:
        pytest.fail("measured first")

    monkeypatch.setattr(devices, "probe_cpu", measure)
    arguments = ("tune", "--results", str(tmp_path))
    if problem == "busy":
        with open_store(tmp_path / "cpu"):
            assert "in use by another tune" in error_of(capsys, *arguments)
    else:
        (tmp_path / "cpu").mkdir()
        (tmp_path / "cpu" / "records.jsonl").write_text(json.dumps({"schema": 10**6}) + "\n")
        assert "newer pagedtune" in error_of(capsys, *arguments)


def test_facts_that_contradict_the_device_name_both_values() -> None:
    live = Device("h100", DeviceKind.CUDA, "NVIDIA H100 PCIe", capability=90, num_units=114)
    with pytest.raises(UsageError, match=r"configs/gpus/h100\.yaml.*H100 PCIe.*num_units is 132 .* and 114 on"):
        check_facts(H100, live)
    check_facts(H100, H100)


@pytest.mark.parametrize(("live_bytes", "fits"), [(78 << 30, True), (40 << 30, False)])
def test_memory_may_fall_short_of_the_data_sheet_a_little(live_bytes: int, fits: bool) -> None:
    stated = Device("x", DeviceKind.CUDA, memory_bytes=80 << 30)
    live = Device("x", DeviceKind.CUDA, memory_bytes=live_bytes)
    if fits:
        check_facts(stated, live)
    else:
        with pytest.raises(UsageError, match="memory_bytes"):
            check_facts(stated, live)


def test_winners_as_json_and_as_table(capsys: pytest.CaptureFixture[str], results: Path) -> None:
    assert main(["winners", "--json", "--results", str(results)]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["entries"]
    assert (entry["variant"], entry["time_evidence"], entry["speedup_eager"]) == ("fast", "measured", 3.0)
    assert main(["winners", "--results", str(results)]) == 0
    shown = capsys.readouterr().out
    for part in ("small", "b16-nhd", "n8-c1024", "fast", "3.00", "50%", "measured"):
        assert part in shown
    assert max(len(line) for line in shown.splitlines()) <= 120


def test_explain_names_path_runner_up_margin_and_evidence(capsys: pytest.CaptureFixture[str], results: Path) -> None:
    assert main(["explain", "small", "--bucket", "n8-c1024", "--results", str(results)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "3 candidates → 3 proven → 3 screened → 2 in the finals of 7",
        "runner-up eager[] takes +200.0%",
        "verdict on-device, time measured",
        "pool format b16-nhd-bf16",
    ):
        assert part in shown


def test_explain_follows_a_batch_to_the_bucket_that_serves_it(
    capsys: pytest.CaptureFixture[str], results: Path
) -> None:
    base = ["explain", "small", "--results", str(results), "--num-seqs", "5", "--context"]
    assert main([*base, "700"]) == 0
    assert "bucket n8-c1024, tuned itself" in capsys.readouterr().out
    assert main([*base, "300"]) == 0
    assert "bucket n8-c512, served by the next larger tuned one, n8-c1024" in capsys.readouterr().out
    assert main([*base, "5000"]) == 2
    assert "beyond what was tuned" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["explain"], "name a model (small)"),
        (["explain", "smal"], "did you mean small"),
        (["explain", "small", "--bucket", "n8-c2048"], "n8-c1024"),
        (["explain", "small", "--num-seqs", "8"], "--context"),
    ],
)
def test_explain_without_a_match_says_what_there_is(
    capsys: pytest.CaptureFixture[str], results: Path, arguments: list[str], part: str
) -> None:
    assert part in error_of(capsys, *arguments, "--results", str(results))


def test_devices_and_variants_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    shown = capsys.readouterr().out
    for part in ("cpu", "h100", "sm_90", "132 SMs", "227 KiB", "3,350"):
        assert part in shown
    assert main(["variants"]) == 0
    assert "cpu_split" in capsys.readouterr().out


def test_one_variant_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["variants", "cpu_split"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "algorithm", "tunables", "num_splits: 1, 2", "bf16: fp32, bf16, fp16; nhd, hnd, xpacked; scales none",
        "constraints", "fp8_e4m3", "numerics", "accumulate fp32",
    ):  # fmt: skip
        assert part in shown


@pytest.mark.parametrize("command", [["variants"], ["winners", "--json"]])
def test_a_reader_who_has_seen_enough_is_no_failure(command: list[str], results: Path) -> None:
    options = ["--results", str(results)] if "winners" in command else []
    run = [sys.executable, "-m", "pagedtune.tuner.cli", *command, *options]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


@pytest.mark.parametrize("variant", ["cuda_split_mma", "cuda_split_simt", "cpu_split"])
def test_constraints_name_no_value_that_nobody_asked_for(variant: str) -> None:
    text = "\n".join(_constraints(find_variant(variant)))
    assert "head_dim=" not in text
    assert "not 320" not in text
    assert "head_dim must be a multiple of 8" in text or "head dims go up to 256" in text


@pytest.mark.usefixtures("no_gpu")
def test_a_tune_that_is_stopped_says_that_it_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_tune, "tune", stop)
    assert main(["tune", "--device", "h100", "--results", str(tmp_path)]) == 130
    assert "the same command goes on from there" in capsys.readouterr().err
