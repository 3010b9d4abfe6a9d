"""The covering arrays: complete, stable, and small."""

from __future__ import annotations

from functools import partial
from itertools import combinations, product
from typing import Any

import pytest

from pagedtune.harness.case import Case, Family, Hazard, Level, reject_case
from pagedtune.harness.cell_cases import cases_for_cell, split_edges
from pagedtune.harness.config_corners import NUM_CORNERS
from pagedtune.harness.coverings import cases_for, dimensions_of, possible, trials_for, turns_of
from pagedtune.harness.dimensions import SIZES
from pagedtune.harness.pairwise import covering_rows
from pagedtune.harness.singles import single_cases
from pagedtune.kernels.bounds import Bucket
from pagedtune.kernels.catalogue import VARIANTS, find_variant
from pagedtune.kernels.cpu_split import CpuSplit
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.eager import Eager
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.serial import from_jsonable, to_jsonable
from pagedtune.kernels.variant import Config, Op, Variant
from pagedtune.tuner.configs import Configs

from .toy import CPU, make_case

H100 = Configs().gpu("h100").device("h100")
BY_OP = {variant.op: variant for variant in VARIANTS if variant.device_kind is DeviceKind.CPU}


@pytest.mark.parametrize("kind", DeviceKind)
@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("op", Op)
def test_every_possible_pair_of_values_occurs(op: Op, level: Level, kind: DeviceKind) -> None:
    spans = dimensions_of(op, level, kind)
    rows = covering_rows(spans, partial(possible, kind=kind))
    for a, b in combinations(spans, 2):
        seen = {(spans[a].index(row[a]), spans[b].index(row[b])) for row in rows}
        for i, x in enumerate(spans[a]):
            for j, y in enumerate(spans[b]):
                assert (i, j) in seen or not _completable({a: x, b: y}, spans, kind), f"{a}={x} with {b}={y}"


def test_values_that_share_a_place_all_occur_and_the_places_are_paired() -> None:
    spans, turns = dimensions_of(Op.ATTENTION, Level.CORNER, DeviceKind.CUDA), turns_of(Level.CORNER, DeviceKind.CUDA)
    names = set(turns) - {"feature", "shape"}  # which are not one field of a problem, or of other ops
    first = {name: {value: group[0] for group in turns[name] for value in group} for name in names}
    seen = [
        {
            "heads": (problem.num_q_heads, problem.num_kv_heads),
            "head_dims": (problem.head_dim, problem.head_dim_v),
            "dtypes": (problem.q_dtype, pool_format.kv_dtype),
            "block_size": pool_format.block_size,
        }
        for problem, pool_format in (
            (case.problem, case.pool_format) for case in cases_for(find_variant("triton_split"), H100, Level.CORNER)
        )
    ]
    for name in names:
        assert {row[name] for row in seen} >= set(spans[name]), name
    for a, b in combinations(sorted(names), 2):
        places = [{first[name].get(value, value) for value in spans[name]} for name in (a, b)]
        met = {(first[a].get(row[a], row[a]), first[b].get(row[b], row[b])) for row in seen}
        assert met >= set(product(*places)), (a, b)
    assert not turns_of(Level.PRODUCTION, DeviceKind.CUDA)


def _completable(pair: dict[str, Any], spans: dict[str, tuple[Any, ...]], kind: DeviceKind) -> bool:
    """By trying everything that two values could be too large, or of the wrong type, for together."""
    others = [name for name in ("shape", "heads", "head_dims", "dtypes", "lengths", "block_size") if name in spans]
    free = [name for name in others if name not in pair]
    fillings = product(*(spans[name] for name in free))
    return any(possible({**pair, **dict(zip(free, filling, strict=True))}, kind) for filling in fillings)


def test_constraints_are_kept_and_hard_pairs_completed() -> None:
    spans: dict[str, tuple[Any, ...]] = {"a": (0, 1, 2), "b": (0, 1, 2), "c": (0, 1), "d": (0, 1)}

    def allowed(row: Any) -> bool:
        # a=2 forces b=2, which forces c=1.
        return not (row.get("a") == 2 and row.get("b", 2) != 2) and not (row.get("b") == 2 and row.get("c", 1) != 1)

    rows = covering_rows(spans, allowed)
    assert all(allowed(row) for row in rows)
    assert {(2, 2, 1, d) for d in (0, 1)} <= {tuple(row.values()) for row in rows}
    assert covering_rows(spans, allowed) == rows


@pytest.mark.parametrize(("level", "most"), [(Level.TINY, 60), (Level.CORNER, 300), (Level.PRODUCTION, 40)])
@pytest.mark.parametrize("op", Op)
def test_cases_are_distinct_stable_and_few(op: Op, level: Level, most: int) -> None:
    cases = cases_for(BY_OP[op], CPU, level)
    assert 20 <= len(cases) <= most
    assert len({case.key for case in cases}) == len(cases)
    assert {case.family for case in cases} == set(Family)
    assert {case.op for case in cases} == {op}
    for case in cases[::17]:
        assert from_jsonable(Case, to_jsonable(case)) == case


