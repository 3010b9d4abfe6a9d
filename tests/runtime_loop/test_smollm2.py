"""A real model: 16 prompts in one continuous batch give what transformers gives each of them alone, and what is shared,
preempted or searched changes no token."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from pagedtune.harness.probe import cpu_facts
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.runtime.adapters.transformers import PagedTransformer
from pagedtune.runtime.beam import BeamParams
from pagedtune.runtime.decode_loop import DecodeLoop
from pagedtune.runtime.dispatch import Dispatch
from pagedtune.runtime.host_pool import HostPool
from pagedtune.runtime.limits import BatchLimits
from pagedtune.runtime.sampling import SamplingParams
from pagedtune.runtime.sequence import Request
from pagedtune.runtime.swap import Preemption, SwapPolicy, SwapSpace
from pagedtune.tuner import smollm2
from pagedtune.tuner.bench_decode import decode_own
from pagedtune.tuner.errors import UsageError

NEW_TOKENS = 64


@pytest.fixture(scope="module")
def smol() -> tuple[Any, Any]:
    try:
        path = smollm2.find_file()
    except UsageError as error:
        pytest.skip(f"needs the model file: {error}")
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the package gguf to read the model file")
    return smollm2.load(path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE])
def test_samples_in_a_small_pool_equal_those_in_a_large_one(smol: tuple[Any, Any], preemption: Preemption) -> None:
    """Parallel sampling with a temperature: forks and copies; then with preemption, by swap and by recompute."""
    model, tokenizer = smol
    prompts = [tokenizer(text)["input_ids"] for text in smollm2.PROMPTS[:3]]
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=3)
    found, swap = [], None
    for num_blocks in (200, 12):
        with PagedTransformer(
            model, PoolFormat(8, DType.FP32), num_blocks, Dispatch(cpu_facts()), BatchLimits(9, 128, 64)
        ) as paged:
            swap = SwapSpace(64, HostPool(paged.cache, 64), SwapPolicy(preemption))
            loop = DecodeLoop(paged, debug=True, swap=swap)
            results = loop.generate(prompts, 20, params, n=3)
            loop.check(idle=True)
            found.append([result.tokens for result in results])
            assert (num_blocks == 12) == any(result.num_preemptions for result in results)
            assert (swap.num_loaded > 0) == (num_blocks == 12 and preemption is Preemption.SWAP)
            assert swap.allocator.num_free == 64
    assert found[0] == found[1]
    assert len(set(found[0])) == 9, "with its own seed, each sample is another"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_beams_of_smollm2_equal_those_of_transformers(smol: tuple[Any, Any]) -> None:
    model, tokenizer = smol
    prompt = tokenizer(smollm2.PROMPTS[0])["input_ids"]
    with torch.inference_mode():
        theirs = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(), max_new_tokens=16, num_beams=4,
            num_return_sequences=4, do_sample=False, length_penalty=1.0, early_stopping=False, eos_token_id=None,
            pad_token_id=0,
        )[:, len(prompt) :].tolist()  # fmt: skip
    with PagedTransformer(
        model, PoolFormat(8, DType.FP32), 60, Dispatch(cpu_facts()), BatchLimits(8, 128, 64)
    ) as paged:
        loop = DecodeLoop(paged, debug=True)
        found = loop.beam_search(Request("beam", tuple(prompt), 16), BeamParams(4))
        loop.check(idle=True)
    assert [list(one.tokens) for one in found] == theirs


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sixteen_prompts_of_smollm2_equal_generation_alone(smol: tuple[Any, Any]) -> None:
    model, tokenizer = smol
    prompts = [tokenizer(text)["input_ids"] for text in smollm2.PROMPTS]
    pool_format, num_blocks = PoolFormat(16, DType.FP32), 32
    assert num_blocks * pool_format.block_size < sum(len(prompt) + NEW_TOKENS for prompt in prompts) / 2
    with PagedTransformer(model, pool_format, num_blocks, Dispatch(cpu_facts()), BatchLimits(16, 256, 64)) as paged:
        loop = DecodeLoop(paged, debug=True)
        results = loop.generate(prompts, NEW_TOKENS)
        assert sum(result.num_preemptions for result in results) > 0
        loop.check(idle=True)
    expected = [decode_own(model, [prompt], NEW_TOKENS)[1].outputs[0] for prompt in prompts]
    assert [result.tokens for result in results] == expected
