"""`cuda_split_mma` on the virtual GPU: right and clean for every shape and semantic, and its traffic by hand counts."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from vgpu_attention import BF16, H100, Case, attention, require_compiler, run, tensors_of

from pagedtune.harness.issue_slots import issue_slots
from pagedtune.harness.vgpu.report import StepReport
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.cuda_split_mma import CudaSplitMma
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.launch import KernelStep, MemsetStep
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.split_mma_plan import CudaSplitMmaConfig, live_splits, row_tiles

VARIANT = CudaSplitMma()
DEVICE = replace(H100, shared_bytes_per_block=232448)
PLAIN = VirtualGpuOptions(num_threads=1)
ADVERSE = replace(PLAIN, reverse_warps=True, reverse_ctas=True, async_early=True, quantum=7, shuffle_seed=3)
FP16, FP8 = DType.FP16, DType.FP8_E4M3
Config = CudaSplitMmaConfig

# Together: each merge, every head dim, GQA ratios of 1 to 71, block sizes of 1 to 256, layouts, queries, features,
# dtypes.
CASES = {
    "window, last block, zero length": (
        Case(Problem(8, 2, 64, window=20), BF16, (5, 37, 128, 0)),
        Config(4, 64, 32, 4, 3, "last_block"),
    ),
    "all features": (
        Case(
            Problem(4, 4, 64, sinks=True, alibi=True, soft_cap=30.0), PoolFormat(8, DType.BF16, Layout.HND), (50, 1, 0)
        ),
        Config(4, 32, 16, 2, 2),
    ),
    "ratio 3 x 80": (
        Case(Problem(6, 2, 80, q_dtype=FP16, window=20), PoolFormat(16, FP16), (50, 33)),
        Config(2, 32, 32, 2, 2, "early_kernel"),
    ),
    "several queries": (
        Case(Problem(8, 2, 64, max_query_len=3), BF16, (40, 3, 100), (3, 2, 3)),
        Config(4, 32, 16, 2, 3, "last_block"),
    ),
    "ratio 71, block 1": (
        Case(Problem(71, 1, 64), PoolFormat(1, DType.BF16), (33, 70)),
        Config(2, 32, 32, 2, 2, "last_block"),
    ),
    "ratio 12 x 112, block 5": (
        Case(Problem(24, 2, 112, alibi=True, q_dtype=FP16), PoolFormat(5, FP16), (130, 70)),
        Config(3, 64, 32, 2, 2),
    ),
    "ratio 20, K 128 V 96, block 256": (
        Case(
            Problem(20, 1, 128, head_dim_v=96, window=30, max_query_len=4, soft_cap=5.0),
            PoolFormat(256, DType.BF16),
            (130, 70),
            (4, 1),
        ),
        Config(8, 16, 16, 1, 3),
    ),
    "256, one split": (Case(Problem(8, 1, 256), BF16, (70, 1)), Config(1, 32, 16, 1, 3)),
    "K 192, V 128, 8 queries": (
        Case(Problem(5, 1, 192, head_dim_v=128, max_query_len=8), PoolFormat(7, DType.BF16), (130, 8), (8, 5)),
        Config(8, 32, 16, 1, 3, "last_block"),
    ),
    "e4m3, bf16": (
        Case(Problem(7, 1, 128, sinks=True), PoolFormat(3, FP8, scale_kind=ScaleKind.PER_TENSOR), (5, 137)),
        Config(4, 128, 32, 4, 2, "last_block"),
    ),
    "e4m3, scales of tokens, 16 tokens a warp": (
        Case(Problem(6, 2, 128, soft_cap=20.0), PoolFormat(3, FP8, Layout.HND, ScaleKind.PER_TOKEN_HEAD), (137, 5)),
        Config(4, 32, 32, 2, 3),
    ),
    "e4m3, scales of tokens, 32 tokens a warp, queries": (
        Case(Problem(5, 1, 64, max_query_len=4), PoolFormat(16, FP8, scale_kind=ScaleKind.PER_TOKEN_HEAD), (70,), (4,)),
        Config(8, 64, 16, 2, 4, "last_block"),
    ),
    "e4m3, 80 and 112": (
        Case(Problem(5, 1, 80, head_dim_v=112, max_query_len=4), PoolFormat(1, FP8), (50, 137), (4, 3)),
        Config(4, 64, 32, 2, 3),
    ),
    "e4m3, ratio 24, HND": (
        Case(
            Problem(24, 1, 192, head_dim_v=128, soft_cap=20.0),
            PoolFormat(16, FP8, Layout.HND, ScaleKind.PER_HEAD),
            (50,),
        ),
        Config(4, 64, 32, 2, 3),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_right_and_clean_under_two_schedules(name: str) -> None:
    case, config = CASES[name]
    tensors, _ = run(VARIANT, config, case, PLAIN)
    out, lse = attention(case, tensors)
    rounding = torch.finfo(case.problem.q_dtype.torch).eps
    assert ((tensors["out"].double() - out).abs() <= rounding * (1 + out.abs())).all()
    off = (tensors["lse"].double() - lse).abs() / lse.abs().clamp(min=1)
    assert (off.nan_to_num(0) <= 2.0**-20).all()
    assert torch.equal(tensors["lse"].isinf(), lse.isinf())
    again, _ = run(VARIANT, config, case, ADVERSE)
    assert torch.equal(again["out"], tensors["out"])
    assert torch.equal(again["lse"], tensors["lse"])


def test_splits_of_a_sequence_do_not_depend_on_the_plan() -> None:
    """ceil(100 / 32) splits of 32 tokens, whatever longer context the plan is made for, and no more than num_splits."""
    config, case = Config(8, 32, 32, 2, 2), Case(Problem(4, 1, 64), BF16, (100,))
    bounds = [Bounds(1, n) for n in (100, 3000)]
    assert [live_splits(case.problem, config, b) for b in bounds] == [4, 8]
    results = []
    for b in bounds:
        tensors = tensors_of(case)
        plan = VARIANT.plan(case.problem, case.pool_format, config, b)
        gpu = VirtualGpu(VARIANT.build(case.problem, case.pool_format, config, DEVICE), PLAIN)
        gpu.prepare(plan.bind(tensors | plan.allocate_workspaces()))()
        results.append(tensors["out"])
    assert torch.equal(*results)


def kv_sectors(step: StepReport) -> int:
    return sum(s.sectors for s in step.sites if s.instruction.startswith("cp.async.cg"))


@pytest.mark.parametrize(
    ("problem", "pool_format"),
    [
        (Problem(8, 2, 128), BF16),
        (Problem(2, 2, 128), PoolFormat(1, DType.BF16)),
        (Problem(8, 2, 128, max_query_len=4), BF16),
        (Problem(7, 1, 128), PoolFormat(16, FP8)),
    ],
    ids=lambda value: value.key,
)
def test_each_byte_is_read_once_without_bank_conflicts(problem: Problem, pool_format: PoolFormat) -> None:
    """Live bytes / 32 sectors of 32 bytes, whatever the group, the block size and the query tokens are; a tail that
    fills no block costs only its own rows. Queries and tables come on top: at most 3 % of these already small cases."""
    require_compiler(VARIANT.name)
    lens = (256, 200)
    queries = (problem.max_query_len,) * 2
    _, gpu = run(VARIANT, Config(4, 64, 64, 4, 2), Case(problem, pool_format, lens, queries), PLAIN)
    split, live = gpu.report.steps[0], sum(lens) * pool_format.bytes_per_token(problem)
    assert kv_sectors(split) == live // 32
    assert split.counters.unique_read_bytes["k_cache"] == live // 2
    assert split.counters.bank_conflicts == 0


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"), [(64, FP8), (80, FP8), (80, DType.BF16), (96, DType.BF16), (128, FP8)]
)
def test_matrix_loads_have_no_bank_conflicts(head_dim: int, kv_dtype: DType) -> None:
    """The loop reads shared memory with ldmatrix only, besides the tokens' places, which a warp broadcasts. Rows of 4,
    5, 10, 12 and 8 copies of 16 bytes: every kind of swizzle."""
    case = Case(Problem(4, 1, head_dim), PoolFormat(16, kv_dtype), (40,))
    _, gpu = run(VARIANT, Config(1, 32, 32, 1, 2), case, PLAIN)
    loads = [s for s in gpu.report.steps[0].sites if s.instruction.startswith(("ldmatrix", "ld.shared.v2"))]
    assert len({s.instruction for s in loads}) >= 3
    assert sum(s.conflicts for s in loads) == 0


@pytest.mark.parametrize(
    ("pool_format", "config"),
    [(BF16, Config(1, 64, 64, 4, 3)), (PoolFormat(16, FP8), Config(1, 128, 128, 4, 3))],
    ids=["bf16", "e4m3"],
)
def test_half_of_the_issue_slots_are_free_at_the_bandwidth_of_an_h200(pool_format: PoolFormat, config: Config) -> None:
    """Machine instructions of the loop per KV byte, times the bytes that each of 132 multiprocessors gets at 4800 GB/s,
    against 4 instructions a cycle at 1755 MHz; and the bytes on their way against bandwidth times 700 ns."""
    problem = Problem(4, 1, 128)
    _, gpu = run(VARIANT, config, Case(problem, pool_format, (1024,)), PLAIN)
    (artifact,) = VARIANT.build(problem, pool_format, config, H100)
    slots = issue_slots(artifact.path, "attention_split", gpu.report.steps[0])
    assert slots.matched, slots.reason
    tile_bytes, per_unit = config.tile_tokens * pool_format.bytes_per_token(problem), 4800e9 / 132
    loops = 1024 // config.tile_tokens * config.num_warps
    assert max(loop.iterations for loop in slots.loops if loop.instructions == slots.main_loop) == loops
    assert slots.main_loop * config.num_warps / tile_bytes * per_unit <= 0.5 * 4 * 1.755e9
    blocks_per_unit = 233472 // (artifact.resources["attention_split"].dynamic_shared_bytes + 1024)
    assert blocks_per_unit * (config.num_stages - 1) * tile_bytes >= per_unit * 700e-9


def test_no_shape_spills() -> None:
    for problem, kv_dtype in (
        (Problem(32, 8, 128), DType.BF16),
        (Problem(32, 1, 128), DType.BF16),
        (Problem(64, 1, 256), DType.BF16),
        (Problem(64, 1, 128), FP8),
    ):
        require_compiler(VARIANT.name)
        pool_format = PoolFormat(16, kv_dtype)
        config = VARIANT.default_config(problem, pool_format, Bounds(8, 4096), DEVICE)
        assert VARIANT.reject(problem, pool_format, config, DEVICE) is None
        (artifact,) = VARIANT.build(problem, pool_format, config, DEVICE)
        resources = artifact.resources["attention_split"]
        assert resources.spill_bytes == 0, problem.key
        assert resources.registers <= 255


def test_blocks_share_the_rows_of_a_large_group_evenly() -> None:
    """At most 128 output registers a thread: 4 tiles of 8 rows at 128 value dims. 71 rows are 9 tiles, so 3 blocks."""
    assert row_tiles(Problem(8, 1, 128)) == 1
    assert row_tiles(Problem(9, 1, 128)) == 2
    assert row_tiles(Problem(71, 1, 128)) == 3
    assert row_tiles(Problem(4, 1, 128, max_query_len=8)) == 4
    assert row_tiles(Problem(64, 1, 256)) == 2


def test_plan_launches_no_block_that_can_have_no_keys() -> None:
    """Splits of 512 tokens: 8 of a context of 4096; of a window of 1000 at most 2; and one needs no merge at all."""
    config = Config(128, 64, 512, 4, 3, "last_block")
    for problem, bounds, splits in (
        (Problem(32, 8, 128), Bounds(3, 4096), 8),
        (Problem(32, 8, 128, window=1000), Bounds(3, 4096), 2),
        (Problem(32, 8, 128), Bounds(3, 512), 1),
    ):
        plan = VARIANT.plan(problem, BF16, config, bounds)
        (launch,) = (s for s in plan.steps if isinstance(s, KernelStep))
        assert launch.grid == (24, splits, 1)
        assert bool(plan.workspaces) == (splits > 1) == any(isinstance(s, MemsetStep) for s in plan.steps)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_splits": 129}, "num_splits=129 must be from 1 to 128"),
        ({"tile_tokens": 48}, "16 or 32 for each of the 4 warps"),
        ({"num_stages": 1}, "num_stages=1 must be from 2"),
        ({"merge": "never"}, "merge='never' must be one of"),
        ({"num_warps": 8, "tile_tokens": 256, "num_stages": 3}, "a block needs .* of shared memory"),
    ],
)
def test_configs_are_rejected_with_their_reason(changes: dict[str, object], reason: str) -> None:
    config = replace(Config(), **changes)  # type: ignore[arg-type]
    found = VARIANT.reject(Problem(32, 8, 128), BF16, config, DEVICE)
    assert found is not None
    assert re.search(reason, found)


@pytest.mark.parametrize(
    ("problem", "pool_format", "reason"),
    [
        (Problem(8, 2, 64, q_dtype=DType.FP32), PoolFormat(16, DType.FP32), "tf32"),
        (Problem(8, 2, 64), PoolFormat(16, DType.BF16, Layout.XPACKED), "xpacked"),
        (Problem(8, 2, 320), BF16, "at most 256"),
        (Problem(8, 2, 72), PoolFormat(16, FP8), "multiple of 16"),
        (Problem(8, 2, 64), PoolFormat(16, FP16), "cannot read fp16 pools"),
    ],
)
def test_shapes_are_rejected_with_their_reason(problem: Problem, pool_format: PoolFormat, reason: str) -> None:
    found = VARIANT.reject(problem, pool_format, Config(), DEVICE)
    assert found is not None
    assert reason in found
