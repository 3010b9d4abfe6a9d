"""`cuda_split_simt` on the virtual GPU: right and clean for every shape and semantic, its traffic by hand counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vgpu_attention import BF16, H100, Case, attention, require_compiler, run

from pagedtune.harness.vgpu.virtual_gpu import VirtualGpuOptions
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.cuda_split_simt import CudaSplitSimt
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.split_simt_plan import CudaSplitSimtConfig, num_lanes, steps

VARIANT = CudaSplitSimt()
DEVICE = replace(H100, shared_bytes_per_block=232448)
PLAIN = VirtualGpuOptions(num_threads=1)
ADVERSE = replace(PLAIN, reverse_warps=True, reverse_ctas=True, async_early=True, quantum=7, shuffle_seed=3)
FP16, FP8, FP32 = DType.FP16, DType.FP8_E4M3, DType.FP32
Config = CudaSplitSimtConfig

# Together: each merge, 4 and 8 lanes, 1 to 8 keys a lane, ratios of 1 to 12, block sizes of 1 to 256, features, dtypes.
CASES = {
    "window, last block, zero length": (
        Case(Problem(4, 2, 64, window=20), BF16, (5, 37, 128, 0)),
        Config(4, 32, 2, 8, "last_block"),
    ),
    "all features": (
        Case(
            Problem(4, 4, 64, sinks=True, alibi=True, soft_cap=30.0), PoolFormat(8, DType.BF16, Layout.HND), (50, 1, 0)
        ),
        Config(4, 16, 1, 4),
    ),
    "ratio 3 x 80": (
        Case(Problem(6, 2, 80, q_dtype=FP16, window=20), PoolFormat(16, FP16), (50, 33)),
        Config(2, 32, 2, 2, "early_kernel"),
    ),
    "several queries, block 1": (
        Case(Problem(4, 2, 64, max_query_len=3), PoolFormat(1, DType.BF16), (40, 3, 100), (3, 2, 3)),
        Config(4, 16, 2, 4, "last_block"),
    ),
    "ratio 12 x 112, block 5": (
        Case(Problem(12, 1, 112, alibi=True, q_dtype=FP16), PoolFormat(5, FP16), (130, 70)),
        Config(3, 64, 2, 4),
    ),
    "K 128 V 96, block 256": (
        Case(Problem(2, 1, 128, head_dim_v=96, window=30, max_query_len=4), PoolFormat(256, DType.BF16), (130,), (4,)),
        Config(8, 16, 1, 2),
    ),
    "256, one split": (Case(Problem(2, 1, 256), BF16, (70, 1)), Config(1, 16, 2, 2)),
    "fp32 query and pool": (Case(Problem(2, 1, 72, q_dtype=FP32), PoolFormat(16, FP32), (70, 5)), Config(4, 16, 2, 1)),
    "e4m3": (
        Case(Problem(2, 1, 128, sinks=True), PoolFormat(3, FP8, scale_kind=ScaleKind.PER_TENSOR), (5, 137)),
        Config(4, 32, 2, 8, "last_block"),
    ),
    "e4m3, scales of tokens, blocks of 2 under 8 keys": (
        Case(Problem(4, 2, 128), PoolFormat(2, FP8, scale_kind=ScaleKind.PER_TOKEN_HEAD), (50, 5)),
        Config(2, 32, 2, 8),
    ),
    "e4m3, scales of tokens, fewer keys than lanes": (
        Case(Problem(2, 1, 64, window=30), PoolFormat(16, FP8, Layout.HND, ScaleKind.PER_TOKEN_HEAD), (50,)),
        Config(2, 32, 2, 2),
    ),
    "e4m3, fp32 query, HND": (
        Case(Problem(4, 2, 96, q_dtype=FP32), PoolFormat(16, FP8, Layout.HND, ScaleKind.PER_HEAD), (50,)),
        Config(2, 32, 2, 4),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_right_and_clean_under_two_schedules(name: str) -> None:
    case, config = CASES[name]
    assert VARIANT.reject(case.problem, case.pool_format, config, DEVICE) is None
    tensors, _ = run(VARIANT, config, case, PLAIN)
    out, lse = attention(case, tensors)
    rounding = 2.0**-18 if case.problem.q_dtype is FP32 else torch.finfo(case.problem.q_dtype.torch).eps
    assert ((tensors["out"].double() - out).abs() <= rounding * (1 + out.abs())).all()
    off = (tensors["lse"].double() - lse).abs() / lse.abs().clamp(min=1)
    assert (off.nan_to_num(0) <= 2.0**-20).all()
    assert torch.equal(tensors["lse"].isinf(), lse.isinf())
    again, _ = run(VARIANT, config, case, ADVERSE)
    assert torch.equal(again["out"], tensors["out"])
    assert torch.equal(again["lse"], tensors["lse"])


@pytest.mark.parametrize(
    ("problem", "pool_format", "queries"),
    [
        (Problem(2, 2, 128), BF16, 1),
        (Problem(2, 1, 128), PoolFormat(1, DType.BF16), 1),
        (Problem(2, 2, 80, max_query_len=2), BF16, 2),
        (Problem(1, 1, 128), PoolFormat(16, FP8), 1),
    ],
    ids=lambda value: str(getattr(value, "key", value)),
)
def test_each_byte_is_read_once(problem: Problem, pool_format: PoolFormat, queries: int) -> None:
    """Live bytes / 32 sectors of 32 bytes, and for each of 4 warps the sectors of its query rows; those twice where 16
    8-bit elements of a key belong to 32 bytes of the query, which two loads take by halves."""
    lens = (256, 200)
    case = Case(problem, pool_format, lens, (queries,) * 2)
    _, gpu = run(VARIANT, Config(1, 64, 4, 4), case, PLAIN)
    step, live = gpu.report.steps[0], sum(lens) * pool_format.bytes_per_token(problem)
    wide = [s for s in step.sites if s.instruction.startswith("ld.global") and ".v4" in s.instruction]
    query = 4 * sum(case.tokens) * problem.num_q_heads * problem.head_dim * problem.q_dtype.itemsize
    loads = 2 if pool_format.kv_dtype.itemsize == 1 else 1
    assert sum(s.sectors for s in wide) == (live + loads * query) // 32
    assert step.counters.unique_read_bytes["k_cache"] == live // 2
    assert step.counters.unique_read_bytes["v_cache"] == live // 2


def test_the_loop_needs_no_shared_memory() -> None:
    """Three times as many keys of one split: not one more access to shared memory, and no more barriers."""
    accesses, barriers = [], []
    for context in (128, 384):
        _, gpu = run(VARIANT, Config(1, 64, 2, 4), Case(Problem(2, 1, 128), BF16, (context,)), PLAIN)
        step = gpu.report.steps[0]
        accesses.append(sum(s.executed for s in step.sites if ".shared" in s.instruction))
        barriers.append(step.counters.barriers)
    assert accesses[0] == accesses[1] > 0
    assert barriers[0] == barriers[1]


def test_no_shape_of_a_small_ratio_spills() -> None:
    require_compiler(VARIANT.name)
    for problem, kv_dtype in (
        (Problem(32, 32, 128), DType.BF16),
        (Problem(32, 16, 128), DType.BF16),
        (Problem(16, 8, 256), DType.BF16),
        (Problem(32, 16, 80), DType.BF16),
        (Problem(32, 16, 128), FP8),
        (Problem(32, 8, 128), DType.BF16),
    ):
        pool_format = PoolFormat(16, kv_dtype)
        config = VARIANT.default_config(problem, pool_format, Bounds(8, 4096), DEVICE)
        assert VARIANT.reject(problem, pool_format, config, DEVICE) is None
        (artifact,) = VARIANT.build(problem, pool_format, config, DEVICE)
        assert artifact.resources["attention_split"].spill_bytes == 0, problem.key


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "lanes", "pieces"),
    [
        (128, DType.BF16, 8, 2),
        (80, DType.BF16, 4, 3),
        (112, DType.BF16, 8, 2),
        (96, DType.BF16, 4, 3),
        (128, FP8, 8, 1),
    ],
)
def test_lanes_of_a_key_leave_few_idle(head_dim: int, kv_dtype: DType, lanes: int, pieces: int) -> None:
    """16, 10, 14, 12 and 8 pieces of 16 bytes: 8 lanes would leave 6 idle of 16 with 10 pieces, 4 lanes 2 of 12."""
    problem, pool_format = Problem(2, 2, head_dim), PoolFormat(16, kv_dtype)
    assert num_lanes(problem, pool_format) == lanes
    assert steps(problem, pool_format) == (pieces, pieces)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_splits": 129}, "num_splits=129 must be from 1 to 128"),
        ({"keys_per_lane": 3}, "keys_per_lane=3 must be a power of two"),
        ({"keys_per_lane": 16}, "keys_per_lane=16 must be from 1 to 8"),
        ({"split_tokens": 0}, "split_tokens=0 must be at least 1"),
        ({"merge": "never"}, "merge='never' must be one of"),
    ],
)
def test_configs_are_rejected_with_their_reason(changes: dict[str, object], reason: str) -> None:
    config = replace(Config(), **changes)  # type: ignore[arg-type]
    found = VARIANT.reject(Problem(32, 32, 128), BF16, config, DEVICE)
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    ("problem", "pool_format", "reason"),
    [
        (Problem(8, 8, 64), PoolFormat(16, DType.BF16, Layout.XPACKED), "xpacked"),
        (Problem(8, 8, 320), BF16, "at most 256"),
        (Problem(8, 8, 72), PoolFormat(16, FP8), "multiple of 16"),
    ],
)
def test_shapes_are_rejected_with_their_reason(problem: Problem, pool_format: PoolFormat, reason: str) -> None:
    found = VARIANT.reject(problem, pool_format, Config(), DEVICE)
    assert found is not None
    assert reason in found
