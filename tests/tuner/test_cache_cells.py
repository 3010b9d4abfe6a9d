"""Cells of cache operations: which there are, that they are the runtime's launches, and who asks for them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pagedtune.harness.count_target import num_units
from pagedtune.kernels.bounds import Bounds, Bucket, bucket_of
from pagedtune.kernels.dispatch import DispatchTable, Winner
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.gpu_cache import cache_limits
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import TimeEvidence, Verdict
from pagedtune.kernels.variant import Op
from pagedtune.runtime.host_pool import STAGING_BYTES
from pagedtune.tuner import cli_tune, devices
from pagedtune.tuner.cache_cells import CHUNK_TOKENS, cache_cells_of, launch_text
from pagedtune.tuner.cli import main
from pagedtune.tuner.configs import CACHE_OPS, Configs, SweepFile
from pagedtune.tuner.errors import UsageError
from pagedtune.tuner.setup import TuneOptions
from pagedtune.tuner.space import Cell, cells_of
from pagedtune.tuner.yaml_files import read_yaml

SWEEP: dict[str, Any] = {
    "description": "test",
    "models": ["llama-3-8b", "smollm2-135m"],
    "dtypes": ["bf16"],
    "block_sizes": [16, 32],
    "layouts": ["nhd"],
    "buckets": [
        {"num_seqs": 1, "context_len": 8192, "weight": 1.0},
        {"num_seqs": 48, "context_len": 1024, "weight": 1.0},
    ],
    "workloads": ["uniform"],
}


def cells(**fields: Any) -> tuple[Cell, ...]:
    return cache_cells_of(Configs(), SweepFile.model_validate({**SWEEP, **fields}, strict=False))


def of(op: Op, model: str = "llama-3-8b", block_size: int = 16) -> list[Cell]:
    found = [c for c in cells() if (c.op, c.model, c.pool_format.block_size) == (op, model, block_size)]
    assert found
    return found


def test_every_problem_and_format_has_each_operation_once_or_twice() -> None:
    found = cells()
    assert len({cell.key for cell in found}) == len(found)
    counts = Counter((c.op, c.model, c.pool_format.key) for c in found)
    assert len(counts) == len(CACHE_OPS) * 2 * 2
    assert set(counts.values()) <= {1, 2}
    assert {(c.model, c.problem.key) for c in found} == {
        ("llama-3-8b", "32/8x128-bf16"),
        ("smollm2-135m", "9/3x64-bf16"),
    }


def test_they_have_no_share_of_the_decode_steps() -> None:
    assert {cell.bucket_weight for cell in cells()} == {0.0}


def test_launches_fill_the_bounds_that_they_are_planned_for() -> None:
    """A token of a write, a pair, and a listed block count as a sequence of the bounds (`cache_limits`)."""
    for cell in cells():
        assert bucket_of(cell.bucket.bounds) == cell.bucket
        (most, *_) = cache_limits(cell.op, cell.bucket.bounds).values()
        assert num_units(cell.op, cell.workload.query_lens) == most


def test_a_write_of_a_decode_batch_and_of_a_chunk() -> None:
    """`ModelAttention` plans a write for `Bounds(tokens, 1)`; 48 sequences decode at most."""
    decode, chunk = of(Op.KV_WRITE)
    assert decode.bucket == bucket_of(Bounds(48, 1))
    assert set(decode.workload.query_lens) == {1}
    assert chunk.bucket == bucket_of(Bounds(CHUNK_TOKENS, 1))
    assert (chunk.workload.context_lens, chunk.workload.query_lens) == ((CHUNK_TOKENS,), (CHUNK_TOKENS,))


def test_blocks_that_are_packed_fill_the_staging_buffer_of_the_host_pool() -> None:
    """`HostPool` plans one launch for the blocks of all layers that its buffer holds: 64 KiB each of llama-3-8b."""
    block = 16 * 8 * 2 * 128 * 2
    for op in (Op.PACK_BLOCKS, Op.UNPACK_BLOCKS):
        (cell,) = of(op)
        assert cell.bucket == bucket_of(Bounds(STAGING_BYTES // block // 32 * 32, 1))
        (twice,) = of(op, block_size=32)
        assert twice.bucket.max_num_seqs == cell.bucket.max_num_seqs // 2


def test_a_gather_is_tuned_at_both_ends_of_the_sweep() -> None:
    assert [c.bucket for c in of(Op.GATHER_KV)] == [Bucket(1, 8192), Bucket(64, 1024)]
    one = [b for b in SWEEP["buckets"] if b["num_seqs"] == 48]
    assert [c.bucket for c in cells(buckets=one, cache_ops=["gather_kv"], models=["llama-3-8b"], block_sizes=[16])] == [
        Bucket(64, 1024)
    ]


def test_the_runtime_finds_the_winner_for_smaller_launches() -> None:
    """Through the lookup of `Dispatch`: a decode batch, a chunk, one forked sequence, and what is beyond the tuned."""
    entries = tuple(
        Winner(
            c.op, c.model, c.problem, c.pool_format, c.bucket, c.workload.name, c.workload.name, {}, 1.0, (1.0, 1.0),
            1.0, Verdict.EMULATED, TimeEvidence.PREDICTED,
        )
        for c in cells()
    )  # fmt: skip
    table = DispatchTable("gpu", entries)

    def variant(op: Op, *bounds: int) -> str | None:
        found = table.lookup(Problem(32, 8, 128), PoolFormat(16, DType.BF16), Bounds(*bounds), op)
        return found and found.variant

    assert [variant(Op.KV_WRITE, n, 1) for n in (1, 64, 65, 2048, 2049)] == ["decode", "decode", "chunk", "chunk", None]
    assert variant(Op.COPY_BLOCKS, 1, 1) == "pairs"
    assert variant(Op.UNPACK_BLOCKS, 1024, 1) == "blocks"
    assert variant(Op.ATTENTION, 1, 1) is None


def test_a_sweep_names_its_operations() -> None:
    assert {c.op for c in cells()} == set(CACHE_OPS)
    assert {c.op for c in cells(cache_ops=["kv_write"])} == {Op.KV_WRITE}
    assert cells(cache_ops=[]) == ()


def test_attention_is_no_cache_operation(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "description: x\nmodels: [m]\ndtypes: [bf16]\nblock_sizes: [16]\nlayouts: [nhd]\nworkloads: [ragged]\n"
        "buckets:\n  - {num_seqs: 1, context_len: 128, weight: 1}\ncache_ops: [kv_write, attention]\n"
    )
    with pytest.raises(UsageError, match=r"cache_ops.*attention is always tuned"):
        read_yaml(path, SweepFile, "x.yaml")


@pytest.mark.parametrize("name", Configs().names("sweeps"))
def test_every_sweep_that_ships_has_them_for_a_gpu(name: str) -> None:
    configs = Configs()
    sweep = configs.sweep(name)
    assert {c.op for c in cells_of(configs, sweep)} == {Op.ATTENTION}
    found = cache_cells_of(configs, sweep)
    assert {c.op for c in found} == set(CACHE_OPS)
    assert len({c.key for c in found}) == len(found)


@pytest.mark.parametrize(
    ("op", "bucket", "workload", "text"),
    [
        (Op.KV_WRITE, Bucket(64, 128), "decode", "write 64 decoded"),
        (Op.KV_WRITE, Bucket(2048, 128), "chunk", "write chunk of 2,048"),
        (Op.COPY_BLOCKS, Bucket(8, 128), "pairs", "copy 8 blocks"),
        (Op.GATHER_KV, Bucket(64, 2048), "ragged", "gather 64 x 2,048"),
        (Op.UNPACK_BLOCKS, Bucket(1024, 128), "blocks", "unpack 1,024 blocks"),
    ],
)
def test_what_a_launch_does(op: Op, bucket: Bucket, workload: str, text: str) -> None:
    assert launch_text(op, bucket, workload) == text


class Asked(Exception):
    """Ends a command where the tune would begin."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[TuneOptions]:
    """What the command asks for; nothing is tuned."""
    seen: list[TuneOptions] = []

    def tune(options: TuneOptions, progress: object) -> None:
        seen.append(options)
        raise Asked

    monkeypatch.setattr(cli_tune, "tune", tune)
    monkeypatch.setattr(devices, "probe_nvidia", lambda: None)
    return seen


