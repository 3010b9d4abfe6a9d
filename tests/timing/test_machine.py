"""What is read from the system, on texts of machines other than this one, and sanity on this one."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedtune.harness import nvidia
from pagedtune.harness.contention import CpuUse, WaitMeter, busy_seconds, waited_too_long
from pagedtune.harness.environment import environment
from pagedtune.harness.probe import cpu_facts as this_cpu
from pagedtune.harness.stream import StreamCurve, StreamPoint, buffer_sizes, measure_curve
from pagedtune.kernels import cpu_facts
from pagedtune.kernels.device import DeviceKind
from pagedtune.kernels.memory import HUGE_PAGE_BYTES, huge_empty, huge_fraction, huge_page_mode

CPUINFO = """processor	: 0
vendor_id	: GenuineIntel
cpu family	: 6
model		: 143
model name	: Intel(R) Xeon(R) Platinum 8481C
cpu MHz		: 2699.998
flags		: fpu avx2 fma f16c avx512f avx512bw avx512dq avx512vl hypervisor
bogomips	: 5399.99

processor	: 1
model name	: something else
"""


def test_facts_come_from_the_first_processor() -> None:
    info = cpu_facts.cpu_info(CPUINFO)
    assert cpu_facts.product_name(info) == "Intel(R) Xeon(R) Platinum 8481C (family 6, model 143)"
    assert cpu_facts.vector_isa(info) == "avx512"


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("avx2 fma f16c avx512f", "avx2"),
        ("avx2 fma f16c", "avx2"),
        ("avx2 fma", "portable"),
        ("avx512f avx512bw avx512dq avx512vl", "portable"),
        ("", "portable"),
    ],
)
def test_a_vector_path_needs_all_of_its_flags(flags: str, isa: str) -> None:
    assert cpu_facts.vector_isa({"flags": flags}) == isa


@pytest.mark.parametrize(
    ("text", "size"), [("32768K", 33554432), ("1M\n", 1 << 20), ("64", 64), ("", None), ("x", None)]
)
def test_cache_sizes(text: str, size: int | None) -> None:
    assert cpu_facts.parse_size(text) == size


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_control_group(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_facts.cgroup_quota(tmp_path) == quota


def test_a_cache_that_cores_share_counts_once(tmp_path: Path) -> None:
    for core in os.sched_getaffinity(0):
        for index, (level, size) in enumerate((("1", "32K"), ("2", "512K"), ("3", "16M"))):
            folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(level)
            (folder / "size").write_text(size)
            (folder / "shared_cpu_list").write_text("0-63" if level == "3" else str(core))
    assert cpu_facts.last_level_cache_bytes(tmp_path) == 16 << 20
    assert cpu_facts.last_level_cache_bytes(tmp_path / "nothing") is None


def test_this_cpu_is_described() -> None:
    device = this_cpu()
    assert device.kind is DeviceKind.CPU
    assert device.name == "cpu"
    assert 1 <= device.num_units <= len(os.sched_getaffinity(0))
    assert device.bandwidth_gb_s is None
    assert device.memory_bytes is not None
    assert device.memory_bytes > 1 << 28


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla T4", "t4"),
        ("NVIDIA", "gpu"),
    ],
)
def test_short_names_of_gpus(product: str, name: str) -> None:
    assert nvidia.short_name(product) == name


def test_without_a_driver_library_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(nvidia.ctypes, "CDLL", absent)
    assert nvidia.probe_nvidia() is None


STAT = "cpu  999 0 0 0 0 0 0 0 0 0\ncpu0 100 10 50 5000 70 3 2 40 9 0\ncpu1 7 0 0 1 0 0 0 0 0 0\nintr 5\n"


def test_busy_time_is_all_but_idle_and_waiting_on_the_usable_cores() -> None:
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert busy_seconds(STAT, {0}) == pytest.approx(205 * tick)
    assert busy_seconds(STAT, {0, 1}) == pytest.approx(212 * tick)
    assert busy_seconds(STAT, {5}) == 0


def test_the_share_of_others_is_what_this_process_did_not_use() -> None:
    before, after = CpuUse(0.0, 10.0, 3.0), CpuUse(2.0, 13.0, 4.0)
    assert before.foreign_share(after, 2) == pytest.approx(0.5)
    assert before.foreign_share(CpuUse(2.0, 10.5, 4.0), 2) == 0.0


def test_waiting_counts_above_a_floor_and_a_share() -> None:
    assert not waited_too_long(15_000, 50_000)
    assert waited_too_long(25_000, 50_000)
    assert not waited_too_long(1_000_000, 100_000_000)
    assert waited_too_long(3_000_000, 100_000_000)


def test_a_thread_that_must_share_its_core_is_seen_waiting() -> None:
    """Two threads burn CPU outside the interpreter lock on one core: each must wait about half of the time."""
    core = next(iter(os.sched_getaffinity(0)))
    matrix = torch.ones(256, 256)
    stop = threading.Event()

    def burn() -> None:
        os.sched_setaffinity(threading.get_native_id(), {core})
        torch.set_num_threads(1)
        while not stop.is_set():
            matrix.mm(matrix)

    threads = [threading.Thread(target=burn) for _ in range(2)]
    for thread in threads:
        thread.start()
    meter = WaitMeter()
    before = meter.read_ns()
    time.sleep(0.3)
    waited = meter.read_ns() - before
    stop.set()
    for thread in threads:
        thread.join()
    meter.close()
    assert waited > 20_000_000


def test_huge_memory_is_aligned_writable_and_keeps_itself_alive() -> None:
    pool = huge_empty((3, 1 << 20), torch.bfloat16)
    view = pool[1:]
    pool.fill_(1.5)
    del pool
    assert view.shape == (2, 1 << 20)
    assert view.is_contiguous()
    assert (view.data_ptr() - (2 << 20)) % HUGE_PAGE_BYTES == 0
    assert float(view.float().sum()) == 1.5 * (2 << 20)


def test_huge_pages_are_used_where_the_system_grants_them() -> None:
    pool = huge_empty((32 << 20,), torch.uint8).fill_(1)
    fraction = huge_fraction(pool)
    if huge_page_mode() not in ("always", "madvise") or sys.platform != "linux":
        pytest.skip(f"transparent huge pages are {huge_page_mode()} here")
    assert fraction is not None
    assert fraction > 0.5


def test_small_tensors_are_ordinary_ones() -> None:
    small = huge_empty((4, 4), torch.float32)
    assert small.shape == (4, 4)
    assert huge_empty((0,), torch.int8).numel() == 0


def test_buffers_reach_from_inside_the_caches_to_far_beyond() -> None:
    sizes = buffer_sizes(32 << 20, 24 << 30)
    assert sizes[0] == 64 << 10
    assert sizes[-1] == 16 * (32 << 20)
    assert all(size % 512 == 0 for size in sizes)
    assert buffer_sizes(260 << 20, 24 << 30)[-1] == 2 << 30
    assert buffer_sizes(None, 1 << 30)[-1] == 128 << 20


@given(
    rates=st.lists(st.floats(1, 500), min_size=1, max_size=6),
    sizes=st.tuples(st.integers(1, 1 << 24), st.integers(1, 1 << 24)),
)
def test_the_ceiling_falls_with_the_working_set_and_is_never_below_the_curve(
    rates: list[float], sizes: tuple[int, int]
) -> None:
    points = tuple(StreamPoint(1 << (12 + 2 * i), rate) for i, rate in enumerate(rates))
    curve = StreamCurve(points)
    small, large = min(sizes), max(sizes)
    assert curve.ceiling_gb_s(small) >= curve.ceiling_gb_s(large) >= curve.memory_gb_s
    assert all(curve.ceiling_gb_s(p.num_bytes) >= p.gb_s for p in points)


def test_of_two_curves_the_faster_points_stay() -> None:
    one = StreamCurve((StreamPoint(1, 10.0), StreamPoint(2, 5.0)), 0.5)
    two = StreamCurve((StreamPoint(1, 9.0), StreamPoint(2, 6.0)), 0.1)
    assert one.merged(two) == StreamCurve((StreamPoint(1, 10.0), StreamPoint(2, 6.0)), 0.1)
    assert one.contended
    assert not StreamCurve((StreamPoint(1, 1.0),), 0.01).contended


def test_a_curve_is_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedtune.harness.stream._TIME_LIMIT_S", 0.05)
    monkeypatch.setattr("pagedtune.harness.stream._MIN_TRIES", 2)
    monkeypatch.setattr("pagedtune.harness.stream._PASS_BYTES", 1 << 20)
    curve = measure_curve((1 << 16, 1 << 20), 1)
    assert [p.num_bytes for p in curve.points] == [1 << 16, 1 << 20]
    assert all(p.gb_s > 0.1 for p in curve.points)


def test_the_environment_names_what_a_reader_needs() -> None:
    facts = environment()
    assert {"python", "torch", "numpy", "compiler", "cpu", "cores", "huge_pages", "load_1min"} <= facts.keys()
    assert facts["torch"] == torch.__version__
