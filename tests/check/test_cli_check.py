"""`pagedtune check` as a user calls it: real processes, exit codes, output, and misbehaving variants."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from pagedtune.harness.case import Case, Family, Hazard, Level
from pagedtune.harness.checking import Listing, Planned
from pagedtune.harness.coverings import cases_for
from pagedtune.harness.external import RequestError, load_variant
from pagedtune.harness.listing import list_cases
from pagedtune.harness.probe import cpu_facts
from pagedtune.kernels.eager import Eager
from pagedtune.kernels.serial import to_jsonable
from pagedtune.tuner import check_view
from pagedtune.tuner.cli import main
from pagedtune.tuner.cli_check import parse_pairs, require_writable, selected
from pagedtune.tuner.errors import UsageError

HERE = Path(__file__).resolve().parent
BAD = HERE / "bad_variants.py"
EXAMPLE = HERE.parents[1] / "examples" / "out_of_tree_variant.py"
COMMAND = [sys.executable, "-m", "pagedtune.tuner.cli", "check"]


@dataclass(frozen=True)
class Ran:
    """One finished command."""

    code: int
    out: str
    err: str


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TERM": "dumb"}


def run(folder: Path, *arguments: str) -> Ran:
    found = subprocess.run(
        [*COMMAND, *arguments], cwd=folder, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    return Ran(found.returncode, found.stdout, found.stderr)


def tiny_cases() -> tuple[Case, ...]:
    return cases_for(Eager(), cpu_facts(), Level.TINY)


@pytest.fixture(scope="module")
def key() -> str:
    """Key of the plainest case of random numbers that every variant here computes."""
    found = [case for case in tiny_cases() if case.family is Family.RANDOM and case.workload.total_context > 8]
    return min(found, key=lambda case: (Hazard.LIVE_NAN in case.hazards, len(case.hazards))).key


@dataclass(frozen=True)
class BadRun:
    """All bad variants in one check."""

    ran: Ran
    junit: ElementTree.Element


NAMES = [
    "RaisesInBuild",
    "RaisesInPlan",
    "RaisesInRun",
    "Hangs",
    "Crashes",
    "WritesOutside",
    "ChangesInputs",
    "Wrong",
    "RejectsAll",
    "Good",
]


@pytest.fixture(scope="module")
def bad_run(tmp_path_factory: pytest.TempPathFactory, key: str) -> BadRun:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "raises.py").write_text("import no_such_module_at_all\n")
    refs = [f"{BAD}:{name}" for name in NAMES] + ["raises.py:Any"]
    ran = run(folder, *refs, "--cases", "tiny", "--only", key, "--timeout", "8", "--junit", "report.xml")
    return BadRun(ran, ElementTree.parse(folder / "report.xml").getroot())


def test_bad_variants_give_exit_code_1_and_the_check_ends(bad_run: BadRun) -> None:
    assert bad_run.ran.code == 1, bad_run.ran
    assert "Traceback" not in bad_run.ran.out + bad_run.ran.err


@pytest.mark.parametrize(
    ("variant", "tag", "kind", "words"),
    [
        ("raises_in_build", "error", "build_failed", "BuildError: mycc: kernel.cu:3: no such instruction"),
        ("raises_in_plan", "error", "crashed", "KeyError: 'no tile for this shape' (bad_variants.py:"),
        ("raises_in_run", "error", "crashed", "RuntimeError: launch failed with two lines (bad_variants.py:"),
        ("hangs", "error", "timeout", "no answer within 8 s in after (bad_variants.py:"),
        ("crashes", "error", "crashed", "ended by SIGSEGV in after (bad_variants.py:"),
        ("writes_outside", "failure", "corrupted", "guards"),
        ("changes_inputs", "failure", "corrupted", "inputs"),
        ("wrong", "failure", "wrong", "out["),
        ("rejects_all", "skipped", "rejected", "needs a Tuesday"),
    ],
)
def test_each_misbehaviour_is_named_in_junit_and_on_the_screen(
    bad_run: BadRun, key: str, variant: str, tag: str, kind: str, words: str
) -> None:
    (case,) = bad_run.junit.findall(f"testsuite[@name='{variant}.attention']/testcase")
    assert case.get("name") == key
    (result,) = case
    assert (result.tag, result.get("type")) == (tag, kind)
    assert words in (result.get("message") or "")
    assert words in bad_run.ran.out


def test_a_good_variant_among_bad_ones_passes_whatever_it_prints(bad_run: BadRun) -> None:
    (case,) = bad_run.junit.findall("testsuite[@name='good.attention']/testcase")
    assert not list(case)
    assert "chatty" not in bad_run.ran.out + bad_run.ran.err


def test_a_file_that_does_not_import_is_an_error_of_the_check(bad_run: BadRun) -> None:
    (case,) = bad_run.junit.findall("testsuite/testcase[@name='load']")
    assert "No module named 'no_such_module_at_all' (raises.py:1)" in (case[0].get("message") or "")


def test_a_variant_that_rejects_everything_is_said_to_be_unchecked(bad_run: BadRun) -> None:
    assert "rejects_all attention: it rejects every case, so nothing was checked" in bad_run.ran.out


def test_every_failure_has_a_command_that_repeats_it(bad_run: BadRun, key: str) -> None:
    assert f"pagedtune check {BAD}:Wrong --device cpu --cases tiny --only '{key}'" in bad_run.ran.out


def test_the_example_passes_the_whole_tiny_level(tmp_path: Path) -> None:
    ran = run(tmp_path, f"{EXAMPLE}:SdpaGather", "--cases", "tiny", "--junit", "report.xml")
    assert ran.code == 0, ran
    assert re.search(r"^PASSED: \d+ cases ran, \d+ rejected by the variant \(1 variant on cpu", ran.out, re.MULTILINE)
    root = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert (root.get("failures"), root.get("errors")) == ("0", "0")
    assert int(root.get("tests", "0")) == len(cases_for(load_variant(f"{EXAMPLE}:SdpaGather"), cpu_facts(), Level.TINY))
    assert [path.name for path in tmp_path.iterdir()] == ["report.xml"]
    table = ran.out.partition("REJECTED")[0]
    assert max(map(len, table.splitlines())) <= 100


def test_the_example_is_as_long_as_documented() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60


def test_a_hopeless_variant_is_given_up_and_what_did_not_run_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{BAD}:RaisesInPlan", "--cases", "tiny", "--allow-missing"]) == 1
    text, meanwhile = capsys.readouterr()
    assert "not run after 3 crashes or time-outs in a row" in text
    assert text.count("FAILED crashed") in (3, 4)  # two run at once
    at_once = [line for line in meanwhile.splitlines() if line.startswith("FAILED crashed")]
    assert sorted(at_once) == sorted(line for line in text.splitlines() if line.startswith("FAILED crashed"))


def test_a_gpu_that_is_not_here_is_checked_on_the_virtual_one_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    assert main(["check", "cuda_paged", "--device", "h100", "--cases", "tiny", "--only", "block_edges"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "for h100 (emulated: the PTX of each binary ran on the virtual GPU, no GPU did)" in text
    assert "cuda_paged" in text
    assert "triton_split" not in text


def test_an_unfit_machine_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    ran = run(tmp_path, "--device", "h10")
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("error: unknown device 'h10'")
    assert ran.err.count("\n") == 1


def test_an_unknown_variant_is_exit_code_2_with_the_nearest_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "eagre"]) == 2
    assert "error: unknown variant 'eagre': did you mean eager" in capsys.readouterr().err


def test_only_selects_one_case_by_its_key_or_several_by_a_part_of_it() -> None:
    cases = tiny_cases()
    planned = tuple(Planned("eager", "eager", case.op, case, {}) for case in cases)
    listings = [Listing("eager", "eager", cases[0].op, planned)]
    (one,) = selected(listings, [cases[3].key])
    assert [found.case for found in one.planned] == [cases[3]]
    (several,) = selected(listings, ["|needle|", cases[3].key])
    assert {c.case.key for c in several.planned} == {c.key for c in cases if c.family is Family.NEEDLE or c == cases[3]}
    with pytest.raises(UsageError, match="--only 'neddle' is in the key of none"):
        selected(listings, ["neddle"])


def test_an_interrupt_ends_the_workers_and_writes_nothing(tmp_path: Path) -> None:
    arguments = [f"{BAD}:Hangs", "--cases", "tiny", "--junit", "report.xml"]
    with subprocess.Popen(
        [*COMMAND, *arguments], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        workers = wait_for_workers(process, 2)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in error
    assert not list(tmp_path.iterdir())
    assert not [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]


def wait_for_workers(process: subprocess.Popen[bytes], count: int) -> list[psutil.Process]:
    """The children of a check once `count` of them run at the same time."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        found = psutil.Process(process.pid).children()
        if len(found) >= count:
            time.sleep(1)
            return found
        time.sleep(0.05)
    raise AssertionError("the check started no workers")


