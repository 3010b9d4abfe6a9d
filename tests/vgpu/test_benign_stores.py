"""Stores of the value that is there already: counted as benign, or faults where a caller asks for the letter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vgpu_pairs import SCHEDULES, module

from pagedtune.harness.vgpu.report import FaultKind, RunReport
from pagedtune.harness.vgpu.run_ptx import Argument, run_ptx
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpuOptions
from pagedtune.kernels.slot import Access

SHARED = ".shared .align 4 .b8 s[4];"
# All 64 threads store 7: 63 of them find it there, and nothing orders the 32 of the other warp.
BODIES = {
    FaultKind.RACE_SHARED: "st.shared.u32 [s], 7;\nbar.sync 0;\nld.shared.u32 %r1, [s];\nst.global.u32 [%rd0], 7;",
    FaultKind.RACE_GLOBAL: "st.global.u32 [%rd0], 7;",
}


def launch(body: str, options: VirtualGpuOptions) -> RunReport:
    arguments: dict[str, Argument] = {"o": (torch.zeros(1, dtype=torch.int32), Access.OUT)}
    return run_ptx(module(body, arguments, SHARED), "k", arguments, block=(64, 1, 1), options=options)


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_stores_are_counted_and_fault_on_request(kind: FaultKind, schedule: str) -> None:
    options = SCHEDULES[schedule]
    report = launch(BODIES[kind], options)
    assert report.clean, [str(f) for f in report.faults]
    assert report.steps[0].benign_races == 63 * len(BODIES[kind].split("st.")[1:])
    strict = launch(BODIES[kind], replace(options, strict_stores=True))
    assert kind in {f.kind for f in strict.faults}


def test_ordered_stores_of_one_value_are_no_race() -> None:
    body = "setp.eq.u32 %p1, %r60, 0;\n@%p1 st.global.u32 [%rd0], 7;\nbar.sync 0;\n"
    body += "setp.eq.u32 %p1, %r60, 40;\n@%p1 st.global.u32 [%rd0], 7;"
    report = launch(body, replace(SCHEDULES["plain"], strict_stores=True))
    assert report.clean
    assert report.steps[0].benign_races == 0
