"""Traffic of the GPU cache operations by hand counts: every byte once, 16 bytes a thread, whole sectors."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from vgpu_attention import H100

from pagedtune.harness.case import Case
from pagedtune.harness.gate import run_case
from pagedtune.harness.vgpu.report import StepReport
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.cuda_cache import CudaCopyBlocks, CudaGatherKV, CudaKVWrite
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.triton_cache import TritonCopyBlocks, TritonGatherKV, TritonKVWrite
from pagedtune.kernels.variant import Op, Variant
from pagedtune.kernels.workload import Workload
from pagedtune.tuner.configs import Configs

PROBLEM = Problem(16, 8, 128)
BF16 = PoolFormat(16, DType.BF16)
FP8 = PoolFormat(16, DType.FP8_E4M3, Layout.HND, ScaleKind.PER_HEAD)
TOKENS, SECTOR = 21, 32


def launch(variant: Variant, pool_format: PoolFormat, tensors: dict[str, torch.Tensor], bounds: Bounds) -> StepReport:
    compiler = "triton" if variant.name.startswith("triton") else "cuda"
    if importlib.util.find_spec(compiler) is None:
        pytest.skip(f"{compiler} is not installed: {variant.name} cannot be compiled")
    config = variant.default_config(PROBLEM, pool_format, bounds, H100)
    gpu = VirtualGpu(variant.build(PROBLEM, pool_format, config, H100), VirtualGpuOptions(num_threads=1))
    gpu.prepare(variant.plan(PROBLEM, pool_format, config, bounds).bind(tensors))()
    return gpu.report.steps[0]


def pools(pool_format: PoolFormat, num_blocks: int = 5) -> dict[str, torch.Tensor]:
    return {
        name: torch.randn(shape(num_blocks, PROBLEM)).to(pool_format.kv_dtype.torch)
        for name, shape in (("k_cache", pool_format.k_shape), ("v_cache", pool_format.v_shape))
    }


def wide_sectors(step: StepReport, kind: str) -> int:
    return sum(s.sectors for s in step.sites if s.instruction.startswith(f"{kind}.global") and ".v" in s.instruction)


@pytest.mark.parametrize("variant", [CudaKVWrite(), TritonKVWrite()], ids=lambda v: v.name)
@pytest.mark.parametrize("pool_format", [BF16, FP8], ids=lambda f: f.key)
def test_write_moves_whole_sectors(variant: Variant, pool_format: PoolFormat) -> None:
    """21 tokens of 8 x (128 + 128) bf16 are read, and as many elements stored; 4 skipped ones cost neither."""
    rows = {name: torch.randn(TOKENS + 4, 8, 128).bfloat16() for name in ("k", "v")}
    slots = torch.cat([torch.arange(TOKENS) + 30, torch.full((4,), -1)])
    tensors = {**rows, "slot_mapping": slots, **pools(pool_format)}
    if pool_format.scale_kind is ScaleKind.PER_HEAD:
        tensors |= {name: torch.rand(8) + 0.5 for name in ("k_scale", "v_scale")}
    step = launch(variant, pool_format, tensors, Bounds(TOKENS + 4, 100))
    # Where 16 elements of 8 bits are 32 bytes of the rows, two loads may take the halves of each sector.
    least = TOKENS * 8 * 256 * 2 // SECTOR
    assert wide_sectors(step, "ld") in ((least,) if variant.name.startswith("cuda") else (least, 2 * least))
    assert step.counters.write_sectors == TOKENS * 8 * 256 * pool_format.kv_dtype.itemsize // SECTOR
    assert step.counters.unique_read_bytes["k"] == TOKENS * 8 * 128 * 2


@pytest.mark.parametrize("variant", [CudaCopyBlocks(), TritonCopyBlocks()], ids=lambda v: v.name)
@pytest.mark.parametrize("pool_format", [BF16, FP8], ids=lambda f: f.key)
def test_copy_moves_whole_sectors(variant: Variant, pool_format: PoolFormat) -> None:
    """Two pairs of K and V blocks are read and written once, with 16 bytes a thread; the skipped pair not at all."""
    before = pools(pool_format)
    tensors = {name: pool.clone() for name, pool in before.items()}
    step = launch(
        variant, pool_format, {**tensors, "block_pairs": torch.tensor([[4, 0], [1, -1], [4, 2]])}, Bounds(3, 100)
    )
    size = 2 * 16 * 8 * 256 * pool_format.kv_dtype.itemsize
    assert wide_sectors(step, "ld") == wide_sectors(step, "st") == size // SECTOR
    assert step.counters.write_sectors == size // SECTOR
    threads = sum(s.lanes for s in step.sites if s.instruction.startswith("st.global"))
    assert threads == size // 16
    for name, pool in tensors.items():
        wanted = before[name].view(torch.uint8)[[4, 1, 4, 3, 4]]
        assert torch.equal(pool.view(torch.uint8), wanted)


@pytest.mark.parametrize("variant", [CudaGatherKV(), TritonGatherKV()], ids=lambda v: v.name)
@pytest.mark.parametrize("pool_format", [BF16, FP8], ids=lambda f: f.key)
def test_gather_moves_whole_sectors(variant: Variant, pool_format: PoolFormat) -> None:
    """21 + 3 tokens are read and written once, 16 bytes a thread, whatever the bounds are."""
    dtype = pool_format.kv_dtype
    tensors = {
        **pools(pool_format),
        "block_table": torch.tensor([[3, 1, -1], [0, -1, -1]], dtype=torch.int32),
        "context_lens": torch.tensor([TOKENS, 3], dtype=torch.int32),
        "out_start": torch.tensor([0, TOKENS, TOKENS + 3], dtype=torch.int32),
        **{name: torch.zeros(TOKENS + 3, 8, 128).to(dtype.torch) for name in ("k_out", "v_out")},
    }
    step = launch(variant, pool_format, tensors, Bounds(4, 100, 100))
    size = (TOKENS + 3) * 8 * 256 * dtype.itemsize
    assert wide_sectors(step, "ld") == wide_sectors(step, "st") == size // SECTOR
    assert sum(s.lanes for s in step.sites if s.instruction.startswith("st.global")) == size // 16


@pytest.mark.parametrize(
    ("problem", "pool_format", "vector_bytes"),
    [
        (Problem(2, 1, 128), BF16, 16),
        (Problem(2, 1, 72), PoolFormat(16, DType.FP8_E4M3), 16),
        (Problem(2, 1, 65, head_dim_v=33), BF16, 2),
        (Problem(2, 1, 66, head_dim_v=34), BF16, 4),
    ],
    ids=lambda value: str(getattr(value, "key", value)),
)
def test_default_takes_the_widest_vectors_that_rows_allow(
    problem: Problem, pool_format: PoolFormat, vector_bytes: int
) -> None:
    """Rows of 256, 144 (of the query), 130 and 66, 132 and 68 bytes."""
    config = CudaKVWrite().default_config(problem, pool_format, Bounds(4, 100), H100)
    assert config.as_dict()["vector_bytes"] == vector_bytes
    wider = CudaKVWrite().config_from(config.as_dict() | {"vector_bytes": 2 * vector_bytes})
    assert CudaKVWrite().reject(problem, pool_format, wider, H100)


def test_spaces_have_reasons_for_what_they_refuse() -> None:
    for variant in (CudaKVWrite(), CudaCopyBlocks(), CudaGatherKV(), TritonKVWrite(), TritonCopyBlocks()):
        summary = variant.summarise_space(Problem(2, 1, 66), BF16, H100)
        assert summary.accepted
        assert all("vector_bytes" in r.reason for r in summary.rejected)
        assert bool(summary.rejected) == (variant.name in ("cuda_kv_write", "cuda_gather_kv"))


def test_e4m3_needs_a_device_that_triton_converts_on() -> None:
    a100 = replace(H100, name="a100", capability=80)
    reason = TritonKVWrite().reject(PROBLEM, FP8, TritonKVWrite().config_type(), a100)
    assert reason is not None
    assert "8.9" in reason
    assert CudaKVWrite().reject(PROBLEM, FP8, CudaKVWrite().config_type(), a100) is None


@pytest.mark.parametrize("name", ["l40s", "h100"])
@pytest.mark.parametrize("variant", [CudaKVWrite(), TritonKVWrite()], ids=lambda v: v.name)
def test_e4m3_is_rounded_once_on_every_device(variant: Variant, name: str) -> None:
    """Thousands of fp32 values, some next to a tie: by way of fp16, as a compiler may go, they would be on it."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    case = Case(
        Op.KV_WRITE,
        Problem(8, 2, 64, q_dtype=DType.FP32, max_query_len=16),
        PoolFormat(16, DType.FP8_E4M3),
        Workload((20, 16), (16, 16), "two"),
    )
    device = Configs().gpu(name).device(name)
    result = run_case(
        variant, variant.default_config(case.problem, case.pool_format, case.bounds, device), case, device
    )
    assert result.passed, result.reason
