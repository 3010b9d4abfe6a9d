"""What a caller hands in is refused by name, and nothing is changed: tokens, plans, requests, configurations."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.beam import BeamParams, BeamSearch
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.errors import InvalidRequest, StepError
from pagedtune.runtime.kv_ledger import KVLedger
from pagedtune.runtime.plan import StepPlan
from pagedtune.runtime.prefix_events import Namespace
from pagedtune.runtime.scheduler import Scheduler
from pagedtune.runtime.scheduler_config import SchedulerConfig
from pagedtune.runtime.sequence import Request


def running(prompt: tuple[int, ...] = (1, 2), vocab_size: int | None = None) -> tuple[Scheduler, StepPlan]:
    """A scheduler with a step of one request in flight."""
    config = SchedulerConfig(16, vocab_size=vocab_size, debug=True)
    scheduler = Scheduler(BlockAllocator(8), BlockTables(2, 8, 4), config)
    scheduler.add(Request("a", prompt, 4))
    plan = scheduler.schedule()
    assert plan is not None
    return scheduler, plan


@pytest.mark.parametrize("vocab_size", [None, 100])
@pytest.mark.parametrize(
    "tokens",
    [
        [1.0], ["5"], [True], [None], np.array([2.5]), np.array([False]), torch.tensor([1.0]), [2**70],
        torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([True]),
    ],
)  # fmt: skip
def test_tokens_that_are_no_integers_leave_the_step_in_flight(tokens: Any, vocab_size: int | None) -> None:
    scheduler, plan = running(vocab_size=vocab_size)
    with pytest.raises(ValueError, match=r"step 1 got tokens of type .* token ids are integers"):
        scheduler.commit(plan, tokens)
    scheduler.check()
    assert scheduler.commit(plan, np.array([5], np.int32)).tokens.tolist() == [5]


@pytest.mark.parametrize("token", [2**64 - 1, 2**63, 2**64 - 2])
def test_a_huge_unsigned_token_is_not_taken_for_a_withheld_one(token: int) -> None:
    scheduler, plan = running()
    with pytest.raises(ValueError, match="ids are 0 to"):
        scheduler.commit(plan, np.array([token], np.uint64))
    assert scheduler.commit(plan, np.array([5], np.uint64)).tokens.tolist() == [5]


@pytest.mark.parametrize(
    "tokens", [[5], (5,), np.array([5], np.uint8), torch.tensor([5], dtype=torch.int32), [torch.tensor(5)]]
)
def test_integers_of_any_kind_are_tokens(tokens: Any) -> None:
    scheduler, plan = running()
    output = scheduler.commit(plan, tokens)
    assert (output.tokens.dtype, output.tokens.tolist()) == (np.int64, [5])


def test_a_plan_of_another_scheduler_is_refused() -> None:
    (one, mine), (_, other) = running((1, 2)), running((3, 4))
    assert mine.step == other.step
    for end in (lambda: one.commit(other, [5]), lambda: one.abort(other)):
        with pytest.raises(StepError, match="hand a plan to the scheduler that made it"):
            end()
    one.check()
    assert one.allocator.steps_in_flight == (1,)
    assert one.commit(replace(mine, block_table=mine.block_table.clone()), [5]).tokens.tolist() == [5]
    with pytest.raises(StepError, match="step 1 cannot end: none is in flight"):
        one.commit(mine, [5])


def test_of_two_steps_in_flight_each_has_its_plan() -> None:
    scheduler, first = running()
    second = scheduler.schedule()
    assert second is not None
    with pytest.raises(StepError, match="step 2 cannot end: the oldest in flight is 1"):
        scheduler.commit(second, [5])
    scheduler.commit(first, [5])
    third = scheduler.schedule()
    assert third is not None
    for plan in (second, third):
        scheduler.commit(plan, [6])
    with pytest.raises(StepError, match="step 1 cannot end"):
        scheduler.abort(first)
    scheduler.check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"namespace": ["tenant"]}, r"namespace=\['tenant'\]: expected a Namespace of two strings, or None"),
        ({"namespace": Namespace(["t"])}, "expected a Namespace of two strings"),  # type: ignore[arg-type]
        ({"namespace": "tenant"}, "namespace='tenant': expected a Namespace"),
        ({"request_id": ""}, "request '' has an empty id: give a name"),
        ({"logprobs": "no"}, "logprobs='no': expected True or False"),
        ({"logprobs": None}, "logprobs=None: expected"),
        ({"logprobs": 5}, "logprobs=5: expected"),
    ],
)
def test_requests_that_could_not_be_served_are_refused_when_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Request(**{"request_id": "a", "prompt": (1,), "max_new_tokens": 1} | changes)
    assert Request("a", (1,), 1, logprobs=np.bool_(True), namespace=None).logprobs  # type: ignore[arg-type]


def test_the_names_of_samples() -> None:
    request = Request("a", (1,), 1, n=3)
    assert request.sample_ids == ("a", "a#1", "a#2")
    assert [request.sample(number, None).request_id for number in range(3)] == ["a", "a#1", "a#2"]


def test_adding_samples_takes_time_in_proportion_to_their_number() -> None:
    def seconds(n: int) -> float:
        best = float("inf")
        for _ in range(3):
            scheduler = Scheduler(BlockAllocator(8), BlockTables(2, 8, 4), SchedulerConfig(16))
            start = time.perf_counter()
            scheduler.add(Request("a", (1,), 1, n=n))
            best = min(best, time.perf_counter() - start)
            assert len(scheduler.roster.live) == n
        return best

    assert seconds(4000) < 40 * seconds(400), "ten times as many: a hundred times as long if each names all of them"


@pytest.mark.parametrize(
    ("name", "lowest"), [("window", 1), ("token_budget", 1), ("vocab_size", 1), ("watermark_blocks", 0)]
)
@pytest.mark.parametrize("below", [1, 4, 0.5])
def test_configurations_that_mean_nothing_are_refused(name: str, lowest: int, below: float) -> None:
    value: Any = lowest - below
    with pytest.raises(ValueError, match=f"{name}={value} must be an integer of at least {lowest}"):
        SchedulerConfig(**{name: value})
    assert getattr(SchedulerConfig(**{name: lowest}), name) == lowest  # type: ignore[arg-type]
    if name == "window":
        with pytest.raises(ValueError, match="window="):
            KVLedger(BlockAllocator(4), BlockTables(1, 4, 4), value)


@pytest.mark.parametrize("n", [16385, 1 << 40, (1 << 63) - 1])
def test_more_samples_than_anybody_draws_are_refused_before_the_host_is_full_of_them(n: int) -> None:
    with pytest.raises(InvalidRequest, match=f"'a' has n={n}: at most 16384 samples"):
        Request("a", (1,), 1, n=n)
    assert Request("a", (1,), 1, n=16384).n == 16384


@pytest.mark.parametrize(
    "changes",
    [
        {"num_beams": 0}, {"num_beams": 1.5}, {"length_penalty": float("nan")}, {"length_penalty": 33},
        {"early_stopping": "never"}, {"early_stopping": None}, {"early_stopping": 1},
    ],
)  # fmt: skip
def test_beams_that_mean_nothing_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(changes))}="):
        BeamParams(**{"num_beams": 2} | changes)


@pytest.mark.parametrize("other", [None, "x", 3, BeamParams(2)])
def test_what_is_no_request_no_plan_or_no_parameters_is_named(other: Any) -> None:
    what = f"is of type {type(other).__name__}: expected a"
    scheduler, plan = running()
    with pytest.raises(InvalidRequest, match=f"request=.* {what} Request"):
        scheduler.add(other)
    for end in (lambda: scheduler.commit(other, [5]), lambda: scheduler.abort(other)):
        with pytest.raises(StepError, match=f"plan=.* {what} StepPlan"):
            end()
    with pytest.raises(InvalidRequest, match=f"request=.* {what} Request"):
        BeamSearch(other, BeamParams(2))
    if not isinstance(other, BeamParams):
        with pytest.raises(InvalidRequest, match=f"params=.* {what} BeamParams"):
            BeamSearch(Request("b", (1,), 1), other)
    scheduler.check()
    assert scheduler.commit(plan, [5]).tokens.tolist() == [5]