@pytest.mark.parametrize(("device", "sweep"), [("h100", "gpu"), ("a100", "quick"), ("cpu", "quick")])
def test_a_tune_of_a_cpu_leaves_them_out(asked: list[TuneOptions], tmp_path: Path, device: str, sweep: str) -> None:
    with pytest.raises(Asked):
        main(["tune", "--device", device, "--sweep", sweep, "--results", str(tmp_path)])
    (options,) = asked
    ops = {cell.op for cell in options.cells}
    assert ops == ({Op.ATTENTION} if device == "cpu" else set(Op))
    assert ("cuda_kv_write" in options.variants) == (device != "cpu")
    assert "cpu_kv_write" not in options.variants


@pytest.mark.parametrize(
    ("variants", "ops"),
    [
        (["cuda_split_mma"], {Op.ATTENTION}),
        (["cuda_kv_write"], {Op.KV_WRITE}),
        (["triton_split", "cuda_pack_blocks"], {Op.ATTENTION, Op.PACK_BLOCKS}),
        ([f"{__file__}:Mine"], set(Op)),  # nobody knows before a worker has loaded it
    ],
)
def test_named_variants_leave_cells_of_what_they_compute(
    asked: list[TuneOptions], tmp_path: Path, variants: list[str], ops: set[Op]
) -> None:
    with pytest.raises(Asked):
        main(["tune", "--device", "h100", "--results", str(tmp_path), *(f"--variant={name}" for name in variants)])
    assert {cell.op for cell in asked[0].cells} == ops