def test_every_hazard_has_a_reason_and_occurs_at_corner_level() -> None:
    assert all(hazard.reason for hazard in Hazard)
    occurring = {hazard for op in Op for case in cases_for(BY_OP[op], CPU, Level.CORNER) for hazard in case.hazards}
    gpu = {hazard for case in single_cases(DeviceKind.CUDA) for hazard in case.hazards}  # which alone has 8-bit pools
    assert occurring | gpu == set(Hazard)


def test_the_corner_level_meets_the_floor() -> None:
    cases = cases_for(BY_OP[Op.ATTENTION], CPU, Level.CORNER)
    assert {case.problem.gqa_ratio for case in cases} >= {1, 2, 3, 4, 5, 6, 7, 8, 16, 71}
    assert {case.problem.head_dim for case in cases} >= {64, 72, 80, 96, 112, 128, 192, 256}
    assert any(case.problem.head_dim != case.problem.head_dim_v for case in cases)
    assert {case.pool_format.block_size for case in cases} >= {1, 16, 32, 64, 128, 256}
    assert {case.pool_format.kv_dtype for case in cases} >= {DType.FP32, DType.BF16, DType.FP16}
    assert {1, 16, 37} <= {case.problem.window for case in cases}
    assert {0, 1, 15, 16, 17} <= {n for c in cases if c.pool_format.block_size == 16 for n in c.workload.context_lens}
    assert {0, 1, 2, 3, 8} <= {n for case in cases for n in case.workload.query_lens}
    # One compilation each for a variant that specialises on them.
    compiled = {(c.problem.gqa_ratio, c.problem.head_dim, c.problem.q_dtype, c.pool_format.kv_dtype) for c in cases}
    assert len(compiled) <= 30


@pytest.mark.parametrize("level", [Level.CORNER, Level.PRODUCTION])
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.device_kind is DeviceKind.CUDA], ids=lambda v: v.name)
def test_cases_of_a_gpu_stay_small_and_take_every_ratio_dim_and_dtype(variant: Variant, level: Level) -> None:
    taken = [c for c in cases_for(variant, H100, level) if _takes(variant, c)]
    for case in taken:
        tokens = sum(case.workload.context_lens)
        assert tokens * case.pool_format.bytes_per_token(case.problem) <= 2 << 20 or case.workload.name in SIZES
    assert len({c.key for c in taken}) == len(taken)
    if variant.op is Op.ATTENTION:
        ratios, queries = {c.problem.gqa_ratio for c in taken}, {c.problem.max_query_len for c in taken}
        dims = {(c.problem.head_dim, c.problem.head_dim_v) for c in taken}
        assert ratios >= {1, 2, 3, 4, 5, 6, 7, 8, 16, 71}
        assert dims >= {(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256), (64, 128)}
        assert {DType.FP8_E4M3, DType.INT8} <= {c.pool_format.kv_dtype for c in taken}
        assert {1, 8} <= queries
        assert 75 <= len(taken) <= 160


def _takes(variant: Variant, case: Case) -> bool:
    config = variant.default_config(case.problem, case.pool_format, case.bounds, H100)
    return variant.reject(case.problem, case.pool_format, config, H100) is None


def test_a_limited_gpu_variant_sees_every_pair_that_it_takes() -> None:
    """Counted from the cases alone: whatever two values some accepted combination has, an accepted case has."""
    variant = find_variant("cuda_split_mma")
    taken = [c for c in cases_for(variant, H100, Level.PRODUCTION) if _takes(variant, c)]
    seen = {(c.problem.head_dim, c.problem.head_dim_v, c.pool_format.kv_dtype, c.problem.q_dtype) for c in taken}
    spans = dimensions_of(Op.ATTENTION, Level.PRODUCTION, DeviceKind.CUDA)
    for (dim, dim_v), (q, kv) in product(spans["head_dims"], spans["dtypes"]):
        problem, pool_format = Problem(8, 2, dim, dim_v, q_dtype=q), PoolFormat(16, kv)
        config = variant.default_config(problem, pool_format, Bucket(4, 1024).bounds, H100)
        accepted = variant.reject(problem, pool_format, config, H100) is None
        assert accepted == ((dim, dim_v, kv, q) in seen)


