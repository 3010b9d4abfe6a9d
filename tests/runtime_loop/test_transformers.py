"""Unmodified transformers models on the paged cache, against their own generation with their own cache."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat
from pagedtune.kernels.variant import Op
from pagedtune.runtime.adapters.attention_probe import UnsupportedModel
from pagedtune.runtime.adapters.transformers import PagedTransformer
from pagedtune.runtime.decode_loop import DecodeLoop
from pagedtune.runtime.dispatch import Dispatch
from pagedtune.runtime.errors import CacheInUse, PagedRuntimeError
from pagedtune.runtime.limits import BatchLimits
from pagedtune.runtime.sampling import SamplingParams
from pagedtune.runtime.sequence import Request

VOCAB = 97
DEVICE = Device("cpu", DeviceKind.CPU, product="any", num_units=2, isa="portable")
NATIVE = Dispatch(DEVICE)
EAGER = Dispatch(DEVICE, fallbacks={Op.ATTENTION: ("eager",), Op.KV_WRITE: ("eager_kv_write",)})
FORMAT = PoolFormat(4, DType.FP32)
LIMITS = BatchLimits(max_num_seqs=16, max_context_len=112, token_budget=32)
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.25,  # with the usual 0.02 all scores are near 0, and attention is an average of everything
    "tie_word_embeddings": False,  # tied, a random model repeats its last token whatever it attends to
}


def llama(**changes: Any) -> Any:
    return build(transformers.LlamaConfig(**COMMON | changes))


def mistral() -> Any:
    return build(transformers.MistralConfig(**COMMON, head_dim=8, sliding_window=6))


def qwen2() -> Any:
    """Biases on q, k and v; the second layer has a window, the first has none."""
    return build(transformers.Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=5, max_window_layers=1))


def gemma2() -> Any:
    """Soft cap, a scale of its own, windows in every other layer."""
    config = transformers.Gemma2Config(
        **COMMON, head_dim=8, sliding_window=7, attn_logit_softcapping=0.5, query_pre_attn_scalar=4
    )
    return build(config)


def gpt_oss() -> Any:
    """Sinks, windows in every other layer, mixture of experts."""
    config = transformers.GptOssConfig(
        **COMMON, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5, rope_parameters=None
    )
    model = build(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def build(config: Any) -> Any:
    """A model with random weights, the same in every run."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


def prompts_of(count: int) -> list[list[int]]:
    """Of lengths 1 to 40, all different where there are few enough."""
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.linspace(1, 40, count).astype(int))
    return [rng.integers(0, VOCAB, int(length)).tolist() for length in lengths]


def own_generation(model: Any, prompt: list[int], length: int) -> tuple[int, ...]:
    """Greedy, with the model's own attention and cache, alone."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
    return tuple(out[0, len(prompt) :].tolist())


def own_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    """Logits after the prompt, [vocab_size], with the model's own attention."""
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, -1]


def paged_logits(paged: PagedTransformer, prompt: list[int]) -> torch.Tensor:
    """Logits after the prompt, [vocab_size], from a request that generates one token."""
    loop = DecodeLoop(paged)
    loop.add(Request("logits", tuple(prompt), 1))
    while plan := loop.scheduler.schedule():
        logits = paged.forward(plan).logits
        loop.scheduler.commit(plan, logits.argmax(-1))
    return logits[0]


@cache
def sixteen() -> tuple[Any, list[list[int]], list[tuple[int, ...]]]:
    """The tiny Llama, 16 prompts, and what each gives alone in 64 tokens."""
    model, prompts = llama(), prompts_of(16)
    return model, prompts, [own_generation(model, prompt, 64) for prompt in prompts]


