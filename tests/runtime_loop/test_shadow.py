"""The shadow finds what nobody should write, in every layout, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.runtime.block_memory import BlockMemory
from pagedtune.runtime.decode_loop import DecodeLoop
from pagedtune.runtime.errors import Invariant, InvariantViolation
from pagedtune.runtime.host_pool import HostPool
from pagedtune.runtime.kv_cache import KVCache
from pagedtune.runtime.kv_shadow import Fault
from pagedtune.runtime.latent_cache import LatentCache
from pagedtune.runtime.limits import BatchLimits
from pagedtune.runtime.plan import StepPlan
from pagedtune.runtime.sequence import Request
from pagedtune.runtime.step_model import Forward
from pagedtune.runtime.swap import Preemption, SwapPolicy, SwapSpace, copy_blocks

from .toy_model import VOCAB, ToyModel, continuation

FORMATS = [
    PoolFormat(4, DType.BF16, Layout.NHD),
    PoolFormat(4, DType.FP32, Layout.HND),
    PoolFormat(4, DType.FP16, Layout.XPACKED),
    PoolFormat(4, DType.FP8_E4M3, Layout.NHD, ScaleKind.PER_HEAD),
    PoolFormat(4, DType.INT8, Layout.HND, ScaleKind.PER_TENSOR),
    PoolFormat(4, DType.INT8, Layout.NHD, ScaleKind.PER_TOKEN_HEAD),
]


class Writer:
    """A model that writes its own bytes to every slot of a step, in two layers, and now and then to a foreign one."""

    vocab_size = VOCAB

    def __init__(self, pool_format: PoolFormat | None, strays_at: int = 0) -> None:
        if pool_format is None:
            self.cache: BlockMemory = LatentCache(24, 8, torch.bfloat16, 4, 2, 30, debug=True)
        else:
            problem = Problem(num_q_heads=2, num_kv_heads=2, head_dim=16, head_dim_v=8)
            self.cache = KVCache(problem, pool_format, 2, 30, debug=True)
        self.limits = BatchLimits(4, 64, 32)
        self.steps, self.strays_at = 0, strays_at
        self.random = torch.Generator().manual_seed(0)

    def forward(self, plan: StepPlan) -> Forward:
        self.steps += 1
        if plan.copies is not None:
            copy_blocks(self.cache, plan.copies)
        for slot in plan.slot_mapping.tolist():
            self.write(slot)
        if self.steps == self.strays_at:
            self.write(int(plan.block_table[0, 0]) * 4)  # the first token, long since written
        return Forward(torch.zeros(len(plan.sample_index), VOCAB), 0, 0)

    def write(self, slot: int) -> None:
        for tensor, axis in zip(self.cache.block_tensors(), self.cache.pool_axes.values(), strict=True):
            target = tensor[:, slot // 4].movedim(axis - 1, 0)[slot % 4]
            noise = torch.randint(0, 120, (*target.shape, target.element_size()), generator=self.random)
            target.copy_(noise.to(torch.uint8).view(target.dtype).squeeze(-1))


@pytest.mark.parametrize("pool_format", [*FORMATS, None], ids=lambda f: f.key if f else "latent")
def test_every_planted_fault_is_found_and_undone(pool_format: PoolFormat) -> None:
    loop = DecodeLoop(Writer(pool_format), shadow=True)
    loop.add(Request("a", (1,) * 11, 12, n=3))
    loop.add(Request("b", (1,) * 6, 2))
    for _ in range(6):
        loop.step()
        loop.check()
    assert loop.shadow is not None
    assert loop.shadow.prove() == tuple(Fault)
    while loop.step():
        loop.check()
    loop.check(idle=True)


@pytest.mark.parametrize("pool_format", [*FORMATS, None], ids=lambda f: f.key if f else "latent")
def test_a_stray_write_of_a_model_is_found(pool_format: PoolFormat) -> None:
    loop = DecodeLoop(Writer(pool_format, strays_at=5), shadow=True)
    loop.add(Request("a", (1,) * 11, 12))
    for _ in range(4):
        loop.step()
        loop.check()
    loop.step()
    with pytest.raises(InvariantViolation, match=r"layer 0, (K|latent), block 0, slot 0 is not what") as found:
        loop.check()
    assert found.value.invariant is Invariant.SHADOW


def test_a_write_after_free_is_found() -> None:
    model = Writer(FORMATS[0])
    loop = DecodeLoop(model, shadow=True)
    loop.run([Request("a", (1,) * 11, 3)])
    loop.check(idle=True)
    model.write(4)
    with pytest.raises(InvariantViolation, match="block 1 was written to after it was freed") as found:
        loop.check()
    assert found.value.invariant is Invariant.POISON


def test_forks_and_swaps_raise_no_false_alarm_and_poison_reaches_nobody() -> None:
    model = ToyModel(12)
    swap = SwapSpace(64, HostPool(model.cache, 64), SwapPolicy(Preemption.SWAP))
    loop = DecodeLoop(model, debug=True, swap=swap, shadow=True)
    prompts = [[(seed * 13 + i * 7) % VOCAB for i in range(length)] for seed, length in enumerate((5, 19, 2, 30))]
    loop.add_all(Request(f"r{i}", tuple(prompt), 10, n=2) for i, prompt in enumerate(prompts))
    results = {}
    while output := loop.step():
        loop.check()
        results |= {finished.request_id: finished.tokens for finished in output.finished}
    for i, prompt in enumerate(prompts):
        assert results[f"r{i}"] == results[f"r{i}#1"] == continuation(prompt, 10)
    assert swap.num_loaded > 0
    loop.check(idle=True)


@pytest.mark.parametrize("pool_format", [*FORMATS, None], ids=lambda f: f.key if f else "latent")
def test_copies_and_swaps_move_every_byte_of_a_block(pool_format: PoolFormat | None) -> None:
    cache = Writer(pool_format).cache
    host = HostPool(cache, 3)
    assert host.block_bytes == cache.block_bytes
    for tensor in cache.block_tensors():
        noise = torch.randint(
            0, 120, (*tensor.shape, tensor.element_size()), generator=torch.Generator().manual_seed(1)
        )
        tensor.copy_(noise.to(torch.uint8).view(tensor.dtype).squeeze(-1))
    before = [tensor.clone() for tensor in cache.block_tensors()]
    copy_blocks(cache, torch.tensor([[3, 7], [4, 8]]))
    host.save(np.array([5, 6]), np.array([2, 0]))
    host.load(np.array([2, 0]), np.array([9, 10]))
    for tensor, old in zip(cache.block_tensors(), before, strict=True):
        moved = [*range(7), 3, 4, 5, 6, *range(11, 30)]
        assert torch.equal(tensor.view(torch.uint8), old[:, moved].view(torch.uint8))
    cache.check()
    assert cache.num_bytes == 32 * cache.block_bytes


def test_a_block_brought_back_into_a_cancelled_ones_place_is_no_foreign_write() -> None:
    prompt = list(range(13))
    model = ToyModel(14, limits=BatchLimits(4, 40, 16))
    host = SwapSpace(14, HostPool(model.cache, 14), SwapPolicy(Preemption.SWAP))
    loop = DecodeLoop(model, debug=True, shadow=True, swap=host)
    for name, tokens in (("away", prompt), ("gone", prompt[::-1])):
        loop.add(Request(name, tokens, 12))
        loop.step()
        loop.step()
    loop.scheduler.preempt("away")
    loop.cancel("gone")
    tokens = []
    while loop.has_work:
        output = loop.step()
        loop.check()
        tokens += [] if output is None else output.tokens.tolist()
    assert host.num_loaded > 0
    assert tuple(tokens) == continuation(prompt, 12)[-len(tokens) :]


def test_what_a_failed_step_wrote_is_no_foreign_write() -> None:
    prompt = list(range(13))
    loop = DecodeLoop(ToyModel(14, fail_at=frozenset({2, 4})), debug=True, shadow=True)
    loop.add(Request("longer", prompt, 6))
    loop.add(Request("shorter", prompt[:2], 6))
    failures, tokens = 0, dict[str, list[int]](longer=[], shorter=[])
    while loop.has_work:
        try:
            output = loop.step()
            assert output is not None
            for name, token in zip(output.request_ids, output.tokens.tolist(), strict=True):
                tokens[name].append(token)
        except FloatingPointError:
            failures += 1
        loop.check()
    assert failures == 2
    assert tuple(tokens["longer"]) == continuation(prompt, 6)
    assert tuple(tokens["shorter"]) == continuation(prompt[:2], 6)


def test_what_is_cancelled_between_two_steps_is_poisoned_before_the_next() -> None:
    seen: list[torch.Tensor] = []

    class Looking(ToyModel):
        def forward(self, plan: StepPlan) -> Forward:
            seen.append(self.cache.block_tensors()[0].clone())
            return super().forward(plan)

    loop = DecodeLoop(Looking(14), debug=True, shadow=True)
    loop.add(Request("stays", (1, 2, 3), 8))
    loop.add(Request("goes", (4, 5, 6), 8))
    loop.step()
    block = loop.explain("goes").blocks[0]
    loop.cancel("goes")
    loop.step()
    assert bool(torch.isnan(seen[-1][:, block]).all()), "what reads it in the next step finds NaN"
    loop.model.cache.block_tensors()[0][:, block] = 1.0
    with pytest.raises(InvariantViolation) as caught:
        loop.check()
    assert caught.value.invariant is Invariant.POISON
