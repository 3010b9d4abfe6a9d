"""The loop with a prefix cache: the same tokens as without, fewer of them computed."""

from __future__ import annotations

import numpy as np
import pytest

from pagedtune.runtime.decode_loop import DecodeLoop
from pagedtune.runtime.limits import BatchLimits
from pagedtune.runtime.prefix_events import Namespace
from pagedtune.runtime.sequence import Request

from .toy_model import VOCAB, ToyModel, continuation

LIMITS = BatchLimits(max_num_seqs=4, max_context_len=64, token_budget=16)


def conversations(count: int, seed: int) -> list[list[int]]:
    """Prompts that share a beginning, or go on from others and their answers."""
    random = np.random.default_rng(seed)
    system = random.integers(0, VOCAB, 9).tolist()
    prompts: list[list[int]] = []
    for _ in range(count):
        start = system
        if prompts and random.random() < 0.5:
            before = prompts[random.integers(len(prompts))]
            start = [*before, *continuation(before, 6)]
        prompts.append([*start, *random.integers(0, VOCAB, random.integers(1, 6)).tolist()][:50])
    return prompts


@pytest.mark.parametrize("num_blocks", [16, 24, 200])
@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_are_those_of_a_run_without_cache(num_blocks: int, seed: int) -> None:
    prompts = conversations(30, seed)
    computed, hits = [], 0
    for prefix_cache in (False, True):
        loop = DecodeLoop(ToyModel(num_blocks, limits=LIMITS), debug=True, shadow=True, prefix_cache=prefix_cache)
        results = [loop.generate(prompts[i : i + 5], 6) for i in range(0, len(prompts), 5)]
        tokens = [finished.tokens for batch in results for finished in batch]
        assert tokens == [continuation(prompt, 6) for prompt in prompts]
        loop.check(idle=True)
        computed.append(loop.times.tokens)
        if loop.prefix_cache is not None:
            hits = loop.prefix_cache.statistics.hit_tokens
    assert hits > 0
    assert computed[1] < computed[0]


def test_a_repeated_prompt_computes_one_token_of_it() -> None:
    loop = DecodeLoop(ToyModel(20, limits=LIMITS), prefix_cache=True)
    prompt = list(range(16))
    for expected in (16, 1):  # the prompt, or its last token; 3 more tokens are fed back in either case
        before = loop.times.tokens
        assert loop.generate([prompt], 4)[0].tokens == continuation(prompt, 4)
        assert loop.times.tokens - before == expected + 3
    statistics = loop.prefix_cache.statistics  # type: ignore[union-attr]
    assert (statistics.hit_tokens, statistics.copied_tokens) == (15, 3)


def test_other_namespaces_and_requests_without_one_share_nothing() -> None:
    loop = DecodeLoop(ToyModel(40, limits=LIMITS), prefix_cache=True)
    assert loop.prefix_cache is not None
    prompt = tuple(range(16))
    for number, namespace in enumerate((Namespace("a"), Namespace("b"), None, None)):
        loop.run([Request(str(number), prompt, 4, namespace=namespace)])
    assert loop.prefix_cache.statistics.hit_tokens == 0
    loop.run([Request("again", prompt, 4, namespace=Namespace("b"))])
    assert loop.prefix_cache.statistics.hit_tokens == 15


def test_samples_of_a_cached_prompt_share_it() -> None:
    loop = DecodeLoop(ToyModel(20, limits=LIMITS), debug=True, prefix_cache=True)
    prompt = tuple(range(12))
    loop.run([Request("first", prompt, 2)])
    loop.add(Request("many", prompt, 4, n=3))
    finished = {}
    while loop.has_work:
        output = loop.step()
        assert output is not None
        loop.check()
        finished |= {each.request_id: each.tokens for each in output.finished}
    assert finished == dict.fromkeys(("many", "many#1", "many#2"), continuation(list(prompt), 4))
    loop.check(idle=True)


@pytest.mark.parametrize("namespace", [Namespace("a"), Namespace("a", "adapter"), None])
def test_a_fork_leaves_its_blocks_where_its_original_would(namespace: Namespace | None) -> None:
    prompt = list(range(13))
    model = ToyModel(40, limits=LIMITS)
    loop = DecodeLoop(model, debug=True, prefix_cache=True)
    statistics = loop.prefix_cache.statistics  # type: ignore[union-attr]
    loop.add(Request("original", prompt, 6, namespace=namespace))
    loop.step()
    loop.step()
    loop.fork("original", "fork")
    loop.scheduler.preempt("fork")  # computed anew, it is on its own
    loop.cancel("original")
    while loop.has_work:
        loop.step()
        loop.check()
    before = statistics.hit_tokens
    loop.run([Request("stranger", prompt, 4)])
    assert statistics.hit_tokens == before, "the default namespace has seen nothing of it"
    loop.run([Request("friend", prompt, 4, namespace=namespace)])
    assert statistics.hit_tokens - before == (0 if namespace is None else 12)


def test_a_prefix_that_became_idle_while_its_user_waited_is_paid_for() -> None:
    """In 3 blocks: the last one waits while others use its prefix, and must not copy a block of it once it has
    all 3 blocks to itself, two for the prefix and the copy's source and two for what it lacks being one too many."""
    loop = DecodeLoop(ToyModel(3, limits=LIMITS), debug=True, prefix_cache=True)
    requests = [Request("a", range(5), 5, n=2), Request("b", range(9), 3)]  # type: ignore[arg-type]
    results = loop.run(requests)
    expected = [continuation(list(range(5)), 5)] * 2 + [continuation(list(range(9)), 3)]
    assert [finished.tokens for finished in results] == expected
    loop.check(idle=True)


def test_a_prompt_of_one_token_that_has_to_sit_out_writes_to_nobody() -> None:
    """In 3 blocks, beside samples that take and drop blocks, a row is admitted before there is a block for it."""
    loop = DecodeLoop(ToyModel(3, limits=BatchLimits(4, 48, 16)), debug=True, prefix_cache=True)
    prompts = [[0, 1, 2], [0]]
    lengths = (6, 7)
    requests = [Request(str(i), prompt, lengths[i], n=2) for i, prompt in enumerate(prompts)]  # type: ignore[arg-type]
    results = loop.run(requests)
    expected = [continuation(prompts[i // 2], lengths[i // 2]) for i in range(4)]
    assert [finished.tokens for finished in results] == expected
    loop.check(idle=True)


def test_evicting_the_block_that_is_about_to_be_copied_is_not_taken_for_room() -> None:
    loop = DecodeLoop(ToyModel(6, limits=BatchLimits(4, 48, 16)), debug=True, prefix_cache=True)
    shapes = [((0,), 8, 1), (tuple(range(7, 16)), 6, 3), (tuple(range(9)), 11, 3), ((0, 1, 2), 10, 3)]
    results = loop.run([Request(str(i), prompt, new, n=n) for i, (prompt, new, n) in enumerate(shapes)])
    expected = [continuation(list(prompt), new) for prompt, new, n in shapes for _ in range(n)]
    assert [finished.tokens for finished in results] == expected
    loop.check(idle=True)
