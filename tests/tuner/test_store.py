"""The records file: what a killed process, a strange file or a second process does to it."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedtune.kernels.record import SCHEMA_VERSION, Record
from pagedtune.tuner.errors import UsageError
from pagedtune.tuner.store import FILE_NAME, open_store, read_records

MakeRecord = Callable[..., Record]


def write(folder: Path, *records: Record) -> Path:
    with open_store(folder) as store:
        store.append(*records)
    return folder / FILE_NAME


def without_time(records: tuple[Record, ...]) -> list[str]:
    return [record.candidate_key for record in records]


def test_what_is_appended_is_read_back(tmp_path: Path, make_record: MakeRecord) -> None:
    first, second = make_record("a", samples=[2.0, 3.0], stage="final", ratios=[1.0]), make_record("b", {"x": 1})
    with open_store(tmp_path / "cpu") as store:
        stored = (*store.append(first), *store.append(second))
    assert read_records(tmp_path / "cpu") == stored
    assert stored[0].timing == first.timing
    assert stored[0].recorded_at < stored[1].recorded_at


def test_record_is_on_disk_when_append_returns(tmp_path: Path, make_record: MakeRecord) -> None:
    with open_store(tmp_path) as store:
        for count in range(1, 4):
            store.append(make_record(f"v{count}"))
            assert len((tmp_path / FILE_NAME).read_text().splitlines()) == count


def test_times_of_records_increase_even_if_the_clock_went_back(tmp_path: Path, make_record: MakeRecord) -> None:
    path = write(tmp_path, make_record("a"))
    data = json.loads(path.read_text())
    data["recorded_at"] = "2999-01-01T00:00:00.000000+00:00"
    path.write_text(json.dumps(data) + "\n")
    with open_store(tmp_path) as store:
        (later,) = store.append(make_record("b"))
    assert later.recorded_at > "2999-01-01T00:00:00.000000+00:00"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_file_cut_anywhere_loses_only_the_torn_entry(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, make_record: MakeRecord
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    with open_store(folder) as store:
        store.append(make_record("a"))
        store.append(make_record("b"))
        store.append_group([make_record("c", stage="final"), make_record("d", stage="final")], "g1")
        store.append(make_record("e"))
    path = folder / FILE_NAME
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    # A line counts from its last character on; the two of the group count together.
    complete = sum(end - 1 <= cut for end in ends)
    expected = ["a[]", "b[]", "c[]", "d[]", "e[]"][: 2 if complete == 3 else complete]
    assert without_time(read_records(folder)) == expected
    with open_store(folder) as store:
        assert without_time(tuple(store.records)) == expected
        store.append(make_record("new"))
    assert without_time(read_records(folder)) == [*expected, "new[]"]
    assert path.read_bytes().endswith(b"\n")


def test_torn_entry_is_kept_beside_the_file_and_mentioned(tmp_path: Path, make_record: MakeRecord) -> None:
    path = write(tmp_path, make_record("a"))
    with path.open("ab") as file:
        file.write(b'{"run_id": "half')
    with open_store(tmp_path) as store:
        (note,) = store.notes
    assert "records.jsonl.torn" in note
    assert b'{"run_id": "half' in (tmp_path / "records.jsonl.torn").read_bytes()
    with open_store(tmp_path) as store:
        assert store.notes == ()


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path, make_record: MakeRecord) -> None:
    path = write(tmp_path, make_record("a"), make_record("b"), make_record("c"))
    lines = path.read_text().splitlines(keepends=True)
    damaged = lines[0] + lines[1][:40] + "\n" + lines[2]
    path.write_text(damaged)
    for reader in (read_records, lambda folder: open_store(folder).__enter__()):
        with pytest.raises(UsageError, match=r"records\.jsonl:2: damaged.*--fresh"):
            reader(tmp_path)
    assert path.read_text() == damaged


@pytest.mark.parametrize("position", [0, 1])
def test_newer_schema_is_refused_with_what_to_do(tmp_path: Path, make_record: MakeRecord, position: int) -> None:
    path = write(tmp_path, make_record("a"), make_record("b"))
    lines = path.read_text().splitlines()
    data = json.loads(lines[position]) | {"schema": SCHEMA_VERSION + 1, "a_new_field": 1}
    lines[position] = json.dumps(data)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError, match=rf":{position + 1}: written by a newer pagedtune.*upgrade.*--results"):
        read_records(tmp_path)


def test_line_of_other_json_is_refused(tmp_path: Path, make_record: MakeRecord) -> None:
    path = write(tmp_path, make_record("a"))
    path.write_text(path.read_text() + '{"what": 1}\n')
    with pytest.raises(UsageError, match=r":2: not a record.*what"):
        read_records(tmp_path)


def test_fresh_sets_the_old_records_aside(tmp_path: Path, make_record: MakeRecord) -> None:
    path = write(tmp_path, make_record("a"))
    before = path.read_bytes()
    with open_store(tmp_path, fresh=True) as store:
        assert store.records == []
        assert len(store.notes) == 1
        store.append(make_record("b"))
    (aside,) = tmp_path.glob("records-until-*.jsonl")
    assert aside.read_bytes() == before
    assert without_time(read_records(tmp_path)) == ["b[]"]


def _try_to_open(folder: str, answer: multiprocessing.Queue[str]) -> None:
    try:
        with open_store(Path(folder)):
            answer.put("opened")
    except UsageError as error:
        answer.put(str(error))


def test_second_process_is_refused_while_the_first_has_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answer: multiprocessing.Queue[str] = context.Queue()
    with open_store(tmp_path):
        process = context.Process(target=_try_to_open, args=(str(tmp_path), answer))
        process.start()
        said = answer.get(timeout=60)
        process.join()
    assert "in use by another tune" in said
    assert "--results" in said
    with open_store(tmp_path):
        pass


def test_unusable_folder_is_refused_before_any_work(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UsageError, match=r"cannot be written.*--results"), open_store(blocked / "cpu"):
        pass
