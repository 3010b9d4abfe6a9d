"""Occupancy against the limits that NVIDIA publishes, worked out by hand."""

from __future__ import annotations

import pytest

from pagedtune.harness.occupancy import Limit, occupancy
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.tuner.configs import Configs

GPUS = {name: Configs().gpu(name).device(name) for name in ("a100", "h100", "h200", "l40s")}


@pytest.mark.parametrize(
    ("gpu", "threads", "registers", "shared", "blocks", "limit"),
    [
        # 2048 threads an SM on sm_80 and sm_90, 1536 on sm_89
        ("a100", 256, 32, 0, 8, Limit.REGISTERS),  # 64 warps of 1024 registers fill the file exactly
        ("h100", 1024, 16, 0, 2, Limit.WARPS),
        ("l40s", 1024, 16, 0, 1, Limit.WARPS),  # 48 warps hold one block of 32
        # resident blocks: 32, and 24 on sm_89
        ("a100", 32, 16, 0, 32, Limit.BLOCKS),
        ("l40s", 32, 16, 0, 24, Limit.BLOCKS),
        # 255 registers: 8192 of a warp, 2 in each partition's 16384, so 8 warps
        ("h100", 128, 255, 0, 2, Limit.REGISTERS),
        # 40 registers: 1280 of a warp, 12 in a partition (12.8 do not fit), 48 warps
        ("a100", 256, 40, 0, 6, Limit.REGISTERS),
        # 33 registers: 1056 rounds up to 1280, as 40
        ("a100", 256, 33, 0, 6, Limit.REGISTERS),
        # shared memory: 48 KiB and the system's 1 KiB of 164, 228 and 100 KiB
        ("a100", 128, 32, 48 << 10, 3, Limit.SHARED),
        ("h100", 128, 32, 48 << 10, 4, Limit.SHARED),
        ("l40s", 128, 32, 48 << 10, 2, Limit.SHARED),
        # the most that a block may ask for still fits once
        ("a100", 128, 32, 163 << 10, 1, Limit.SHARED),
        ("h100", 128, 32, 227 << 10, 1, Limit.SHARED),
        ("l40s", 128, 32, 99 << 10, 1, Limit.SHARED),
        ("l40s", 128, 32, (99 << 10) + 1, 0, Limit.SHARED),
        ("h100", 128, 256, 0, 0, Limit.REGISTERS),
    ],
)
def test_published_limits(gpu: str, threads: int, registers: int, shared: int, blocks: int, limit: Limit) -> None:
    found = occupancy(GPUS[gpu], threads, registers, shared)
    assert (found.blocks, found.limit) == (blocks, limit)


def test_warps_are_whole() -> None:
    """33 threads take two warps: 32 blocks by warps and by blocks alike, a full SM."""
    found = occupancy(GPUS["h100"], 33, 16, 0)
    assert (found.blocks, found.warps, found.share) == (32, 64, 1.0)


def test_more_of_anything_never_raises_occupancy() -> None:
    for gpu in GPUS.values():
        for threads in (32, 96, 128, 512):
            for more in range(16, 256, 24):
                assert occupancy(gpu, threads, more + 24, 0).blocks <= occupancy(gpu, threads, more, 0).blocks
                assert occupancy(gpu, threads, 32, more * 900).blocks <= occupancy(gpu, threads, 32, more * 800).blocks


def test_an_unknown_capability_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no occupancy limits are known for compute capability 7\.0"):
        occupancy(Device("v100", DeviceKind.CUDA, capability=70), 128, 32, 0)


@pytest.mark.parametrize("threads", [0, 1025])
def test_a_block_that_cannot_be_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="must be from 1 to 1024"):
        occupancy(GPUS["h100"], threads, 32, 0)
