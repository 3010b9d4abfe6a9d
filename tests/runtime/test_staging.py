"""What the host sends survives until the step that it was sent for has ended; here the CPU plays the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedtune.runtime.errors import StepError
from pagedtune.runtime.staging import Staging


def staging() -> Staging:
    return Staging(torch.device("cpu"), copies=True)


def test_arrays_arrive_whole_whatever_their_types() -> None:
    arrays = (np.arange(5), np.array([[1, 2], [3, 4]], np.int32), np.empty(0, np.int64), np.array([True, False, True]))
    sent = staging().send(1, (1,), arrays)
    for tensor, values in zip(sent, arrays, strict=True):
        assert torch.equal(tensor, torch.from_numpy(values))
        assert tensor.data_ptr() % 8 == 0


def test_a_step_in_flight_keeps_what_it_was_sent() -> None:
    own = staging()
    source = np.arange(4)
    first = own.send(1, (1,), (source,))[0]
    source[:] = 9
    second = own.send(2, (1, 2), (source,))[0]
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3], [9] * 4)
    with pytest.raises(StepError, match="overwrite what step 1, still in flight"):
        own.send(3, (1, 2, 3), (source,))
    own.send(3, (2, 3), (source + 1,))
    assert second.tolist() == [9] * 4


def test_memory_grows_with_the_largest_step() -> None:
    own = staging()
    big = np.arange(100_000)
    assert own.send(1, (1,), (big, big))[1].tolist() == big.tolist()
    assert own.send(3, (3,), (big[:3],))[0].tolist() == [0, 1, 2]


def test_on_the_cpu_nothing_is_copied() -> None:
    values = np.arange(3)
    assert Staging(torch.device("cpu")).send(1, (1,), (values,))[0].data_ptr() == values.ctypes.data
