"""Counts of cache operations: bytes and sectors by hand, and large launches from small ones against the launch."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from pagedtune.harness import cache_counts
from pagedtune.harness.cache_counts import count_cache_op
from pagedtune.harness.cache_tensors import cache_tensors
from pagedtune.harness.count_target import Target
from pagedtune.harness.kernel_counts import NotCounted
from pagedtune.harness.prediction_jobs import predict_candidate
from pagedtune.harness.roofline import moved_bytes
from pagedtune.kernels.bounds import Bounds, Bucket
from pagedtune.kernels.catalogue import VARIANTS, find_variant
from pagedtune.kernels.device import DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.serial import to_jsonable
from pagedtune.kernels.variant import Op, Variant
from pagedtune.kernels.workload import Workload
from pagedtune.tuner.configs import Configs

pytestmark = pytest.mark.usefixtures("own_counts")
needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="NVRTC is not installed")
GPU = Configs().gpu("h100").device("h100")
PROBLEM = Problem(4, 2, 64)
FORMAT = PoolFormat(16, DType.BF16)
TOKEN = 2 * (64 + 64) * 2  # bytes of K and V of a token: two heads, bf16
ONE_EACH = Workload((1,) * 40)
GATHERED = Workload((128, 16, 64))
CUDA_OPS = [v for v in VARIANTS if v.device_kind is DeviceKind.CUDA and v.op is not Op.ATTENTION]


def target(name: str, bounds: Bounds, pool_format: PoolFormat = FORMAT) -> Target:
    variant = find_variant(name)
    return Target(variant, variant.default_config(PROBLEM, pool_format, bounds, GPU), PROBLEM, pool_format, bounds, GPU)


@pytest.mark.parametrize(
    ("op", "workload", "num_bytes"),
    [
        (Op.KV_WRITE, Workload((5, 300), (1, 300)), 301 * 2 * TOKEN),
        (Op.COPY_BLOCKS, ONE_EACH, 40 * 16 * 2 * TOKEN),
        (Op.GATHER_KV, GATHERED, 208 * 2 * TOKEN),
        (Op.PACK_BLOCKS, ONE_EACH, 40 * 16 * 2 * TOKEN),
        (Op.UNPACK_BLOCKS, ONE_EACH, 40 * 16 * 2 * TOKEN),
        (Op.ATTENTION, GATHERED, 208 * TOKEN),
    ],
)
def test_bytes_that_must_move(op: Op, workload: Workload, num_bytes: int) -> None:
    assert moved_bytes(op, PROBLEM, FORMAT, workload) == num_bytes


def test_a_quantised_write_moves_wide_rows_to_narrow_ones_and_their_scales() -> None:
    """bf16 in; int8 out, with an fp32 scale for each of K and V, token and head."""
    pool_format = PoolFormat(16, DType.INT8, Layout.NHD, ScaleKind.PER_TOKEN_HEAD)
    assert moved_bytes(Op.KV_WRITE, PROBLEM, pool_format, Workload((10,), (10,))) == 10 * 2 * (128 * 2 + 128 + 2 * 4)


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "workload", "read", "written", "lists"),
    [
        ("cuda_kv_write", ONE_EACH, 40 * TOKEN, 40 * TOKEN, 40 * 8),
        ("cuda_copy_blocks", ONE_EACH, 640 * TOKEN, 640 * TOKEN, 40 * 16),
        ("cuda_gather_kv", GATHERED, 208 * TOKEN, 208 * TOKEN, 3 * 4 + 4 * 4 + (8 + 1 + 4) * 4),
        ("cuda_pack_blocks", ONE_EACH, 640 * TOKEN, 640 * TOKEN, 40 * 8),
        ("cuda_unpack_blocks", ONE_EACH, 640 * TOKEN, 640 * TOKEN, 40 * 8),
    ],
)
def test_bytes_and_sectors_by_hand(name: str, workload: Workload, read: int, written: int, lists: int) -> None:
    """Each byte of K and V once; beside them the list of slots, pairs or blocks, or lengths, starts and table. Rows are
    whole sectors of 32 bytes, and nothing but K and V is written."""
    num_units = workload.num_seqs
    counted = count_cache_op(target(name, Bounds(num_units, 128)), workload)
    (step,) = counted.steps
    assert read + written <= step.unique_bytes <= read + written + lists
    assert step.write_sectors == written / 32
    assert step.read_sectors >= read / 32
    assert step.workspace_bytes == 0


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "bounds", "workload"),
    [
        ("cuda_kv_write", Bounds(512, 128), Workload((512,), (512,))),
        ("triton_kv_write", Bounds(512, 128), Workload((1,) * 512)),
        ("cuda_copy_blocks", Bounds(32, 128), Workload((1,) * 32)),
        ("cuda_gather_kv", Bounds(4, 256), Workload((256, 100, 33, 200))),
        ("triton_pack_blocks", Bounds(32, 128), Workload((1,) * 32)),
        ("cuda_unpack_blocks", Bounds(32, 128), Workload((1,) * 32)),
    ],
)
def test_a_large_launch_from_small_ones(
    name: str, bounds: Bounds, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line's answer beside the launch itself, within what the check allows."""
    whole = count_cache_op(target(name, bounds), workload)
    assert whole.how == "the launch itself was run"
    monkeypatch.setattr(cache_counts, "MAX_WHOLE_BYTES", 0)
    monkeypatch.setattr(cache_counts, "PART_BYTES", 1)
    told = count_cache_op(target(name, bounds), workload)
    assert "checked on" in told.how
    for a, b in zip(told.steps, whole.steps, strict=True):
        assert a.blocks == b.blocks
        assert a.read_sectors == pytest.approx(b.read_sectors, rel=0.03)
        assert a.write_sectors == pytest.approx(b.write_sectors, rel=0.03)
        assert a.unique_bytes == pytest.approx(b.unique_bytes, rel=0.03)
        assert a.num_instructions == pytest.approx(b.num_instructions, rel=0.03)
        assert a.busiest == pytest.approx(b.busiest, rel=0.03)


