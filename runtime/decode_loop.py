"""The loop around a model: schedule, run, sample, take over; step by step, streaming, or to the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter_ns

from .allocator import BlockAllocator
from .arrays import blocks_for
from .beam import BeamParams, BeamSearch, Hypothesis
from .block_tables import BlockTables
from .errors import Invariant, InvariantViolation, PagedRuntimeError
from .kv_shadow import KVShadow
from .metrics import SequenceReport, Snapshot
from .plan import StepOutput
from .prefix_cache import PrefixCache
from .sampling import SamplingParams, logprobs_of, sample
from .scheduler import Scheduler
from .scheduler_config import SchedulerConfig
from .sequence import Finished, Request
from .sequence import Sequence as LiveSequence
from .step_model import Forward, StepModel
from .step_times import StepTimes
from .swap import SwapSpace
from .token_stream import TokenStream
from .validation import token_ids

__all__ = ["DecodeLoop", "Forward", "StepModel"]


class DecodeLoop:
    """Continuous batching over a model, one step at a time.

    Requests may be added and cancelled between any two steps. Not for use from several threads at once. The model's
    cache belongs to this loop until `close`, or until nothing refers to the loop any more.

    Args:
        model: what runs the steps.
        watermark_blocks: see `SchedulerConfig`.
        debug: records what each step reads, for `check()`.
        swap: host memory for preempted sequences; see `SwapSpace`.
        window: see `SchedulerConfig`.
        prefix_cache: keeps the blocks of sequences for later ones with the same prefix and namespace.
        shadow: watches every slot of the cache for foreign writes, and poisons what is freed; see `KVShadow`. Slow.

    Attributes:
        shadow: the watch, or None.
        times: where the time of all steps went; replace it to measure a stretch of its own.

    Raises:
        CacheInUse: another loop has the model's cache.
        ValueError: a swap space that moves nothing, or blocks of another cache; a window below that of a layer, as
            far as the model's attribute `problems` tells; else as `Scheduler`.
    """

    def __init__(
        self,
        model: StepModel,
        watermark_blocks: int = 0,
        debug: bool = False,
        swap: SwapSpace | None = None,
        window: int | None = None,
        prefix_cache: bool = False,
        shadow: bool = False,
    ) -> None:
        cache, limits = model.cache, model.limits
        if swap is not None:
            swap.require_mover_of(cache)
        _require_window(model, window)
        self.model = model
        self.allocator = BlockAllocator(cache.num_blocks)
        max_blocks = blocks_for(limits.max_context_len, cache.block_size)
        self.tables = BlockTables(limits.max_num_seqs, max_blocks, cache.block_size, cache.device, cache.null_block)
        config = SchedulerConfig(
            limits.token_budget, watermark_blocks, model.vocab_size, debug, window, limits.max_context_len
        )
        self.prefix_cache = PrefixCache(self.allocator, cache.block_size) if prefix_cache else None
        self.scheduler = Scheduler(self.allocator, self.tables, config, swap, self.prefix_cache)
        self.times = StepTimes()
        self._searches: list[BeamSearch] = []
        self._streams: list[TokenStream] = []
        self.shadow = KVShadow(cache, self.allocator) if shadow else None
        cache.claim(self)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestTooLarge: it is longer than the model allows, or could not finish even with the pool to itself.
            InvalidRequest: its id is in use, or a token of its prompt or stop tokens is outside the vocabulary.
            CacheInUse: this loop is closed.
        """
        self.model.cache.require_claim(self)
        self.scheduler.add(request)

    def add_all(self, requests: Iterable[Request]) -> tuple[str, ...]:
        """Queues all of `requests` or, if one is refused, none; returns their ids.

        Raises:
            RequestTooLarge, InvalidRequest: as for `add`.
        """
        added: list[LiveSequence] = []
        try:
            for request in requests:
                self.add(request)
                added += self._sequences(request.sample_ids)
        except BaseException:
            self._cancel_live(added)
            raise
        return tuple(sequence.request_id for sequence in added)

    def cancel(self, request_id: str) -> Finished:
        """Ends a request now and returns what it had produced.

        Raises:
            RequestFinished: it has ended already.
            UnknownRequest: there is none of this id.
        """
        return self.scheduler.cancel(request_id)

    def fork(
        self,
        request_id: str,
        new_id: str,
        position: int | None = None,
        tokens: Sequence[int] = (),
        sampling: SamplingParams | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        """Branches a new request off a live one; see `Scheduler.fork`."""
        self.scheduler.fork(request_id, new_id, position, tokens, sampling, max_new_tokens)

    def speculate(self, request_id: str, tokens: Sequence[int]) -> None:
        """Guesses the next tokens of a running request, for the next step to verify; see `Scheduler.speculate`."""
        self.scheduler.speculate(request_id, tokens)

    def close(self) -> None:
        """Cancels what is live and gives the cache up, for another loop over the same model; final.

        Call it between steps. Other resources go with the loop.
        """
        for request_id in list(self.scheduler.roster.live):
            self.cancel(request_id)
        self.model.cache.release(self)

    def step(self) -> StepOutput | None:
        """Runs one step. None if there is nothing to run.

        Whatever the model raises passes through: the step's sequences are then computed anew in later steps, and no
        block and no token is lost.

        Raises:
            InvalidToken: logits of NaN, or without any token, of the requests that it names. The step counts as
                failed, and fails again unless those are cancelled.
            CacheInUse: this loop is closed.
        """
        start = perf_counter_ns()
        self.model.cache.require_claim(self)
        if self.shadow is not None:
            self.shadow.after_commit()  # what was cancelled, or was lost with a failed step, since the last one
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        try:
            if self.shadow is not None:
                self.shadow.before_step(plan)
            forward = self.model.forward(plan)
            if self.shadow is not None:
                self.shadow.after_step(plan)
            tokens = sample(forward.logits, plan.sampling)
            logprobs = logprobs_of(forward.logits, tokens) if plan.wants_logprobs else None
            for search in self._searches:
                search.withhold(plan, forward.logits, tokens)
            output = self.scheduler.commit(plan, tokens, logprobs)
            if self.shadow is not None:
                self.shadow.after_commit()
        except BaseException:
            if plan.step in self.allocator.steps_in_flight:
                self.scheduler.abort(plan)
            raise
        for stream in self._streams:
            stream.take(output)
        for search in self._searches:
            search.advance(self.scheduler)
        times = self.times
        times.steps += 1
        times.tokens += plan.num_tokens
        times.model_ns += forward.model_ns
        times.kernel_ns += forward.kernel_ns
        times.total_ns += perf_counter_ns() - start
        return output

    def stream(self, requests: Iterable[Request]) -> Iterator[tuple[str, int]]:
        """Queues `requests` and yields (request id, token) as tokens come, until all of them have ended.

        Other live requests run along; their tokens are not yielded. Several streams may be open, and other steps
        run, in between: each stream yields all of its own tokens. Closing the iterator cancels what is left.

        Raises:
            RequestTooLarge, InvalidRequest: as for `add_all`, before the first token.
        """
        mine = self._sequences(self.add_all(requests))
        stream = TokenStream(mine)
        self._streams.append(stream)
        try:
            while stream.tokens or stream.is_live:
                while stream.tokens:
                    yield stream.tokens.popleft()
                if stream.is_live:
                    self._advance()
        finally:
            self._streams.remove(stream)
            self._cancel_live(mine)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop_token_ids: Sequence[int] = (),
        n: int = 1,
        logprobs: bool = False,
    ) -> list[Finished]:
        """Continues all of `prompts` and returns the results in their order: the n samples of the first, and so on.

        Args:
            prompts: token ids, each at least one.
            max_new_tokens: most tokens to generate for each.
            sampling: for all, or one for each; greedy without.
            stop_token_ids: tokens that end an output.
            n, logprobs: see `Request`.

        Raises:
            RequestTooLarge, InvalidRequest: a prompt is empty or too long, or a token unknown: nothing is queued.
            ValueError: another number of sampling parameters than prompts.
        """
        each = [sampling or SamplingParams()] * len(prompts) if not isinstance(sampling, Sequence) else list(sampling)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} sampling parameters for {len(prompts)} prompts: give one, or one each")
        stops = token_ids("generate", "stop_token_ids", stop_token_ids)
        tokens = [token_ids("generate", f"prompt {i}", prompt) for i, prompt in enumerate(prompts)]
        requests = [
            Request(f"generate-{i}", prompt, max_new_tokens, params, stops, n, logprobs)
            for i, (prompt, params) in enumerate(zip(tokens, each, strict=True))
        ]
        return self.run(requests)

    def beam_search(self, request: Request, params: BeamParams) -> list[Hypothesis]:
        """Searches for the most probable outputs, beside whatever else runs; best first.

        There are as many as beams, or fewer where logits of -inf leave no more.

        Raises:
            RequestTooLarge: the pool does not hold all beams at their longest, or the model not the longest.
            InvalidRequest: as for `add`.
        """
        self.model.cache.require_claim(self)
        search = BeamSearch(request, params)
        search.start(self.scheduler)
        self._searches.append(search)
        try:
            while not search.is_done:
                self._advance()
        finally:
            self._searches.remove(search)
            if not search.is_done:
                search.cancel(self.scheduler)
        return search.finished

    def run(self, requests: Sequence[Request]) -> list[Finished]:
        """Runs `requests` to their end and returns the results in their order, all samples of each together.

        One that is cancelled meanwhile is among them, with the output that it had.

        Raises:
            RequestTooLarge, InvalidRequest: as for `add_all`.
        """
        mine = self._sequences(self.add_all(requests))
        try:
            while any(sequence.finished is None for sequence in mine):
                self._advance()
        finally:
            self._cancel_live(mine)
        return [sequence.finished for sequence in mine if sequence.finished is not None]

    def _advance(self) -> StepOutput:
        """A step that must exist, because requests are live and no step is in flight."""
        output = self.step()
        if output is None:
            raise PagedRuntimeError(
                "requests are live and no step could be planned: blocks are reserved, or another step is in flight"
            )
        return output

    def _sequences(self, request_ids: Iterable[str]) -> list[LiveSequence]:
        return [self.scheduler.roster.live[request_id] for request_id in request_ids]

    def _cancel_live(self, sequences: Iterable[LiveSequence]) -> None:
        for sequence in sequences:
            if sequence.finished is None:
                self.cancel(sequence.request_id)

    def snapshot(self) -> Snapshot:
        """Where the blocks are and what the queue does."""
        return self.scheduler.snapshot(self.model.cache.block_bytes)

    def explain(self, request_id: str) -> SequenceReport:
        """Where one live request is, what it holds, what it shares; raises as `cancel`."""
        return self.scheduler.explain(request_id)

    def check(self, idle: bool = False) -> None:
        """Derives every invariant of scheduler, tables, allocator and pool anew.

        Args:
            idle: also that nothing is live and every block is free.

        Raises:
            InvariantViolation: names the invariant.
        """
        self.scheduler.check()
        self.model.cache.check()
        if self.shadow is not None:
            self.shadow.check()
        cached = 0 if self.prefix_cache is None else self.prefix_cache.num_cached
        if idle and (self.has_work or self.allocator.num_free + cached != self.allocator.num_blocks):
            detail = (
                f"{self.allocator.num_free} of {self.allocator.num_blocks} blocks are free, {cached} cached: some lost"
            )
            raise InvariantViolation(Invariant.CONSERVATION, detail)


def _require_window(model: StepModel, window: int | None) -> None:
    """Raises ValueError if a layer of the model, as far as it tells, attends to blocks that would be given back."""
    for problem in () if window is None else getattr(model, "problems", ()):
        if problem.window is None or problem.window > window:
            seen = "all earlier tokens" if problem.window is None else f"the last {problem.window} tokens"
            raise ValueError(
                f"window={window}, and a layer of the model attends to {seen}: their blocks would be given back. Give "
                "the widest window of its layers, or none"
            )
