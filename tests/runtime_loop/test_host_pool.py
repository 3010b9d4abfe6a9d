"""Blocks on their way to host memory and back: every byte arrives, whichever way they go, and nothing else moves."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagedtune.harness.vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Op
from pagedtune.runtime import attention, host_pool
from pagedtune.runtime.block_memory import BlockMemory
from pagedtune.runtime.decode_loop import DecodeLoop
from pagedtune.runtime.dispatch import Dispatch
from pagedtune.runtime.host_pool import HostPool, StreamOrder, adjacent_runs
from pagedtune.runtime.kv_cache import KVCache
from pagedtune.runtime.latent_cache import LatentCache
from pagedtune.runtime.swap import Preemption, SwapPolicy, SwapSpace

from .toy_model import VOCAB, ToyModel, continuation

DEVICE = Device("cpu", DeviceKind.CPU, product="any", num_units=2, isa="portable")
H100 = Device("h100", DeviceKind.CUDA, capability=90, num_units=132, shared_bytes_per_block=232448)
PROBLEM = Problem(num_q_heads=2, num_kv_heads=2, head_dim=16, head_dim_v=8)
FORMATS = [
    PoolFormat(4, DType.BF16, Layout.NHD),
    PoolFormat(3, DType.FP32, Layout.HND),
    PoolFormat(4, DType.FP16, Layout.XPACKED),
    PoolFormat(4, DType.FP8_E4M3, Layout.NHD, ScaleKind.PER_HEAD),
    PoolFormat(1, DType.INT8, Layout.HND, ScaleKind.PER_TENSOR),
]
NATIVE = {Op.PACK_BLOCKS: ("cpu_pack_blocks",), Op.UNPACK_BLOCKS: ("cpu_unpack_blocks",)}
EAGER = {Op.PACK_BLOCKS: ("eager_pack_blocks",), Op.UNPACK_BLOCKS: ("eager_unpack_blocks",)}
WAYS: dict[str, tuple[dict[Op, tuple[str, ...]] | None, bool]] = {  # kernels, and whether through a staging buffer
    "copies": (None, False),
    "native": (NATIVE, False),
    "eager": (EAGER, False),
    "native staged": (NATIVE, True),
    "eager staged": (EAGER, True),
}
BLOCKS, HOSTS = np.array([7, 2, 11, 0, 5]), np.array([6, 3, 4, 0, 5])
BACK = np.array([1, 9, 3, 8, 4])


def filled(pool_format: PoolFormat, layers: int = 3) -> KVCache:
    """A cache of 12 blocks between guards, with any bytes in it."""
    cache = KVCache(PROBLEM, pool_format, layers, 12, debug=True, null_block=True)
    random = torch.Generator().manual_seed(4)
    for tensor in cache.block_tensors():
        noise = torch.randint(0, 256, (*tensor.shape, tensor.element_size()), generator=random)
        tensor.copy_(noise.to(torch.uint8).view(tensor.dtype).squeeze(-1))
    return cache


def content(cache: BlockMemory) -> list[torch.Tensor]:
    """The bytes of all pools, null block and guards included."""
    return [pool.clone().view(torch.uint8) for pool in cache.layers_as_one()]


def host_of(cache: BlockMemory, num_blocks: int, way: str, turn: int) -> HostPool:
    """Host memory that `turn` blocks go to at a time where there is a staging buffer."""
    fallbacks, staged = WAYS[way]
    dispatch = None if fallbacks is None else Dispatch(DEVICE, fallbacks=fallbacks)
    return HostPool(cache, num_blocks, dispatch, turn * cache.block_bytes, staged)


@pytest.mark.parametrize(("way", "turn"), [*((way, 100) for way in WAYS), ("native staged", 1), ("native staged", 2)])
@pytest.mark.parametrize("pool_format", FORMATS, ids=lambda f: f.key)
def test_blocks_come_back_where_they_are_wanted_and_nothing_else_moves(
    pool_format: PoolFormat, way: str, turn: int
) -> None:
    cache = filled(pool_format)
    before = [t.clone().view(torch.uint8) for t in cache.block_tensors()]
    host = host_of(cache, 8, way, turn)
    assert (host.selection is None) == (way == "copies")
    assert host.block_bytes == cache.block_bytes
    host.save(BLOCKS, HOSTS)
    for tensor in cache.block_tensors():
        tensor[:, torch.from_numpy(BLOCKS)] = 0
    host.load(HOSTS[::-1].copy(), BACK)
    for tensor, old in zip(cache.block_tensors(), before, strict=True):
        wanted = old.clone()
        wanted[:, BLOCKS] = 0
        wanted[:, BACK] = old[:, BLOCKS[::-1].copy()]
        assert torch.equal(tensor.view(torch.uint8), wanted)
    cache.check()


@pytest.mark.parametrize("pool_format", FORMATS, ids=lambda f: f.key)
def test_all_ways_give_the_same_bytes_after_many_transfers(pool_format: PoolFormat) -> None:
    results = []
    for way in WAYS:
        cache = filled(pool_format, layers=2)
        host = host_of(cache, 9, way, turn=3)
        random = np.random.default_rng(8)
        for _ in range(12):
            count = int(random.integers(1, 9))
            hosts = random.permutation(9)[:count]
            host.save(random.permutation(12)[:count], hosts)
            some = hosts[: int(random.integers(0, count + 1))]
            host.load(some, random.permutation(12)[: len(some)])
        results.append(content(cache))
        cache.check()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "copies"])
def test_a_packed_block_is_k_then_v_of_each_layer(way: str) -> None:
    cache = filled(FORMATS[0])
    host = host_of(cache, 4, way, turn=100)
    host.save(np.array([9]), np.array([2]))
    memory: torch.Tensor = host._mover._memory  # type: ignore[attr-defined]
    for layer in range(3):
        block = (cache.k_cache(layer)[9].flatten(), cache.v_cache(layer)[9].flatten())
        assert torch.equal(memory[2, layer].view(torch.int16), torch.cat(block).view(torch.int16))


def test_adjacent_host_blocks_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    real = host_pool.copy

    def counted(source: torch.Tensor, target: torch.Tensor) -> None:
        copies.append(len(source))
        real(source, target)

    monkeypatch.setattr(host_pool, "copy", counted)
    host = host_of(filled(FORMATS[0]), 8, "native staged", turn=100)
    host.save(BLOCKS, HOSTS)  # host blocks 0 and 3 to 6, in whatever order they are named
    assert copies == [1, 4]
    host.load(HOSTS, BLOCKS)
    assert copies == [1, 4, 1, 4]


def test_on_a_cpu_adjacent_host_blocks_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    real = attention.PlannedOp.bind

    def counted(planned: attention.PlannedOp, tensors: dict[str, torch.Tensor]) -> Callable[[], None]:
        launches.append(len(tensors["block_ids"]))
        return real(planned, tensors)

    monkeypatch.setattr(attention.PlannedOp, "bind", counted)
    cache = filled(FORMATS[0], layers=3)
    host = host_of(cache, 8, "native", turn=1)
    host.save(BLOCKS, HOSTS)  # host blocks 0 and 3 to 6, each in three layers
    assert launches == [3, 12]
    host.load(HOSTS, BLOCKS)
    assert launches == [3, 12, 3, 12]


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [
        ([], []),
        ([5], [(0, 5, 1)]),
        ([0, 1, 2], [(0, 0, 3)]),
        ([0, 3, 4, 7, 8, 9, 11], [(0, 0, 1), (1, 3, 2), (3, 7, 3), (6, 11, 1)]),
    ],
)
def test_adjacent_runs(blocks: list[int], runs: list[tuple[int, int, int]]) -> None:
    assert adjacent_runs(np.array(blocks, dtype=np.int64)) == runs


def test_blocks_are_copied_one_by_one_where_no_kernel_takes_them() -> None:
    missing = Dispatch(DEVICE, fallbacks={})
    assert HostPool(filled(FORMATS[0]), 2, missing).selection is None
    half = Dispatch(DEVICE, fallbacks={Op.PACK_BLOCKS: ("cpu_pack_blocks",)})
    assert HostPool(filled(FORMATS[0]), 2, half).selection is None
    latent = LatentCache(24, 8, torch.bfloat16, 4, 2, 30)
    assert HostPool(latent, 2, Dispatch(DEVICE)).selection is None


def test_by_default_the_native_kernel_packs() -> None:
    selection = HostPool(filled(FORMATS[0]), 2, Dispatch(DEVICE)).selection
    assert selection is not None
    assert selection.variant.name == "cpu_pack_blocks"


def test_kernels_of_another_kind_of_device_are_refused() -> None:
    with pytest.raises(ValueError, match="the cache is on cpu and the kernels run on cuda"):
        HostPool(filled(FORMATS[0]), 2, Dispatch(H100))


@pytest.mark.parametrize("name", ["num_blocks", "staging_bytes"])
def test_sizes_must_be_positive(name: str) -> None:
    sizes: dict[str, Any] = {"num_blocks": 2, "staging_bytes": 2} | {name: 0}
    with pytest.raises(ValueError, match=name):
        HostPool(filled(FORMATS[0]), **sizes)


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("pool_format", FORMATS, ids=lambda f: f.key)
def test_the_kernels_that_a_gpu_would_run_give_the_same_bytes(
    pool_format: PoolFormat, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way with the CUDA kernels, their PTX on the virtual GPU."""
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-bindings is not installed: no CUDA kernel can be compiled")
    plain, cache = filled(pool_format), filled(pool_format)
    monkeypatch.setattr(host_pool, "torch_device", lambda kind: torch.device("cpu"))
    options = VirtualGpuOptions(num_threads=1, capability=90)
    monkeypatch.setattr(attention, "make_executor", lambda kind, artifacts: VirtualGpu(artifacts, options))
    host = HostPool(cache, 8, Dispatch(H100), 2 * cache.block_bytes, staged)
    assert host.selection is not None
    assert host.selection.variant.name == "cuda_pack_blocks"
    copies = HostPool(plain, 8)
    for mover in (host, copies):
        mover.save(BLOCKS, HOSTS)
        mover.load(HOSTS, BACK)
    assert all(torch.equal(a, b) for a, b in zip(content(cache), content(plain), strict=True))
    cache.check()


