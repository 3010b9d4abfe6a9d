"""Traffic of packing and unpacking on the GPU by hand counts: every byte once, 16 bytes a thread, whole sectors."""

from __future__ import annotations

import pytest
import torch
from test_gpu_cache_ops import BF16, FP8, PROBLEM, SECTOR, launch, pools, wide_sectors
from vgpu_attention import H100

from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.cuda_swap import CudaPackBlocks, CudaUnpackBlocks
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.triton_swap import TritonPackBlocks, TritonUnpackBlocks
from pagedtune.kernels.variant import Op, Variant

VARIANTS = [CudaPackBlocks(), CudaUnpackBlocks(), TritonPackBlocks(), TritonUnpackBlocks()]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(1).contiguous().view(torch.uint8)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("pool_format", [BF16, FP8, PoolFormat(16, DType.BF16, Layout.XPACKED)], ids=lambda f: f.key)
def test_blocks_move_in_whole_sectors(variant: Variant, pool_format: PoolFormat) -> None:
    """Three blocks of K and V are read and written once, with 16 bytes a thread; the skipped one not at all.

    Beside them each block of threads reads its id, 8 bytes of one sector.
    """
    before = pools(pool_format)
    row = sum(pool[0].numel() for pool in before.values())
    size = 3 * row * pool_format.kv_dtype.itemsize
    staging = torch.randn(4, row).to(pool_format.kv_dtype.torch)
    tensors = {name: pool.clone() for name, pool in before.items()}
    given = {**tensors, "staging": staging.clone(), "block_ids": torch.tensor([4, 1, -1, 2])}
    step = launch(variant, pool_format, given, Bounds(6, 100))
    assert wide_sectors(step, "ld") == wide_sectors(step, "st") == size // SECTOR
    assert step.counters.write_sectors == size // SECTOR
    assert sum(s.lanes for s in step.sites if s.instruction.startswith("st.global")) == size // 16
    assert step.counters.read_sectors - size // SECTOR <= step.counters.instructions["global"]
    packed = torch.cat([bytes_of(pool) for pool in before.values()], 1)
    if variant.op is Op.PACK_BLOCKS:
        assert torch.equal(bytes_of(given["staging"])[[0, 1, 3]], packed[[4, 1, 2]])
        assert torch.equal(bytes_of(given["staging"])[2], bytes_of(staging)[2])
        assert all(torch.equal(bytes_of(tensors[name]), bytes_of(before[name])) for name in before)
    else:
        packed[[4, 1, 2]] = bytes_of(staging)[[0, 1, 3]]
        assert torch.equal(torch.cat([bytes_of(pool) for pool in tensors.values()], 1), packed)


@pytest.mark.parametrize("variant", VARIANTS[:2], ids=lambda v: v.name)
@pytest.mark.parametrize(
    ("problem", "align"),
    [
        (PROBLEM, 16),
        (Problem(2, 1, 65, head_dim_v=33), 2),  # rows of 65 and 33 elements
        (Problem(2, 1, 66, head_dim_v=34), 4),
        (Problem(2, 1, 64, head_dim_v=36), 8),  # V's rows of 72 bytes
    ],
    ids=lambda value: getattr(value, "key", str(value)),
)
def test_a_row_need_be_aligned_no_more_than_runs_of_k_and_v(variant: Variant, problem: Problem, align: int) -> None:
    """16 tokens of one head: both parts of a row and the row itself are multiples of what the slot asks for."""
    config = variant.default_config(problem, BF16, Bounds(4, 100), H100)
    slots = variant.plan(problem, BF16, config, Bounds(4, 100)).slots
    assert slots["v_cache"].align == align
    assert slots["staging"].align >= align
    shape = slots["staging"].shape
    assert isinstance(shape[1], int)
    assert shape[1] * 2 % slots["staging"].align == 0


def test_spaces_have_reasons_for_what_they_refuse() -> None:
    for variant in VARIANTS:
        summary = variant.summarise_space(Problem(2, 1, 65), PoolFormat(2, DType.BF16), H100)
        assert summary.accepted
        assert all("vector_bytes" in r.reason for r in summary.rejected)
        assert bool(summary.rejected) == variant.name.startswith("cuda")
