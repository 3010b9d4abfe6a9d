"""How requests end, and which are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from small_scheduler import commit, make, next_plan, request, shape

from pagedtune.runtime.errors import InvalidRequest, RequestFinished, StepError, UnknownRequest
from pagedtune.runtime.roster import REMEMBERED
from pagedtune.runtime.sampling import SamplingParams
from pagedtune.runtime.sequence import FinishReason, Request, Sequence
from pagedtune.runtime.staging import Staging


@pytest.mark.parametrize("moment", ["waiting", "running", "in flight", "preempted"])
def test_cancel_at_any_point_gives_everything_back(moment: str) -> None:
    scheduler = make()
    scheduler.add(request("a", 6))
    plan = None if moment == "waiting" else next_plan(scheduler)
    if plan is not None and moment != "in flight":
        commit(scheduler, plan)
    if moment == "preempted":
        scheduler.preempt("a")
    finished = scheduler.cancel("a")
    assert (finished.reason, len(finished.tokens)) == (FinishReason.CANCELLED, int(moment in ("running", "preempted")))
    if plan is not None and moment == "in flight":
        assert scheduler.snapshot().fenced == 2
        assert commit(scheduler, plan) == {}
    snapshot = scheduler.snapshot()
    assert (snapshot.free, snapshot.running, snapshot.waiting, snapshot.finished) == (16, 0, 0, 1)
    scheduler.check()
    with pytest.raises(RequestFinished, match="has ended already: cancelled"):
        scheduler.cancel("a")


def test_ids_that_are_unknown_ended_or_taken() -> None:
    scheduler = make()
    with pytest.raises(UnknownRequest, match="'x' is unknown"):
        scheduler.cancel("x")
    scheduler.add(request("a", 2))
    with pytest.raises(InvalidRequest, match="'a' is live already"):
        scheduler.add(request("a", 2))
    for number in range(REMEMBERED + 1):
        scheduler.add(request(str(number), 2))
        scheduler.cancel(str(number))
    with pytest.raises(RequestFinished):
        scheduler.preempt("1")
    with pytest.raises(UnknownRequest, match="ended before the last") as found:
        scheduler.preempt("0")
    assert not isinstance(found.value, RequestFinished), "the memory of ended requests is bounded"
    scheduler.add(request("1", 2))
    assert scheduler.cancel("1").tokens == ()


def test_a_failed_step_is_computed_anew() -> None:
    scheduler = make()
    scheduler.add(request("a", 5))
    scheduler.add(request("b", 2))
    commit(scheduler, next_plan(scheduler), token=50)
    plan = next_plan(scheduler)
    scheduler.abort(plan)
    scheduler.check()
    assert scheduler.snapshot().free == 16
    again = next_plan(scheduler)
    assert shape(again) == {"a": 6, "b": 3}
    assert again.input_ids.tolist() == [0, 1, 2, 3, 4, 50, 0, 1, 50]


@pytest.mark.parametrize(
    ("tokens", "message"), [([], "samples 1 tokens"), ([1, 2], "samples 1 tokens"), ([100], "0 to 99"), ([-2], "-2")]
)
def test_bad_tokens_leave_the_step_in_flight(tokens: list[int], message: str) -> None:
    scheduler = make()
    scheduler.add(request("a", 2))
    plan = next_plan(scheduler)
    with pytest.raises(ValueError, match=message):
        scheduler.commit(plan, tokens)
    scheduler.check()
    assert scheduler.commit(plan, torch.tensor([5])).tokens.tolist() == [5]


def test_a_withheld_token_pauses_its_sequence_until_it_is_given() -> None:
    scheduler = make()
    for name in ("a", "b"):
        scheduler.add(request(name, 2, 3))
    output = scheduler.commit(next_plan(scheduler), [-1, 7])
    assert output.request_ids.tolist() == ["b"]
    assert shape(next_plan(scheduler)) == {"b": 1}, "a has nothing to go on from"
    with pytest.raises(InvalidRequest, match="token 100 in token"):
        scheduler.give("a", 100)
    for token, message in (
        (-1, "not negative"),
        (2**31, "below 2"),
        (1.5, "integers"),
        ("5", "integers"),
        (None, "int"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            scheduler.give("a", token)  # type: ignore[arg-type]
    assert scheduler.lacks_token("a")
    assert scheduler.give("a", 5) is None
    scheduler.check()
    plan = next_plan(scheduler)
    assert plan.input_ids[plan.request_ids.tolist().index("a")] == 5
    with pytest.raises(InvalidRequest, match="'a' lacks no token"):
        scheduler.give("a", 5)


def test_a_withheld_token_pauses_amid_steps_of_one_token_each() -> None:
    scheduler = make()
    for name in ("a", "b"):
        scheduler.add(request(name, 2, 8))
    for _ in range(2):
        commit(scheduler, next_plan(scheduler))
    scheduler.commit(next_plan(scheduler), [-1, 7])
    assert shape(next_plan(scheduler)) == {"b": 1}


@pytest.mark.parametrize(("sampled", "taken"), [([-1, -1, -1], []), ([5, -1, -1], [5]), ([8, -1, 6], [8])])
def test_a_withheld_token_ends_the_drafts(sampled: list[int], taken: list[int]) -> None:
    scheduler = make()
    scheduler.add(request("a", 4))
    commit(scheduler, next_plan(scheduler), 9)
    scheduler.speculate("a", [5, 6])
    assert scheduler.commit(next_plan(scheduler), sampled).tokens.tolist() == taken
    scheduler.check()
    assert scheduler.lacks_token("a") == (sampled[0] != 8), "a draft that was wrong is followed by no token"
    if scheduler.lacks_token("a"):
        scheduler.give("a", 4)
        taken = [*taken, 4]
    plan = next_plan(scheduler)
    assert (plan.input_ids.tolist(), plan.positions.tolist()) == (taken[-1:], [4 + len(taken)])


def test_no_token_is_withheld_from_which_a_step_goes_on() -> None:
    scheduler = make()
    scheduler.add(request("a", 4))
    first, second = next_plan(scheduler), next_plan(scheduler)
    with pytest.raises(StepError, match="withholds a token of request 'a', and a step in flight goes on from it"):
        scheduler.commit(first, [-1])
    commit(scheduler, first, 5)
    scheduler.commit(second, [-1])
    assert scheduler.lacks_token("a")


def test_a_token_without_log_probability_says_so() -> None:
    scheduler = make()
    scheduler.add(request("a", 4, 4, logprobs=True))
    commit(scheduler, next_plan(scheduler))
    assert scheduler.rows.logprobs is not None
    scheduler.rows.logprobs[:] = 123.0  # of whoever had the row before
    scheduler.preempt("a")
    for _ in range(2):
        commit(scheduler, next_plan(scheduler))
    logprobs = scheduler.cancel("a").logprobs
    assert logprobs is not None
    assert np.isnan(logprobs[1:]).all()


def test_log_probabilities_may_be_of_any_float_type() -> None:
    scheduler = make()
    scheduler.add(request("a", 4, 4, logprobs=True))
    plan = next_plan(scheduler)
    output = scheduler.commit(plan, [9], torch.tensor([-0.5], dtype=torch.bfloat16, requires_grad=True))
    assert output.logprobs is not None
    assert output.logprobs.tolist() == [-0.5]


@pytest.mark.parametrize("is_mix", [False, True])
@pytest.mark.parametrize("is_behind", [False, True])
def test_a_step_that_cannot_be_sent_has_not_begun(
    is_mix: bool, is_behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the device has no memory left; with another step in flight or not, and with blocks to be copied."""
    scheduler = make()
    staging = Staging(torch.device("cpu"), copies=True)
    monkeypatch.setattr(scheduler._planner, "_staging", staging)
    scheduler.add(request("a", 5, 12))
    commit(scheduler, next_plan(scheduler))
    first = next_plan(scheduler) if is_behind else None
    scheduler.fork("a", "b", tokens=(7,))  # who writes next to their common block copies it
    if is_mix:
        scheduler.add(request("c", 9))
    with monkeypatch.context() as patch:
        patch.setattr(staging, "send", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scheduler.schedule()
    scheduler.check()
    assert scheduler.allocator.steps_in_flight == ((first.step,) if first else ())
    if first:
        commit(scheduler, first)
    lengths = {}
    while scheduler.has_work:
        plan = next_plan(scheduler)
        lengths |= {
            one.request_id: len(one.tokens) for one in scheduler.commit(plan, [9] * int(plan.samples.sum())).finished
        }
        scheduler.check()
    assert lengths == {"a": 12, "b": 12} | ({"c": 8} if is_mix else {})
    assert scheduler.snapshot().free == 16


def test_a_fork_that_may_not_overwrite_waits_for_the_step_that_reads() -> None:
    scheduler = make(num_blocks=2)
    scheduler.add(request("a", 6, 2))
    commit(scheduler, next_plan(scheduler))
    plan = next_plan(scheduler)
    scheduler.fork("a", "b", position=6, tokens=(4,))
    scheduler.cancel("a")
    assert scheduler.schedule() is None, "b fills the block that the step in flight reads, and there is no other"
    scheduler.commit(plan, [9])
    assert shape(next_plan(scheduler)) == {"b": 1}


def test_drafts_of_a_step_that_could_not_be_planned_are_not_taken_for_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make()
    scheduler.add(request("a", 4, 4))
    commit(scheduler, next_plan(scheduler))
    scheduler.speculate("a", [1, 2])
    scheduler.add(request("b", 4))
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.roster, "enter", lambda sequence: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scheduler.schedule()
    scheduler.cancel("b")
    for _ in range(2):
        plan = next_plan(scheduler)
        scheduler.commit(plan, [9] * plan.sampling.seed.size)
    scheduler.add(request("c", 4))
    assert shape(next_plan(scheduler))["a"] == 1, "its last token"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ()}, "empty prompt"),
        ({"prompt": (1, -2)}, "token -2 in prompt"),
        ({"prompt": (1, 100)}, "token 100 in prompt: the vocabulary has ids 0 to 99"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"stop_token_ids": (100,)}, "token 100 in stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "token -1 in stop_token_ids"),
        ({"stop_token_ids": tuple(range(9))}, "9 stop tokens: at most 8"),
        ({"stop_token_ids": 5}, "stop_token_ids of type int"),
        ({"stop_token_ids": None}, "stop_token_ids of type NoneType"),
        ({"stop_token_ids": (1.0,)}, "token 1.0 in stop_token_ids"),
        ({"prompt": "text"}, "prompt of type str"),
        ({"prompt": b"text"}, "prompt of type bytes"),
        ({"prompt": 7}, "prompt of type int"),
        ({"prompt": torch.tensor(7)}, "prompt of type int"),
        ({"prompt": (1, 2.0)}, "token 2.0 in prompt: token ids are integers"),
        ({"prompt": (1, True)}, "token True in prompt"),
        ({"prompt": np.array([1.5])}, "token 1.5 in prompt"),
        ({"prompt": torch.zeros(2)}, "token 0.0 in prompt"),
        ({"prompt": np.zeros((1, 2), np.int64)}, "in one dimension"),
        ({"prompt": (2**31,)}, "token 2147483648 in prompt: token ids are below"),
        ({"prompt": (2**64,)}, "token ids are below"),
        ({"max_new_tokens": math.nan}, "max_new_tokens=nan must be an integer"),
        ({"max_new_tokens": 4.0}, "max_new_tokens=4.0 must be an integer"),
        ({"max_new_tokens": "4"}, "max_new_tokens='4' must be an integer"),
        ({"max_new_tokens": True}, "max_new_tokens=True must be an integer"),
        ({"max_new_tokens": 2**63}, "max_new_tokens=9223372036854775808 must be"),
        ({"max_new_tokens": 2**63 - 1}, "stores up to"),
        ({"sampling": None}, "sampling=None"),
        ({"request_id": 7}, "id of type int"),
        ({"request_id": ["a"]}, "id of type list"),
    ],
)
def test_bad_requests_are_refused(changes: dict[str, object], message: str) -> None:
    values: dict[str, object] = {"request_id": "bad", "prompt": (1, 2), "max_new_tokens": 4, **changes}
    scheduler = make()
    with pytest.raises(InvalidRequest, match=message):
        scheduler.add(Request(**values))  # type: ignore[arg-type]
    assert not scheduler.has_work