@pytest.mark.parametrize("dispatch", [NATIVE, EAGER], ids=["native", "eager"])
def test_sixteen_prompts_in_a_pool_too_small_for_them_equal_generation_alone(dispatch: Dispatch) -> None:
    model, prompts, expected = sixteen()
    assert len(set(expected)) == 16, "outputs that are all alike would prove little"
    num_blocks = 60
    needed = sum(-(-(len(prompt) + 63) // FORMAT.block_size) for prompt in prompts)
    assert num_blocks < needed / 4
    with PagedTransformer(model, FORMAT, num_blocks, dispatch, LIMITS, debug=True) as paged:
        loop = DecodeLoop(paged, debug=True)
        results = loop.generate(prompts, 64)
        assert [result.tokens for result in results] == expected
        assert sum(result.num_preemptions for result in results) > 0
        loop.check(idle=True)
    assert own_generation(model, prompts[0], 64) == expected[0], "closing gives the model its own attention back"


@pytest.mark.parametrize("make", [mistral, qwen2, gemma2, gpt_oss])
@pytest.mark.parametrize("dispatch", [NATIVE, EAGER], ids=["native", "eager"])
def test_windows_soft_caps_sinks_and_scales_are_passed_through(make: Callable[[], Any], dispatch: Dispatch) -> None:
    model, prompts = make(), prompts_of(5)
    expected = [own_generation(model, prompt, 12) for prompt in prompts]
    own = own_logits(model, prompts[0])
    with PagedTransformer(model, FORMAT, 30, dispatch, LIMITS) as paged:
        loop = DecodeLoop(paged)
        assert [result.tokens for result in loop.generate(prompts, 12)] == expected
        loop.check(idle=True)
        loop.close()
        torch.testing.assert_close(paged_logits(paged, prompts[0]), own, rtol=1e-4, atol=1e-4)


def test_each_layers_attention_is_what_its_model_says() -> None:
    with PagedTransformer(gemma2(), FORMAT, 8, EAGER, LIMITS) as paged:
        first, second = paged.problems
    assert (first.window, second.window) == (7, None)
    assert first.soft_cap == second.soft_cap == 0.5
    assert first.scale == 4**-0.5
    with PagedTransformer(gpt_oss(), FORMAT, 8, EAGER, LIMITS) as paged:
        assert [(p.window, p.sinks, p.scale) for p in paged.problems] == [(5, True, None), (None, True, None)]


def test_a_pool_in_another_layout_and_dtype_changes_little() -> None:
    """bf16 keys and values in HND: logits of a whole prompt stay near, though not equal."""
    model, prompts, _ = sixteen()
    own = own_logits(model, prompts[3])
    with PagedTransformer(model, PoolFormat(8, DType.BF16, Layout.HND), 32, EAGER, LIMITS) as paged:
        logits = paged_logits(paged, prompts[3])
    assert torch.nn.functional.cosine_similarity(logits, own, dim=0) > 0.999
    assert not torch.equal(logits, own)


def llama4() -> Any:
    config = transformers.Llama4TextConfig(
        **COMMON, head_dim=8, attention_chunk_size=8, intermediate_size_mlp=64, num_local_experts=1, moe_layers=[]
    )
    return build(config)


def deepseek() -> Any:
    config = transformers.DeepseekV3Config(
        **COMMON | {"num_key_value_heads": 6, "num_hidden_layers": 1},
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    )
    return build(config)


def both_ways() -> Any:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


def t5() -> Any:
    config = transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config).eval()


def bloom() -> Any:
    return build(transformers.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2))


