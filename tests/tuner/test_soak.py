"""The soak: short runs, and what it must notice. The long one is `python -m pagedtune.tuner.soak`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedtune.runtime.errors import PagedRuntimeError
from pagedtune.runtime.prefix_sharing import PrefixSharing
from pagedtune.tuner.soak import SoakSettings, soak

SHORT = SoakSettings(requests=250, check_every=20, cancel=0.1, fork=0.1, preempt=0.05)


@pytest.mark.parametrize("swap_blocks", [0, 64])
def test_requests_come_and_go_through_a_full_pool(swap_blocks: int) -> None:
    seen: list[int] = []
    result = soak(replace(SHORT, swap_blocks=swap_blocks), seen.append)
    ended = result.finished + result.cancelled
    assert ended >= SHORT.requests  # forks and second samples beside the requests
    assert min(result.cancelled, result.forks, result.preemptions, result.checks) > 0
    assert (result.swapped > 0) == (swap_blocks > 0)
    assert result.pool_use > 0.75
    assert result.hit_rate > 0
    assert seen[-1] >= SHORT.requests - 100


def test_equal_seeds_give_equal_runs() -> None:
    counts = [(r.finished, r.cancelled, r.steps, r.preemptions, r.hit_rate) for r in (soak(SHORT) for _ in range(2))]
    assert counts[0] == counts[1]


def test_a_lease_that_is_never_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = PrefixSharing.leave

    def forget_one_in_ten(self: PrefixSharing, row: int) -> None:
        calls.append(row)
        if len(calls) % 10:
            leave(self, row)
        else:
            self._leases.pop(row, None)

    calls: list[int] = []
    monkeypatch.setattr(PrefixSharing, "leave", forget_one_in_ten)
    with pytest.raises(PagedRuntimeError):
        soak(SHORT)
