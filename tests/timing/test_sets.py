"""What timed launches work on, and the least time that they can take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedtune.harness.roofline import FLOOR_SLACK, floor_us, kv_bytes, visible_tokens
from pagedtune.harness.timing_sets import DoesNotFit, Extent, extent, make_sets
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.slots import attention_slots
from pagedtune.kernels.workload import Workload

SMALL = Problem(6, 2, 16, q_dtype=DType.FP32)
FP32 = PoolFormat(16, DType.FP32)
CPU = Device("cpu", DeviceKind.CPU, l2_bytes=1 << 20, memory_bytes=8 << 30)


def test_kv_bytes_are_those_of_every_visible_token_once() -> None:
    llama, bf16 = Problem(32, 8, 128), PoolFormat(16, DType.BF16)
    assert kv_bytes(llama, bf16, Workload.uniform(8, 4096)) == 8 * 4096 * 2 * 8 * 128 * 2
    assert kv_bytes(llama, PoolFormat(256, DType.BF16), Workload((1, 0))) == 4096


def test_a_window_limits_what_must_be_read() -> None:
    problem = Problem(4, 4, 64, window=100)
    assert visible_tokens(problem, Workload((1000, 50, 0))) == 150
    assert visible_tokens(Problem(4, 4, 64, window=100, max_query_len=8), Workload((1000,), (8,))) == 107


def test_the_floor_is_the_bytes_over_the_ceiling_with_the_allowance() -> None:
    assert floor_us(30_000_000, 30.0) == pytest.approx(1000 / FLOOR_SLACK)


def test_a_cold_rotation_is_several_times_the_cache() -> None:
    size = extent(SMALL, FP32, Workload.uniform(4, 64), CPU, "cold")
    assert size.set_bytes == 4 * 64 * 256
    assert size.working_set_bytes >= 5 << 20
    assert size.note == ""


def test_a_hot_rotation_is_one_set() -> None:
    assert extent(SMALL, FP32, Workload.uniform(4, 64), CPU, "hot").num_sets == 1


def test_a_rotation_that_is_too_small_to_be_cold_says_so() -> None:
    size = extent(SMALL, FP32, Workload((1,)), CPU, "cold")
    assert size.num_sets == 4096
    assert "not quite cold" in size.note


def test_pools_stay_within_their_share_of_memory() -> None:
    little = Device("cpu", DeviceKind.CPU, l2_bytes=1 << 20, memory_bytes=32 << 20)
    size = extent(SMALL, FP32, Workload.uniform(8, 512), little, "cold")
    assert 1 <= size.working_set_bytes <= 8 << 20
    with pytest.raises(DoesNotFit, match=r"16 MiB .* 8 MiB"):
        extent(SMALL, FP32, Workload.uniform(8, 8192), little, "cold")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="cold, hot"):
        extent(SMALL, FP32, Workload((1,)), CPU, "warm")


@given(
    lens=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 16]),
    num_sets=st.integers(1, 4),
    layout=st.sampled_from(list(Layout)),
)
@settings(max_examples=30, deadline=None)
def test_every_block_belongs_to_one_sequence_of_one_set(
    lens: list[int], block_size: int, num_sets: int, layout: Layout
) -> None:
    workload, pool_format = Workload(tuple(lens)), PoolFormat(block_size, DType.FP32, layout)
    sets = make_sets(SMALL, pool_format, workload, Extent(num_sets, 1), seed=1)
    live = [b for s in range(num_sets) for row in sets.tensors(s)["block_table"].tolist() for b in row if b >= 0]
    assert len(live) == len(set(live)) == num_sets * workload.num_blocks(block_size)
    assert all(b < sets.shared["k_cache"].shape[0] for b in live)
    for row, length in zip(sets.block_tables[0].tolist(), lens, strict=True):
        needed = -(-length // block_size)
        assert all(b >= 0 for b in row[:needed])
        assert all(b == -1 for b in row[needed:])


@pytest.mark.parametrize(
    ("problem", "pool_format"),
    [
        (SMALL, FP32),
        (Problem(4, 2, 32, 16, sinks=True, alibi=True), PoolFormat(8, DType.BF16, Layout.HND)),
        (Problem(4, 4, 32), PoolFormat(16, DType.INT8, scale_kind=ScaleKind.PER_HEAD)),
        (Problem(4, 4, 32, q_dtype=DType.FP16), PoolFormat(16, DType.FP8_E4M3, Layout.XPACKED, ScaleKind.PER_TENSOR)),
    ],
)
def test_the_tensors_fill_every_slot_with_finite_numbers(problem: Problem, pool_format: PoolFormat) -> None:
    sets = make_sets(problem, pool_format, Workload((5, 40)), Extent(2, 1), seed=0)
    tensors = sets.tensors(1) | {"out": sets.poisoned_outputs()[1]}
    slots = attention_slots(problem, pool_format)
    assert tensors.keys() == {name for name, spec in slots.items() if not spec.optional}
    for name, tensor in tensors.items():
        assert tensor.dtype == slots[name].dtype
        assert tensor.float().isfinite().all() == (name != "out")
    assert tensors["k_cache"].float().std() > 0.1


def test_the_same_seed_gives_the_same_sets() -> None:
    first, again, other = (make_sets(SMALL, FP32, Workload((40,)), Extent(3, 1), seed) for seed in (1, 1, 2))
    assert torch.equal(first.block_tables, again.block_tables)
    assert torch.equal(first.q, again.q)
    assert not torch.equal(first.q, other.q)