def dynamic_rope() -> Any:
    return llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (t5, "encoder-decoder"),
        (bloom, "attention interface"),
        (deepseek, "latent attention"),
        (dynamic_rope, "dynamic rotary"),
        (llama4, "pattern other than all earlier keys"),
        (both_ways, "in both directions"),
    ],
)
def test_a_model_with_other_attention_is_refused_before_anything_is_allocated(
    make: Callable[[], Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_pool(*_: Any, **__: Any) -> None:
        raise AssertionError("a pool was allocated")

    monkeypatch.setattr("pagedtune.runtime.adapters.transformers.KVCache", no_pool)
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=text):
        PagedTransformer(model, FORMAT, 8, EAGER, LIMITS)
    assert model.config._attn_implementation == before


def test_limits_device_and_mode_are_checked() -> None:
    model = llama()
    with pytest.raises(ValueError, match="max_context_len=256 is beyond the 128 positions"):
        PagedTransformer(model, FORMAT, 8, EAGER, BatchLimits(4, 256, 32))
    gpu = Device("h100", DeviceKind.CUDA, capability=90)
    with pytest.raises(ValueError, match="on cpu, and the kernels are for cuda"):
        PagedTransformer(model, FORMAT, 8, Dispatch(gpu), LIMITS)
    with pytest.raises(ValueError, match="training mode"):
        PagedTransformer(model.train(), FORMAT, 8, EAGER, LIMITS)
    assert model.config._attn_implementation == "eager"


def test_the_model_says_when_it_is_used_past_its_adapter() -> None:
    model = llama()
    paged = PagedTransformer(model, FORMAT, 8, EAGER, LIMITS)
    with pytest.raises(PagedRuntimeError, match="run it through a DecodeLoop"):
        model(torch.tensor([[1, 2]]))
    loop = DecodeLoop(paged)
    paged.close()
    paged.close()
    model(torch.tensor([[1, 2]]))
    with pytest.raises(PagedRuntimeError, match="closed"):
        loop.generate([[1]], 1)
    loop.check(idle=True)
    paged.open()
    assert loop.generate([[1]], 3)[0].tokens == own_generation(llama(), [1], 3)
    loop.check(idle=True)
    paged.close()
    assert model.config._attn_implementation == "eager"


def test_a_model_serves_one_adapter_at_a_time() -> None:
    model = llama()
    first = PagedTransformer(model, FORMAT, 8, EAGER, LIMITS)
    with pytest.raises(CacheInUse, match="another PagedTransformer is open"):
        PagedTransformer(model, FORMAT, 8, EAGER, LIMITS)
    first.close()
    with PagedTransformer(model, FORMAT, 8, EAGER, LIMITS), pytest.raises(CacheInUse):
        first.open()
    first.open()
    del first
    gc.collect()
    assert model.config._attn_implementation == "eager", "an adapter that is garbage gives the model back"


def test_sampling_with_a_seed_does_not_depend_on_the_batch() -> None:
    model, prompts, _ = sixteen()
    params = [SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=seed) for seed in range(4)]
    with PagedTransformer(model, FORMAT, 200, NATIVE, LIMITS) as paged:
        loop = DecodeLoop(paged)
        together = loop.generate(prompts[:4], 16, params)
        alone = [loop.generate([prompt], 16, param)[0] for prompt, param in zip(prompts, params, strict=False)]
        greedy = loop.generate(prompts[:4], 16)
        loop.check(idle=True)
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert all(a.tokens != b.tokens for a, b in zip(together, greedy, strict=True))


@pytest.mark.parametrize("dispatch", [NATIVE, EAGER], ids=["native", "eager"])
def test_blocks_behind_the_window_of_all_layers_are_given_back_without_changing_a_token(dispatch: Dispatch) -> None:
    """The kernels must not follow the table there: entries given back name nothing, and their blocks are reused."""
    prompts = [[(i * 7 + k) % VOCAB for i in range(length)] for k, length in enumerate((21, 5, 33))]
    model, found, most = mistral(), [], []
    for window in (None, 6):
        with PagedTransformer(model, FORMAT, 60, dispatch, LIMITS, debug=True) as paged:
            assert {problem.window for problem in paged.problems} == {6}
            loop = DecodeLoop(paged, debug=True, window=window, shadow=True)
            loop.add_all(Request(f"r{i}", tuple(prompt), 30, n=2) for i, prompt in enumerate(prompts))
            results, held = {}, 0
            while output := loop.step():
                loop.check()
                held = max(held, loop.snapshot().named)
                results |= {finished.request_id: finished.tokens for finished in output.finished}
            loop.check(idle=True)
            found.append(results)
            most.append(held)
    assert found[0] == found[1]
    assert most[1] < most[0] / 2
