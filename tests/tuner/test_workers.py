"""Which variants may share a process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pagedtune.tuner.workers import WorkerPool, variants_in

JOB = "fake_jobs:process_of"
FOREIGN, OTHER = "/somewhere/mine.py:Mine", "an_entry_point"
LIMIT_S = 30.0


def test_variants_of_a_job() -> None:
    assert variants_in({"variant": "eager"}) == {"eager"}
    assert variants_in({"candidates": [{"variant": "eager"}, {"variant": FOREIGN}]}) == {"eager", FOREIGN}
    assert variants_in({"other": 1}) == variants_in(3) == frozenset()


@pytest.mark.parametrize("through_map", [False, True])
def test_code_from_outside_the_catalogue_shares_its_process_with_no_other(
    monkeypatch: pytest.MonkeyPatch, through_map: bool
) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    with WorkerPool(1, ["fake_jobs:process_of"]) as pool:

        def process_of(ref: str) -> int:
            if through_map:
                ((_, answer),) = pool.map(JOB, [ref], lambda item: {"variant": item}, LIMIT_S)
            else:
                answer = pool.call(JOB, {"variant": ref}, LIMIT_S)
            assert isinstance(answer, int)
            return answer

        catalogue = process_of("eager")
        assert process_of("cpu_split") == catalogue
        foreign = process_of(FOREIGN)
        assert foreign != catalogue
        assert process_of(FOREIGN) == foreign
        other = process_of(OTHER)
        assert other not in (foreign, catalogue)
        assert process_of("eager") not in (other, foreign, catalogue)
