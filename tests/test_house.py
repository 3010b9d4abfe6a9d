"""Rules of the house that neither the linter nor the type checker knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest


class Size(Protocol):
    """What tests/conftest.py says of a source file."""

    path: str
    lines: int
    aim: int
    limit: int


SizeRule = Callable[[Path, str], Size | None]


def too_long(root: Path, paths: list[str], size_rule: SizeRule) -> list[str]:
    """The files above the length that fails."""
    sizes = [size for path in paths if (size := size_rule(root, path))]
    return [f"{size.path}: {size.lines} lines; at most {size.limit}" for size in sizes if size.lines > size.limit]


def test_no_source_file_is_above_its_hard_limit(root: Path, tree: list[str], size_rule: SizeRule) -> None:
    assert too_long(root, tree, size_rule) == []


@pytest.mark.parametrize(
    ("name", "lines", "fails"),
    [
        ("kernels/a.py", 400, False),
        ("kernels/a.py", 401, True),
        ("kernels/cpu/a.cpp", 500, False),
        ("kernels/cpu/a.cpp", 501, True),
        ("tests/test_a.py", 401, True),
        ("configs/gpus/cpu.yaml", 5000, False),
    ],
)
def test_a_file_above_its_limit_is_found(
    tmp_path: Path, size_rule: SizeRule, name: str, lines: int, fails: bool
) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("x = 1\n" * lines)
    assert bool(too_long(tmp_path, [name], size_rule)) == fails


def test_the_native_and_generated_files_stay_out_of_the_tree(tree: list[str]) -> None:
    built = {".so", ".o", ".cubin", ".pyc", ".whl"}
    assert not [path for path in tree if Path(path).suffix in built]
    assert "pyproject.toml" in tree, "the list of the tree's files is empty or wrong"
