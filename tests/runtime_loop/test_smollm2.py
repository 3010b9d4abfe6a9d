"""A real model: 16 prompts in one continuous batch give what transformers gives each of them alone."""

from __future__ import annotations

import importlib.util

import pytest

from pagedtune.harness.probe import cpu_facts
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.runtime.adapters.transformers import PagedTransformer
from pagedtune.runtime.decode_loop import DecodeLoop
from pagedtune.runtime.dispatch import Dispatch
from pagedtune.runtime.limits import BatchLimits
from pagedtune.tuner import smollm2
from pagedtune.tuner.bench_decode import decode_own
from pagedtune.tuner.errors import UsageError

NEW_TOKENS = 64


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sixteen_prompts_of_smollm2_equal_generation_alone() -> None:
    try:
        path = smollm2.find_file()
    except UsageError as error:
        pytest.skip(f"needs the model file: {error}")
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the package gguf to read the model file")
    model, tokenizer = smollm2.load(path)
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
