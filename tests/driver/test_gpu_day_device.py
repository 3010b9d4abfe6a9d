"""What gpu-day does only on a device, on a stand-in that passes for one: times, rates, and NVIDIA's tools."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driver_kernels import H100
from vgpu_attention import require_compiler

from pagedtune.harness.cuda_context import CudaContext, Timer
from pagedtune.harness.gpu_day import bandwidth, timings, tools
from pagedtune.harness.gpu_day.cells import DRY_CELLS, candidates
from pagedtune.harness.gpu_day.journal import Journal
from pagedtune.harness.gpu_day.session import Session
from pagedtune.harness.gpu_day.summary import summarise
from pagedtune.harness.standin_driver import StandInDriver
from pagedtune.kernels.variant import BuildError

(CELL,) = DRY_CELLS


class Clocked(StandInDriver):
    """A stand-in that passes for silicon: whatever lies between two events takes about 10 µs."""

    emulated = False

    def cuEventElapsedTime(self, start: Any, end: Any) -> tuple[Any, float]:
        return self.CUresult.CUDA_SUCCESS, 0.010 * (1 + len(self.launches) % 3 / 1000)


def test_the_device_is_busy_while_a_timed_replay_is_queued() -> None:
    """Else the host's way from the first mark to the launch would be part of the time."""
    driver = Clocked(H100)
    driver.cuInit(0)
    with CudaContext(driver) as context:
        graph, timer = context.capture(lambda: None), Timer(context)
        before = len(driver.calls)
        assert timer.around(graph) == pytest.approx(10, rel=0.01)
        assert [call.name for call in driver.calls[before:]] == [
            "cuGraphLaunch",
            "cuEventRecord",
            "cuGraphLaunch",
            "cuEventRecord",
            "cuEventSynchronize",
        ]


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """On a `Clocked` device, whose cache is so small that three pools of the cell are five times that."""
    device = replace(H100, l2_bytes=CELL.kv_bytes // 2)

    def open_clocked(_: Session) -> CudaContext:
        driver = Clocked(device)
        driver.cuInit(0)
        return CudaContext(driver)

    def introduce(context: CudaContext, artifacts: Any) -> None:
        context.driver.know(*artifacts)

    monkeypatch.setattr(Session, "open", open_clocked)
    for module in (timings, bandwidth):
        monkeypatch.setattr(module, "introduce", introduce)
        monkeypatch.setattr(module, "WARM_UP_S", 0.0)
    return Session(device, Journal(tmp_path, "day", "on-device"), time.monotonic() + 20)


def test_each_cell_is_timed_and_compared(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler("triton_split")
    monkeypatch.setattr(timings, "CELLS", (CELL,))
    monkeypatch.setattr(timings, "candidates", lambda cell, device: candidates(cell, device)[:2])
    monkeypatch.setattr(timings, "MIN_LAUNCHES", 1)
    assert timings.run(session) == {"cells": 1, "done": 1}
    first, second = session.journal.lines("timings")
    assert [line["candidate"].split()[0] for line in (first, second)] == ["triton_split", "cuda_paged"]
    for line in (first, second):
        assert line["pools"] == 3
        assert line["status"] == "passed"
        assert line["time_us"] == pytest.approx(10 / 3, rel=0.01)  # a replay launches once on each of three pools
        assert line["gb_s"] == pytest.approx(CELL.kv_bytes / (10 / 3) / 1e3, rel=0.01)
        assert line["samples"] >= 12
        assert line["evidence"] == "on-device"
        assert "dry" not in line
    assert first["ratio"] is None
    assert second["ratio"] == pytest.approx(1, rel=0.01)
    text = summarise(session.journal)
    assert "cuda_paged default" in text
    assert "DRY" not in text


def test_rates_are_bytes_over_time(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of 1 MiB moves 2 MiB; a sample of 10 µs holds two launches, one for each buffer."""
    require_compiler("cuda_paged")
    monkeypatch.setattr(bandwidth, "SIZES_MIB", (1,))
    monkeypatch.setattr(bandwidth, "MIN_SAMPLE_BYTES", 1)
    monkeypatch.setattr(bandwidth, "NUM_SAMPLES", 6)
    best = bandwidth.run(session)
    assert best == {
        "best_copy_gb_s": pytest.approx(2 * 2**20 / 5 / 1e3, rel=0.01),
        "best_read_gb_s": pytest.approx(2**20 / 5 / 1e3, rel=0.01),
    }
    assert [(line["kind"], line["buffers"]) for line in session.journal.lines("bandwidth")] == [
        ("copy", 2),
        ("read", 2),
    ]


def fake_tool(folder: Path, script: str) -> Callable[[str], str]:
    path = folder / "tool"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return lambda _: str(path)


def test_ncu_is_asked_for_less_where_it_does_not_know_a_metric(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_compiler("triton_split")
    row = '"0","attention_split(int)","lts__t_sectors_srcunit_tex_op_read.sum","sector","1,024"'
    script = (
        'case "$*" in *"--print-units base --clock-control none"*);; *) exit 2;; esac\n'
        'case "$*" in *l1tex__*) echo "==ERROR== Failed to find metric l1tex"; exit 1;; esac\n'
        f"""printf '%s\\n' '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"' '{row}'"""
    )
    monkeypatch.setattr(tools, "tool", fake_tool(tmp_path, script))
    monkeypatch.setattr(tools, "COUNTED", CELL)
    monkeypatch.setattr("pagedtune.harness.gpu_day.one_case.COUNTED", CELL)
    tools.counters(session)
    assert len(session.journal.lines("counters")) == len(tools.VARIANTS)
    for line in session.journal.lines("counters"):
        assert line["ncu"] == {"attention_split": {"lts__t_sectors_srcunit_tex_op_read.sum": 1024.0}}
        assert line["reason"] == ""
    assert "1024 L2 read sectors" in summarise(session.journal)


def test_ncu_without_permission_is_a_reason(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler("triton_split")
    monkeypatch.setattr(tools, "tool", fake_tool(tmp_path, 'echo "==ERROR== ERR_NVGPUCTRPERM"; exit 1'))
    monkeypatch.setattr(tools, "COUNTED", CELL)
    monkeypatch.setattr("pagedtune.harness.gpu_day.one_case.COUNTED", CELL)
    tools.counters(session)
    assert session.journal.lines("counters")[0]["reason"] == "ncu ended with 1: ==ERROR== ERR_NVGPUCTRPERM"


def test_ncu_counts_where_nothing_can_be_emulated(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(*_: Any) -> None:
        raise BuildError("no C++ compiler found: install g++ or clang++")

    row = '"0","attention_split(int)","lts__t_sectors_srcunit_tex_op_read.sum","sector","1,024"'
    header = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    monkeypatch.setattr(tools, "tool", fake_tool(tmp_path, f"printf '%s\\n' '{header}' '{row}'"))
    monkeypatch.setattr(tools, "virtual_counters", no_compiler)
    tools.counters(session)
    for line in session.journal.lines("counters"):
        assert line["virtual"] is None
        assert line["virtual_reason"] == "BuildError: no C++ compiler found: install g++ or clang++"
        assert line["ncu"] == {"attention_split": {"lts__t_sectors_srcunit_tex_op_read.sum": 1024.0}}
    assert "virtual GPU: none (BuildError: no C++" in summarise(session.journal)


def test_what_the_sanitizer_finds_is_told_from_what_stops_it(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'case "$*" in *racecheck*) echo "hazard"; exit 86;; *synccheck*) exit 3;; esac; echo "$@"'
    monkeypatch.setattr(tools, "tool", fake_tool(tmp_path, script))
    assert tools.sanitizer(session) == {"memcheck": "clean", "racecheck": "errors", "synccheck": "failed"}
    clean, errors, _ = session.journal.lines("sanitizer")
    assert "-m pagedtune.harness.gpu_day.one_case gate 0 1 2 3" in clean["tail"]
    assert errors["tail"] == "hazard"


def test_tools_that_are_not_installed_are_skipped_with_their_reason(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "tool", lambda _: None)
    assert tools.sanitizer(session) == {"skipped": "compute-sanitizer is not installed"}
    assert session.journal.lines("sanitizer")[0]["reason"] == "compute-sanitizer is not installed"