@pytest.mark.parametrize(
    "tokens", [[1, 2], np.array([1, 2], np.uint8), torch.tensor([1, 2]), (np.int64(1), torch.tensor(2)), range(1, 3)]
)
def test_integers_of_any_kind_become_plain_ones(tokens: object) -> None:
    made = Request("a", tokens, np.int32(3), stop_token_ids=tokens)  # type: ignore[arg-type]
    assert (made.prompt, made.stop_token_ids, made.max_new_tokens) == ((1, 2), (1, 2), 3)
    assert {type(value) for value in (*made.prompt, *made.stop_token_ids, made.max_new_tokens)} == {int}


@pytest.mark.parametrize("where", ["before", "within"])
def test_an_admission_that_fails_loses_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever slips past validation: here a method that raises, or a top_k beyond the column it goes to."""
    scheduler = make()
    good, bad = request("good", 5, 2), request("bad", 3, sampling=SamplingParams(temperature=1.0))
    if where == "within":
        object.__setattr__(bad.sampling, "top_k", 2**64)
    else:
        admit = scheduler.rows.admit

        def failing(sequence: Sequence) -> int:
            if sequence.request is bad:
                raise OverflowError("as told to")
            return admit(sequence)

        monkeypatch.setattr(scheduler.rows, "admit", failing)
    for each in (good, bad, request("last", 2, 2)):
        scheduler.add(each)
    for _ in range(2):
        with pytest.raises(OverflowError):
            scheduler.schedule()
        scheduler.check()
    assert scheduler.cancel("bad").tokens == ()
    scheduler.check()
    commit(scheduler, next_plan(scheduler))
    assert commit(scheduler, next_plan(scheduler)) == {"good": FinishReason.LENGTH, "last": FinishReason.LENGTH}
    assert (scheduler.has_work, scheduler.snapshot().free) == (False, 16)
