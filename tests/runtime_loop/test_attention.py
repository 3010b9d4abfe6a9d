"""PagedAttention on the caller's tensors, against attention over plain contiguous K and V."""

from __future__ import annotations

import math

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.launch import LaunchPlan, WorkspaceSpec
from pagedtune.kernels.pool_format import Layout, PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Op
from pagedtune.runtime.attention import PagedAttention, PagedOp, Workspaces
from pagedtune.runtime.dispatch import Dispatch

DEVICE = Device("cpu", DeviceKind.CPU, product="any", num_units=2, isa="portable")
PROBLEM = Problem(6, 2, 8, q_dtype=DType.FP32)
EAGER = {Op.ATTENTION: ("eager",), Op.KV_WRITE: ("eager_kv_write",)}
NATIVE = {Op.ATTENTION: ("cpu_split",), Op.KV_WRITE: ("cpu_kv_write",)}
CONTEXTS, QUERIES = (1, 7, 33, 12), (1, 7, 5, 1)  # decode, whole prompt, chunk of a prompt, decode


class Batch:
    """Random sequences, written into a pool through the write op under test."""

    def __init__(self, problem: Problem, pool_format: PoolFormat, dispatch: Dispatch) -> None:
        generator = torch.Generator().manual_seed(3)
        heads, block_size = problem.num_kv_heads, pool_format.block_size
        self.k, self.v = ([torch.randn(c, heads, 8, generator=generator) for c in CONTEXTS] for _ in range(2))
        self.q = torch.randn(sum(QUERIES), problem.num_q_heads, 8, generator=generator)
        counts = [-(-c // block_size) for c in CONTEXTS]
        blocks = torch.randperm(sum(counts) + 3, generator=generator).int()
        self.tables = list(blocks[: sum(counts)].split(counts))
        self.block_table = torch.full((len(CONTEXTS), max(counts)), -1, dtype=torch.int32)
        for row, table in zip(self.block_table, self.tables, strict=True):
            row[: len(table)] = table
        self.pools = {
            "k_cache": torch.full(pool_format.k_shape(len(blocks), problem), math.nan),
            "v_cache": torch.full(pool_format.v_shape(len(blocks), problem), math.nan),
        }
        slots = [table.long().repeat_interleave(block_size) * block_size for table in self.tables]
        slots = [(s + torch.arange(len(s)) % block_size)[:c] for s, c in zip(slots, CONTEXTS, strict=True)]
        written = {"k": torch.cat(self.k), "v": torch.cat(self.v), "slot_mapping": torch.cat(slots)}
        writer = PagedOp(Op.KV_WRITE, problem, pool_format, dispatch)
        writer.plan(Bounds(sum(CONTEXTS), 1)).bind({**written, **self.pools})()
        self.context_lens = torch.tensor(CONTEXTS, dtype=torch.int32)
        self.query_start_loc = torch.tensor((0, *torch.tensor(QUERIES).cumsum(0)), dtype=torch.int32)

    def expected(self, problem: Problem) -> torch.Tensor:
        """In float64, over K and V as they were before they went through the pool."""
        outs = []
        for q, k, v in zip(self.q.split(QUERIES), self.k, self.v, strict=True):
            k, v = (x.double().repeat_interleave(problem.gqa_ratio, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(8)
            if problem.soft_cap:
                scores = problem.soft_cap * torch.tanh(scores / problem.soft_cap)
            back = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
            seen = (back >= 0) & (back < (problem.window or len(k)))
            outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v))
        return torch.cat(outs)


@pytest.mark.parametrize("fallbacks", [EAGER, NATIVE], ids=["eager", "native"])
@pytest.mark.parametrize(
    ("problem", "pool_format"),
    [
        (PROBLEM, PoolFormat(4, DType.FP32)),
        (PROBLEM, PoolFormat(16, DType.FP32, Layout.HND)),
        (Problem(6, 2, 8, q_dtype=DType.FP32, window=3), PoolFormat(4, DType.FP32)),
        (Problem(6, 2, 8, q_dtype=DType.FP32, soft_cap=0.5), PoolFormat(8, DType.FP32)),
    ],
    ids=["plain", "hnd", "window", "soft cap"],
)
def test_prompts_chunks_and_decodes_in_one_launch(
    fallbacks: dict[Op, tuple[str, ...]], problem: Problem, pool_format: PoolFormat
) -> None:
    dispatch = Dispatch(DEVICE, fallbacks=fallbacks)
    batch = Batch(problem, pool_format, dispatch)
    attention = PagedAttention(problem, pool_format, dispatch)
    bounds = Bounds(len(CONTEXTS), max(CONTEXTS), max(QUERIES))
    tensors = (batch.block_table, batch.context_lens, batch.query_start_loc)
    out = attention(batch.q, batch.pools["k_cache"], batch.pools["v_cache"], *tensors, bounds)
    torch.testing.assert_close(out.double(), batch.expected(problem), rtol=1e-5, atol=1e-5)
    given = torch.empty_like(out)
    lse = torch.empty(out.shape[:2])
    again = attention(batch.q, batch.pools["k_cache"], batch.pools["v_cache"], *tensors, bounds, out=given, lse=lse)
    assert again is given
    assert torch.equal(given, out)
    assert torch.isfinite(lse).all()


def test_a_tensor_that_does_not_fit_is_named() -> None:
    dispatch = Dispatch(DEVICE, fallbacks=EAGER)
    batch = Batch(PROBLEM, PoolFormat(4, DType.FP32), dispatch)
    attention = PagedAttention(PROBLEM, PoolFormat(4, DType.FP32), dispatch)
    bounds = Bounds(len(CONTEXTS), max(CONTEXTS), max(QUERIES))
    rest = (batch.block_table, batch.context_lens, batch.query_start_loc, bounds)
    with pytest.raises(ValueError, match=r"slot 'q' has dtype torch\.float64"):
        attention(batch.q.double(), batch.pools["k_cache"], batch.pools["v_cache"], *rest)
    with pytest.raises(ValueError, match="slot 'block_table'"):
        attention(batch.q, batch.pools["k_cache"], batch.pools["v_cache"], batch.block_table.long(), *rest[1:])
    with pytest.raises(ValueError, match="num_seqs=4 exceeds the plan's bound of 2"):
        attention(batch.q, batch.pools["k_cache"], batch.pools["v_cache"], *rest[:3], Bounds(2, 64, 8))


def test_a_binary_is_loaded_once_for_all_buckets_that_run_it() -> None:
    attention = PagedAttention(PROBLEM, PoolFormat(4, DType.FP32), Dispatch(DEVICE, fallbacks=NATIVE))
    one, other = (attention.plan(Bounds(seqs, 128)) for seqs in (1, 64))
    assert [a.key for a in one.selection.artifacts] == [a.key for a in other.selection.artifacts] != []
    assert one is not other
    assert one.executor is other.executor


def test_workspaces_grow_and_are_shared() -> None:
    """Split partials of one launch at a time: the memory of the largest serves them all."""
    problem, pool_format = PROBLEM, PoolFormat(16, DType.FP32)
    workspaces = Workspaces()
    variant = next(v for v in Dispatch(DEVICE).variants if v.name == "cpu_split")
    config = variant.config_from({"num_splits": 4})
    small, large = (variant.plan(problem, pool_format, config, Bounds(n, 4096)) for n in (2, 8))
    first = workspaces.take(small)["partial_out"]
    second = workspaces.take(large)["partial_out"]
    third = workspaces.take(small)["partial_out"]
    assert tuple(first.shape) == tuple(third.shape) == small.workspaces["partial_out"].shape
    assert tuple(second.shape) == large.workspaces["partial_out"].shape
    assert third.data_ptr() == second.data_ptr() != first.data_ptr()


def test_outgrown_workspaces_stay_for_the_graphs_that_hold_their_addresses() -> None:
    """Nothing but `Workspaces` refers to them here, as where a CUDA graph was captured over a launch."""
    workspaces = Workspaces()
    plans = [LaunchPlan((), {}, {"partial": WorkspaceSpec(torch.uint8, (size,))}) for size in (100, 101, 150, 1000)]
    taken = [StorageWeakRef(workspaces.take(plan)["partial"].untyped_storage()) for plan in plans]
    assert not any(memory.expired() for memory in taken)
    assert workspaces.take(plans[1])["partial"].untyped_storage().nbytes() == 1000
    assert len({memory.cdata for memory in taken}) == 3  # 150 bytes fit into the 200 that 101 asked for
    del workspaces
    assert all(memory.expired() for memory in taken)
