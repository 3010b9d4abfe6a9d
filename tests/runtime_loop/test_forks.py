"""Samples, forks and swaps in the loop: everybody gets what it would get alone, whatever is shared meanwhile."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch

from pagedtune.kernels.problem import Problem
from pagedtune.runtime.decode_loop import DecodeLoop
from pagedtune.runtime.errors import RequestTooLarge
from pagedtune.runtime.host_pool import HostPool
from pagedtune.runtime.limits import BatchLimits
from pagedtune.runtime.sampling import SamplingParams
from pagedtune.runtime.sequence import Request
from pagedtune.runtime.swap import Preemption, SwapPolicy, SwapSpace

from .toy_model import VOCAB, ToyModel, continuation

PROMPTS = [[(seed * 13 + i * 7) % VOCAB for i in range(length)] for seed, length in enumerate((1, 4, 5, 19, 2, 30, 8))]


def swapped(model: ToyModel, preemption: Preemption = Preemption.SWAP, host_blocks: int = 64) -> SwapSpace:
    return SwapSpace(host_blocks, HostPool(model.cache, host_blocks), SwapPolicy(preemption))


@pytest.mark.parametrize("num_blocks", [16, 40])
@pytest.mark.parametrize("n", [2, 5])
def test_samples_share_their_prompt_and_equal_the_single_sequence(num_blocks: int, n: int) -> None:
    model = ToyModel(num_blocks, limits=BatchLimits(8, 64, 16))
    loop = DecodeLoop(model, debug=True)
    results = loop.generate(PROMPTS, 9, n=n)
    expected = [continuation(prompt, 9) for prompt in PROMPTS for _ in range(n)]
    assert [r.tokens for r in results] == expected
    loop.check(idle=True)


def test_samples_hold_one_prompt() -> None:
    loop = DecodeLoop(ToyModel(40, limits=BatchLimits(8, 64, 64)), debug=True)
    loop.add(Request("r", tuple(PROMPTS[5]), 8, n=4))  # 30 tokens: 7 full blocks of 4 and one with two tokens
    loop.step()
    assert loop.snapshot().named == 8
    loop.step()  # the other three branch off at token 29, and each writes its own last block
    snapshot = loop.snapshot()
    assert (snapshot.running, snapshot.named, snapshot.table_entries) == (4, 7 + 4, 4 * 8)
    assert loop.explain("r#2").shared_blocks == 7
    assert "7 shared" in str(loop.explain("r#2"))
    assert snapshot.bytes.saved == 3 * 7 * loop.model.cache.block_bytes
    loop.check()
    while loop.step():
        loop.check()
    loop.check(idle=True)


def test_samples_with_a_temperature_differ_and_repeat_with_their_seed() -> None:
    params = SamplingParams(temperature=3.0, seed=11)

    def run(num_blocks: int) -> list[tuple[int, ...]]:
        loop = DecodeLoop(ToyModel(num_blocks), debug=True)
        tokens = [r.tokens for r in loop.generate(PROMPTS[3:4], 8, params, n=4)]
        loop.check(idle=True)
        return tokens

    first = run(40)
    assert len(set(first)) == 4
    assert run(40) == run(9) == first, "preempted or not"


@pytest.mark.parametrize("position", [1, 3, 4, 5, 19, 23])
def test_a_branch_from_any_position_goes_on_from_there(position: int) -> None:
    loop = DecodeLoop(ToyModel(40), debug=True)
    prompt = PROMPTS[3]
    loop.add(Request("root", tuple(prompt), 12))
    for _ in range(6):
        loop.step()
    known = [*prompt, *continuation(prompt, 12)]
    loop.fork("root", "branch", position, tokens=(50, 51))
    loop.check()
    results = {}
    while output := loop.step():
        loop.check()
        results |= {finished.request_id: finished.tokens for finished in output.finished}
    assert results["root"] == continuation(prompt, 12)
    begun = [*known[:position], 50, 51]
    whole = begun + list(continuation(begun, 40))
    start = min(position, len(prompt))
    assert results["branch"] == tuple(whole[start : start + 12])
    loop.check(idle=True)


def test_a_fork_grows_no_longer_than_the_model_allows() -> None:
    loop = DecodeLoop(ToyModel(40, limits=BatchLimits(4, 10, 16)), debug=True)  # a row has blocks for 12 tokens
    loop.add(Request("root", (1, 2, 3), 5))
    loop.step()
    for position, longest in ((None, 7), (2, 8)):
        with pytest.raises(RequestTooLarge, match=f"up to {longest + 1} new tokens exceed max_context_len=10"):
            loop.fork("root", "branch", position, max_new_tokens=longest + 1)
        loop.fork("root", "branch", position, max_new_tokens=longest)
        loop.cancel("branch")
    loop.check()


@pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE])
@pytest.mark.parametrize("num_blocks", [11, 14])
def test_a_small_pool_changes_no_token(preemption: Preemption, num_blocks: int) -> None:
    model = ToyModel(num_blocks)
    swap = swapped(model, preemption)
    loop = DecodeLoop(model, debug=True, swap=swap)
    loop.add_all(Request(f"r{i}", tuple(prompt), 12) for i, prompt in enumerate(PROMPTS))
    results = {}
    while output := loop.step():
        loop.check()
        results |= {finished.request_id: finished for finished in output.finished}
    assert [results[f"r{i}"].tokens for i in range(len(PROMPTS))] == [continuation(p, 12) for p in PROMPTS]
    assert any(r.num_preemptions for r in results.values())
    assert (swap.num_saved > 0) == (preemption is Preemption.SWAP)
    assert swap.num_loaded == swap.num_saved
    assert swap.allocator.num_free == 64
    expected = sum(len(p) + 11 for p in PROMPTS)
    if preemption is Preemption.SWAP:
        assert loop.times.tokens == expected, "nothing was computed twice"
    else:
        assert loop.times.tokens > expected
    loop.check(idle=True)


def test_a_full_host_falls_back_to_computing_anew() -> None:
    model = ToyModel(11)
    loop = DecodeLoop(model, debug=True, swap=swapped(model, host_blocks=1))
    assert [r.tokens for r in loop.generate(PROMPTS, 12)] == [continuation(p, 12) for p in PROMPTS]
    loop.check(idle=True)


def test_the_rule_takes_the_cheaper_way() -> None:
    policy = SwapPolicy(bytes_per_second=1e9, seconds_per_token=1e-4)
    # 10 blocks of 1 MB, out and in: 20 ms; 160 tokens anew: 16 ms; 320: 32 ms
    assert not policy.prefers_swap(10, 160, 1_000_000)
    assert policy.prefers_swap(10, 320, 1_000_000)
    with pytest.raises(ValueError, match="must be a positive number"):
        SwapPolicy(bytes_per_second=0)


def test_cancelling_while_in_host_memory_frees_it() -> None:
    model = ToyModel(40)
    swap = swapped(model)
    loop = DecodeLoop(model, debug=True, swap=swap)
    loop.add(Request("a", tuple(PROMPTS[3]), 12))
    loop.step()
    loop.scheduler.preempt("a")
    assert loop.explain("a").place == "in host memory"
    assert swap.allocator.num_free < 64
    loop.check()
    loop.cancel("a")
    assert swap.allocator.num_free == 64
    loop.check(idle=True)


def test_log_probabilities_are_those_of_the_logits() -> None:
    loop = DecodeLoop(ToyModel(40), debug=True)
    with_logs, without = loop.run(
        [Request("a", tuple(PROMPTS[3]), 5, logprobs=True), Request("b", tuple(PROMPTS[1]), 5)]
    )
    # one logit of 1 among zeros: log(e / (e + VOCAB - 1))
    expected = float(1 - torch.tensor(float(torch.e) + VOCAB - 1).log())
    assert with_logs.logprobs == pytest.approx([expected] * 5, abs=1e-5)
    assert without.logprobs is None
    loop.add(Request("c", tuple(PROMPTS[3]), 5, logprobs=True, n=2))
    loop.step()
    loop.scheduler.preempt("c")
    loop.step()
    while (own := loop.explain("c").num_tokens - len(PROMPTS[3])) < 2:
        loop.step()
    loop.fork("c", "d", tokens=(9,))
    results = {}
    while output := loop.step():
        results |= {finished.request_id: finished for finished in output.finished}
    for name in ("c", "c#1"):
        assert results[name].logprobs == pytest.approx([expected] * 5, abs=1e-5)
    forked = results["d"].logprobs
    assert forked is not None
    assert [math.isnan(value) for value in forked] == [i == own for i in range(5)], "nothing is known of a foreign one"
    loop.check(idle=True)


def test_all_samples_are_cancelled_together() -> None:
    loop = DecodeLoop(ToyModel(40), debug=True)
    loop.add(Request("a", tuple(PROMPTS[3]), 12, n=6))
    loop.step()
    loop.step()
    assert {f.request_id for f in loop.scheduler.cancel_all("a#3")} == {"a", *(f"a#{i}" for i in range(1, 6))}
    loop.check(idle=True)


@pytest.mark.parametrize("window", [1, 4, 5, 9])
def test_blocks_behind_the_window_are_given_back(window: int) -> None:
    """The toy reads everything, so its tokens would be wrong: only the books are looked at."""
    model = ToyModel(40, limits=BatchLimits(2, 64, 64))
    loop = DecodeLoop(model, debug=True, window=window)
    loop.add(Request("a", tuple(PROMPTS[3]), 30))
    most = 0
    while loop.has_work:
        plan = loop.scheduler.schedule()
        assert plan is not None
        stored = int(plan.ends[0])
        blocks = loop.tables.blocks_of(plan.rows)
        # The query is at stored - 1 and sees window tokens, itself included.
        needed = {p // 4 for p in range(max(0, stored - window), stored)}
        assert len(needed) <= blocks.size
        most = max(most, blocks.size if plan.num_tokens == 1 else 0)
        loop.check()
        loop.scheduler.commit(plan, [1])
        loop.check()
    assert most <= -(-window // 4) + 2
    loop.check(idle=True)


@pytest.mark.parametrize(("widest", "is_refused"), [(None, True), (9, True), (8, False), (1, False)])
def test_blocks_that_a_layer_attends_to_are_not_given_back(widest: int | None, is_refused: bool) -> None:
    model = ToyModel(40)
    model.problems = tuple(Problem(1, 1, 1, window=window) for window in (4, widest))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="window=8, and a layer") if is_refused else nullcontext():
        DecodeLoop(model, window=8)


@pytest.mark.parametrize("temperature", [0.0, 3.0])
@pytest.mark.parametrize("num_blocks", [12, 40])
def test_drafts_change_no_token_and_save_steps(num_blocks: int, temperature: float) -> None:
    """Good guesses, bad ones, and good ones that go bad after a while."""
    params = SamplingParams(temperature, seed=5)

    def requests() -> list[Request]:
        return [Request(f"r{i}", tuple(prompt), 14, params, logprobs=True) for i, prompt in enumerate(PROMPTS)]

    expected = DecodeLoop(ToyModel(80), debug=True).run(requests())
    loop = DecodeLoop(ToyModel(num_blocks, limits=BatchLimits(4, 64, 24)), debug=True)
    loop.add_all(requests())
    results, outputs, step = {}, {f"r{i}": 0 for i in range(len(PROMPTS))}, 0
    while loop.has_work:
        for i, known in enumerate(expected):
            name = f"r{i}"
            if name in loop.scheduler.roster.live:
                guess = [*known.tokens[outputs[name] :][: step % 6], 7, 9][: step % 5]
                loop.speculate(name, guess)
        output = loop.step()
        assert output is not None
        loop.check()
        for name in output.request_ids.tolist():
            outputs[name] += 1
        results |= {finished.request_id: finished for finished in output.finished}
        step += 1
    assert [results[f"r{i}"].tokens for i in range(len(PROMPTS))] == [e.tokens for e in expected]
    for i, one in enumerate(expected):
        assert results[f"r{i}"].logprobs == pytest.approx(one.logprobs, abs=1e-6)
    if num_blocks == 40:
        assert loop.times.steps < 14 * 2, "several tokens in a step"
    loop.check(idle=True)


def test_a_draft_ends_at_a_stop_token_and_at_the_longest_output() -> None:
    expected = continuation(PROMPTS[3], 12)
    loop = DecodeLoop(ToyModel(40), debug=True)
    loop.add(Request("stop", tuple(PROMPTS[3]), 12, stop_token_ids=(expected[4],)))
    loop.add(Request("full", tuple(PROMPTS[3]), 6))
    results = {}
    loop.step()
    while loop.has_work:
        for name in list(loop.scheduler.roster.live):
            done = loop.explain(name).num_tokens - len(PROMPTS[3])
            loop.speculate(name, expected[done : done + 8])
        output = loop.step()
        assert output is not None
        results |= {finished.request_id: finished.tokens for finished in output.finished}
        loop.check()
    assert results == {"stop": expected[: expected.index(expected[4]) + 1], "full": expected[:6]}
    loop.check(idle=True)