def test_at_production_level_the_corners_of_the_space_are_paired_with_everything() -> None:
    trials = trials_for(find_variant("triton_split"), H100, Level.PRODUCTION)
    assert {trial.corner for trial in trials} == set(range(NUM_CORNERS))
    for feature in ("window", "soft_cap", "sinks", "alibi"):
        assert {t.corner for t in trials if getattr(t.case.problem, feature)} == set(range(NUM_CORNERS))
    corner = trials_for(find_variant("triton_split"), H100, Level.CORNER)
    assert {t.corner for t in corner if t.case.workload.name != "single"} == {None}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"hazards": (Hazard.TAIL_FOREIGN, Hazard.TAIL_INT_MAX)}, "only one of"),
        ({"hazards": (Hazard.HUGE_SINKS,)}, "needs a problem with sinks"),
        ({"hazards": (Hazard.SATURATED_CAP,)}, "needs a problem with a soft cap"),
        ({"hazards": (Hazard.LIVE_NAN,), "family": Family.NEEDLE}, "random family"),
        ({"hazards": (Hazard.SKIPPED_TOKENS,)}, "belongs to kv_write"),
        ({"hazards": (Hazard.REPLAY,), "op": Op.GATHER_KV}, "belong to attention"),
    ],
)
def test_contradictory_cases_are_refused(arguments: dict[str, Any], says: str) -> None:
    hazards, family = arguments.pop("hazards"), arguments.pop("family", Family.RANDOM)
    with pytest.raises(ValueError, match=says):
        make_case((5,), family, *hazards, **arguments)


def test_hazards_are_sorted_so_that_equal_cases_have_equal_keys() -> None:
    a = make_case((5,), Family.RANDOM, Hazard.TAIL_FOREIGN, Hazard.STRIDED)
    b = make_case((5,), Family.RANDOM, Hazard.STRIDED, Hazard.TAIL_FOREIGN)
    assert a == b
    assert a.key == b.key
    assert reject_case(a) is None
    assert make_case((5,)).key != make_case((6,)).key


def test_cases_of_a_cell_keep_its_problem_and_format() -> None:
    problem, pool_format = Problem(32, 8, 128), PoolFormat(16, DType.BF16)
    config = CpuSplit().config_from({"num_splits": 4, "split_tokens": 100})
    cases = cases_for_cell(problem, pool_format, Bucket(8, 4096), CpuSplit(), config)
    assert 6 <= len(cases) <= 10
    assert {(c.problem, c.pool_format) for c in cases} == {(problem, pool_format)}
    assert {c.family for c in cases} == set(Family)
    lens = {n for c in cases for n in c.workload.context_lens}
    assert {0, 1, 15, 16, 17, 99, 100, 101, 127, 128, 129} <= lens
    assert any(c.bounds == Bucket(8, 4096).bounds for c in cases)


@pytest.mark.parametrize("bucket", [Bucket(1, 128), Bucket(64, 128), Bucket(2, 1 << 20, 4)])
@pytest.mark.parametrize("block_size", [1, 256])
@pytest.mark.parametrize("op", Op)
def test_cases_of_any_cell_can_be_made(op: Op, block_size: int, bucket: Bucket) -> None:
    cases = cases_for_cell(Problem(8, 8, 256), PoolFormat(block_size, DType.FP32), bucket, BY_OP[op])
    assert len({case.key for case in cases}) == len(cases)


def test_split_edges_come_from_the_names_of_tunables() -> None:
    config = CpuSplit().config_from({"num_splits": 4, "split_tokens": 100, "tile_tokens": 32, "prefetch_tokens": 0})
    assert split_edges(config, 200) == [100, 64, 50, 32]
    assert split_edges(None, 200) == [64]
    assert split_edges(None, 2) == [1]


class OnlyPlain(Eager):
    """Takes even GQA ratios, NHD pools without scales and one query token; no feature."""

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Everything else."""
        featured = (problem.window, problem.soft_cap, problem.sinks, problem.alibi) != (None, None, False, False)
        odd = problem.gqa_ratio % 2 or problem.max_query_len > 1
        plain_format = (pool_format.layout, pool_format.scale_kind) == (Layout.NHD, ScaleKind.NONE)
        return None if plain_format and not featured and not odd else "plain attention only"


def test_a_variant_with_limits_is_covered_over_all_that_it_takes() -> None:
    variant = OnlyPlain()
    cases = cases_for(variant, CPU, Level.CORNER)
    taken = [c for c in cases if variant.reject(c.problem, c.pool_format, variant.config_type(), CPU) is None]
    spans = dimensions_of(Op.ATTENTION, Level.CORNER)
    assert {(c.pool_format.block_size, c.family) for c in taken} == set(product(spans["block_size"], spans["family"]))
    ratios = {shape.num_q_heads // shape.num_kv_heads for shape in spans["shape"]}
    assert {c.problem.gqa_ratio for c in taken} == {ratio for ratio in ratios if ratio % 2 == 0}
    common = cases_for(Eager(), CPU, Level.CORNER)
    refused = [c for c in common if variant.reject(c.problem, c.pool_format, variant.config_type(), CPU) is not None]
    assert [c for c in cases if c not in taken] == refused  # shown with their reason
    assert len(taken) < len(common)


def test_a_variant_that_takes_nothing_gets_the_common_cases() -> None:
    class Nothing(Eager):
        def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
            return "nothing"

    assert cases_for(Nothing(), CPU, Level.TINY) == cases_for(Eager(), CPU, Level.TINY)
