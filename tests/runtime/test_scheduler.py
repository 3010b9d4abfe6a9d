"""What the scheduler plans: budget, chunks, admission, preemption, steps in flight. At random:
test_scheduler_machine.py. How requests end: test_requests.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_scheduler import BLOCK_SIZE, commit, make, next_plan, request, shape

from pagedtune.runtime.errors import PoolExhausted, RequestTooLarge, StepError
from pagedtune.runtime.sampling import SamplingParams
from pagedtune.runtime.sequence import FinishReason


def test_a_long_prompt_runs_in_chunks_and_samples_after_the_last() -> None:
    scheduler = make(budget=10)
    scheduler.add(request("a", 25))
    for start, count, samples in ((0, 10, False), (10, 10, False), (20, 5, True)):
        plan = next_plan(scheduler)
        assert plan.positions.tolist() == list(range(start, start + count))
        assert plan.input_ids.tolist() == list(range(start, start + count))
        assert plan.context_lens.tolist() == [start + count]
        assert plan.samples.tolist() == [samples]
        commit(scheduler, plan)
    assert next_plan(scheduler).input_ids.tolist() == [9]


def test_the_budget_goes_to_single_tokens_first_and_the_batch_has_them_first() -> None:
    scheduler = make(budget=8)
    scheduler.add(request("long", 20))
    scheduler.add(request("short", 2))
    seen = []
    for _ in range(5):
        plan = next_plan(scheduler)
        assert plan.num_tokens <= 8
        seen.append(shape(plan))
        commit(scheduler, plan)
    assert seen[:3] == [{"long": 8}, {"long": 8}, {"long": 4, "short": 2}]
    assert seen[3:] == [{"long": 1, "short": 1}] * 2
    scheduler.add(request("late", 12))
    plan = next_plan(scheduler)
    assert plan.request_ids.tolist() == ["long", "short", "late"]
    assert plan.query_lens.tolist() == [1, 1, 6]
    assert (plan.num_decodes, plan.bounds.max_query_len, plan.bounds.max_num_seqs) == (2, 6, 3)
    assert plan.query_start_loc.tolist() == [0, 1, 2, 8]
    assert plan.sample_index.tolist() == [0, 1], "the prompt of the late one is not complete"


def test_tensors_have_the_types_that_kernels_expect() -> None:
    scheduler = make()
    scheduler.add(request("a", 3))
    plan = next_plan(scheduler)
    found = {
        name: getattr(plan, name).dtype
        for name in ("input_ids", "positions", "slot_mapping", "query_start_loc", "block_table", "context_lens")
    }
    long, short = torch.int64, torch.int32
    assert list(found.values()) == [long, long, long, short, short, short]


def test_a_request_as_large_as_the_pool_runs_and_a_larger_one_is_refused_at_once() -> None:
    scheduler = make(num_blocks=6)
    stored = 6 * BLOCK_SIZE
    with pytest.raises(RequestTooLarge, match="up to 25 tokens: 7 blocks of 4, and a sequence can have 6"):
        scheduler.add(request("larger", stored - 4, 6))
    assert scheduler.snapshot().waiting == 0
    scheduler.add(request("equal", stored - 4, 5))  # the fifth token is never stored
    ended: dict[str, FinishReason] = {}
    while scheduler.has_work:
        ended |= commit(scheduler, next_plan(scheduler))
    assert ended == {"equal": FinishReason.LENGTH}
    assert scheduler.snapshot().free == 6


def test_a_request_wider_than_the_tables_is_refused() -> None:
    with pytest.raises(RequestTooLarge, match="a sequence can have 12"):
        make(num_blocks=100).add(request("wide", 50, 1))


def test_admission_counts_the_whole_prompt_and_what_others_were_promised() -> None:
    scheduler = make(num_blocks=10, budget=8)
    scheduler.add(request("a", 24, 1))  # 6 blocks, in three chunks
    scheduler.add(request("b", 20, 1))  # 5 blocks: more than a leaves
    scheduler.add(request("c", 1, 1))  # would fit, but nobody overtakes
    for _ in range(3):
        plan = next_plan(scheduler)
        assert shape(plan) == {"a": 8}
        commit(scheduler, plan)
    assert shape(next_plan(scheduler)) == {"b": 8}
    assert scheduler.snapshot().preemptions == 0


def test_the_watermark_is_kept_unless_nothing_runs() -> None:
    scheduler = make(num_blocks=8, watermark=3)
    scheduler.add(request("a", 19, 4))
    scheduler.add(request("b", 3, 4))
    plan = next_plan(scheduler)
    assert shape(plan) == {"a": 19}, "5 of 8 blocks: a may pass the watermark, b may not"
    while scheduler.snapshot().running:
        ended = commit(scheduler, plan)
        plan = next_plan(scheduler)
        if ended:
            break
    assert shape(plan) == {"b": 3}


def test_the_latest_is_preempted_and_resumes_with_its_output() -> None:
    scheduler = make(num_blocks=4)
    scheduler.add(request("a", 7, 6))
    scheduler.add(request("b", 6, 6))
    commit(scheduler, next_plan(scheduler), token=50)
    commit(scheduler, next_plan(scheduler), token=51)
    plan = next_plan(scheduler)  # a's ninth token needs a third block
    assert (plan.preempted, shape(plan)) == (("b",), {"a": 1})
    ended: dict[str, FinishReason] = {}
    while "a" not in ended:
        ended |= commit(scheduler, plan, token=52)
        plan = next_plan(scheduler)
    assert shape(plan) == {"b": 8}, "its prompt and both tokens again"
    assert plan.input_ids.tolist() == [0, 1, 2, 3, 4, 5, 50, 51]
    finished = scheduler.commit(plan, [53]).finished
    while not finished:
        finished = scheduler.commit(next_plan(scheduler), [53]).finished
    assert finished[0].tokens == (50, 51, 53, 53, 53, 53)
    assert finished[0].num_preemptions == 1
    assert scheduler.snapshot().free == 4


def test_with_a_step_in_flight_nobody_is_preempted_in_vain() -> None:
    scheduler = make(num_blocks=4)
    for name in ("a", "b", "c"):
        scheduler.add(request(name, 3, 9))
    commit(scheduler, next_plan(scheduler))
    second = next_plan(scheduler)  # the fourth token of each: their blocks are full
    third = next_plan(scheduler)  # each lacks a block and one is free; what c gives back, the second step still reads
    assert third.preempted == ("c",)
    assert shape(third) == {"a": 1}, "b sits out instead of being preempted as well"
    commit(scheduler, second)
    fourth = next_plan(scheduler)
    assert (fourth.preempted, shape(fourth)) == ((), {"a": 1, "b": 1})
    commit(scheduler, third)
    commit(scheduler, fourth)


def test_two_steps_in_flight_give_the_same_tokens_as_one() -> None:
    scheduler = make()
    scheduler.add(request("a", 3, 4))
    first, second = next_plan(scheduler), next_plan(scheduler)
    assert second.input_ids.tolist() == [-1], "sampled by the step before"
    with pytest.raises(StepError, match="in flight"):
        scheduler.schedule()
    with pytest.raises(StepError, match="the oldest in flight"):
        scheduler.commit(second, [51])
    commit(scheduler, first, token=50)
    third = next_plan(scheduler)
    commit(scheduler, second, token=51)
    fourth = next_plan(scheduler)
    assert fourth.positions.tolist() == [5]
    commit(scheduler, third, token=52)
    assert scheduler.schedule() is None, "its last token is on its way"
    assert commit(scheduler, fourth, token=53) == {"a": FinishReason.LENGTH}
    assert not scheduler.has_work


def test_a_stop_found_late_discards_the_step_behind_it() -> None:
    scheduler = make()
    scheduler.add(request("a", 3, 8, stop_token_ids=(7, 8)))
    first, second = next_plan(scheduler), next_plan(scheduler)
    assert commit(scheduler, first, token=8) == {"a": FinishReason.STOP}
    assert scheduler.snapshot().fenced == 1, "the second step still reads its block"
    scheduler.add(request("b", 2, 8))
    table = second.block_table.tolist()
    third = next_plan(scheduler)
    assert third.rows.tolist() == second.rows.tolist(), "the row is in use again"
    assert (table, third.block_table.tolist()) == ([[0]], [[1]]), "the block is not"
    output = scheduler.commit(second, [9])
    assert (output.tokens.size, output.finished) == (0, ())
    commit(scheduler, third, token=60)
    assert next_plan(scheduler).input_ids.tolist() == [60]


def test_blocks_taken_away_after_admission_are_an_error_not_a_hang() -> None:
    scheduler = make(num_blocks=4)
    scheduler.add(request("a", 8, 4))
    held = scheduler.allocator.reserve(3)
    with pytest.raises(PoolExhausted, match="3 reserved"):
        scheduler.schedule()
    scheduler.check()
    scheduler.allocator.release_reserved(held)
    assert shape(next_plan(scheduler)) == {"a": 8}


def test_bad_configurations_are_refused() -> None:
    with pytest.raises(ValueError, match="token_budget=3 is below max_num_seqs=4"):
        make(budget=3)
    with pytest.raises(ValueError, match="watermark_blocks=-1"):
        make(watermark=-1)


def test_a_snapshot_accounts_for_every_block_and_slot() -> None:
    scheduler = make()
    scheduler.add(request("a", 6))
    scheduler.add(request("b", 4))
    scheduler.allocator.reserve(2)
    plan = next_plan(scheduler)
    snapshot = scheduler.snapshot()
    assert (snapshot.free, snapshot.referenced, snapshot.fenced, snapshot.reserved) == (11, 3, 0, 2)
    assert (snapshot.live_tokens, snapshot.waste_tokens, snapshot.steps_in_flight) == (10, 2, 1)
    assert snapshot.utilisation == pytest.approx(10 / 12)
    scheduler.cancel("b")
    snapshot = scheduler.snapshot()
    assert (snapshot.referenced, snapshot.fenced, snapshot.waste_tokens) == (2, 1, 2)
    commit(scheduler, plan)
    assert scheduler.snapshot().fenced == 0


def test_sampling_parameters_follow_their_request() -> None:
    scheduler = make()
    scheduler.add(request("a", 6))
    scheduler.add(request("b", 4, sampling=SamplingParams(0.5, 10, 0.9, seed=7)))
    scheduler.preempt("a")
    for position in range(3):
        plan = next_plan(scheduler)
        order = np.argsort(plan.request_ids.astype(str))
        batch = plan.sampling
        assert batch.temperature[order].tolist() == [0, 0.5]
        assert (batch.top_k[order].tolist(), batch.top_p[order].tolist()) == ([0, 10], [1, 0.9])
        assert batch.seed[order][1] == 7
        assert batch.position.tolist() == [position] * 2
        commit(scheduler, plan)
    scheduler.preempt("b")
    plan = next_plan(scheduler)
    assert plan.sampling.position.tolist() == [3, 3], "a token's random number does not change when it is recomputed"
