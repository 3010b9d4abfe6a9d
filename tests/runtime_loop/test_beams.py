"""Beam search against a search over plain lists, and against transformers' own."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedtune.harness.probe import cpu_facts
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.runtime.adapters.transformers import PagedTransformer
from pagedtune.runtime.allocator import BlockAllocator
from pagedtune.runtime.arrays import blocks_for
from pagedtune.runtime.beam import BeamParams, BeamSearch
from pagedtune.runtime.block_tables import BlockTables
from pagedtune.runtime.decode_loop import DecodeLoop
from pagedtune.runtime.dispatch import Dispatch
from pagedtune.runtime.errors import InvalidRequest, RequestTooLarge
from pagedtune.runtime.host_pool import HostPool
from pagedtune.runtime.limits import BatchLimits
from pagedtune.runtime.plan import StepPlan
from pagedtune.runtime.prefix_cache import PrefixCache
from pagedtune.runtime.scheduler import Scheduler
from pagedtune.runtime.sequence import Request
from pagedtune.runtime.step_model import Forward
from pagedtune.runtime.swap import Preemption, SwapPolicy, SwapSpace

from .toy_model import VOCAB, ToyModel, next_token

PROMPT = tuple(range(3, 16))


def row_of(tokens: list[int]) -> torch.Tensor:
    """Logits that only these tokens have."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(next_token(tokens) * 131 + len(tokens)))


