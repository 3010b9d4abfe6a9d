"""Shared fixtures, and the report of files that have grown past what the house aims for."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is loaded: several test processes share the cores, and OpenMP threads that spin while they wait take the
# time from those that they wait for (measured: a case of the gate takes ten times as long on a busy machine).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts what it runs in the background with interrupts ignored, and so would be every process that a test
# starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The time of one example says nothing on a shared machine; pytest-timeout stops what hangs. Continuous integration
# repeats the same examples, so that a red run is about the change at hand; other runs look for new ones.
settings.register_profile("house", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("house")

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {".venv", "build", "dist", "results"}
KERNEL_SOURCES = {".cpp", ".h", ".cu", ".cuh"}


@dataclass(frozen=True)
class FileSize:
    """Length of one source file in lines, the length it should stay under, and the length it must."""

    path: str
    lines: int
    aim: int
    limit: int


def source_files(root: Path) -> list[str]:
    """Paths relative to `root` of all files that belong to the project: tracked, or new and not ignored.

    Without git (an unpacked source archive) every file outside the generated folders counts.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        listed = [str(path.relative_to(root)) for path in root.rglob("*")]
    relative = (Path(name) for name in listed if name)
    return sorted(
        str(path)
        for path in relative
        if path.parts[0] not in GENERATED and "__pycache__" not in path.parts and (root / path).is_file()
    )


def size_of(root: Path, path: str) -> FileSize | None:
    """The size of a source file and its bounds; None for a file that has none (data, text)."""
    suffix = Path(path).suffix
    if suffix in KERNEL_SOURCES or path.endswith("_kernel.py"):
        aim, limit = 400, 500
    elif suffix == ".py":
        aim, limit = (300 if path.startswith("tests/") else 250), 400
    else:
        return None
    return FileSize(path, len((root / path).read_text(encoding="utf-8").splitlines()), aim, limit)


@pytest.fixture(scope="session")
def root() -> Path:
    """The top folder of the working tree."""
    return ROOT


@pytest.fixture(scope="session")
def tree() -> list[str]:
    """The project's files, relative to the top folder, sorted."""
    return source_files(ROOT)


@pytest.fixture(scope="session")
def size_rule() -> Callable[[Path, str], FileSize | None]:
    """`size_of`, for the test that enforces it."""
    return size_of


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The kill rate of the gate, if planted faults ran, and the files above their aim (no failure by itself:
    tests/test_house.py has the hard limits)."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ())]
    found = [value for r in reports for name, value in getattr(r, "user_properties", ()) if name == "planted_fault"]
    for line in kill_table(found):
        terminalreporter.write_line(line)
    sizes = [size for path in source_files(ROOT) if (size := size_of(ROOT, path))]
    for size in sorted(sizes, key=lambda size: size.aim - size.lines):
        if size.lines > size.aim:
            terminalreporter.write_line(f"house: {size.path} has {size.lines} lines; the aim is {size.aim}")


def kill_table(found: list[tuple[str, str, str, str, bool | None]]) -> list[str]:
    """One line per planted fault (name, source, check that refused it, case, whether allclose 1e-2 passes it)."""
    if not found:
        return []
    words = {True: "passes", False: "finds", None: "-"}
    lines = [f"planted: {'fault':<56} {'refused by':<16} {'plain allclose 1e-2':<20} as in"]
    for name, source, check, _, plain in sorted(found):
        lines.append(f"planted: {name:<56} {check or 'NOT REFUSED':<16} {words[plain]:<20} {source}")
    killed, missed = sum(bool(f[2]) for f in found), sum(f[4] is True for f in found)
    compared = sum(f[4] is not None for f in found)
    lines.append(
        f"planted: the gate refuses {killed} of {len(found)} faults ({100 * killed / len(found):.0f} %); "
        f"a plain allclose of 1e-2 on friendly inputs passes {missed} of the {compared} that it was tried on"
    )
    return lines