@needs_nvrtc
def test_what_is_not_proportional_is_run_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds, workload = Bounds(32, 128), Workload((1,) * 32)
    monkeypatch.setattr(cache_counts, "MAX_WHOLE_BYTES", 0)
    monkeypatch.setattr(cache_counts, "PART_BYTES", 1)
    monkeypatch.setattr(cache_counts, "MAX_ERROR", -1.0)
    assert count_cache_op(target("cuda_copy_blocks", bounds), workload).how == "the launch itself was run"
    monkeypatch.setattr(cache_counts, "MAX_KV_BYTES", 1 << 10)
    with pytest.raises(NotCounted, match="not proportional to what it moves"):
        count_cache_op(target("cuda_copy_blocks", bounds), workload)


FORMATS = [
    FORMAT,
    PoolFormat(8, DType.BF16, Layout.HND),
    PoolFormat(16, DType.BF16, Layout.XPACKED),
    PoolFormat(16, DType.FP8_E4M3, Layout.NHD, ScaleKind.PER_HEAD),
    PoolFormat(16, DType.INT8, Layout.HND, ScaleKind.PER_TOKEN_HEAD),
]


@pytest.mark.parametrize("pool_format", FORMATS, ids=lambda f: f.key)
@pytest.mark.parametrize("variant", CUDA_OPS, ids=lambda v: v.name)
def test_the_tensors_are_what_every_variant_takes(variant: Variant, pool_format: PoolFormat) -> None:
    """All that the op's slots ask for, in shapes and dtypes that bind."""
    bounds = Bounds(3, 128, 1) if variant.op is not Op.KV_WRITE else Bounds(22, 128)
    config = variant.default_config(PROBLEM, pool_format, bounds, GPU)
    reason = variant.reject(PROBLEM, pool_format, config, GPU)
    swaps = variant.op in (Op.PACK_BLOCKS, Op.UNPACK_BLOCKS)
    assert (reason is not None) == (swaps and pool_format.has_token_scales)  # its rows hold K and V alone
    if reason is None:
        lengths, query_lens = (17, 1, 40), (1, 1, 20)
        plan = variant.plan(PROBLEM, pool_format, config, bounds)
        assert plan.bind(cache_tensors(variant.op, PROBLEM, pool_format, lengths, query_lens))


def test_a_write_goes_to_the_last_tokens_of_each_sequence() -> None:
    slots = cache_tensors(Op.KV_WRITE, PROBLEM, FORMAT, (17, 1, 40), (1, 1, 20))["slot_mapping"]
    assert len(set(slots.tolist())) == 22
    assert slots[0] % 16 == 0  # token 16 is the first of its block
    assert slots[1] % 16 == 0
    assert [int(s) % 16 for s in slots[2:]] == [t % 16 for t in range(20, 40)]
    assert len({int(s) // 16 for s in slots[2:]}) == 2  # tokens 20 to 31, and 32 to 39


def test_no_block_is_copied_over_another_that_is_read() -> None:
    pairs = cache_tensors(Op.COPY_BLOCKS, PROBLEM, FORMAT, (1,) * 9, (1,) * 9)["block_pairs"]
    assert pairs.dtype is torch.int64
    assert sorted(pairs.flatten().tolist()) == list(range(18))


@needs_nvrtc
def test_the_job_predicts_a_cache_operation() -> None:
    payload = {
        "variant": "cuda_kv_write",
        "config": {},
        "problem": to_jsonable(PROBLEM),
        "pool_format": to_jsonable(FORMAT),
        "device": to_jsonable(GPU),
        "bucket": to_jsonable(Bucket(64, 128)),
        "workload": to_jsonable(Workload((1,) * 64)),
    }
    answer = predict_candidate(payload)
    assert answer["timing"]["kv_bytes"] == 64 * 2 * TOKEN
    assert answer["timing"]["mode"] == "predicted"
    (step,) = answer["counters"]["predicted"]
    assert step["total_us"] == pytest.approx(answer["timing"]["median_us"])
    assert step["dram_bytes"] >= 64 * 2 * TOKEN