@pytest.mark.parametrize("way", WAYS)
def test_preempted_sequences_go_on_as_if_nothing_had_happened(way: str) -> None:
    model = ToyModel(12)
    swap = SwapSpace(64, host_of(model.cache, 64, way, turn=2), SwapPolicy(Preemption.SWAP))
    loop = DecodeLoop(model, debug=True, swap=swap, shadow=True)
    prompts = [[(seed * 13 + i * 7) % VOCAB for i in range(length)] for seed, length in enumerate((5, 19, 2, 30))]
    results = loop.generate(prompts, 10, n=2)
    assert [r.tokens for r in results] == [continuation(prompt, 10) for prompt in prompts for _ in range(2)]
    assert swap.num_loaded > 0
    loop.check(idle=True)


class FakeCuda:
    """Streams and events that only write down what happens to them."""

    def __init__(self) -> None:
        self.current, self.log = "a", list[str]()

    def current_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self.current, self.log)

    def event(self) -> FakeEvent:
        return FakeEvent(self.log)


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and self.name == other.name

    __hash__ = None  # type: ignore[assignment]

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits for {event.of}")


class FakeEvent:
    def __init__(self, log: list[str]) -> None:
        self.of, self.log = "nothing", log

    def record(self, stream: FakeStream) -> None:
        self.of = stream.name
        self.log.append(f"{stream.name} recorded")


def test_another_stream_waits_for_the_last_transfer_and_the_same_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    order = StreamOrder(torch.device("cuda", 0))
    for stream in "aabb":
        fake.current = stream
        with order:
            pass
    fake.current = "a"
    with pytest.raises(RuntimeError, match="half-way"), order:
        raise RuntimeError("half-way")
    assert fake.log == [
        "a recorded", "a recorded", "b waits for a", "b recorded", "b recorded", "a waits for b", "a recorded",
    ]  # fmt: skip


def test_on_a_cpu_no_stream_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fail: Callable[..., None] = lambda *_: pytest.fail("there are no streams on a CPU")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", fail)
    order = StreamOrder(torch.device("cpu"))
    for _ in range(2):
        with order:
            pass
