"""What a kernel finds in memory: live numbers where the tables point, poison everywhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.inputs import INT_MAX, AttentionInputs, Inputs
from pagedtune.harness.memory import HIGH_ELEMENTS, Poison, bits, poison_bits, same_bits
from pagedtune.harness.placement import place
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.launch import LaunchPlan
from pagedtune.kernels.pool_format import Layout, ScaleKind
from pagedtune.kernels.slots import attention_slots

from .toy import make_case


def made(case: Case, poison: Poison = Poison.NAN) -> Inputs:
    """Tensors of a case for a plan without workspaces; binding checks them."""
    plan = LaunchPlan((), attention_slots(case.problem, case.pool_format))
    inputs = AttentionInputs(case).make(plan, poison)
    plan.bind(inputs.tensors)
    return inputs


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("poison", Poison)
def test_every_slot_that_is_not_live_is_poisoned(layout: Layout, poison: Poison) -> None:
    case = make_case((33, 0, 16, 1), layout=layout)
    inputs = made(case, poison)
    for name in ("k_cache", "v_cache"):
        pool = inputs.slots[name].view
        poisoned = int((bits(pool) == poison_bits(pool.dtype, poison)).sum())
        # 50 live tokens x 2 KV heads x 64; a normal number never equals the poison.
        assert pool.numel() - poisoned == 50 * 2 * 64
        assert poisoned > 0


@pytest.mark.parametrize("poison", Poison)
@pytest.mark.parametrize("hazards", [(), (Hazard.STRIDED_POOL, Hazard.OFFSET_BASE), (Hazard.HIGH_POOL,)])
def test_scales_of_dead_slots_are_poisoned(hazards: tuple[Hazard, ...], poison: Poison) -> None:
    case = make_case((33, 0, 16, 1), Family.RANDOM, *hazards, kv_dtype=DType.INT8, scale_kind=ScaleKind.PER_TOKEN_HEAD)
    inputs = made(case, poison)
    for name in ("k_scale", "v_scale"):
        whole, first = inputs.slots[name].view, inputs.first_block
        window = whole[first:]
        poisoned = bits(window) == poison_bits(window.dtype, poison)
        assert int((~poisoned).sum()) == 50 * 2  # 50 live tokens of 2 KV heads
        assert (window[~poisoned] > 0).all()
        assert window[~poisoned].unique().numel() > 90  # each token's its own
        assert inputs.snapshot()[name].shape == window.shape
        assert (first * whole.stride(0) >= HIGH_ELEMENTS) == (Hazard.HIGH_POOL in hazards)
        assert whole.is_contiguous() == (not hazards)
    table = inputs.slots["block_table"].view[0].tolist()
    live = inputs.slots["k_scale"].view[table[2]]  # token 32 alone lives in the third block
    assert (bits(live) != poison_bits(live.dtype, poison)).sum(dim=1).tolist() == [1, 1]


def test_live_numbers_do_not_depend_on_the_poison_or_the_call() -> None:
    case = make_case((33, 5))
    a, b = made(case, Poison.NAN), made(case, Poison.FINITE)
    live = bits(a.slots["k_cache"].view) != poison_bits(torch.bfloat16, Poison.NAN)
    assert torch.equal(bits(a.slots["k_cache"].view)[live], bits(b.slots["k_cache"].view)[live])
    for name in ("q", "block_table", "context_lens", "query_start_loc"):
        assert same_bits(a.slots[name].view, b.slots[name].view)
    assert a.slots["q"].view.data_ptr() != b.slots["q"].view.data_ptr()


@pytest.mark.parametrize(
    ("hazard", "entry"), [(Hazard.TAIL_MINUS_ONE, -1), (Hazard.TAIL_INT_MAX, INT_MAX), (Hazard.TAIL_FOREIGN, None)]
)
def test_table_entries_past_the_end(hazard: Hazard, entry: int | None) -> None:
    table = made(make_case((33, 0, 16), Family.RANDOM, hazard)).slots["block_table"].view
    ends = [table[seq, blocks:].tolist() for seq, blocks in enumerate((3, 0, 1))]
    assert all(end for end in ends)
    if entry is None:
        live = {*table[0, :3].tolist(), *table[2, :1].tolist()}
        assert all(e in live for end in ends for e in end)
        assert not set(ends[0]) & set(table[0, :3].tolist())
    else:
        assert all(e == entry for end in ends for e in end)


def test_blocks_before_the_window_are_gone() -> None:
    case = make_case((100,), block_size=16, window=20)
    table = made(case).slots["block_table"].view[0].tolist()
    # The query at position 99 sees keys 80 to 99: blocks 5 and 6.
    assert table[:5] == [-1] * 5
    assert min(table[5:7]) >= 0


def test_shared_blocks_and_private_ones() -> None:
    tables = place(make_case((40, 40, 10), Family.RANDOM, Hazard.SHARED_BLOCKS), np.random.default_rng(0)).tables
    assert tables[0][0] == tables[1][0]
    assert tables[0][2] != tables[1][2]
    apart = place(make_case((40, 40, 10)), np.random.default_rng(0)).tables
    flat = [block for table in apart for block in table]
    assert len(set(flat)) == len(flat)


def test_identity_and_permuted_tables() -> None:
    lens = (64, 64)
    assert made(make_case(lens, Family.RANDOM, Hazard.IDENTITY_TABLE)).slots["block_table"].view[1, :4].tolist() == [
        4,
        5,
        6,
        7,
    ]
    assert made(make_case(lens)).slots["block_table"].view[0, :4].tolist() != [0, 1, 2, 3]


def test_a_high_pool_lies_above_two_to_the_32_elements() -> None:
    inputs = made(make_case((33,), Family.RANDOM, Hazard.HIGH_POOL))
    block = int(inputs.slots["block_table"].view[0, :3].min())
    for name in ("k_cache", "v_cache"):
        assert block * inputs.slots[name].view.stride(0) >= HIGH_ELEMENTS
    assert inputs.snapshot()["k_cache"].shape[0] < 16


@pytest.mark.parametrize(("lens", "query_lens"), [((9, 5), ()), ((9, 5, 7), (3, 1, 2))])
def test_high_rows_end_above_two_to_the_32_elements(lens: tuple[int, ...], query_lens: tuple[int, ...]) -> None:
    """q, out and lse alike; every row exists, holds the right numbers, and a change of one is seen and undone."""
    inputs = made(make_case(lens, Family.RANDOM, Hazard.HIGH_ROWS, query_lens=query_lens))
    plain = made(make_case(lens, Family.RANDOM, query_lens=query_lens))
    inputs.freeze()
    for name in ("q", "out", "lse"):
        carved = inputs.slots[name]
        view, rows = carved.view, carved.view.shape[0]
        assert (rows - 1) * view.stride(0) >= HIGH_ELEMENTS
        assert view[0].is_contiguous()
        assert torch.equal(bits(view), bits(plain.slots[name].view)), name
        assert carved.changed_anywhere() is None
        view[-1].flatten()[3] = 7.0
        assert carved.changed_anywhere() == (rows - 1) * view.stride(0) + 3
        carved.restore()
        assert carved.changed_anywhere() is None


def test_a_batch_of_one_token_has_no_high_rows() -> None:
    with pytest.raises(ValueError, match="high_rows needs two query tokens"):
        make_case((5,), Family.RANDOM, Hazard.HIGH_ROWS)


def test_strided_and_offset_memory() -> None:
    case = make_case((5, 3), Family.RANDOM, Hazard.STRIDED, Hazard.OFFSET_BASE, Hazard.STRIDED_POOL)
    inputs = made(case)
    for name in ("q", "out", "k_cache", "v_cache", "block_table", "lse"):
        assert not inputs.slots[name].view.is_contiguous(), name
        assert inputs.slots[name].view.data_ptr() % 16, name
    assert inputs.slots["k_cache"].view.stride(0) != inputs.slots["v_cache"].view.stride(0)


def test_needle_queries_pick_their_target() -> None:
    case = make_case((300,), Family.NEEDLE, heads=(8, 2, 64, 64))
    maker = AttentionInputs(case)
    k = maker.content.k.double().numpy()
    order = [maker.placement.slot_of(0, token, 16) for token in range(300)]
    picked = []
    for head in range(8):
        scores = (
            np.array([k[block, slot, head // 4] for block, slot in order]) @ maker.content.q[0, head].double().numpy()
        )
        weights = np.exp(scores / 8 - (scores / 8).max())
        assert weights.max() / weights.sum() > 0.9
        picked.append(int(weights.argmax()))
    assert len(set(picked)) == 8
    assert {0, 299} & set(picked)


@pytest.mark.parametrize("features", [{}, {"sinks": True}, {"alibi": True}, {"window": 7}])
def test_coded_cases_are_exact(features: dict[str, object]) -> None:
    assert AttentionInputs(make_case((130, 1, 0), Family.CODED, **features)).content.exact


def test_a_subset_of_the_sequences_has_the_same_numbers() -> None:
    case = make_case((33, 7, 5), query_lens=(2, 1, 3))
    plan = LaunchPlan((), attention_slots(case.problem, case.pool_format))
    maker = AttentionInputs(case)
    whole, alone = maker.make(plan, Poison.NAN), maker.make(plan, Poison.NAN, [2])
    assert same_bits(whole.slots["q"].view[3:6], alone.slots["q"].view)
    assert alone.slots["query_start_loc"].view.tolist() == [0, 3]
    assert torch.equal(whole.slots["block_table"].view[2:], alone.slots["block_table"].view)
