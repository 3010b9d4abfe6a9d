"""Selection: a pure function of the set of records, and the rules by which a cell is decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedtune.kernels.record import Record, Status
from pagedtune.kernels.serial import to_jsonable
from pagedtune.tuner.select import decide_all, select

MakeRecord = Callable[..., Record]
DEVICE = "cpu|some|2|avx2"


def at(second: int) -> str:
    return f"2026-01-01T00:00:{second:02d}.000000+00:00"


def finals(make: MakeRecord, group: str, second: int, *members: tuple[str, list[float]], **more: Any) -> list[Record]:
    """A group of finals; each member has its times in µs by round, the first is the incumbent."""
    reference = members[0][1]
    return [
        make(
            name,
            stage="final",
            samples=times,
            ratios=[own / first for own, first in zip(times, reference, strict=True)],
            at=at(second),
            group=group,
            group_index=i,
            group_size=len(members),
            **more.get(name, {}),
        )
        for i, (name, times) in enumerate(members)
    ]


def steady(time_us: float) -> list[float]:
    return [time_us * (1 + 0.0002 * (i % 5)) for i in range(20)]


def winner(records: list[Record]) -> str:
    (entry,) = select(records, DEVICE).entries
    return entry.variant


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_order_and_repetition_of_records_change_nothing(data: st.DataObject, make_record: MakeRecord) -> None:
    records = []
    for second, block_size in enumerate(data.draw(st.lists(st.sampled_from([16, 32, 64]), min_size=1, max_size=4))):
        names = data.draw(st.lists(st.sampled_from(["a", "b", "c", "eager"]), min_size=1, max_size=4, unique=True))
        times = [(name, steady(data.draw(st.sampled_from([100.0, 100.3, 120.0])))) for name in names]
        records += [
            replace(r, pool_format=replace(r.pool_format, block_size=block_size))
            for r in finals(make_record, f"g{second}", second, *times)
        ]
        records += [
            make_record(n, stage="screen", samples=[t[0]], at=at(second), block_size=block_size) for n, t in times
        ]
        if data.draw(st.booleans()):
            failed = data.draw(st.sampled_from(names))
            records.append(
                make_record(failed, status=Status.WRONG, at=at(data.draw(st.integers(0, 9))), block_size=block_size)
            )
    mixed = data.draw(st.permutations([*records, *data.draw(st.lists(st.sampled_from(records), max_size=6))]))
    assert to_jsonable(select(mixed, DEVICE)) == to_jsonable(select(records, DEVICE))


def test_fastest_by_paired_ratio_wins_under_a_drift_that_hides_it(make_record: MakeRecord) -> None:
    drift = [100.0 * (1 + 0.05 * i) for i in range(20)]
    records = finals(make_record, "g", 0, ("slow", [1.03 * t for t in drift]), ("fast", drift))
    (entry,) = select(records, DEVICE).entries
    assert entry.variant == "fast"
    assert entry.runner_up == "slow[]"
    assert entry.margin == pytest.approx(0.03)
    assert entry.ties == ()


@pytest.mark.parametrize(("ratio", "tied"), [(1.005, True), (0.995, True), (1.02, False)])
def test_tie_within_one_percent_goes_to_the_smaller_workspace(
    make_record: MakeRecord, ratio: float, tied: bool
) -> None:
    times = steady(100.0)
    records = finals(
        make_record,
        "g",
        0,
        ("big", times),
        ("small", [ratio * t for t in times]),
        big={"workspace_bytes": 4096},
        small={"workspace_bytes": 16},
    )
    (entry,) = select(records, DEVICE).entries
    assert entry.variant == ("small" if tied else "big")
    assert entry.ties == (("big[]",) if tied else ())


def test_tie_without_workspaces_goes_to_the_canonical_order(make_record: MakeRecord) -> None:
    times = steady(100.0)
    more = {"late": {"order": 7}, "early": {"order": 3}}
    assert (
        winner(finals(make_record, "g", 0, ("late", times), ("early", [1.004 * t for t in times]), **more)) == "early"
    )


def test_wide_interval_is_no_tie(make_record: MakeRecord) -> None:
    times = steady(100.0)
    noisy = [t * (0.9 if i % 2 else 1.12) for i, t in enumerate(times)]
    (decision,) = decide_all(finals(make_record, "g", 0, ("a", times), ("b", noisy)), DEVICE).values()
    assert decision.ties == ()


def test_candidate_that_failed_last_cannot_win(make_record: MakeRecord) -> None:
    records = finals(make_record, "g", 1, ("wrong", steady(50.0)), ("right", steady(100.0)))
    assert winner(records) == "wrong"
    assert winner([*records, make_record("wrong", status=Status.WRONG, at=at(2))]) == "right"
    assert winner([*records, make_record("wrong", status=Status.WRONG, at=at(0))]) == "wrong"


def test_not_run_says_nothing_about_a_candidate(make_record: MakeRecord) -> None:
    records = finals(make_record, "g", 1, ("a", steady(50.0)), ("b", steady(100.0)))
    assert winner([*records, make_record("a", status=Status.NOT_RUN, at=at(2))]) == "a"


def test_later_finals_decide(make_record: MakeRecord) -> None:
    earlier = finals(make_record, "g1", 1, ("a", steady(50.0)), ("b", steady(100.0)))
    later = finals(make_record, "g2", 2, ("a", steady(110.0)), ("b", steady(100.0)))
    assert winner([*earlier, *later]) == "b"


def test_times_of_an_older_source_do_not_count(make_record: MakeRecord) -> None:
    old = finals(make_record, "g1", 1, ("a", steady(50.0)), ("b", steady(100.0)), a={"source": "old"})
    assert winner(old) == "a"
    assert winner([*old, make_record("a", at=at(2), source="new")]) == "b"


def test_without_finals_the_screening_decides(make_record: MakeRecord) -> None:
    records = [make_record(n, stage="screen", samples=[t, t, t], at=at(1)) for n, t in (("a", 9.0), ("b", 7.0))]
    (entry,) = select(records, DEVICE).entries
    assert (entry.variant, entry.runner_up) == ("b", "a[]")
    assert entry.margin == pytest.approx(9 / 7 - 1)


def test_speedups_are_over_eager_and_over_the_variants_own_default(make_record: MakeRecord) -> None:
    times = steady(100.0)
    group = finals(
        make_record,
        "g",
        1,
        ("fast", times),
        ("eager", [4 * t for t in times]),
        eager={"is_default": True},
        fast={"config": {"x": 2}},
    )
    default = make_record("fast", {"x": 1}, "screen", samples=[150.0] * 3, is_default=True, at=at(0))
    tuned = make_record("fast", {"x": 2}, "screen", samples=[100.0] * 3, at=at(0))
    (entry,) = select([*group, default, tuned], DEVICE).entries
    assert entry.speedup_eager == pytest.approx(4.0)
    assert entry.speedup_default == pytest.approx(1.5)  # it did not reach the finals: by the screening
    (alone,) = select(group[:1], DEVICE).entries
    assert alone.speedup_eager is None


def test_candidate_retired_early_is_ranked_by_its_ratio(make_record: MakeRecord) -> None:
    group = finals(make_record, "g", 1, ("a", steady(100.0)), ("b", steady(102.0)))
    retired = make_record(
        "slow", stage="final", samples=[300.0] * 5, ratios=[3.0] * 5, at=at(1), group="g", group_index=2, group_size=3
    )
    (decision,) = decide_all([*group, retired], DEVICE).values()
    assert [r.record.variant for r in decision.ranking] == ["a", "b", "slow"]
    assert decision.ranking[2].ratio[0] == pytest.approx(3.0)


def test_other_devices_do_not_mix_in(make_record: MakeRecord) -> None:
    mine = finals(make_record, "g1", 1, ("a", steady(100.0)), ("b", steady(120.0)))
    theirs = [replace(r, device="cpu|other|8|avx512") for r in finals(make_record, "g2", 2, ("b", steady(1.0)))]
    table = select([*mine, *theirs], DEVICE)
    assert [e.variant for e in table.entries] == ["a"]
    assert table.device == DEVICE
