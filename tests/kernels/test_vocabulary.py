"""The shared nouns: what they refuse, their identities, and their one bucket function."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedtune.kernels.bounds import Bounds, Bucket, bucket_of
from pagedtune.kernels.dispatch import DispatchTable, Winner
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.launch import Access, LaunchPlan
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import Record, Status, TimeEvidence, Timing, Verdict
from pagedtune.kernels.serial import from_jsonable, to_jsonable
from pagedtune.kernels.slots import attention_slots, copy_blocks_slots, gather_kv_slots, kv_write_slots
from pagedtune.kernels.workload import Workload

BOUNDS = st.builds(Bounds, st.integers(1, 5000), st.integers(1, 1 << 20), st.integers(1, 64))
PROBLEMS = st.builds(
    lambda heads, ratio, dim, dtype, window, sinks: Problem(
        heads * ratio, heads, dim, q_dtype=dtype, window=window, sinks=sinks
    ),
    st.integers(1, 32),
    st.integers(1, 71),
    st.integers(1, 256),
    st.sampled_from([DType.FP32, DType.BF16, DType.FP16]),
    st.none() | st.integers(1, 4096),
    st.booleans(),
)
FORMATS = st.builds(
    PoolFormat,
    st.integers(1, 256),
    st.sampled_from(list(DType)),
    st.sampled_from(list(Layout)),
    st.sampled_from(list(ScaleKind)),
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_q_heads": 0}, "num_q_heads=0 must be an integer of at least 1"),
        ({"head_dim": 0, "head_dim_v": 64}, "head_dim=0"),
        ({"num_kv_heads": 3}, "num_q_heads=32 is not a multiple of num_kv_heads=3"),
        ({"head_dim": True}, "head_dim=True"),
        ({"window": 0}, "window=0"),
        ({"soft_cap": float("nan")}, "soft_cap=nan"),
        ({"scale": -1.0}, "scale=-1.0"),
        ({"q_dtype": DType.INT8}, "use fp32, bf16 or fp16"),
        ({"max_query_len": 0}, "max_query_len=0"),
    ],
)
def test_impossible_problem_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Problem(**good | fields)


def test_block_size_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size=0"):
        PoolFormat(0, DType.BF16)


@given(BOUNDS)
def test_bucket_covers_its_bounds_and_is_its_own_bucket(bounds: Bounds) -> None:
    bucket = bucket_of(bounds)
    for field in dataclasses.fields(Bounds):
        assert getattr(bucket, field.name) >= getattr(bounds, field.name)
    assert bucket_of(bucket.bounds) == bucket


@given(BOUNDS, BOUNDS)
def test_bucket_is_monotonic(a: Bounds, b: Bounds) -> None:
    low = Bounds(*(min(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Bounds)))
    for field in dataclasses.fields(Bucket):
        assert getattr(bucket_of(low), field.name) <= getattr(bucket_of(a), field.name)


@given(PROBLEMS, PROBLEMS)
def test_problem_key_identifies_a_problem(a: Problem, b: Problem) -> None:
    assert (a.key == b.key) == (a == b)


@given(FORMATS, FORMATS)
def test_format_key_identifies_a_format(a: PoolFormat, b: PoolFormat) -> None:
    assert (a.key == b.key) == (a == b)


def test_pool_shapes_are_those_of_the_layouts() -> None:
    problem = Problem(32, 8, 128)
    shapes = {layout: PoolFormat(16, DType.BF16, layout).k_shape(7, problem) for layout in Layout}
    assert shapes == {
        Layout.NHD: (7, 16, 8, 128),
        Layout.HND: (7, 8, 16, 128),
        Layout.XPACKED: (7, 8, 16, 16, 8),  # x = 16 bytes / 2 bytes
    }
    assert PoolFormat(16, DType.BF16, Layout.XPACKED).v_shape(7, problem) == (7, 8, 128, 16)


@pytest.mark.parametrize("layout", list(Layout))
def test_axes_name_the_dimensions_of_the_shape(layout: Layout) -> None:
    problem, pool_format = Problem(6, 3, 64, 32), PoolFormat(5, DType.FP32, layout)
    for shape, axes, dim in (
        (pool_format.k_shape(2, problem), pool_format.k_axes, 64),
        (pool_format.v_shape(2, problem), pool_format.v_axes, 32),
    ):
        assert (shape[axes.block], shape[axes.slot], shape[axes.head]) == (2, 5, 3)
        inner = 1 if axes.pack is None else shape[axes.pack]
        assert shape[axes.dim] * inner == dim


def test_kv_bytes_of_llama_3_8b_are_128_kib_a_token() -> None:
    """32 layers x 4 KiB: the figure usually quoted for bf16 KV of Llama 3 8B."""
    assert PoolFormat(16, DType.BF16).bytes_per_token(Problem(32, 8, 128)) * 32 == 128 * 1024


def test_scales_of_tokens_are_bytes_of_the_token_and_part_of_the_pool() -> None:
    """8 heads x (128 + 128 bytes + two scales of 4 bytes)."""
    problem, pool_format = Problem(32, 8, 128), PoolFormat(16, DType.INT8, scale_kind=ScaleKind.PER_TOKEN_HEAD)
    assert pool_format.bytes_per_token(problem) == 8 * (256 + 8)
    assert pool_format.key == "b16-nhd-int8-per_token_head"
    assert pool_format.scale_shape(5, problem) == (5, 8, 16)
    assert pool_format.block_slots == ("k_cache", "v_cache", "k_scale", "v_scale")
    assert PoolFormat(16, DType.INT8, scale_kind=ScaleKind.PER_HEAD).block_slots == ("k_cache", "v_cache")
    assert kv_write_slots(problem, pool_format)["v_scale"].access is Access.INOUT
    assert attention_slots(problem, pool_format)["v_scale"].access is Access.IN
    for slots in (attention_slots, kv_write_slots, copy_blocks_slots, gather_kv_slots):
        assert slots(problem, pool_format)["k_scale"].shape == ("num_blocks", 8, 16)
    assert "8-bit pools" in (PoolFormat(16, DType.BF16, scale_kind=ScaleKind.PER_TOKEN_HEAD).reject(problem) or "")


def test_as_many_blocks_of_scales_as_of_values_are_bound() -> None:
    problem, pool_format = Problem(2, 2, 16), PoolFormat(4, DType.INT8, scale_kind=ScaleKind.PER_TOKEN_HEAD)
    plan = LaunchPlan((), copy_blocks_slots(problem, pool_format))
    tensors = {
        "block_pairs": torch.zeros(1, 2, dtype=torch.int64),
        **{name: torch.zeros(pool_format.k_shape(3, problem), dtype=torch.int8) for name in ("k_cache", "v_cache")},
        **{name: torch.zeros(3, 2, 8)[..., :4] for name in ("k_scale", "v_scale")},  # any stride but along the slots
    }
    plan.bind(tensors)
    with pytest.raises(ValueError, match="'v_scale' has shape"):
        plan.bind({**tensors, "v_scale": torch.zeros(2, 2, 4)})
    with pytest.raises(ValueError, match="'k_scale' has strides"):
        plan.bind({**tensors, "k_scale": torch.zeros(3, 4, 2).transpose(1, 2)})


@given(PROBLEMS, FORMATS, BOUNDS)
def test_json_round_trip(problem: Problem, pool_format: PoolFormat, bounds: Bounds) -> None:
    for value in (problem, pool_format, bounds):
        assert from_jsonable(type(value), json.loads(json.dumps(to_jsonable(value)))) == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 1}, "only the keys"),
        ({"num_q_heads": "32"}, r"Problem.num_q_heads: expected int, found '32'"),
        ({"q_dtype": "bf17"}, r"Problem.q_dtype: expected one of fp32"),
        ({"sinks": 1}, r"Problem.sinks: expected bool"),
    ],
)
def test_json_of_another_form_is_refused_with_its_path(change: dict[str, Any], message: str) -> None:
    data = to_jsonable(Problem(32, 8, 128)) | change
    with pytest.raises(ValueError, match=message):
        from_jsonable(Problem, data)
    del data["num_kv_heads"]
    with pytest.raises(ValueError):
        from_jsonable(Problem, data)


def record(**changes: Any) -> Record:
    """A passed, timed record, with changes."""
    timing = Timing("cold", (10.0, 11.0), 10.5, (10.0, 11.0), 4096)
    fields: dict[str, Any] = {
        "run_id": "r", "device": "cpu", "op": "attention", "model": "m", "problem": Problem(32, 8, 128),
        "pool_format": PoolFormat(16, DType.BF16), "bucket": Bucket(8, 1024), "workload": "uniform",
        "variant": "v", "config": {"a": 1}, "stage": "final", "status": Status.PASSED,
        "verdict": Verdict.ON_DEVICE, "time_evidence": TimeEvidence.MEASURED, "timing": timing,
    }  # fmt: skip
    return Record(**fields | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"status": Status.WRONG, "reason": "off"},  # a time of a wrong kernel
        {"verdict": Verdict.NONE},  # a time of an unproven one
        {"time_evidence": TimeEvidence.NONE},  # a time from nowhere
        {"timing": None},  # evidence of no time
        {"status": Status.CRASHED, "timing": None, "time_evidence": TimeEvidence.NONE},  # a failure without a reason
    ],
)
def test_impossible_records_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        record(**changes)


def test_record_round_trip() -> None:
    original = record()
    assert from_jsonable(Record, json.loads(json.dumps(to_jsonable(original)))) == original


@given(st.integers(1, 300), st.integers(1, 10_000), st.integers(0, 99))
def test_workloads_stay_within_their_bounds(num_seqs: int, max_context_len: int, seed: int) -> None:
    for name in ("uniform", "ragged", "one_long"):
        workload = Workload.named(name, num_seqs, max_context_len, seed)
        assert workload.num_seqs == num_seqs
        assert max(workload.context_lens) == max_context_len
        assert min(workload.context_lens) >= 1


@pytest.mark.parametrize(("lens", "queries"), [((), ()), ((-1,), (0,)), ((4,), (5,)), ((4, 4), (1,))])
def test_impossible_workloads_are_refused(lens: tuple[int, ...], queries: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        Workload(lens, queries)


def test_dispatch_takes_the_nearest_larger_bucket_and_nothing_beyond() -> None:
    problem, pool_format = Problem(32, 8, 128), PoolFormat(16, DType.BF16)
    entries = tuple(
        Winner("attention", "m", problem, pool_format, Bucket(n, c), "uniform", f"v{n}-{c}", {}, 1.0, (1.0, 1.0), 1.0,
               Verdict.ON_DEVICE, TimeEvidence.MEASURED)
        for n, c in ((1, 1024), (8, 1024), (8, 4096))
    )  # fmt: skip
    table = DispatchTable("cpu", entries)
    found = {b: table.lookup(problem, pool_format, b) for b in (Bounds(1, 900), Bounds(3, 900), Bounds(8, 1025))}
    assert [w.variant for w in found.values() if w] == ["v1-1024", "v8-1024", "v8-4096"]
    assert table.lookup(problem, pool_format, Bounds(9, 100)) is None
    assert table.lookup(problem, pool_format, Bounds(1, 100, max_query_len=4)) is None
    assert table.lookup(problem, PoolFormat(32, DType.BF16), Bounds(1, 100)) is None
    assert from_jsonable(DispatchTable, json.loads(json.dumps(to_jsonable(table)))) == table
