"""Counts of large shapes from small ones: against runs of the shape itself, and against counts by hand."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pagedtune.harness import count_run, kernel_counts
from pagedtune.harness.count_run import Run, matrix_work, run_counts
from pagedtune.harness.count_target import Target
from pagedtune.harness.fewer_heads import with_fewer_heads, with_heads
from pagedtune.harness.kernel_counts import NotCounted, count
from pagedtune.harness.occupancy import reject_static
from pagedtune.harness.prediction_jobs import predict_candidate
from pagedtune.kernels.artifact import Artifact, ArtifactKind, KernelAbi, Resources
from pagedtune.kernels.bounds import Bounds, Bucket
from pagedtune.kernels.cuda_paged import CudaPaged, CudaPagedConfig
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.launch import KernelStep, LaunchPlan
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.serial import to_jsonable
from pagedtune.kernels.workload import Workload
from pagedtune.tuner.configs import Configs

pytestmark = pytest.mark.usefixtures("own_counts")
needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="NVRTC is not installed")
GPU = Configs().gpu("h100").device("h100")
PROBLEM = Problem(8, 4, 64)
FORMAT = PoolFormat(16, DType.BF16)
LENGTHS = (512, 37, 300, 129, 400, 64, 211)


def target(num_seqs: int = len(LENGTHS)) -> Target:
    return Target(CudaPaged(), CudaPagedConfig(4), PROBLEM, FORMAT, Bounds(num_seqs, 512), GPU)


@needs_nvrtc
def test_a_batch_is_the_sum_of_its_sequences() -> None:
    """The rule's answer against the batch itself, all four heads and seven sequences of it."""
    workload = Workload(LENGTHS)
    counted = count(target(), workload)
    assert 0 <= counted.error <= kernel_counts.MAX_ERROR
    assert "from one sequence and 1 of 4 KV heads" in counted.how
    (step,) = counted.steps
    plan = target().plan(PROBLEM, len(LENGTHS))
    own = Run(target().artifacts(PROBLEM), plan, PROBLEM, FORMAT, LENGTHS, (1,) * len(LENGTHS), GPU)
    (seen,) = run_counts(own)
    assert step.read_sectors == pytest.approx(seen["sectors.read"], rel=0.03)
    assert step.num_instructions == pytest.approx(kernel_counts.num_instructions(seen), rel=0.03)
    assert step.busiest == pytest.approx(seen["busiest"], rel=0.03)
    assert step.blocks == len(LENGTHS) * PROBLEM.num_q_heads


@needs_nvrtc
def test_unique_bytes_and_sectors_by_hand() -> None:
    """Whole blocks: each K and V byte is distinct once, and each of the GQA group's two heads reads its sectors."""
    counted = count(replace(target(1), bounds=Bounds(1, 256)), Workload((256,)))
    (step,) = counted.steps
    kv = 256 * PROBLEM.num_kv_heads * 2 * 64 * 2
    assert kv <= step.unique_bytes <= 1.03 * kv  # queries, outputs, table and lengths beside it
    assert 2 * kv / 32 <= step.read_sectors <= 1.05 * 2 * kv / 32
    assert step.workspace_bytes == 0.0


@needs_nvrtc
def test_irregular_work_is_run_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_counts, "MAX_ERROR", -1.0)  # nothing extrapolates well enough
    whole = count(target(), Workload(LENGTHS))
    assert whole.how == "the batch itself was run"
    monkeypatch.setattr(kernel_counts, "MAX_KV_BYTES", 1 << 20)
    with pytest.raises(NotCounted, match="not regular enough to be extrapolated"):
        count(target(), Workload(LENGTHS))


@needs_nvrtc
def test_counts_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(count_run, "cache_dir", lambda: tmp_path)
    first = count(target(1), Workload((100,)))
    assert list((tmp_path / "counts").glob("*.json"))
    monkeypatch.setattr(count_run, "_count", lambda run: pytest.fail("counted again"))
    assert count(target(1), Workload((100,))) == first


@needs_nvrtc
def test_the_job_gives_a_time_with_what_it_is_made_of() -> None:
    payload = {
        "variant": "cuda_paged",
        "config": {"num_warps": 4},
        "problem": to_jsonable(PROBLEM),
        "pool_format": to_jsonable(FORMAT),
        "device": to_jsonable(GPU),
        "bucket": to_jsonable(Bucket(1, 128)),
        "workload": to_jsonable(Workload((100,))),
    }
    answer = predict_candidate(payload)
    timing = answer["timing"]
    assert timing["mode"] == "predicted"
    assert timing["samples_us"] == []
    assert timing["kv_bytes"] == 100 * FORMAT.bytes_per_token(PROBLEM)
    assert timing["note"].startswith("predicted, not measured")
    (step,) = answer["counters"]["predicted"]
    assert step["total_us"] == pytest.approx(timing["median_us"])
    assert step["bound"] in ("memory", "launch", "issue")


@needs_nvrtc
def test_fewer_heads_run_the_same_binary() -> None:
    fewer = with_fewer_heads(CudaPaged(), CudaPagedConfig(4), PROBLEM, FORMAT, GPU, 2)
    assert fewer == with_heads(PROBLEM, 2) == Problem(4, 2, 64)

    class Picky(CudaPaged):
        def reject(self, problem, pool_format, config, device):  # type: ignore[no-untyped-def]
            return "all heads or none" if problem != PROBLEM else None

    assert with_fewer_heads(Picky(), CudaPagedConfig(4), PROBLEM, FORMAT, GPU, 2) == PROBLEM


@pytest.mark.parametrize(
    ("opcode", "kind", "work"),
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "bf16", 16 * 8 * 16),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "tf32", 16 * 8 * 8),
        ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", "e4m3", 16 * 8 * 32),
    ],
)
def test_multiply_adds_of_a_matrix_instruction(opcode: str, kind: str, work: int) -> None:
    assert matrix_work(opcode) == (kind, work)


def test_an_opcode_without_a_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="names no shape"):
        matrix_work("mma.sync.aligned.row.col.f32")


@pytest.mark.parametrize(
    ("resources", "threads", "reason"),
    [
        (Resources(registers=64), 128, None),
        (Resources(registers=256), 128, "needs 256 registers a thread"),
        (Resources(registers=64, spill_bytes=512), 128, "spills: 512 bytes"),
        (Resources(registers=64, dynamic_shared_bytes=233_000), 128, "needs 233000 bytes of shared memory"),
        (Resources(registers=128), 1024, "not one block of k .1024 threads. fits on h100: too much of its registers"),
    ],
)
def test_what_a_binary_shows_before_it_runs(resources: Resources, threads: int, reason: str | None) -> None:
    """255 registers a thread, 227 KiB a block, 64 K registers an SM: the CUDA programming guide's table for 9.0."""
    artifact = Artifact(ArtifactKind.CUBIN, Path("k"), "key", "sm_90", {"k": KernelAbi(())}, {"k": resources})
    plan = LaunchPlan((KernelStep("k", (1, 1, 1), (), (threads, 1, 1)),), {})
    found = reject_static((artifact,), plan, GPU)
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(reason, found)
    if resources.spill_bytes:
        assert reject_static((artifact,), plan, GPU, allow_spills=True) is None
