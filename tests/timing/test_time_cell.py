"""The timing job on real launches: its answers and its refusals, never its times."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedtune.harness import timing_jobs
from pagedtune.harness.device_lock import DeviceBusy, device_lock
from pagedtune.harness.stream import StreamCurve, StreamPoint
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.eager import Eager, attend
from pagedtune.kernels.launch import CallStep, LaunchPlan, Tensors
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import Timing
from pagedtune.kernels.serial import from_jsonable, to_jsonable
from pagedtune.kernels.variant import BuildError, Variant
from pagedtune.kernels.workload import Workload

PROBLEM, FORMAT, LENGTHS = Problem(4, 2, 16, q_dtype=DType.FP32), PoolFormat(4, DType.FP32), Workload((9, 3))
CPU = Device("cpu", DeviceKind.CPU, num_units=1, l2_bytes=1 << 14, memory_bytes=4 << 30)
Step = Callable[[Tensors], None]


class Faulty(Eager):
    """`eager` with another step."""

    name = "faulty"

    def __init__(self, step: Step) -> None:
        self.step = step

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Any, bounds: Any) -> LaunchPlan:
        sound = super().plan(problem, pool_format, config, bounds)
        return LaunchPlan((CallStep(self.step),), sound.slots, limits=sound.limits)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, a short warm-up, and a ceiling that nothing here reaches."""
    monkeypatch.setenv("PAGEDTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr("pagedtune.harness.cpu_sampler.WARM_UP_S", 0.0)
    monkeypatch.setattr("pagedtune.harness.cpu_sampler.CpuSampler.min_block_s", 0.0)
    monkeypatch.setattr(timing_jobs, "stream_curve", lambda device, refresh=False: curve(1e6))


def curve(gb_s: float) -> StreamCurve:
    return StreamCurve((StreamPoint(512, gb_s),))


def payload(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "problem": to_jsonable(PROBLEM),
        "pool_format": to_jsonable(FORMAT),
        "workload": to_jsonable(LENGTHS),
        "device": to_jsonable(CPU),
        "candidates": [{"variant": "eager", "config": {}}] * 2,
        "mode": "cold",
        "stage": "final",
        "budget_s": 0.05,
        "seed": 3,
    }
    return fields | changes


def run_with(monkeypatch: pytest.MonkeyPatch, *variants: Variant, **changes: Any) -> list[dict[str, Any]]:
    """The answers for variants that no catalogue has."""
    by_name = {str(i): variant for i, variant in enumerate(variants)}
    monkeypatch.setattr(timing_jobs, "load_variant", by_name.__getitem__)
    candidates = [{"variant": name, "config": {}} for name in by_name]
    return timing_jobs.time_cell(payload(candidates=candidates, **changes))


@pytest.mark.parametrize("mode", ["cold", "hot"])
def test_two_candidates_are_timed_in_pairs(mode: str) -> None:
    first, second = (from_jsonable(Timing, a) for a in timing_jobs.time_cell(payload(mode=mode)))
    assert first.mode == second.mode == mode
    assert first.kv_bytes == 12 * 2 * 2 * 16 * 4
    assert first.pair_ratios == ()
    assert len(second.pair_ratios) == len(second.samples_us) >= 3
    assert first.ratio_ci is None
    assert second.ratio_ci is not None
    assert first.ci_us[0] <= first.median_us <= first.ci_us[1]


def test_a_screen_has_no_ratios() -> None:
    answers = [from_jsonable(Timing, a) for a in timing_jobs.time_cell(payload(stage="screen"))]
    assert all(a.pair_ratios == () and a.ratio_ci is None for a in answers)


def test_a_launch_that_writes_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    sound, lazy = run_with(monkeypatch, Eager(), Faulty(lambda tensors: None))
    assert "status" not in sound
    assert lazy["status"] == "wrong"
    assert "unwritten" in lazy["reason"]


def test_a_kernel_that_works_only_now_and_then_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"n": 0}

    def every_other(tensors: Tensors) -> None:
        calls["n"] += 1
        if calls["n"] % 2:
            attend(PROBLEM, FORMAT, tensors)

    (answer,) = run_with(monkeypatch, Faulty(every_other))
    assert answer["status"] == "wrong"


