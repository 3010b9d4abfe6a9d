"""Which kernel runs: the device ladder, the blocklist, and what is said about it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pagedtune.kernels.bounds import Bounds, bucket_of
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dispatch import DispatchTable, Winner
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.eager import Eager
from pagedtune.kernels.pool_format import PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import TimeEvidence, Verdict
from pagedtune.kernels.serial import from_jsonable, to_jsonable
from pagedtune.kernels.variant import Config, Op
from pagedtune.runtime.artifact_source import ArtifactUnavailable
from pagedtune.runtime.attention import PagedAttention
from pagedtune.runtime.blocklist import BLOCKLIST_VARIABLE, Blocklist
from pagedtune.runtime.dispatch import Dispatch, NoKernel
from pagedtune.runtime.ladder import Rung, TunedOn, recompute_splits, rung_of

PROBLEM = Problem(9, 3, 64, q_dtype=DType.FP32)
FORMAT = PoolFormat(16, DType.FP32)
HERE = Device("cpu", DeviceKind.CPU, product="Maker | Model 7", num_units=8, isa="avx2")
FALLBACKS = {Op.ATTENTION: ("second", "plain")}


@dataclass(frozen=True)
class SplitConfig(Config):
    """As a split-K kernel has it."""

    num_splits: int = 3
    tile: int = 64


class Tuned(Eager):
    """Stands for a kernel with tunables; runs like eager."""

    name = "tuned"
    config_type = SplitConfig


class Second(Eager):
    """Stands for a kernel that needs a library."""

    name = "second"


class Plain(Eager):
    """Stands for the safe default."""

    name = "plain"


class Libraries:
    """An artifact source that lacks the libraries of some variants, and notes what it was asked."""

    def __init__(self, *missing: str) -> None:
        self.missing, self.asked = missing, []

    def artifacts(self, variant, problem, pool_format, config, device):
        self.asked.append((variant.name, config))
        if variant.name in self.missing:
            raise ArtifactUnavailable("no library for this CPU was shipped")
        return ()


def winner(bounds: Bounds, variant: str = "tuned", **config: int) -> Winner:
    return Winner(
        op="attention",
        model="m",
        problem=PROBLEM,
        pool_format=FORMAT,
        bucket=bucket_of(bounds),
        workload="ragged",
        variant=variant,
        config={"num_splits": 4, "tile": 32, **config} if variant == "tuned" else {},
        median_us=123.4,
        ci_us=(120.0, 125.0),
        bandwidth_gb_s=10.0,
        verdict=Verdict.ON_DEVICE,
        time_evidence=TimeEvidence.MEASURED,
    )


def table(device: Device = HERE, *entries: Winner) -> DispatchTable:
    return DispatchTable(device.fingerprint, entries or (winner(Bounds(16, 1024)),))


def attention(table_: DispatchTable | None, libraries: Libraries | None = None, *blocked: str) -> PagedAttention:
    variants = (Tuned(), Second(), Plain())
    blocklist = Blocklist(frozenset(blocked), "blocklist.txt")
    return PagedAttention(
        PROBLEM, FORMAT, Dispatch(HERE, libraries or Libraries(), table_, variants, FALLBACKS, blocklist)
    )


def test_exact_device_and_bucket_take_the_winner_with_its_evidence() -> None:
    found = attention(table()).explain(Bounds(9, 600))
    assert (found.variant, found.config, found.rung) == ("tuned", "num_splits=4,tile=32", Rung.EXACT)
    assert (found.verdict, found.time_evidence, found.median_us) == (Verdict.ON_DEVICE, TimeEvidence.MEASURED, 123.4)
    assert found.bucket == bucket_of(Bounds(16, 1024))
    for part in ("tuned[num_splits=4,tile=32]", "rung exact", "n16-c1024", "123.4 us, measured", "verdict on-device"):
        assert part in str(found)


@pytest.mark.parametrize(
    ("tuned_on", "rung", "splits"),
    [
        (replace(HERE, num_units=16), Rung.FAMILY, 2),
        (replace(HERE, num_units=2), Rung.FAMILY, 16),
        (replace(HERE, num_units=64), Rung.FAMILY, 1),
        (replace(HERE, product="Other"), Rung.CAPABILITY, 4),
        (replace(HERE, product="Other", num_units=4), Rung.CAPABILITY, 8),
    ],
)
def test_a_table_of_a_relative_is_used_with_splits_recomputed(tuned_on: Device, rung: Rung, splits: int) -> None:
    found = attention(table(tuned_on)).explain(Bounds(16, 1024))
    assert (found.variant, found.config, found.rung) == ("tuned", f"num_splits={splits},tile=32", rung)
    as_tuned = splits == 4
    assert found.median_us == (123.4 if as_tuned else None), "a time of another config is none of this one"
    assert found.time_evidence is (TimeEvidence.TRANSFERRED if as_tuned else TimeEvidence.NONE)


def test_a_table_of_a_stranger_is_not_used() -> None:
    found = attention(table(replace(HERE, isa="avx512"))).explain(Bounds(16, 1024))
    assert (found.variant, found.rung, found.verdict) == ("second", Rung.UNTUNED, Verdict.NONE)


def test_beyond_the_tuned_range_the_winner_runs_with_its_default_config() -> None:
    entries = (winner(Bounds(4, 512), "second"), winner(Bounds(16, 1024)))
    found = attention(table(HERE, *entries)).explain(Bounds(17, 1024))
    assert (found.variant, found.config, found.rung) == ("tuned", "num_splits=3,tile=64", Rung.UNTUNED)
    assert "n32-c1024" in found.why
    assert found.median_us is None
    prefill = attention(table(HERE, *entries)).explain(Bounds(1, 128, 64))
    assert (prefill.variant, prefill.rung) == ("tuned", Rung.UNTUNED), "decode cells say nothing of prefill times"


def test_another_problem_or_format_is_not_served_by_the_table() -> None:
    other = PagedAttention(
        replace(PROBLEM, window=8),
        FORMAT,
        Dispatch(HERE, Libraries(), table(), (Tuned(), Second(), Plain()), FALLBACKS, Blocklist()),
    )
    assert other.explain(Bounds(16, 1024)).variant == "second"


def test_what_cannot_run_is_passed_over_with_its_reason() -> None:
    found = attention(table(), Libraries("second"), "tuned").explain(Bounds(16, 1024))
    assert (found.variant, found.rung) == ("plain", Rung.SAFE)
    assert found.passed_over == (
        "tuned is switched off by blocklist.txt",
        "second: no library for this CPU was shipped",
    )
    assert "passed over: tuned is switched off by blocklist.txt" in str(found)


def test_without_any_kernel_every_reason_is_given() -> None:
    with pytest.raises(NoKernel, match=r"no library.*plain is switched off"):
        attention(None, Libraries("second"), "plain").plan(Bounds(1, 1))
    quantised = PoolFormat(16, DType.INT8, scale_kind=ScaleKind.PER_TENSOR)
    with pytest.raises(NoKernel, match="int8"):
        PagedAttention(PROBLEM, quantised, Dispatch(HERE, Libraries(), None, (Plain(),), FALLBACKS)).plan(Bounds(1, 1))


def test_a_winner_serves_pools_of_its_own_scales_only() -> None:
    here = PoolFormat(16, DType.INT8, scale_kind=ScaleKind.PER_TOKEN_HEAD)
    entry = replace(winner(Bounds(16, 1024)), pool_format=here)
    stored = from_jsonable(DispatchTable, to_jsonable(table(HERE, entry)))
    assert stored.lookup(PROBLEM, here, Bounds(16, 1024)) == entry
    for kind in set(ScaleKind) - {ScaleKind.PER_TOKEN_HEAD}:
        assert stored.lookup(PROBLEM, replace(here, scale_kind=kind), Bounds(16, 1024)) is None


def test_a_variant_of_a_table_that_is_not_installed_is_passed_over() -> None:
    found = attention(table(HERE, winner(Bounds(16, 1024), "gone"))).explain(Bounds(16, 1024))
    assert found.variant == "second"
    assert found.passed_over == ("gone is not installed",)


def test_one_plan_for_each_bucket_and_one_log_line_for_each_rung(caplog: pytest.LogCaptureFixture) -> None:
    libraries = Libraries()
    kernel = attention(table(), libraries)
    with caplog.at_level(logging.INFO):
        plans = {id(kernel.plan(Bounds(n, c))) for n in range(9, 17) for c in (513, 1024)}
        kernel.plan(Bounds(17, 4))
        kernel.plan(Bounds(33, 4))
    assert len(plans) == 1
    assert [name for name, _ in libraries.asked] == ["tuned"] * 3, "artifacts are asked for once a bucket"
    levels = [(record.levelname, "rung exact" in record.message) for record in caplog.records]
    assert levels == [("INFO", True), ("WARNING", False)]


@pytest.fixture
def blocklist_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "blocklist.txt"
    path.write_text("# known wrong on Model 7\ntuned  # since release 3\n\nsecond\n", encoding="utf-8")
    return path


def test_a_blocklist_file_names_variants(blocklist_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BLOCKLIST_VARIABLE, raising=False)
    assert Dispatch(HERE).blocklist.names == frozenset()
    monkeypatch.setenv(BLOCKLIST_VARIABLE, str(blocklist_file))
    dispatch = Dispatch(HERE, Libraries(), table(), (Tuned(), Second(), Plain()), FALLBACKS)
    assert dispatch.blocklist.names == {"tuned", "second"}
    assert dispatch.select(Op.ATTENTION, PROBLEM, FORMAT, Bounds(16, 1024)).variant.name == "plain"


def test_a_blocklist_that_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        Blocklist.read(tmp_path / "missing.txt")
    (tmp_path / "bad.txt").write_text("eager\nall kernels please\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.txt:2: 'all kernels please'"):
        Blocklist.read(tmp_path / "bad.txt")


def test_a_blocked_name_that_nobody_has_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    attention(None, None, "tunde")
    assert "blocklist.txt names tunde" in caplog.text


def test_fingerprints_are_taken_apart_from_the_right() -> None:
    assert TunedOn.parse(HERE.fingerprint) == TunedOn("Maker | Model 7", 8, "avx2")
    for bad in ("", "cpu", "cpu|x|many|avx2", "cpu|x|0|avx2"):
        with pytest.raises(ValueError, match="no fingerprint"):
            rung_of(bad, HERE)


def test_configs_without_splits_travel_unchanged() -> None:
    assert recompute_splits(Config(), replace(HERE, num_units=2).fingerprint, HERE) == Config()
