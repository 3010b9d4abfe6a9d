"""The rule behind the default number of splits, by hand counts."""

from __future__ import annotations

import pytest

from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.split_defaults import SplitShape, default_splits, extra_share

DEVICE = Device("h100", DeviceKind.CUDA, capability=90, num_units=132)
BF16 = PoolFormat(16, DType.BF16)
CHOICES = (1, 2, 4, 8, 16, 32)
KIB = 1 << 10


def splits(problem: Problem, bounds: Bounds, shape: SplitShape, pool_format: PoolFormat = BF16) -> int:
    return default_splits(problem, pool_format, bounds, DEVICE, shape, CHOICES)


def test_extra_share_by_hand() -> None:
    """4 rows: each split writes and reads 129 floats of one, and reads 256 bytes of its query; a key and value: 512."""
    one = 4 * (2 * 129 * 4 + 256)
    assert extra_share(Problem(32, 8, 128), BF16, Bounds(8, 4096), 4) == pytest.approx(4 * one / (4096 * 512))
    assert extra_share(Problem(32, 8, 128, window=1024), BF16, Bounds(8, 4096), 4) == pytest.approx(
        4 * one / (1024 * 512)
    )
    fp8 = PoolFormat(16, DType.FP8_E4M3)
    assert extra_share(Problem(32, 8, 128), fp8, Bounds(8, 4096), 4) == pytest.approx(4 * one / (4096 * 256))
    three = Problem(32, 8, 128, max_query_len=3)
    assert extra_share(three, BF16, Bounds(8, 4096, 3), 4) == pytest.approx(3 * 4 * one / (4096 * 512))


@pytest.mark.parametrize(
    ("problem", "bounds", "blocks", "expected"),
    [
        (Problem(32, 8, 128), Bounds(8, 4096), 64, 4),  # 2 fill 128 of 132; 4 add 1.0 %
        (Problem(28, 4, 128), Bounds(8, 4096), 32, 4),  # 4 fill; 8 would add 3.4 %
        (Problem(32, 32, 128), Bounds(8, 4096), 256, 1),  # 256 blocks are two for nearly every multiprocessor
        (Problem(32, 4, 128), Bounds(1, 32768), 4, 32),  # 32 fill; 64 is no choice
        (Problem(32, 8, 128), Bounds(1, 512), 8, 16),  # filling comes first, whatever it adds; 32 would add 31 %
        (Problem(32, 8, 128), Bounds(1, 128), 1, 32),  # all that there are
    ],
)
def test_fill_the_device_then_a_second_block_if_it_is_cheap(
    problem: Problem, bounds: Bounds, blocks: int, expected: int
) -> None:
    assert splits(problem, bounds, SplitShape(blocks, 64 * KIB)) == expected


def test_small_blocks_need_more_of_them_on_each_multiprocessor() -> None:
    """25 KiB must be on their way: two blocks of 12.5 KiB, so 7/8 x 264 = 231 of them, and 4 splits of 64, not 2."""
    problem, bounds = Problem(32, 8, 128), Bounds(8, 256)  # of so few keys that a second block is never cheap
    assert splits(problem, bounds, SplitShape(64, 25 * KIB)) == 2
    assert splits(problem, bounds, SplitShape(64, 25 * KIB // 2)) == 4


def test_no_second_block_where_none_fits() -> None:
    assert splits(Problem(16, 8, 256), Bounds(8, 4096), SplitShape(64, 128 * KIB)) == 4
    assert splits(Problem(16, 8, 256), Bounds(8, 4096), SplitShape(64, 128 * KIB, resident=1)) == 2
