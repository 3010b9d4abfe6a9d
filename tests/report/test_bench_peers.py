"""The peer comparison, without a peer: what it says of a process that fails, and its arithmetic."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pagedtune.tuner.bench_peers import geometric_mean, run_peer
from pagedtune.tuner.errors import UsageError


def test_geometric_mean_of_a_ratio_and_its_inverse_is_one() -> None:
    assert geometric_mean([4.0, 0.25]) == pytest.approx(1.0)
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


def test_a_peer_that_is_not_installed_is_said_so_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)ended with code 1 .*No module named 'vllm'"):
        list(run_peer(Path(sys.executable), 0.1, tmp_path / "log"))
