"""Guard bands, poison and canaries."""

from __future__ import annotations

import pytest
import torch

from pagedtune.harness.memory import (
    HIGH_ELEMENTS,
    Poison,
    bits,
    canary_bits,
    carve,
    fill,
    first_difference,
    poison_bits,
    reserve,
    same_bits,
)

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", FLOATS)
def test_poison_is_nan_or_large_and_finite(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, dtype=dtype)
    fill(tensor, Poison.NAN)
    assert tensor.float().isnan().all()
    fill(tensor, Poison.FINITE)
    assert tensor.double().isfinite().all()
    assert tensor.double().abs().min() > 400
    for poison in Poison:
        bits(tensor).fill_(canary_bits(dtype, poison))
        assert bool(tensor.double().isnan().all()) is (poison is Poison.NAN)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_canary_differs_from_poison_and_the_two_poisons_differ(dtype: torch.dtype) -> None:
    patterns = {f(dtype, poison) for poison in Poison for f in (poison_bits, canary_bits)}
    assert len(patterns) == 4


@pytest.mark.parametrize("pad", [(), (1, 2)])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_write_outside_the_view_is_found(pad: tuple[int, ...], offset: int) -> None:
    carved = carve((3, 4), torch.bfloat16, Poison.NAN, pad, offset)
    carved.freeze()
    carved.view.fill_(1.0)
    assert carved.changed_outside() is None
    assert carved.changed_anywhere() == 0
    start = (carved.view.data_ptr() - carved.parent.data_ptr()) // 2
    carved.parent[start - 1] = 1.0
    assert carved.changed_outside() == -1
    carved.restore()
    assert carved.changed_anywhere() is None


def test_a_write_between_padded_rows_is_found() -> None:
    carved = carve((3, 4), torch.float32, Poison.FINITE, (0, 2))
    carved.freeze()
    start = (carved.view.data_ptr() - carved.parent.data_ptr()) // 4
    carved.parent[start + 4] = 0.0
    assert carved.changed_outside() == 4


def test_offset_moves_the_base_off_its_alignment() -> None:
    assert carve((8,), torch.float32, Poison.NAN, offset=1).view.data_ptr() % 16 == 4


def test_bit_comparison_sees_signed_zeros_and_nan_payloads() -> None:
    zero = torch.zeros(2)
    assert same_bits(zero, zero.clone())
    assert not same_bits(zero, -zero)
    assert first_difference(zero, torch.tensor([0.0, -0.0])) == (1,)
    with pytest.raises(ValueError, match="the same"):
        first_difference(zero, zero)


def test_a_reserved_pool_costs_only_the_pages_that_are_touched() -> None:
    def resident_pages() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    before = resident_pages()
    blocks = HIGH_ELEMENTS // 1024 + 4
    carved = reserve((blocks, 1024), torch.float32, blocks - 4)
    fill(carved.parent, Poison.NAN)
    assert carved.parent.numel() == 4 * 1024
    assert carved.view[-1].isnan().all()
    assert carved.view[0, 0] == 0  # what a wrapped offset reads
    assert (resident_pages() - before) * 4096 < 64 << 20
