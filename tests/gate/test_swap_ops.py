"""Packing and unpacking, bit for bit: right kernels pass, and every element that should stay is watched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagedtune.harness.cache_inputs import CacheInputs, expected
from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.gate import run_case
from pagedtune.harness.memory import Poison, bits
from pagedtune.harness.verdicts import Check
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.catalogue import VARIANTS, find_variant
from pagedtune.kernels.cpu_swap import CpuPackBlocks, CpuUnpackBlocks
from pagedtune.kernels.device import DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.eager_swap import EagerPackBlocks, EagerUnpackBlocks
from pagedtune.kernels.launch import CallStep, LaunchPlan, Tensors
from pagedtune.kernels.native import NativeExecutor
from pagedtune.kernels.pool_format import Layout, PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.slots import block_elements, pack_blocks_slots, unpack_blocks_slots
from pagedtune.kernels.variant import Config, Op, Variant

from .toy import CPU, make_case

PACK, UNPACK = Op.PACK_BLOCKS, Op.UNPACK_BLOCKS
Edit = Callable[[Tensors], None]
MEMORY = (Hazard.HIGH_POOL, Hazard.HIGH_STAGING, Hazard.GAPPED_POOL, Hazard.STRIDED_POOL, Hazard.STRIDED)
CASES = [
    *(make_case((33, 5), Family.CODED, op=op, layout=layout) for op in (PACK, UNPACK) for layout in Layout),
    *(make_case((33, 5), Family.RANDOM, hazard, op=op) for op in (PACK, UNPACK) for hazard in MEMORY),
    *(make_case((70, 33), Family.RANDOM, Hazard.SKIPPED_TOKENS, op=op) for op in (PACK, UNPACK)),
    *(make_case((0,), op=op) for op in (PACK, UNPACK)),
    *(make_case((9,), op=op, kv_dtype=d, block_size=1) for op in (PACK, UNPACK) for d in (DType.FP8_E4M3, DType.INT8)),
    make_case((20,), Family.RANDOM, Hazard.OFFSET_BASE, op=PACK, heads=(2, 1, 65, 33), kv_dtype=DType.FP32),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_right_kernels_pass(case: Case) -> None:
    variants = [v for v in VARIANTS if v.op is case.op and v.device_kind is DeviceKind.CPU]
    assert len(variants) == 2
    for variant in variants:
        result = run_case(variant, variant.config_type(), case, CPU)
        assert result.passed, f"{variant.name}: {result.reason}"
        assert Check.EXACT in result.checks


def edited(op: Op, edit: Edit) -> Variant:
    """The torch variant of an op, with an edit of its tensors after the call."""
    base: type[Variant] = EagerPackBlocks if op is PACK else EagerUnpackBlocks

    class Edited(base):  # type: ignore[misc, valid-type]
        def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
            plan = super().plan(problem, pool_format, config, bounds)
            right = plan.steps[0]

            def call(tensors: Tensors) -> None:
                right.function(tensors)
                edit(tensors)

            return LaunchPlan((CallStep(call),), plan.slots, plan.workspaces, plan.limits)

    variant: Variant = Edited()
    return variant


def bump(name: str, *at: int) -> Edit:
    """Changes the last bit of one element."""

    def edit(tensors: Tensors) -> None:
        tensors[name].view(torch.int16)[at] ^= 1

    return edit


def after_the_end(name: str) -> Edit:
    """Writes behind the last element of a tensor."""

    def edit(tensors: Tensors) -> None:
        tensor = tensors[name]
        end = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        tensor.as_strided((1,), (1,), end + 1).zero_()

    return edit


PLAIN = {op: make_case((33, 5), Family.CODED, op=op) for op in (PACK, UNPACK)}
SKIPPING = {op: make_case((70, 33), Family.RANDOM, Hazard.SKIPPED_TOKENS, op=op) for op in (PACK, UNPACK)}
SPACED = make_case((33, 5), Family.RANDOM, Hazard.STRIDED, op=PACK)
GAPPED = make_case((33, 5), Family.RANDOM, Hazard.GAPPED_POOL, op=UNPACK)
WRONG: list[tuple[str, Case, Edit, Check]] = [
    ("one bit of a row", PLAIN[PACK], bump("staging", 1, 7), Check.EXACT),
    ("a skipped row is cleared", SKIPPING[PACK], lambda t: t["staging"][0].zero_(), Check.EXACT),
    ("the pool is changed", PLAIN[PACK], bump("v_cache", 0, 0, 0, 0), Check.INPUTS),
    ("the list is changed", PLAIN[PACK], lambda t: t["block_ids"].zero_(), Check.INPUTS),
    ("a write behind the buffer", PLAIN[PACK], after_the_end("staging"), Check.GUARDS),
    ("a write between two rows", SPACED, lambda t: t["staging"].as_strided((1,), (1,), _end(t)).zero_(), Check.GUARDS),
    ("the buffer is changed", PLAIN[UNPACK], bump("staging", 0, 0), Check.INPUTS),
    ("an element of a pool", PLAIN[UNPACK], bump("k_cache", 0, 3, 1, 2), Check.EXACT),
    ("a block that is not listed", SKIPPING[UNPACK], lambda t: _unlisted(t).zero_(), Check.EXACT),
    ("a write behind the pool", PLAIN[UNPACK], after_the_end("k_cache"), Check.GUARDS),
    ("a write into a gap", GAPPED, lambda t: _gap(t["v_cache"]).zero_(), Check.GUARDS),
]


def _end(tensors: Tensors) -> int:
    return tensors["staging"].storage_offset() + tensors["staging"].shape[1]


def _unlisted(tensors: Tensors) -> torch.Tensor:
    blocks = set(range(len(tensors["k_cache"]))) - set(tensors["block_ids"].tolist())
    return tensors["k_cache"][min(blocks)]


def _gap(pool: torch.Tensor) -> torch.Tensor:
    """The first element behind the first row of a block, [num_blocks, block_size, heads, dim]."""
    return pool.as_strided((1,), (1,), pool.storage_offset() + pool.shape[3])


@pytest.mark.parametrize(("name", "case", "edit", "check"), WRONG, ids=[w[0] for w in WRONG])
def test_wrong_kernels(name: str, case: Case, edit: Edit, check: Check) -> None:
    variant = edited(case.op, edit)
    result = run_case(variant, variant.config_type(), case, CPU)
    assert result.failed == check, result.reason


def small(op: Op) -> dict[str, torch.Tensor]:
    """Four blocks of two tokens with one head of two (K) and one (V) elements."""
    return {
        "k_cache": torch.arange(16.0).view(4, 2, 1, 2),
        "v_cache": 100 + torch.arange(8.0).view(4, 2, 1, 1),
        "block_ids": torch.tensor([3, -1, 0]),
        "staging": 1000 + torch.arange(18.0).view(3, 6),
    }


SMALL = {op: make_case((2,), op=op, heads=(1, 1, 2, 1), q_dtype=DType.FP32, block_size=2) for op in (PACK, UNPACK)}
PACKED = [[12, 13, 14, 15, 106, 107], [1006, 1007, 1008, 1009, 1010, 1011], [0, 1, 2, 3, 100, 101]]
K_UNPACKED = [1012, 1013, 1014, 1015, 4, 5, 6, 7, 8, 9, 10, 11, 1000, 1001, 1002, 1003]
V_UNPACKED = [1016, 1017, 102, 103, 104, 105, 1004, 1005]


def test_expected_rows_are_k_then_v_in_the_order_of_the_list() -> None:
    after = expected(SMALL[PACK], small(PACK), 0)
    assert after["staging"].tolist() == PACKED
    assert torch.equal(after["k_cache"], small(PACK)["k_cache"])


def test_expected_blocks_are_those_of_the_list() -> None:
    after = expected(SMALL[UNPACK], small(UNPACK), 0)
    assert after["k_cache"].flatten().tolist() == K_UNPACKED
    assert after["v_cache"].flatten().tolist() == V_UNPACKED
    assert torch.equal(after["staging"], small(UNPACK)["staging"])


@pytest.mark.parametrize("name", ["eager", "cpu"])
def test_kernels_give_the_rows_and_blocks_worked_out_by_hand(name: str) -> None:
    for op, wanted in ((PACK, {"staging": PACKED}), (UNPACK, {"k_cache": K_UNPACKED, "v_cache": V_UNPACKED})):
        variant, case, tensors = find_variant(f"{name}_{op}"), SMALL[op], small(op)
        run_on(variant, case, tensors)
        for slot, numbers in wanted.items():
            assert tensors[slot].flatten().tolist() == torch.tensor(numbers).flatten().tolist()


def run_on(variant: Variant, case: Case, tensors: dict[str, torch.Tensor]) -> None:
    config = variant.config_type()
    plan = variant.plan(case.problem, case.pool_format, config, Bounds(8, 16))
    artifacts = variant.build(case.problem, case.pool_format, config, CPU)
    NativeExecutor(artifacts).prepare(plan.bind(tensors))()


def test_a_pool_in_another_order_of_memory_is_packed_in_the_order_of_its_dimensions() -> None:
    """[nb, tokens, heads, dim] whose memory has the heads outside: rows are those of the dense tensor."""
    case = make_case((2,), op=PACK, heads=(2, 2, 3, 3), q_dtype=DType.FP32, block_size=4)
    memory = [torch.randn(5, 2, 4, 3) for _ in range(2)]
    k, v = (m.permute(0, 2, 1, 3) for m in memory)
    tensors = {"k_cache": k, "v_cache": v, "block_ids": torch.tensor([2, 4]), "staging": torch.zeros(2, 48)}
    run_on(CpuPackBlocks(), case, tensors)
    assert torch.equal(tensors["staging"], torch.cat([k.flatten(1), v.flatten(1)], 1)[[2, 4]])


@pytest.mark.parametrize(
    ("variant", "ids", "message"),
    [
        (CpuPackBlocks(), [1, 4], "block"),
        (CpuUnpackBlocks(), [0, 4], "block"),
        (CpuUnpackBlocks(), [2, -1, 2], "listed twice"),
    ],
    ids=["packed past the pool", "unpacked past the pool", "unpacked twice"],
)
def test_ids_that_cannot_be_are_refused_and_nothing_is_written(variant: Variant, ids: list[int], message: str) -> None:
    tensors = small(variant.op) | {"block_ids": torch.tensor(ids), "staging": torch.zeros(len(ids), 6)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(RuntimeError, match=message):
        run_on(variant, SMALL[variant.op], tensors)
    assert all(torch.equal(tensors[name], before[name]) for name in before)


def test_a_block_may_be_packed_twice() -> None:
    tensors = small(PACK) | {"block_ids": torch.tensor([2, 2]), "staging": torch.zeros(2, 6)}
    run_on(CpuPackBlocks(), SMALL[PACK], tensors)
    assert tensors["staging"].tolist() == [[8, 9, 10, 11, 104, 105]] * 2


def test_more_blocks_than_the_bounds_are_refused() -> None:
    case = SMALL[PACK]
    plan = CpuPackBlocks().plan(case.problem, case.pool_format, CpuPackBlocks().config_type(), Bounds(2, 16))
    with pytest.raises(ValueError, match="num_listed=3 exceeds"):
        plan.bind(small(PACK))


def test_slots_of_a_row() -> None:
    problem, pool_format = Problem(4, 2, 64, head_dim_v=32), PoolFormat(16, DType.BF16)
    assert block_elements(problem, pool_format) == (16 * 2 * 64, 16 * 2 * 32)
    for slots in (pack_blocks_slots(problem, pool_format), unpack_blocks_slots(problem, pool_format)):
        assert slots["staging"].shape == ("num_listed", 16 * 2 * 96)
        assert slots["block_ids"].dtype == torch.int64


@pytest.mark.parametrize("op", [PACK, UNPACK])
def test_what_a_case_lists(op: Op) -> None:
    """No block twice when unpacking, one when packing, some without a token; high rows beyond 2^32 elements."""
    case = make_case((70, 33), Family.RANDOM, op=op)
    plan = find_variant(f"eager_{op}").plan(case.problem, case.pool_format, Config(), case.bounds)
    slots = CacheInputs(case).make(plan, Poison.NAN).slots
    ids = slots["block_ids"].view.tolist()
    assert len(ids) - len(set(ids)) == (1 if op is PACK else 0)
    rows = {slots["staging"].view[i].view(torch.int16).sum().item() for i in range(len(ids))}
    assert len(rows) == (1 if op is PACK else len(ids))
    high = CacheInputs(make_case((70, 33), Family.RANDOM, Hazard.HIGH_STAGING, op=op)).make(plan, Poison.NAN)
    assert high.slots["block_ids"].view[0] == -1
    assert high.slots["staging"].view[-1].storage_offset() >= 2**32
    assert (bits(high.slots["staging"].view[0]) == 0).all()  # the others are never touched


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"op": Op.COPY_BLOCKS, "hazards": (Hazard.HIGH_STAGING,)}, "high_staging belongs to"),
        ({"op": PACK, "hazards": (Hazard.HIGH_STAGING, Hazard.SKIPPED_TOKENS)}, "only one of"),
        ({"op": PACK, "hazards": (Hazard.GAPPED_POOL, Hazard.HIGH_POOL)}, "only one of"),
        ({"op": Op.GATHER_KV, "hazards": (Hazard.SKIPPED_TOKENS,)}, "skipped_tokens belongs to"),
        ({"op": UNPACK, "hazards": (Hazard.REPLAY,)}, "belong to attention"),
    ],
)
def test_cases_that_contradict_themselves(fields: dict[str, object], message: str) -> None:
    hazards: tuple[Hazard, ...] = fields["hazards"]  # type: ignore[assignment]
    with pytest.raises(ValueError, match=message):
        make_case((5,), Family.RANDOM, *hazards, op=fields["op"])  # type: ignore[arg-type]
