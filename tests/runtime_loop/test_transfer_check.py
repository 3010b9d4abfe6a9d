"""Transfers that name blocks which are not there, or one twice, move nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedtune.runtime.decode_loop import DecodeLoop
from pagedtune.runtime.host_pool import HostPool
from pagedtune.runtime.swap import SwapSpace

from .test_host_pool import FORMATS, WAYS, content, filled, host_of
from .toy_model import ToyModel


@pytest.mark.parametrize(
    ("blocks", "hosts", "message"),
    [
        ([0], [99], "host_blocks names block 99: ids are 0 to 3"),
        ([0], [-1], "host_blocks names block -1: ids are 0 to 3"),
        ([12], [0], "blocks names block 12: ids are 0 to 11"),
        ([-1], [0], "blocks names block -1: ids are 0 to 11"),
        ([0, 1], [2, 2], "host_blocks names block 2 twice"),
        ([0, 1], [2], r"blocks has shape \(2,\) and host_blocks \(1,\)"),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_ids_that_name_no_block_move_nothing(way: str, blocks: list[int], hosts: list[int], message: str) -> None:
    cache = filled(FORMATS[0])
    host = host_of(cache, 4, way, turn=2)
    host.save(np.arange(4), np.arange(4))
    before = content(cache)
    for move, args in ((host.save, (blocks, hosts)), (host.load, (hosts, blocks))):
        with pytest.raises(ValueError, match=message):
            move(*map(np.array, args))
    host.load(np.arange(4), np.arange(4))  # what was saved is still there
    assert all(map(torch.equal, content(cache), before))


def test_two_host_blocks_cannot_go_to_one_block() -> None:
    host = HostPool(filled(FORMATS[0]), 4)
    with pytest.raises(ValueError, match="blocks names block 7 twice"):
        host.load(np.array([0, 1]), np.array([7, 7]))


def test_a_swap_space_is_no_larger_than_its_host_pool() -> None:
    host = HostPool(filled(FORMATS[0]), 2)
    assert host.num_blocks == 2
    with pytest.raises(ValueError, match="num_blocks=8 exceeds the 2 blocks"):
        SwapSpace(8, host)


def test_a_loop_takes_no_swap_space_that_would_lose_its_blocks() -> None:
    model, other = ToyModel(8), ToyModel(8)
    with pytest.raises(ValueError, match="no mover"):
        DecodeLoop(model, swap=SwapSpace(8))
    with pytest.raises(ValueError, match="blocks of another cache"):
        DecodeLoop(model, swap=SwapSpace(8, HostPool(other.cache, 8)))
    loop = DecodeLoop(model, swap=SwapSpace(8, HostPool(model.cache, 8)))
    assert loop.generate([[1, 2]], 2), "a refusal claims no cache"
