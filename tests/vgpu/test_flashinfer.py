"""FlashInfer's paged decode, compiled from its wheel's headers, against the oracle; and the plan of its host code.

Skipped where the package index cannot be reached: `pytest -m "not foreign"` leaves out what needs the wheel.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedtune.harness import oracle
from pagedtune.harness.count_run import random_tensors
from pagedtune.harness.foreign import ForeignError
from pagedtune.harness.inputs import AttentionData
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions
from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.launch import KernelStep
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import BuildError
from pagedtune.kernels.workload import Workload
from pagedtune.tuner import flashinfer_kernels
from pagedtune.tuner.configs import Configs
from pagedtune.tuner.emulated_flashinfer import (
    FlashInferPeer,
    Planned,
    chunk_pages,
    decode_plan,
    division,
    merge_blocks,
    tables,
)
from pagedtune.tuner.emulated_peer import Ask, Cell
from pagedtune.tuner.flashinfer_kernels import FIELDS, Shape, kernels

H100 = Configs().gpu("h100").device("h100")
SCHEDULES = {
    "plain": VirtualGpuOptions(num_threads=1),
    "adverse": VirtualGpuOptions(num_threads=1, reverse_warps=True, reverse_ctas=True, async_early=True, quantum=7),
}


def built_or_skip(shape: Shape) -> dict[str, Artifact]:
    pytest.importorskip("cuda.bindings.nvrtc", reason="FlashInfer's kernels are compiled with NVRTC")
    pytest.importorskip("triton", reason="the CUDA headers come with Triton's wheel")
    try:
        return kernels(shape, H100.capability)
    except ForeignError as error:
        pytest.skip(str(error))


@pytest.mark.foreign
@pytest.mark.parametrize(
    ("heads", "dim", "page_size", "lens", "chunk"),
    [
        ((8, 2), 128, 16, (5, 37, 130, 700), 8),
        ((8, 2), 128, 16, (5, 37, 128), None),
        ((2, 2), 64, 1, (1, 300), 128),
        ((6, 2), 64, 12, (11, 12, 13, 500), 10),
    ],
    ids=["split", "whole", "one-head-token-pages", "three-heads-pages-of-12"],
)
def test_decode(heads: tuple[int, int], dim: int, page_size: int, lens: tuple[int, ...], chunk: int | None) -> None:
    """Chunks as `chunk_pages` gives them: of 128 tokens, for a device has room for them all; none for short batches."""
    problem, pool = Problem(*heads, dim, q_dtype=DType.BF16), PoolFormat(page_size, DType.BF16)
    built = built_or_skip(shape := Shape.of(problem, DType.BF16))
    assert chunk_pages([-(-n // page_size) for n in lens], page_size, heads[1], H100.num_units) == chunk
    tensors = random_tensors(problem, pool, lens, (1,) * len(lens))
    planned = Planned(lens, chunk, merge_blocks(len(lens) * heads[0], shape, built["merge"], H100))
    prepared = decode_plan(problem, tensors, planned, built, H100)
    expected = torch.from_numpy(oracle.attention(AttentionData(problem, pool, tensors)).out)
    for options in SCHEDULES.values():
        tensors["out"].zero_()
        gpu = VirtualGpu(prepared.artifacts, replace(options, capability=H100.capability))
        gpu.prepare(prepared.plan.bind(prepared.plan.allocate_workspaces() | dict(prepared.tensors)))()
        assert len(gpu.report.steps) == (1 if chunk is None else 2)
        # Chunks' outputs and the answer are rounded once each, relative to the largest value.
        error = (tensors["out"].double() - expected).abs().max() / expected.abs().max()
        assert error < 2 * torch.finfo(torch.bfloat16).eps, float(error)


@pytest.mark.foreign
def test_the_whole_batch_fills_the_device_once() -> None:
    """With n blocks on an SM: the least chunk of 8 x 256 pages, 8 KV heads, that leaves no block waiting."""
    cell = Cell(Problem(32, 8, 128, q_dtype=DType.BF16), PoolFormat(16, DType.BF16), Workload.uniform(8, 4096), H100)
    built_or_skip(Shape.of(cell.problem, DType.BF16))
    tensors = random_tensors(cell.problem, cell.pool_format, (64,), (1,))
    peer = FlashInferPeer()
    decode, merge = peer.blocks(Ask(cell, tensors, cell.problem, {}))
    assert decode % 64 == 0
    assert merge == 2 * 132  # 256 rows
    prepared = peer.prepare(Ask(cell, tensors, cell.problem, {}))
    (step, merge_step) = prepared.plan.steps
    assert isinstance(step, KernelStep)
    assert isinstance(merge_step, KernelStep)
    assert step.grid == (decode // 64, 8, 1)
    assert merge_step.grid == (32, 1, 1)  # of one sequence's rows


@pytest.mark.foreign
def test_another_layout_of_the_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(DType.BF16, DType.BF16, 64, 1)
    built_or_skip(shape)
    moved = {**FIELDS, "o_indptr": (208, FIELDS["o_indptr"][1]), "kv_chunk_size_ptr": (200, FIELDS["o_indptr"][1])}
    monkeypatch.setattr(flashinfer_kernels, "FIELDS", moved)
    with pytest.raises(BuildError, match="o_indptr"):
        kernels(shape, H100.capability)


def test_chunks_by_hand() -> None:
    """At most 1188 blocks / (8 sequences x 8 heads) = 18 chunks: 15 pages of 256, as 14 would make 19."""
    assert chunk_pages([256] * 8, 16, 8, 1188) == 15
    assert chunk_pages([256] * 149, 16, 8, 1188) is None  # as many sequences x heads as blocks: not split
    assert chunk_pages([8, 3, 1], 16, 8, 1188) is None  # no sequence above 128 tokens
    assert chunk_pages([9, 3, 1], 16, 8, 1188) == 8
    assert chunk_pages([2048], 16, 4, 132) == 63  # 33 chunks of 32768 tokens for one sequence, over 4 heads


def test_work_list_by_hand() -> None:
    found = {name: list_.tolist() for name, list_ in tables([7, 1, 6], 3).items()}
    assert found == {"requests": [0, 0, 0, 1, 2, 2], "tiles": [0, 1, 2, 0, 0, 1], "firsts": [0, 3, 4, 6]}


@given(st.integers(1, 1 << 20), st.integers(0, (1 << 32) - 2))
def test_division_by_multiplying_is_exact(divisor: int, number: int) -> None:
    multiplier, add, shift = division(divisor)
    high = (number + add) * multiplier >> 32 if multiplier else number
    assert multiplier < 1 << 32
    assert high >> shift == number // divisor


def test_shapes_without_a_kernel_are_named() -> None:
    cell = Cell(Problem(28, 4, 128, q_dtype=DType.BF16), PoolFormat(16, DType.BF16), Workload.uniform(1, 64), H100)
    assert "7 query heads a KV head" in FlashInferPeer().reject(cell)
    assert "head dim 96" in Shape(DType.BF16, DType.BF16, 96, 4).reject()
    assert "over int8" in Shape(DType.BF16, DType.INT8, 128, 4).reject()
    assert Shape(DType.BF16, DType.FP8_E4M3, 128, 8).reject() == ""


def test_shared_memory_by_hand() -> None:
    """K and V, 2 stages, 4 heads x 2 rows of 128 x 2 bytes; 128 offsets of 8 bytes. MHA: 4 tokens at a time, 8 rows."""
    assert Shape(DType.BF16, DType.BF16, 128, 4).shared_bytes() == 2 * 2 * 4 * 2 * 128 * 2 + 128 * 8
    assert Shape(DType.BF16, DType.BF16, 128, 1).shared_bytes() == 2 * 2 * 4 * 8 * 128 * 2 + 4 * 128 * 8
    assert Shape(DType.BF16, DType.BF16, 128, 4).block == (16, 4, 2)
    assert Shape(DType.BF16, DType.BF16, 64, 3).block == (8, 3, 5)
    assert Shape(DType.BF16, DType.FP8_E4M3, 128, 4).block == (8, 4, 4)
    assert Shape(DType.BF16, DType.BF16, 128, 4).merge_shared_bytes == 4 * 8 * 128 * 2 + 128 * 4
