"""`pagedtune emulate` as a user calls it: figures, faults with their lines, exit codes and refusals."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from pagedtune.harness.emulation import SCHEDULES
from pagedtune.tuner.cli import main
from pagedtune.tuner.emulate_view import hottest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

SMALL = ("--problem", "4/2x32", "--num-seqs", "2", "--context-len", "40", "--config", "num_splits=2",
         "--config", "tile_tokens=32", "--config", "split_tokens=16")  # fmt: skip

VARIANTS = """
from dataclasses import replace
from pagedtune.kernels.launch import CType, ScalarArg, StrideArg
from pagedtune.kernels.triton_split import TritonSplit

class Right(TritonSplit):
    name = "right"

def exchanged(variant, arguments, wanted, value):
    plan = TritonSplit.plan(variant, *arguments)
    first = plan.steps[0]
    args = tuple(value if arg == wanted else arg for arg in first.args)
    return replace(plan, steps=(replace(first, args=args), *plan.steps[1:]))

class TableTooFar(TritonSplit):
    name = "table_too_far"
    def plan(self, *arguments):
        return exchanged(self, arguments, StrideArg("block_table", 0), ScalarArg(1 << 20, CType.I64))

class WrongScale(TritonSplit):
    name = "wrong_scale"
    def plan(self, *arguments):
        return exchanged(self, arguments, ScalarArg(32**-0.5, CType.F32), ScalarArg(0.2, CType.F32))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("variants") / "emulated.py"
    path.write_text(VARIANTS)
    return path


def test_a_clean_run(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", "--variant", f"{file}:Right", *SMALL, "--sites"]) == 0
    out = capsys.readouterr().out
    for text in ("sectors read", "x the fewest possible", "bytes in flight per block", "bank conflicts",
                 "machine instructions", "attention_merge", "cp.async", "error over what is allowed",
                 "PASSED", "evidence: emulated"):  # fmt: skip
        assert text in out, text


def test_json_has_every_figure(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", "--variant", f"{file}:Right", *SMALL, "--json", "--sites", "--schedule", "adverse"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["passed"]
    assert data["schedule"] == "adverse"
    assert data["config"]["num_splits"] == 2
    assert [step["entry"] for step in data["steps"]] == ["attention_split", "attention_merge"]
    counters = data["steps"][0]["counters"]
    kv = 2 * 40 * 2 * 32 * 2  # sequences, tokens, heads, dims, bytes
    assert counters["unique_read_bytes"]["k_cache"] == kv
    assert data["kv_bytes"] == 2 * kv
    assert counters["read_sectors"] >= data["steps"][0]["least_read_sectors"] >= 2 * kv // 32
    assert sum(site["lanes"] for site in data["steps"][0]["sites"]) == counters["lane_instructions"]
    assert all(0 <= ratio <= 1 for ratio in data["error_over_bound"].values())
    assert {"element", "row", "lse"} <= data["error_over_bound"].keys()


def test_scales_of_tokens_are_read_once_and_count_as_kv(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = ["--kv-dtype", "int8", "--scales", "per_token_head"]
    assert main(["emulate", "--variant", f"{file}:Right", *SMALL, *pool, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    scales, kv = 2 * 40 * 2 * 4, 2 * 40 * 2 * 32  # sequences, tokens, heads, then bytes or dims
    unique = data["steps"][0]["counters"]["unique_read_bytes"]
    assert (unique["k_scale"], unique["v_scale"], unique["k_cache"]) == (scales, scales, kv)
    assert data["kv_bytes"] == 2 * (kv + scales)


def test_a_fault_is_shown_with_its_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", "--variant", f"{file}:TableTooFar", *SMALL]) == 1
    out = capsys.readouterr().out
    assert "FAULT attention_split: access outside every allocation at PTX line" in out
    assert "block_table" in out
    assert "the answer was not compared" in out
    assert "FAILED" in out


def test_a_wrong_answer_fails(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", "--variant", f"{file}:WrongScale", *SMALL, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert not data["passed"]
    assert not data["faults"]
    assert data["failure"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--variant", "{file}:Right", "--device", "h1000"], "did you mean h100"),
        (["--variant", "{file}:Right", "--device", "cpu"], "only PTX is emulated, for one of a100"),
        (["--variant", "cpu_split"], "`pagedtune check cpu_split` runs it here"),
        (["--variant", "nothing"], "unknown variant 'nothing'"),
        (["--variant", "{file}:Right", "--problem", "32x8"], "or a shape such as 32/8x128"),
        (["--variant", "{file}:Right", "--problem", "6/4x64"], "not a multiple"),
        (["--variant", "{file}:Right", "--dtype", "bf61"], "did you mean bf16"),
        (["--variant", "{file}:Right", "--layout", "nhdd"], "did you mean nhd"),
        (["--variant", "{file}:Right", "--schedule", "advers"], "did you mean adverse"),
        (["--variant", "{file}:Right", "--scales", "per_token"], "did you mean per_token_head"),
        (["--variant", "{file}:Right", "--scales", "per_token_head"], "add --kv-dtype int8"),
        (["--variant", "{file}:Right", "--config", "tiles=3"], "tile_tokens"),
        (["--variant", "{file}:Right", "--config", "tile_tokens=33"], "must be a power of two"),
        (["--variant", "{file}:Right", "--problem", "4/1x1024"], "head dims go up to 512"),
    ],
)
def test_what_cannot_be_run_is_refused(
    options: list[str], says: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["emulate", *(option.format(file=file) for option in options)]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1


def test_help_names_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in SCHEDULES)


def test_the_hottest_sites_stay_in_order() -> None:
    from pagedtune.harness.vgpu.report import SiteReport

    sites = [SiteReport(k, "add", "", k % 7, 0, 1000 if k == 90 else 0, 0, 0, 0) for k in range(100)]
    chosen = hottest(sites)
    assert [s.line for s in chosen] == sorted(s.line for s in chosen)
    assert 90 in [s.line for s in chosen]
    assert len(chosen) <= 24
