"""`python -m pagedtune_runtime`: verify, explain and calibrate, and what calibration changes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedtune.tuner.export import Exported

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = "import runpy; runpy.run_module('pagedtune_runtime', run_name='__main__')"


def test_verify_says_what_it_checked(exported: Exported, installed: Path, run_isolated: Run) -> None:
    libraries = len(exported.manifest.libraries)
    assert libraries >= 2  # attention and cache operations
    done = run_isolated(COMMAND, installed, "verify")
    assert done.returncode == 0, done.stderr
    for part in ("files,", "as exported", f"{libraries} libraries: load on this machine", "1 entries", "digest"):
        assert part in done.stdout, done.stdout


def test_calibration_is_kept_and_used(installed: Path, run_isolated: Run, overrides: Path) -> None:
    before = run_isolated(COMMAND, installed, "explain")
    assert before.returncode == 0, before.stderr
    assert "calibrated here: no" in before.stdout
    assert "100.0 us, measured" in before.stdout  # the time in the records

    settled = run_isolated(COMMAND, installed, "calibrate", "--budget", "4")
    assert settled.returncode == 0, settled.stderr + settled.stdout
    assert "1 of 1 cells settled" in settled.stdout
    (path,) = overrides.iterdir()
    (entry,) = json.loads(path.read_text())["entries"]
    # The reference takes one sequence at a time with torch: it cannot win against the C++ kernel.
    assert (entry["variant"], entry["time_evidence"]) == ("cpu_split", "measured")

    after = run_isolated(COMMAND, installed, "explain", "--seqs", "2", "--context", "100")
    assert after.returncode == 0, after.stderr
    assert "calibrated here: 1 cells" in after.stdout
    assert "won n4-c256 when calibrated on this machine" in after.stdout
    assert f"{entry['median_us']:.1f} us, measured" in after.stdout

    path.write_text("{")
    damaged = run_isolated(COMMAND, installed, "explain")
    assert damaged.returncode == 0
    assert "calibrated here: no" in damaged.stdout
    assert f"{path} is left out" in damaged.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("calibrate", "--budget", "0"), "--budget 0 must be at least 1 second"),
        (("explain", "--seqs", "2"), "--seqs and --context come together"),
        (("explain", "--seqs", "0", "--context", "1"), "0 must be at least 1"),
        (("explain", "--query", "2"), "--query comes with --seqs and --context"),
        (("explain", "--seqs", "1", "--context", "10", "--query", "20"), "--query 20 exceeds --context 10"),
        (("frob",), "invalid choice"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: tuple[str, ...], message: str, installed: Path, run_isolated: Run
) -> None:
    done = run_isolated(COMMAND, installed, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