def listing(ref: str, **changes: object) -> dict[str, object]:
    payload = {"variant": ref, "device": to_jsonable(cpu_facts()), "level": "tiny", "settings": {}}
    found: dict[str, object] = list_cases({**payload, **changes})
    return found


@pytest.mark.parametrize(
    ("ref", "settings", "words"),
    [
        ("no/such/file.py:Mine", {}, "no file"),
        (f"{BAD}:Missing", {}, "has no 'Missing': it has Bad, RaisesInBuild"),
        (f"{BAD}:NotAVariant", {}, "is no variant: derive it from"),
        (f"{BAD}:Good", {"tiles": "8"}, "good has no tunable tiles; it has tile"),
        (f"{BAD}:Good", {"tile": "eight"}, "tile: expected int, found 'eight'"),
        ("eager", {"tile": "8"}, "it has none"),
    ],
)
def test_a_request_that_names_nothing_is_refused_with_what_there_is(
    ref: str, settings: dict[str, str], words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        listing(ref, settings=settings)
    assert words in str(caught.value)


def test_settings_reach_every_case() -> None:
    cases = listing(f"{BAD}:Good", settings={"tile": "8"})["cases"]
    assert isinstance(cases, list)
    assert cases
    assert all(case["config"] == {"tile": 8} for case in cases)


def test_a_variant_of_another_kind_of_device_is_refused() -> None:
    with pytest.raises(RequestError, match="eager is for cpu devices and h100 is a cuda device"):
        listing("eager", device={**to_jsonable(cpu_facts()), "name": "h100", "kind": "cuda"})


@pytest.mark.parametrize("texts", [["tile"], ["=4"], ["tile="], ["tile=1", "tile=2"]])
def test_a_malformed_setting_is_refused(texts: list[str]) -> None:
    with pytest.raises(UsageError, match="--config"):
        parse_pairs(texts)


@pytest.mark.parametrize(
    ("path", "words"),
    [("missing/report.xml", "there is no folder"), (".", "is a folder"), ("/proc/report.xml", "cannot be written")],
)
def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path, path: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        require_writable(tmp_path / path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "h10"], "unknown device 'h10': did you mean h100"),
        (["--cases", "huge"], "unknown --cases 'huge'"),
        (["--op", "atention"], "did you mean attention"),
        (["--timeout", "0"], "--timeout 0 must be above 0"),
        (["--junit", "missing/report.xml"], "there is no folder"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["check", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error


def test_every_failure_counts_whether_its_line_is_shown_or_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no terminal only some items get a line; what they count must be of all of them."""
    monkeypatch.setattr(check_view, "PLAIN_AFTER_S", 0.0)
    monkeypatch.setattr(check_view, "PLAIN_EVERY_S", math.inf)
    asked: list[int] = []
    shown = check_view.with_progress(
        range(3), 3, "cases", lambda item: str(asked.append(item)), lambda item: "!" * item
    )
    assert list(shown) == [0, 1, 2]
    assert asked == [0, 1, 2]
    assert capsys.readouterr().err.split() == ["1", "of", "3", "cases:", "None", "!", "!!"]
