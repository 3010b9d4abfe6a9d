"""What is not exported: nothing proven, nothing that has changed since, nothing that is only predicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pagedtune.kernels.record import Record, TimeEvidence
from pagedtune.tuner.cli import main
from pagedtune.tuner.errors import UsageError
from pagedtune.tuner.export import export

MakeFinals = Callable[..., list[Record]]
MakeResults = Callable[[Path, list[Record]], Path]


def refusal(folder: Path, out: Path, **options: object) -> str:
    """The reason for which an export is refused; nothing is written."""
    with pytest.raises(UsageError) as caught:
        export(folder, out, **options)  # type: ignore[arg-type]
    assert not list(out.glob("*"))
    return str(caught.value)


def test_without_winners_it_says_to_tune(tmp_path: Path) -> None:
    assert "run `make tune`" in refusal(tmp_path / "cpu", tmp_path / "dist")


def test_the_command_says_to_tune_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--results", str(tmp_path)]) == 2
    assert "run `make tune`" in capsys.readouterr().err


def test_an_unknown_model_gets_the_known_ones(results: Path, tmp_path: Path) -> None:
    text = refusal(results, tmp_path / "dist", models=("tyni",))
    assert "did you mean tiny?" in text


def test_winners_of_an_older_source_are_stale(
    make_finals: MakeFinals, make_results: MakeResults, tmp_path: Path
) -> None:
    old = [replace(r, provenance={**r.provenance, "source": "older"}) for r in make_finals()]
    text = refusal(make_results(tmp_path / "cpu", old), tmp_path / "dist")
    assert "1 of 1 winners are stale" in text
    assert "cpu_split for tiny 6/2x32-fp32" in text


@pytest.mark.parametrize("source", [None, "older"])
def test_a_look_at_the_winners_says_which_are_stale(
    source: str | None,
    make_finals: MakeFinals,
    make_results: MakeResults,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = make_finals()
    if source is not None:
        records = [replace(r, provenance={**r.provenance, "source": source}) for r in records]
    make_results(tmp_path / "cpu", records)
    assert main(["winners", "--results", str(tmp_path), "--device", "cpu"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ("1 of 1 winners are stale: the source of cpu_split has changed" in text) == (source is not None)


def test_a_binary_that_was_not_timed_is_refused(
    make_finals: MakeFinals, make_results: MakeResults, tmp_path: Path
) -> None:
    other = [replace(r, artifact_keys=("0" * 24,)) if r.artifact_keys else r for r in make_finals()]
    text = refusal(make_results(tmp_path / "cpu", other), tmp_path / "dist")
    assert "000000000000000000000000 was proven and timed" in text
    assert "it was as it was then and is" in text  # the compiler of the records


def test_predicted_times_need_leave(make_finals: MakeFinals, make_results: MakeResults, tmp_path: Path) -> None:
    folder = make_results(tmp_path / "cpu", make_finals(TimeEvidence.PREDICTED))
    assert "--allow-predicted" in refusal(folder, tmp_path / "dist")
    done = export(folder, tmp_path / "dist", allow_predicted=True)
    assert any("predicted" in note for note in done.manifest.notes)


def test_winners_that_do_not_follow_from_the_records_are_refused(
    make_finals: MakeFinals, make_results: MakeResults, tmp_path: Path
) -> None:
    folder = make_results(tmp_path / "cpu", make_finals())
    table = json.loads((folder / "winners.json").read_text())
    table["entries"][0]["median_us"] = 1.0
    (folder / "winners.json").write_text(json.dumps(table))
    assert "does not follow from the records" in refusal(folder, tmp_path / "dist")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"device": "d"}', '{"device": "d", "entries": [1]}'])
def test_unreadable_winners_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "winners.json").write_text(text)
    assert "winners.json cannot be read" in refusal(tmp_path / "cpu", tmp_path / "dist")


def test_an_unwritable_folder_is_one_line(results: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="--out"):
        export(results, tmp_path / "file" / "dist")
