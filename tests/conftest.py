"""Shared fixtures, and the report of files that have grown past what the house aims for."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

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
def sizes(tree: list[str]) -> list[FileSize]:
    """The sizes of all source files."""
    return [size for path in tree if (size := size_of(ROOT, path))]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists the files above their aim (no failure: that is what test_house_sizes decides)."""
    long = [size for path in source_files(ROOT) if (size := size_of(ROOT, path)) and size.lines > size.aim]
    for size in sorted(long, key=lambda size: size.aim - size.lines):
        terminalreporter.write_line(f"house: {size.path} has {size.lines} lines; the aim is {size.aim}")