def test_a_kernel_that_skips_what_it_has_done_before_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    done: set[int] = set()

    def remember(tensors: Tensors) -> None:
        if tensors["out"].data_ptr() not in done:
            done.add(tensors["out"].data_ptr())
            attend(PROBLEM, FORMAT, tensors)

    (answer,) = run_with(monkeypatch, Faulty(remember))
    assert answer["status"] == "wrong"
    assert "another output" in answer["reason"]


def test_an_output_that_is_off_the_oracle_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_a_token(tensors: Tensors) -> None:
        attend(PROBLEM, FORMAT, dict(tensors) | {"context_lens": (tensors["context_lens"] - 1).clamp(min=1)})

    (answer,) = run_with(monkeypatch, Faulty(drop_a_token))
    assert answer["status"] == "wrong"
    assert "off the oracle" in answer["reason"]


def test_a_promise_of_the_same_bits_is_held_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def jitter(tensors: Tensors) -> None:
        attend(PROBLEM, FORMAT, tensors)
        tensors["out"].mul_(1 + 1e-5 * torch.rand(()))

    (answer,) = run_with(monkeypatch, Faulty(jitter))
    assert answer["status"] == "wrong"


def test_a_time_below_the_floor_is_no_win(monkeypatch: pytest.MonkeyPatch) -> None:
    refreshed: list[bool] = []

    def slow_memory(device: Device, refresh: bool = False) -> StreamCurve:
        refreshed.append(refresh)
        return curve(1e-9)

    monkeypatch.setattr(timing_jobs, "stream_curve", slow_memory)
    (answer,) = run_with(monkeypatch, Eager())
    assert answer["status"] == "too_fast"
    assert "below the floor" in answer["reason"]
    assert refreshed == [False, True], "the ceiling is measured anew before a time is called impossible"


def test_failures_of_one_candidate_leave_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoBuild(Eager):
        def build(self, *arguments: Any) -> Any:
            raise BuildError("no compiler: install one")

    class Refuses(Eager):
        def reject(self, *arguments: Any) -> str | None:
            return "head dim 16 is not for me"

    def explode(tensors: Tensors) -> None:
        raise RuntimeError("boom")

    answers = run_with(monkeypatch, NoBuild(), Refuses(), Faulty(explode), Eager())
    assert [a.get("status") for a in answers] == ["build_failed", "rejected", "crashed", None]
    assert answers[2]["reason"] == "RuntimeError: boom"
    assert from_jsonable(Timing, answers[3]).pair_ratios == ()


def test_what_does_not_fit_or_has_no_timer_is_not_run() -> None:
    tiny = Device("cpu", DeviceKind.CPU, memory_bytes=1 << 12)
    gpu = Device("h100", DeviceKind.CUDA)
    for device, words in ((tiny, "MiB"), (gpu, "no timer for cuda")):
        answers = timing_jobs.time_cell(payload(device=to_jsonable(device)))
        assert [a["status"] for a in answers] == ["not_run", "not_run"]
        assert words in answers[0]["reason"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stage": "semi"}, "screen, final"),
        ({"mode": "warm"}, "cold, hot"),
        ({"candidates": []}, "at least one"),
        ({"candidates": [{"variant": "eagre", "config": {}}]}, "eager"),
        ({"candidates": [{"variant": "eager", "config": {"x": 1}}]}, "no tunable x"),
        ({"problem": {"num_q_heads": 1}}, "num_kv_heads"),
    ],
)
def test_a_payload_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        timing_jobs.time_cell(payload(**changes))


def test_one_process_times_at_a_time() -> None:
    hold = partial(device_lock, CPU)
    with hold(1.0), pytest.raises(DeviceBusy, match="another process"), hold(0.05):
        pytest.fail("two held the lock")
    with hold(0.05):
        pass
