"""The outer decision: expected costs worked out by hand from the formula in `formats.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagedtune.kernels.bounds import Bucket
from pagedtune.kernels.dispatch import Winner
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.record import Record
from pagedtune.tuner.formats import FormatChoice, choose_formats
from pagedtune.tuner.select import select

MakeRecord = Callable[..., Record]
SHORT, LONG = Bucket(8, 256), Bucket(1, 8192)


@pytest.fixture
def choose(make_record: MakeRecord) -> Callable[..., FormatChoice]:
    """The choice among `(block size, bucket, µs)`, with weight and mean context of each bucket."""

    def run(times: list[tuple[int, Bucket, float]], facts: dict[Bucket, tuple[float, float]]) -> FormatChoice:
        records = [
            make_record(
                stage="screen",
                samples=[us],
                block_size=size,
                bucket=bucket,
                bucket_weight=facts[bucket][0],
                mean_context=facts[bucket][1],
            )
            for size, bucket, us in times
        ]
        table = select(records, records[0].device)
        by_cell = {r.cell_key: r.provenance for r in records}
        (choice,) = choose_formats(table.entries, [by_cell[_cell(entry)] for entry in table.entries])
        assert table.chosen_formats == ({choice.model_key: choice.chosen} if choice.chosen else {})
        return choice

    return run


def _cell(entry: Winner) -> str:
    parts = (entry.op, entry.model, entry.problem.key, entry.pool_format.key, entry.bucket.key, entry.workload)
    return "|".join(parts)


def test_cost_is_weighted_time_times_memory(choose: Callable[..., FormatChoice]) -> None:
    facts = {SHORT: (3.0, 100.0), LONG: (1.0, 1000.0)}
    choice = choose([(16, SHORT, 10), (16, LONG, 50), (64, SHORT, 8), (64, LONG, 48)], facts)
    waste = {b: (3 * (b - 1) / 2 / 100 + (b - 1) / 2 / 1000) / 4 for b in (16, 64)}
    time = {16: (3 * 10 + 50) / 4, 64: (3 * 8 + 48) / 4}
    expected = {b: time[b] / time[64] * (1 + waste[b]) / (1 + waste[16]) for b in (16, 64)}
    assert choice.model_key == "small/bf16"
    for cost in choice.costs:
        size = cost.pool_format.block_size
        assert cost.time_us == pytest.approx(time[size])
        assert cost.wasted == pytest.approx(waste[size])
        assert cost.cost == pytest.approx(expected[size])
    assert choice.chosen == PoolFormat(16, DType.BF16)  # 64 is faster, but wastes a quarter of the memory


def test_faster_format_wins_where_contexts_are_long(choose: Callable[..., FormatChoice]) -> None:
    assert choose([(16, LONG, 60), (64, LONG, 50)], {LONG: (1.0, 8000.0)}).chosen == PoolFormat(64, DType.BF16)


def test_tie_goes_to_the_smaller_block(choose: Callable[..., FormatChoice]) -> None:
    choice = choose([(16, LONG, 50.2), (64, LONG, 50)], {LONG: (1.0, 8000.0)})
    assert choice.chosen == PoolFormat(16, DType.BF16)
    assert "ties b64" in choice.reason


def test_formats_are_compared_on_the_cells_they_share(choose: Callable[..., FormatChoice]) -> None:
    facts = {SHORT: (1.0, 200.0), LONG: (1.0, 8000.0)}
    choice = choose([(16, SHORT, 10), (16, LONG, 50), (64, LONG, 20)], facts)
    assert choice.chosen == PoolFormat(64, DType.BF16)
    assert "1 of 2 cells" in choice.reason


def test_nothing_is_chosen_without_a_common_cell(choose: Callable[..., FormatChoice]) -> None:
    choice = choose([(16, SHORT, 10), (64, LONG, 20)], {SHORT: (1.0, 200.0), LONG: (1.0, 8000.0)})
    assert choice.chosen is None
    assert "not decided" in choice.reason