class Diverse(ToyModel):
    """Every sequence has logits of its own, read back through its table."""

    def _logits(self, table: torch.Tensor, context_len: int) -> torch.Tensor:
        blocks = table[: -(-context_len // self.block_size)].long()
        slots = (blocks[:, None] * self.block_size + torch.arange(self.block_size)).flatten()[:context_len]
        return row_of([int(token) for token in self._slots[slots]])


def plain_search(prompt: tuple[int, ...], length: int, beams: int) -> list[tuple[int, ...]]:
    """Without stop tokens: the best `beams` at each length."""
    running = [(0.0, prompt)]
    for _ in range(length):
        nexts = [
            (score + logprob, (*tokens, token))
            for score, tokens in running
            for token, logprob in enumerate(torch.log_softmax(row_of(list(tokens)), 0).tolist())
        ]
        running = sorted(nexts, reverse=True)[:beams]
    return [tokens[len(prompt) :] for _, tokens in running]


@pytest.mark.parametrize("beams", [1, 2, 5])
@pytest.mark.parametrize("num_blocks", [30, 60])
def test_beams_equal_a_search_over_lists(beams: int, num_blocks: int) -> None:
    loop = DecodeLoop(Diverse(num_blocks, limits=BatchLimits(8, 64, 32)), debug=True, shadow=True)
    loop.add(Request("other", (9, 8, 7), 30))
    found = loop.beam_search(Request("beam", PROMPT, 9), BeamParams(beams))
    assert [one.tokens for one in found] == plain_search(PROMPT, 9, beams)
    loop.check()
    assert list(loop.scheduler.roster.live) in ([], ["other"]), "no beam is left"
    while loop.step():
        loop.check()
    loop.check(idle=True)


def test_beams_survive_preemption() -> None:
    expected = plain_search(PROMPT, 6, 3)

    class Preempting(Diverse):
        loop: DecodeLoop

        def forward(self, plan: StepPlan) -> Forward:
            forward = super().forward(plan)
            if self.passes in (4, 6):
                self.loop.scheduler.preempt(str(plan.request_ids[-1]))
            return forward

    model = Preempting(40, limits=BatchLimits(8, 64, 32))
    model.loop = loop = DecodeLoop(model, debug=True)
    assert [one.tokens for one in loop.beam_search(Request("beam", PROMPT, 6), BeamParams(3))] == expected
    assert loop.scheduler.roster.num_preemptions == 2
    loop.check(idle=True)


def preempt_last(loop: DecodeLoop, number: int) -> None:
    """The youngest beam, so that it has to come back beside those that wait for it."""
    loop.scheduler.preempt(list(loop.scheduler.roster.live)[-1])


def add_another(loop: DecodeLoop, number: int) -> None:
    """Others run, wait, and lose their blocks amid the search."""
    if len(loop.scheduler.roster.live) < 6:
        loop.add(Request(f"other {number}", tuple(range(number, number + 5 + number % 7)), 3 + number % 5))
    if number % 3 == 0:
        loop.scheduler.preempt(sorted(loop.scheduler.roster.live)[-1])


@pytest.mark.parametrize("disturb", [preempt_last, add_another])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("preemption", [None, Preemption.SWAP])
@pytest.mark.parametrize("watermark", [0, 2])
@pytest.mark.parametrize("length", [3, 4, 6])
def test_beams_that_just_fit_never_wait_for_each_other(
    disturb: Callable[[DecodeLoop, int], None],
    is_shared: bool,
    preemption: Preemption | None,
    watermark: int,
    length: int,
) -> None:
    class Disturbed(Diverse):
        loop: DecodeLoop

        def forward(self, plan: StepPlan) -> Forward:
            forward = super().forward(plan)
            if self.passes % 3 == 2:
                disturb(self.loop, self.passes)
            return forward

    beams, shared = 3, 3  # blocks that the prompt of 13 tokens fills
    num_blocks = shared + beams * (blocks_for(len(PROMPT) + length - 1, 4) - shared)
    model = Disturbed(num_blocks, limits=BatchLimits(4, 64, 32))
    swap = None if preemption is None else SwapSpace(30, HostPool(model.cache, 30), SwapPolicy(preemption))
    model.loop = loop = DecodeLoop(model, watermark, debug=True, swap=swap, prefix_cache=is_shared)
    found = loop.beam_search(Request("beam", PROMPT, length), BeamParams(beams))
    assert [one.tokens for one in found] == plain_search(PROMPT, length, beams)
    loop.check()


def test_two_searches_in_a_pool_for_one_end_both() -> None:
    loop = DecodeLoop(Diverse(8, limits=BatchLimits(6, 64, 32)), debug=True)
    searches = [BeamSearch(Request(name, PROMPT, 6), BeamParams(2)) for name in ("a", "b")]
    for search in searches:
        search.start(loop.scheduler)
    loop._searches += searches
    while not all(search.is_done for search in searches):
        assert loop.step() is not None
        loop.check()
    for search in searches:
        assert [one.tokens for one in search.finished] == plain_search(PROMPT, 6, 2)
    loop.check(idle=True)


def test_a_beam_takes_no_name_of_a_live_request_and_the_model_may_be_as_long_as_it_is() -> None:
    loop = DecodeLoop(Diverse(60, limits=BatchLimits(8, len(PROMPT) + 6, 32)), debug=True)
    loop.add(Request("beam~2", (9, 8, 7), 12))
    assert len(loop.beam_search(Request("beam", PROMPT, 6), BeamParams(3))) == 3
    with pytest.raises(RequestTooLarge, match="13 prompt and up to 7 new"):
        loop.beam_search(Request("beam", PROMPT, 7), BeamParams(3))


def test_pins_are_held_back_from_beams() -> None:
    allocator = BlockAllocator(10)
    tables = BlockTables(4, 8, 4)
    cache = PrefixCache(allocator, 4, max_pinned_blocks=3)
    scheduler = Scheduler(allocator, tables, prefix_cache=cache)
    with pytest.raises(RequestTooLarge, match="2 beams take up to 9 blocks and 2 rows; there are 7 and 4"):
        BeamSearch(Request("beam", PROMPT, 12), BeamParams(2)).start(scheduler)


def test_drafts_behind_a_beam_change_no_choice() -> None:
    class Drafting(Diverse):
        loop: DecodeLoop
        drafts = 0

        def forward(self, plan: StepPlan) -> Forward:
            forward = super().forward(plan)
            self.drafts += plan.num_samples is not None
            return forward

    model = Drafting(60, limits=BatchLimits(8, 64, 32))
    model.loop = loop = DecodeLoop(model, debug=True)
    search = BeamSearch(Request("beam", PROMPT, 6), BeamParams(3))
    search.start(loop.scheduler)
    loop._searches.append(search)
    while not search.is_done:
        for name in loop.scheduler.roster.live:
            loop.speculate(name, (1, 2))
        loop.step()
        loop.check()
    assert model.drafts > 0
    assert [one.tokens for one in search.finished] == plain_search(PROMPT, 6, 3)


def test_what_cannot_fit_is_refused_and_an_error_leaves_nothing() -> None:
    loop = DecodeLoop(Diverse(10, limits=BatchLimits(8, 64, 32), fail_at=frozenset({3})), debug=True)
    with pytest.raises(RequestTooLarge, match="5 beams take up to"):
        loop.beam_search(Request("beam", PROMPT, 9), BeamParams(5))
    with pytest.raises(FloatingPointError):
        loop.beam_search(Request("beam", PROMPT, 5), BeamParams(2))
    loop.check(idle=True)
    with pytest.raises(ValueError, match="num_beams=0"):
        BeamParams(0)


def test_failed_steps_change_no_beam() -> None:
    """All beams are computed anew: what they were about to choose is forgotten."""

    class Failing(Diverse):
        def forward(self, plan: StepPlan) -> Forward:
            forward = super().forward(plan)
            if self.passes in (3, 5) and len(forward.logits):
                forward.logits[-1] = torch.nan  # of another request: the whole step fails, after the beams have chosen
            return forward

    loop = DecodeLoop(Failing(60, limits=BatchLimits(8, 64, 32)), debug=True)
    search = BeamSearch(Request("beam", PROMPT, 6), BeamParams(3))
    search.start(loop.scheduler)
    loop._searches.append(search)
    loop.add(Request("other", (9, 8, 7), 12))
    failures = 0
    while not search.is_done:
        try:
            loop.step()
        except ValueError:
            failures += 1
        loop.check()
    assert failures == 2
    assert [one.tokens for one in search.finished] == plain_search(PROMPT, 6, 3)


def test_cancelling_a_beam_ends_its_search_and_nothing_else() -> None:
    class Cancelling(Diverse):
        loop: DecodeLoop

        def forward(self, plan: StepPlan) -> Forward:
            if self.passes == 4:
                self.loop.cancel("beam")
            return super().forward(plan)

    model = Cancelling(60, limits=BatchLimits(8, 64, 32))
    model.loop = loop = DecodeLoop(model, debug=True)
    loop.add(Request("other", (9, 8, 7), 12))
    assert loop.beam_search(Request("beam", PROMPT, 6), BeamParams(1)) == []
    assert list(loop.scheduler.roster.live) == ["other"]
    loop.check()


def test_a_token_that_is_excluded_is_in_no_hypothesis() -> None:
    class Choosy(ToyModel):
        def _logits(self, table: torch.Tensor, context_len: int) -> torch.Tensor:
            logits = torch.full((VOCAB,), -torch.inf)
            logits[5 : 6 if context_len < len(PROMPT) + 2 else 7] = 0.0
            return logits

    loop = DecodeLoop(Choosy(60, limits=BatchLimits(8, 64, 32)), debug=True)
    found = loop.beam_search(Request("beam", PROMPT, 4), BeamParams(5))
    assert sorted(one.tokens for one in found) == [(5, 5, 5, 5), (5, 5, 5, 6), (5, 5, 6, 5), (5, 5, 6, 6)]
    loop.check(idle=True)


@pytest.mark.parametrize("penalty", [-32, 32])
def test_the_steepest_penalties_still_score(penalty: float) -> None:
    loop = DecodeLoop(Diverse(60, limits=BatchLimits(8, 64, 32)), debug=True)
    found = loop.beam_search(Request("beam", PROMPT, 40), BeamParams(3, penalty))
    assert len(found) == 3
    assert all(math.isfinite(one.score) for one in found)


def test_a_search_has_no_part_in_a_later_request_of_the_same_id() -> None:
    loop = DecodeLoop(Diverse(60, limits=BatchLimits(8, 64, 32)), debug=True)
    search = BeamSearch(Request("beam", PROMPT, 6), BeamParams(2))
    search.start(loop.scheduler)
    loop._searches.append(search)
    loop.step()
    loop.cancel("beam")
    again = Request("beam", (9, 8, 7), 4)
    assert loop.run([again]) == DecodeLoop(Diverse(60)).run([again])
    assert search.is_done
    loop.check(idle=True)


def test_drafts_of_another_request_do_not_take_a_beams_choice_away() -> None:
    class Drafting(Diverse):
        drafts = 0

        def forward(self, plan: StepPlan) -> Forward:
            forward = super().forward(plan)
            self.drafts += plan.num_samples is not None
            return forward

    expected = plain_search(PROMPT, 7, 3)
    model = Drafting(60, limits=BatchLimits(8, 64, 32))
    loop = DecodeLoop(model, debug=True)
    loop.add(Request("other", (9, 8, 7), 40))
    loop.step()
    search = BeamSearch(Request("beam", PROMPT, 7), BeamParams(3))
    search.start(loop.scheduler)
    loop._searches.append(search)
    while not search.is_done:
        loop.speculate("other", (1, 2))
        loop.step()
        loop.check()
    assert model.drafts >= 7
    assert [one.tokens for one in search.finished] == expected


def test_a_search_draws_no_samples() -> None:
    loop = DecodeLoop(Diverse(60, limits=BatchLimits(8, 64, 32)), debug=True)
    with pytest.raises(InvalidRequest, match="'beam' has n=2: a beam search draws no samples"):
        loop.beam_search(Request("beam", PROMPT, 4, n=2), BeamParams(2))
    loop.check(idle=True)


@pytest.mark.parametrize(
    ("beams", "penalty", "early", "stop"),
    [
        (2, 1.0, False, ()), (4, 1.0, False, (5,)), (4, 0.0, True, (5,)), (3, 2.0, False, (9,)), (6, 1.0, True, (9,)),
        (2, 2.0, False, (18, 56, 24, 29, 3, 12, 11, 1)),
        (3, 0.0, False, tuple(range(10, 18))), (4, 2.0, False, tuple(range(50, 58))),
    ],
)  # fmt: skip
def test_beams_equal_those_of_transformers(beams: int, penalty: float, early: bool, stop: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data *= 3  # else all continuations are about as probable
    prompts = [tuple((i * 7 + k) % 61 for i in range(11)) for k in range(3)]
    theirs = []
    for prompt in prompts:
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(), max_new_tokens=12,
                num_beams=beams, num_return_sequences=beams, length_penalty=penalty, early_stopping=early,
                do_sample=False, eos_token_id=list(stop) or None, pad_token_id=0, output_scores=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        theirs.append((output.sequences[:, len(prompt) :].tolist(), output.sequences_scores.tolist()))
    with PagedTransformer(model, PoolFormat(4, DType.FP32), 80, Dispatch(cpu_facts()), BatchLimits(8, 64, 32)) as paged:
        loop = DecodeLoop(paged, debug=True)
        for prompt, (sequences, scores) in zip(prompts, theirs, strict=True):
            found = loop.beam_search(
                Request("beam", prompt, 12, stop_token_ids=stop), BeamParams(beams, penalty, early)
            )
            assert [one.score for one in found] == pytest.approx(scores, abs=1e-4)
            for one, sequence in zip(found, sequences, strict=True):
                assert list(one.tokens) == sequence[: len(one.tokens)]
                assert set(sequence[len(one.tokens) :]) <= {0, *stop[:1]}  # they take padding with 0 for none
            loop.check(idle=True)
    assert math.isfinite(scores[0])
