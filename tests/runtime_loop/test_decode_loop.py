"""The loop: every request gets what it would get alone, however it is batched, preempted, cancelled or disturbed."""

from __future__ import annotations

import gc
import itertools
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

from pagedtune.runtime.decode_loop import DecodeLoop, Forward
from pagedtune.runtime.errors import (
    CacheInUse,
    InvalidRequest,
    InvalidToken,
    RequestFinished,
    RequestTooLarge,
    UnknownRequest,
)
from pagedtune.runtime.limits import BatchLimits
from pagedtune.runtime.plan import StepPlan
from pagedtune.runtime.sampling import SamplingParams
from pagedtune.runtime.sequence import FinishReason, Request

from .toy_model import VOCAB, ToyModel, continuation

PROMPTS = [[(seed * 13 + i * 7) % VOCAB for i in range(length)] for seed, length in enumerate((1, 4, 5, 19, 2, 30, 8))]


def loop_of(model: ToyModel) -> DecodeLoop:
    return DecodeLoop(model, debug=True)


def requests(max_new_tokens: int = 12) -> list[Request]:
    return [Request(f"r{i}", tuple(prompt), max_new_tokens) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("num_blocks", [11, 14, 40], ids=["the longest alone", "two or three", "all"])
def test_each_request_gets_what_it_gets_alone(num_blocks: int) -> None:
    loop = loop_of(ToyModel(num_blocks))
    results = loop.generate(PROMPTS, 12)
    assert [r.tokens for r in results] == [continuation(prompt, 12) for prompt in PROMPTS]
    assert {r.reason for r in results} == {FinishReason.LENGTH}
    assert (num_blocks < 40) == any(r.num_preemptions for r in results), "the small pools are there to preempt"
    loop.check(idle=True)


def test_prompts_longer_than_the_budget_run_in_chunks() -> None:
    model = ToyModel(40, limits=BatchLimits(4, 64, 4))
    loop = loop_of(model)
    results = loop.generate(PROMPTS, 3)
    assert [r.tokens for r in results] == [continuation(prompt, 3) for prompt in PROMPTS]
    assert loop.times.tokens == sum(len(prompt) + 3 - 1 for prompt in PROMPTS)
    loop.check(idle=True)


def test_a_stream_yields_every_token_once_and_in_order() -> None:
    loop = loop_of(ToyModel(14))
    outputs = defaultdict(list)
    for request_id, token in loop.stream(requests()):
        outputs[request_id].append(token)
        loop.check()
    assert {k: tuple(v) for k, v in outputs.items()} == {
        f"r{i}": continuation(prompt, 12) for i, prompt in enumerate(PROMPTS)
    }
    loop.check(idle=True)


def test_requests_may_come_while_others_run() -> None:
    loop = loop_of(ToyModel(40))
    first, second = Request("first", (1, 2, 3), 10), Request("second", (4,), 5)
    tokens = defaultdict(list)
    loop.add(first)
    for number in itertools.count():
        if number == 4:
            loop.add(second)
        output = loop.step()
        if output is None:
            break
        for request_id, token in zip(output.request_ids, output.tokens, strict=True):
            tokens[request_id].append(int(token))
    assert tuple(tokens["first"]) == continuation([1, 2, 3], 10)
    assert tuple(tokens["second"]) == continuation([4], 5)
    loop.check(idle=True)


def test_a_stop_token_ends_its_own_request_only() -> None:
    alone = [continuation(prompt, 12) for prompt in PROMPTS]
    stop = alone[2][4]
    loop = loop_of(ToyModel(40))
    for result, tokens in zip(loop.generate(PROMPTS, 12, stop_token_ids=[stop]), alone, strict=True):
        cut = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert result.tokens == tokens[:cut]
        assert result.reason is (FinishReason.STOP if stop in tokens else FinishReason.LENGTH)
    loop.check(idle=True)


@pytest.mark.parametrize("after", [0, 1, 7, 30])
def test_cancelling_at_any_time_leaves_the_others_alone(after: int) -> None:
    loop = loop_of(ToyModel(14))
    outputs = defaultdict(list)
    loop.add_all(requests())
    for _ in range(after):
        output = loop.step()
        assert output is not None
        for request_id, token in zip(output.request_ids, output.tokens, strict=True):
            outputs[request_id].append(int(token))
    live = [request_id for request_id in ("r3", "r6") if request_id in loop.scheduler.roster.live]
    for request_id in live:
        cancelled = loop.cancel(request_id)
        assert cancelled.reason is FinishReason.CANCELLED
        assert list(cancelled.tokens) == outputs[request_id], "what was produced before is handed back"
        loop.check()
    while output := loop.step():
        for request_id, token in zip(output.request_ids, output.tokens, strict=True):
            outputs[request_id].append(int(token))
    for i, prompt in enumerate(PROMPTS):
        expected = continuation(prompt, 12)
        assert tuple(outputs[f"r{i}"]) == (expected[: len(outputs[f"r{i}"])] if f"r{i}" in live else expected)
    loop.check(idle=True)


def test_a_closed_stream_cancels_what_is_left() -> None:
    loop = loop_of(ToyModel(14))
    other = Request("other", (5, 6), 20)
    loop.add(other)
    stream = loop.stream(requests())
    assert next(stream)[0].startswith("r")
    stream.close()
    assert list(loop.scheduler.roster.live) == ["other"], "a request of somebody else goes on"
    assert loop.run([]) == []
    while loop.step():
        pass
    loop.check(idle=True)


def test_a_failing_model_loses_no_token_and_no_block() -> None:
    loop = loop_of(ToyModel(14, fail_at=frozenset({1, 5, 6, 20})))
    loop.add_all(requests())
    outputs, failures = defaultdict(list), 0
    while loop.has_work:
        try:
            output = loop.step()
        except FloatingPointError:
            failures += 1
            assert loop.allocator.num_free == loop.allocator.num_blocks, "the step's sequences gave everything back"
            loop.check()
            continue
        assert output is not None
        for request_id, token in zip(output.request_ids, output.tokens, strict=True):
            outputs[request_id].append(int(token))
    assert failures == 4
    assert [tuple(outputs[f"r{i}"]) for i in range(len(PROMPTS))] == [continuation(p, 12) for p in PROMPTS]
    loop.check(idle=True)


def test_a_failure_during_generate_cancels_its_requests() -> None:
    loop = loop_of(ToyModel(40, fail_at=frozenset({3})))
    with pytest.raises(FloatingPointError):
        loop.generate(PROMPTS, 12)
    loop.check(idle=True)
    assert loop.generate(PROMPTS[:1], 2)[0].tokens == continuation(PROMPTS[0], 2), "the loop is still good"


@pytest.mark.parametrize("temperature", [0.0, 1e-6], ids=["greedy", "random"])
def test_logits_that_are_no_numbers_do_not_pass_as_tokens(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1)

    class Broken(ToyModel):
        def forward(self, plan: StepPlan) -> Forward:
            forward = super().forward(plan)
            if self.passes == 3:
                forward.logits[-1, 7] = torch.nan
            return forward

    loop = loop_of(Broken(40))
    with pytest.raises(ValueError, match="Logits of NaN"):
        loop.generate(PROMPTS, 4, params)
    loop.check(idle=True)
    model = Broken(40)
    loop = loop_of(model)
    loop.add(Request("a", (1, 2, 3), 6, params))
    tokens = []
    while loop.has_work:
        try:
            output = loop.step()
        except ValueError:
            assert (model.passes, loop.allocator.num_free) == (3, 40), "the step was aborted"
            loop.check()
            continue
        assert output is not None
        tokens += output.tokens.tolist()
    assert tuple(tokens) == continuation([1, 2, 3], 6)
    loop.check(idle=True)


def test_the_error_names_whose_logits_are_no_numbers_and_without_them_the_others_go_on() -> None:
    class Broken(ToyModel):
        def forward(self, plan: StepPlan) -> Forward:
            forward = super().forward(plan)
            for i, name in enumerate(plan.request_ids[plan.samples].tolist()):
                if name.startswith("bad"):
                    forward.logits[i] = torch.nan
            return forward

    loop = loop_of(Broken(60))
    for name in ("good", "bad", "fine", "bad too"):
        loop.add(Request(name, (1, 2, 3), 4))
    with pytest.raises(InvalidToken, match="request 'bad', 'bad too'") as caught:
        loop.step()
    assert caught.value.request_ids == ("bad", "bad too")
    for name in caught.value.request_ids:
        assert loop.cancel(name).tokens == ()
    tokens: dict[str, list[int]] = {"good": [], "fine": []}
    while loop.has_work:
        output = loop.step()
        assert output is not None
        for name, token in zip(output.request_ids, output.tokens.tolist(), strict=True):
            tokens[name].append(token)
    assert {tuple(each) for each in tokens.values()} == {continuation([1, 2, 3], 4)}
    loop.check(idle=True)


def test_streams_and_other_steps_take_no_token_from_each_other() -> None:
    loop = loop_of(ToyModel(60))
    streams = [loop.stream([Request(f"s{i}", PROMPTS[i], 6)]) for i in range(2)]
    tokens: list[list[int]] = [[], []]
    for turn in range(6):
        for stream, mine in zip(streams, tokens, strict=True):
            mine.append(next(stream)[1])
        if turn == 2:
            assert loop.generate(PROMPTS[2:3], 3)[0].tokens == continuation(PROMPTS[2], 3)
            loop.step()
    assert [next(stream, None) for stream in streams] == [None, None]
    assert [tuple(mine) for mine in tokens] == [continuation(prompt, 6) for prompt in PROMPTS[:2]]
    loop.check(idle=True)


def test_a_stream_has_no_part_in_a_later_request_of_the_same_id() -> None:
    loop = loop_of(ToyModel(60))
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    for request_id, token in loop.stream([Request("a", PROMPTS[0], 2), Request("b", PROMPTS[1], 6)]):
        tokens[request_id].append(token)
        if request_id == "b" and len(tokens["b"]) == 3:
            loop.add(Request("a", PROMPTS[2], 12))  # the id is free again
    assert tuple(tokens["a"]) == continuation(PROMPTS[0], 2)
    assert tuple(tokens["b"]) == continuation(PROMPTS[1], 6)
    assert loop.explain("a").num_prompt_tokens == len(PROMPTS[2]), "it lives on when the stream has ended"
    later = loop.cancel("a").tokens
    assert later
    assert later == continuation(PROMPTS[2], 12)[: len(later)]


def test_a_run_returns_what_is_cancelled_meanwhile() -> None:
    class Impatient(ToyModel):
        loop: DecodeLoop

        def forward(self, plan: StepPlan) -> Forward:
            if self.passes == 2:
                self.loop.cancel("a")
            return super().forward(plan)

    model = Impatient(60)
    model.loop = loop = loop_of(model)
    first, second = loop.run([Request("a", PROMPTS[0], 6), Request("b", PROMPTS[1], 6)])
    assert (first.request_id, first.reason) == ("a", FinishReason.CANCELLED)
    assert first.tokens == continuation(PROMPTS[0], 6)[:2]
    assert second.tokens == continuation(PROMPTS[1], 6)
    loop.check(idle=True)


def test_a_cache_serves_one_loop_at_a_time() -> None:
    model = ToyModel(40)
    first = loop_of(model)
    first.add(Request("a", (1, 2, 3), 4))
    with pytest.raises(CacheInUse, match="in use by a DecodeLoop"):
        DecodeLoop(model)
    assert first.step() is not None, "the refusal did not disturb it"
    first.close()
    first.close()
    first.check(idle=True)
    with pytest.raises(CacheInUse, match="closed"):
        first.add(Request("b", (1,), 1))
    with pytest.raises(CacheInUse, match="closed"):
        first.step()
    second = loop_of(model)
    first.close()
    with pytest.raises(CacheInUse, match="in use"):
        DecodeLoop(model)
    assert second.generate(PROMPTS[:1], 3)[0].tokens == continuation(PROMPTS[0], 3)
    del second
    gc.collect()
    assert loop_of(model).generate(PROMPTS[:1], 3)[0].tokens == continuation(PROMPTS[0], 3), "garbage holds no cache"


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        (lambda: Request("x", (), 4), InvalidRequest, "empty prompt"),
        (lambda: Request("x", (1,), 4, stop_token_ids=(VOCAB,)), InvalidRequest, "stop_token_ids"),
        (lambda: Request("x", (VOCAB,), 4), InvalidRequest, "vocabulary"),
        (lambda: Request("x", tuple([1] * 40), 5), RequestTooLarge, "pool"),
        (lambda: Request("x", tuple([1] * 60), 5), RequestTooLarge, "max_context_len=64"),
    ],
    ids=["empty prompt", "unknown stop token", "unknown token", "longer than the pool", "longer than the model"],
)
def test_what_can_never_run_is_refused_and_nothing_is_queued(request_, error: type[Exception], text: str) -> None:
    loop = loop_of(ToyModel(10))
    with pytest.raises(error, match=text):
        loop.add_all([Request("good", (1, 2), 3), request_()])
    assert not loop.has_work, "all or none"
    loop.check(idle=True)


