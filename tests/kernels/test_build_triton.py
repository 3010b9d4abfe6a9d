"""Builds of Triton kernels in threads, as an export makes them: nothing of the process is theirs alone."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagedtune.kernels import build_triton


def test_two_builds_of_one_source_both_see_the_whole_module(tmp_path: Path) -> None:
    source = tmp_path / "slow_kernels.py"
    source.write_text("import time\ntime.sleep(0.3)\nkernel = 1\n")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: build_triton._load_module(source).kernel, range(2)))
    assert found == [1, 1]


def test_a_source_that_fails_is_not_taken_for_loaded(tmp_path: Path) -> None:
    source = tmp_path / "broken_kernels.py"
    source.write_text("raise RuntimeError('broken')\n")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            build_triton._load_module(source)


@pytest.mark.parametrize("before", [None, "0"])
def test_line_info_stays_out_until_the_last_build_has_ended(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TRITON_DISABLE_LINE_INFO"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    first, second = build_triton._no_line_info, build_triton._no_line_info
    first.__enter__()
    second.__enter__()
    assert os.environ[name] == "1"
    first.__exit__()
    assert os.environ[name] == "1"
    second.__exit__()
    assert os.environ.get(name) == before
