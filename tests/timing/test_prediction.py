"""The time model against sums done by hand, and what must hold of any such model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedtune.harness import prediction
from pagedtune.harness.prediction import StepWork, missing_facts, predict
from pagedtune.kernels.device import Device, DeviceKind

# 100 SMs at 1000 MHz with 1000 GB/s: one clock is a nanosecond, one byte a picosecond.
GPU = Device(
    "toy",
    DeviceKind.CUDA,
    capability=90,
    num_units=100,
    registers_per_unit=65536,
    shared_bytes_per_block=232448,
    shared_bytes_per_unit=233472,
    l2_bytes=50 << 20,
    bandwidth_gb_s=1000.0,
    boost_clock_mhz=1000.0,
)
FIXED_US = prediction.LAUNCH_US + prediction.RAMP_LATENCIES * prediction.DRAM_LATENCY_US
# 1600 equal blocks of 128 threads at full occupancy (16 an SM): one wave. 92 MB are 100 us at 92 % of the peak.
WORK = StepWork(
    "k",
    blocks=1600,
    threads=128,
    registers=32,
    shared_bytes=0,
    instructions={"integer": 1600.0},
    busiest=1.0,
    read_sectors=92e6 / 32,
    write_sectors=0.0,
    unique_bytes=92e6,
    workspace_bytes=0.0,
    shared_passes=0.0,
    tensor={},
    bytes_in_flight=1e6,
)


def total(work: StepWork, device: Device = GPU) -> float:
    return predict([work], device).total_us - FIXED_US


def test_memory_at_the_peak() -> None:
    (step,) = predict([WORK], GPU).steps
    assert step.memory_us == pytest.approx(100.0)
    assert (step.waves, step.blocks_per_unit, step.bound) == (1.0, 16, "memory")
    assert total(WORK) == pytest.approx(100.0)


def test_littles_law() -> None:
    """1600 blocks with 100 bytes each: 160 kB in 0.7 us are 228.6 GB/s."""
    slow = replace(WORK, bytes_in_flight=100.0)
    assert predict([slow], GPU).steps[0].gb_s == pytest.approx(160e3 / 0.7 / 1e3)
    assert total(slow) == pytest.approx(92e6 / (160e3 / 0.7))


def test_a_last_wave_with_few_blocks_draws_little() -> None:
    """1700 blocks: a full wave, then 100 blocks that draw 100/1600 of what the full wave does below the peak."""
    flat = replace(WORK, bytes_in_flight=100.0)
    more = replace(flat, blocks=1700, instructions={"integer": 1700.0}, unique_bytes=92e6 * 17 / 16,
                   read_sectors=92e6 / 32 * 17 / 16)  # fmt: skip
    assert total(more) == pytest.approx(2 * total(flat))  # a block takes its time however many run beside it
    assert predict([more], GPU).steps[0].waves == pytest.approx(17 / 16)


def test_the_busiest_block_counts() -> None:
    """The same work, half of it in 50 blocks: 1600 blocks are 100 times the busiest one's work."""
    ragged = replace(WORK, busiest=16.0, bytes_in_flight=100.0)
    (step,) = predict([ragged], GPU).steps
    assert step.work_blocks == 100.0
    assert step.memory_us == pytest.approx(92e6 / (100 * 100 / 0.7))


def test_issue() -> None:
    """16 blocks of 4 warps are enough for 4 instructions a clock: 4e6 on each SM take 1e6 clocks. Fewer warps issue
    at (warps x 2 / 4); integers run at 64 lanes a clock, 2 instructions."""
    busy = replace(WORK, instructions={"control": 4e8}, busiest=4e8 / 1600, unique_bytes=0.0, read_sectors=0.0)
    assert total(busy) == pytest.approx(1e6 / 1e3)
    integers = replace(busy, instructions={"integer": 4e8})
    assert total(integers) == pytest.approx(2e6 / 1e3)
    one_warp = replace(busy, blocks=100, threads=32, instructions={"control": 1e8}, busiest=1e6)
    assert total(one_warp) == pytest.approx(1e6 / 0.5 / 1e3)


def test_renamed_registers_cost_nothing() -> None:
    moves = replace(WORK, instructions={"integer": 1600.0, "move": 1e12}, busiest=(1e12 + 1600) / 1600)
    assert total(moves) == pytest.approx(total(WORK))


def test_tensor_cores() -> None:
    """1270 multiply-adds a clock with bf16 on sm_90, twice that with e4m3."""
    work = replace(WORK, unique_bytes=0.0, read_sectors=0.0, tensor={"bf16": 1270e6 * 100})
    assert total(work) == pytest.approx(1e6 / 1e3)
    assert total(replace(work, tensor={"e4m3": 1270e6 * 100})) == pytest.approx(0.5e6 / 1e3)


def test_the_l2_serves_what_is_read_again() -> None:
    """Read four times: free of memory where it fits into the L2, and a quarter of the rest where that is 3/4 of it."""
    small = replace(WORK, unique_bytes=40e6, read_sectors=160e6 / 32)
    assert prediction.dram_bytes(small, GPU) == 40e6
    large = replace(WORK, unique_bytes=4 * (50 << 20) / 3, read_sectors=16 * (50 << 20) / 3 / 32)
    again = 3 * 4 * (50 << 20) / 3
    assert prediction.dram_bytes(large, GPU) == pytest.approx(4 * (50 << 20) / 3 + again / 4)


def test_workspaces_stay_in_the_l2_where_they_fit() -> None:
    fits = replace(WORK, workspace_bytes=20e6, read_sectors=112e6 / 32)
    assert prediction.dram_bytes(fits, GPU) == pytest.approx(92e6)
    large = replace(WORK, workspace_bytes=30e6, read_sectors=122e6 / 32)
    assert prediction.dram_bytes(large, GPU) == pytest.approx(122e6)


def test_steps_follow_each_other() -> None:
    both = predict([WORK, WORK], GPU)
    assert both.total_us == pytest.approx(2 * predict([WORK], GPU).total_us)
    assert both.low_us < both.total_us < both.high_us
    assert both.high_us / both.total_us == pytest.approx(1 + prediction.UNCERTAINTY)


@pytest.mark.parametrize("factor", [1.1, 2.0, 5.0])
def test_more_work_never_takes_less_time(factor: float) -> None:
    for name in ("unique_bytes", "read_sectors", "shared_passes"):
        base = replace(WORK, bytes_in_flight=400.0, shared_passes=1e6)
        assert total(replace(base, **{name: getattr(base, name) * factor})) >= total(base)
    assert total(replace(WORK, bytes_in_flight=100.0 * factor)) <= total(replace(WORK, bytes_in_flight=100.0))


def test_a_device_without_its_facts_is_refused() -> None:
    bare = replace(GPU, bandwidth_gb_s=None, boost_clock_mhz=None)
    assert missing_facts(bare) == ("bandwidth_gb_s", "boost_clock_mhz")
    with pytest.raises(ValueError, match="its facts lack bandwidth_gb_s, boost_clock_mhz"):
        predict([WORK], bare)
    with pytest.raises(ValueError, match="no throughputs are known"):
        predict([WORK], replace(GPU, capability=70))


def test_a_kernel_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="not one block of k fits on toy: too much of its shared memory"):
        predict([replace(WORK, shared_bytes=230 << 10)], GPU)