def test_what_ends_while_others_are_queued_hides_no_error() -> None:
    loop = DecodeLoop(ToyModel(40), debug=True)

    def requests() -> Iterator[Request]:
        yield Request("a", (1, 2), 4)
        yield Request("b", (1, 2), 4, n=2)
        loop.cancel("a")
        raise KeyError("the caller's own")

    with pytest.raises(KeyError, match="the caller's own"):
        loop.add_all(requests())
    loop.check(idle=True)


def test_cancelling_what_is_not_live_says_so() -> None:
    loop = loop_of(ToyModel(10))
    finished = loop.run([Request("done", (1, 2), 3)])
    assert finished[0].tokens == continuation([1, 2], 3)
    with pytest.raises(RequestFinished, match="ended already"):
        loop.cancel("done")
    with pytest.raises(UnknownRequest):
        loop.cancel("never added")
    loop.check(idle=True)


def test_parameters_must_match_the_prompts() -> None:
    with pytest.raises(ValueError, match="2 sampling parameters for 7 prompts"):
        loop_of(ToyModel(40)).generate(PROMPTS, 2, [SamplingParams(), SamplingParams()])


def test_times_add_up() -> None:
    loop = loop_of(ToyModel(40))
    assert loop.times.outside_share == 0.0
    loop.generate(PROMPTS, 5)
    times = loop.times
    assert times.steps == loop.model.passes
    assert times.model_ns == times.kernel_ns == times.steps, "one nanosecond each, says the toy"
    assert times.outside_ns == times.total_ns - 2 * times.steps > 0
    assert 0.99 < times.outside_share < 1.0
