"""`make generate` on a machine that leaves tuning no time: it goes on, and then says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pagedtune.harness.probe import __file__ as probe

SCRIPT = Path(probe).resolve().parents[1] / "scripts" / "generate.sh"
PAGEDTUNE = """#!/bin/sh
for last; do [ "$before" = --budget ] && budget=$last; before=$last; done
echo "$1$budget" >> calls
tunes=$(grep -c tune calls)
[ "$1" = tune ] && { [ "$tunes" -ge GOOD ]; exit; }
[ "$tunes" -ge GOOD ] && exit 0
exit 2
"""


def run(folder: Path, good: int) -> tuple[int, str, list[str]]:
    """Exit code, what was said and the commands run, where the `good`-th tune is the first to find a winner."""
    (folder / "scripts").mkdir()
    shutil.copy(SCRIPT, folder / "scripts")
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name, text in (("pagedtune", PAGEDTUNE.replace("GOOD", str(good))), ("python", "#!/bin/sh\nexit 7\n")):
        (path := folder / ".venv" / "bin" / name).write_text(text)
        path.chmod(0o755)
    done = subprocess.run(
        ["bash", "scripts/generate.sh"],
        cwd=folder, env={**os.environ, "PROMPT": "x"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr, (folder / "calls").read_text().split()


@pytest.mark.parametrize("good", [1, 3])
def test_a_tune_without_a_winner_goes_on(tmp_path: Path, good: int) -> None:
    _, said, calls = run(tmp_path, good)
    assert calls == ["export", *["tune60", "tune120", "tune240"][:good], "export"]
    assert "nothing can be exported" not in said


def test_after_three_longer_and_longer_tunes_it_says_what_to_do(tmp_path: Path) -> None:
    code, said, calls = run(tmp_path, 9)
    assert (code, calls) == (2, ["export", "tune60", "tune120", "tune240"])
    assert "nothing can be exported after seven minutes of tuning" in said
    assert "--budget 900" in said
