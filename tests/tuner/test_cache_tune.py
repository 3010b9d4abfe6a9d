"""A tune of attention and of a cache operation: each with its own kind, and the pool's format is attention's."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from quiet import Quiet
from rich.console import Console

from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.record import Record, TimeEvidence, Verdict
from pagedtune.kernels.variant import Op
from pagedtune.tuner import devices
from pagedtune.tuner.bench import Jobs
from pagedtune.tuner.budget import Budget
from pagedtune.tuner.cache_cells import cache_cells_of
from pagedtune.tuner.cache_view import show_cache_winners
from pagedtune.tuner.cli import main
from pagedtune.tuner.configs import Configs, SweepFile
from pagedtune.tuner.errors import UsageError
from pagedtune.tuner.run import TuneResult, tune
from pagedtune.tuner.select import select
from pagedtune.tuner.setup import TuneOptions
from pagedtune.tuner.space import cells_of
from pagedtune.tuner.tables import format_choices, show_winners

HERE = Path(__file__).parent
GPU = Device("h100", DeviceKind.CUDA, "NVIDIA H100 80GB HBM3", capability=90, num_units=132, bandwidth_gb_s=3350.0)
SWEEP = {
    "description": "test",
    "models": ["smollm2-135m"],
    "dtypes": ["bf16"],
    "block_sizes": [16],
    "layouts": ["nhd"],
    "buckets": [{"num_seqs": 4, "context_len": 128, "weight": 1.0}],
    "workloads": ["uniform"],
    "max_cache_candidates": 7,
}


@pytest.fixture(scope="module", autouse=True)
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(HERE), *sys.path])
        patch.setattr(devices, "probe_nvidia", lambda: None)
        patch.setenv("PAGEDTUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def options_for(folder: Path, *variants: str, ops: tuple[str, ...] = ("kv_write",)) -> TuneOptions:
    plan = SweepFile.model_validate({**SWEEP, "cache_ops": ops}, strict=False)
    return TuneOptions(
        device=GPU,
        cells=cells_of(Configs(), plan) + cache_cells_of(Configs(), plan),
        variants=tuple(f"{HERE / 'fake_gpu.py'}:{name}" for name in variants),
        sweep=plan,
        sweep_name="test",
        folder=folder / "h100",
        budget_s=60.0,
        present=False,
        jobs=replace(Jobs(), check="fake_jobs:check", predict="fake_gpu:predict"),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache-tune")


@pytest.fixture(scope="module")
def result(folder: Path) -> TuneResult:
    """Attention at one bucket, writes at two, and no variant for block copies."""
    return tune(options_for(folder, "ManyGpu", "WriteGpu", ops=("kv_write", "copy_blocks")), Quiet())


def test_each_op_has_winners_of_its_own_variants(result: TuneResult) -> None:
    won = [(e.op, e.bucket.key, e.workload, e.variant) for e in result.table.entries]
    assert sorted(won) == [
        ("attention", "n4-c128", "uniform", "many_gpu"),
        ("kv_write", "n2048-c128", "chunk", "write_gpu"),
        ("kv_write", "n4-c128", "decode", "write_gpu"),
    ]
    for entry in result.table.entries:
        assert (entry.verdict, entry.time_evidence) == (Verdict.EMULATED, TimeEvidence.PREDICTED)
    pairs = {(r.op, r.variant) for r in result.records}
    assert pairs == {("attention", "many_gpu"), ("kv_write", "write_gpu")}


def test_cells_that_no_variant_computes_are_left_out(result: TuneResult) -> None:
    assert (result.num_cells, result.cells_reached) == (3, 3)


def test_fewer_candidates_of_a_cache_operation(result: TuneResult) -> None:
    """Seven of the accepted ones of `write_gpu`, its default among them; those refused are recorded all the same."""

    def tried(op: Op) -> set[float]:
        seen = {r.candidate_key: r for r in result.records if r.op == op and r.bucket.max_num_seqs == 4}
        return {r.config["us"] for r in seen.values() if r.config["kind"] != "refused"}

    assert len(tried(Op.ATTENTION)) > len(tried(Op.KV_WRITE))
    writes = {r.candidate_key for r in result.records if r.op == Op.KV_WRITE and r.config["kind"] != "refused"}
    assert len(writes) == 7
    assert "write_gpu[kind=good,us=200.0]" in writes


def test_the_format_is_chosen_on_attention_alone(result: TuneResult) -> None:
    attention = select([r for r in result.records if r.op == Op.ATTENTION], result.table.device)
    assert result.table.chosen_formats == attention.chosen_formats != {}
    (choice,) = format_choices(result.records, result.table)
    assert choice == format_choices(result.records, attention)[0]
    writes = select([r for r in result.records if r.op == Op.KV_WRITE], result.table.device)
    assert len(writes.entries) == 2
    assert writes.chosen_formats == {}


def test_slow_writes_change_no_format(result: TuneResult) -> None:
    """Were writes part of the average, a format whose writes take a second would lose."""

    def other_format(record: Record) -> Record:
        pool_format = replace(record.pool_format, block_size=8)
        slow = replace(record, pool_format=pool_format)
        if record.op == Op.KV_WRITE and record.timing is not None:
            slow = replace(slow, timing=replace(record.timing, median_us=1e6, ci_us=(9e5, 2e6)))
        return slow

    records = [*result.records, *map(other_format, result.records)]
    (chosen,) = select(records, result.table.device).chosen_formats.values()
    assert chosen.block_size == 8  # it wastes less memory


def text_of(result: TuneResult) -> tuple[str, str]:
    consoles = [Console(width=120, file=io.StringIO()) for _ in range(2)]
    show_winners(consoles[0], result.table, result.records)
    show_cache_winners(consoles[1], result.table, result.records)
    first, second = (c.file.getvalue() for c in consoles)  # type: ignore[attr-defined]
    return first, second


def test_tables_of_their_own(result: TuneResult) -> None:
    attention, cache = text_of(result)
    assert "write" not in attention
    assert "many_gpu" in attention
    assert "many_gpu" not in cache
    assert "Cache operations  smollm2-135m  9/3x64-bf16  predicted, not measured" in cache
    assert "write 4 decoded" in cache
    assert "write chunk of 2,048" in cache


def test_without_them_there_is_no_table(result: TuneResult) -> None:
    table = replace(result.table, entries=tuple(e for e in result.table.entries if e.op == Op.ATTENTION))
    assert text_of(replace(result, table=table))[1] == ""


def test_commands_show_both(result: TuneResult, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--results", str(folder)]
    assert main(["winners", *where]) == 0
    out = capsys.readouterr().out
    assert out.index("many_gpu") < out.index("Cache operations") < out.index("KV pool per model")
    assert main(["explain", "smollm2-135m", *where]) == 0
    out = capsys.readouterr().out
    assert "winner: many_gpu" in out
    assert "winner: write_gpu" not in out
    assert out.index("winner: many_gpu") < out.index("Cache operations")
    assert main(["explain", "smollm2-135m", "--op", "kv_write", "--num-seqs", "100", "--context", "1", *where]) == 0
    out = capsys.readouterr().out
    assert "served by the next larger tuned one, n2048-c128" in out
    assert "write chunk of 2,048: smollm2-135m" in out
    assert "`calibrate` settles attention alone" in out
    assert "many_gpu" not in out
    assert main(["explain", "smollm2-135m", "--op", "gather_kv", *where]) == 2
    assert "gather_kv was not tuned here; there are attention, kv_write" in capsys.readouterr().err


def test_a_variant_of_an_op_that_is_not_tuned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"write_gpu computes kv_write on cuda; this tune is about attention on cuda"):
        tune(options_for(tmp_path, "ManyGpu", "WriteGpu", ops=()), Quiet())


def test_a_cell_may_count_less_than_the_one_before_it() -> None:
    """60 s less the reserve, for one cell and two that count a quarter each: 1 of 1.5, then a half of the rest."""
    now = 0.0
    budget = Budget(62.0, lambda: now)
    first = budget.slice_of(1.5)
    assert first.left_s == pytest.approx(40.0)
    now = 40.0
    assert budget.slice_of(2).left_s == pytest.approx(10.0)
