"""Beam search on forks: beams share the blocks of what they have in common, and a dropped beam gives its own back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from .arrays import blocks_for
from .errors import InvalidRequest, RequestTooLarge
from .plan import WITHHELD, StepPlan
from .scheduler import Scheduler
from .sequence import Finished, Request, Sequence
from .validation import count_of, real_number, require_type

MAX_PENALTY = 32  # (2^31)^32, of more tokens than any row holds, is still a double


@dataclass(frozen=True)
class BeamParams:
    """How to search.

    Args:
        num_beams: sequences kept at each length.
        length_penalty: a hypothesis of n tokens scores its log probability / n^penalty, from -32 to 32: above 0 favours
            long ones.
        early_stopping: ends with as many finished hypotheses as beams; else once none that runs can beat the worst
            of them, by what it scores now.

    Raises:
        ValueError: no beam, a penalty that is no such number, or `early_stopping` neither True nor False.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        count_of("num_beams", self.num_beams, 1)
        penalty = real_number("length_penalty", self.length_penalty, "0 compares sums of log probabilities")
        if abs(penalty) > MAX_PENALTY:
            raise InvalidRequest(f"length_penalty={penalty} must be from -{MAX_PENALTY} to {MAX_PENALTY}")
        if not isinstance(self.early_stopping, bool):  # "never" of transformers, taken as true, would be its opposite
            raise ValueError(f"early_stopping={self.early_stopping!r} must be True or False")


@dataclass(frozen=True, order=True)
class Hypothesis:
    """A result.

    Args:
        score: log probability of its tokens / their number^length_penalty.
        tokens: output, a stop token included.
    """

    score: float
    tokens: tuple[int, ...]


@dataclass
class _Beam:
    """A running one: its score, its output, and the best continuations once its step has run. A request is known by
    its sequence: as soon as that has ended, its id is free for another one."""

    sequence: Sequence
    score: float
    tokens: tuple[int, ...]
    candidates: tuple[torch.Tensor, torch.Tensor] | None = None  # (log probabilities, tokens), best first


@dataclass
class BeamSearch:
    """One search, beside whatever else the scheduler runs. It finds fewer hypotheses than beams where logits of -inf
    leave no more.

    Its beams withhold their tokens: when all of them have run, the best continuations of all become the beams of
    the next length. A beam that goes on twice is forked, one that does not is cancelled. Beams that lost their
    blocks meanwhile are waited for. An engine that keeps two steps in flight commits one over its beams before it
    schedules the next: from a withheld token none can go on.

    Args:
        request: prompt, longest output and stop tokens; sampling parameters are not used.
        params: how to search.

    Raises:
        InvalidRequest: one of them is something else.
    """

    request: Request
    params: BeamParams
    finished: list[Hypothesis] = field(default_factory=list)
    is_done: bool = False
    _beams: dict[str, _Beam] = field(default_factory=dict)
    _num_forks: int = 0

    def __post_init__(self) -> None:
        require_type("request", self.request, Request)
        require_type("params", self.params, BeamParams)

    def start(self, scheduler: Scheduler) -> None:
        """Queues the first beam.

        Raises:
            RequestTooLarge: the pool does not hold all beams at their longest.
            InvalidRequest: more than one sample, or as for `Scheduler.add`.
        """
        if self.request.n != 1:
            raise InvalidRequest(
                f"request {self.request.request_id!r} has n={self.request.n}: a beam search draws no samples, and "
                "returns as many outputs as beams; leave n at 1"
            )
        size, count, most = scheduler.tables.block_size, self.params.num_beams, scheduler.most_blocks
        shared = (len(self.request.prompt) - 1) // size
        needed = shared + count * (blocks_for(self.request.max_stored_tokens, size) - shared)
        if needed > most or count > scheduler.tables.max_num_seqs:
            raise RequestTooLarge(
                f"request {self.request.request_id!r}: {count} beams take up to {needed} blocks and {count} rows; "
                f"there are {most} and {scheduler.tables.max_num_seqs}. Fewer beams, a shorter output or a larger pool"
            )
        # Its last token is withheld like the others and never given: not the scheduler ends it, but the search.
        scheduler.add(self.request.with_changes(stop_token_ids=()))
        name = self.request.request_id
        self._beams[name] = _Beam(scheduler.roster.live[name], 0.0, ())

    def withhold(self, plan: StepPlan, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Takes the logits of its beams, and withholds their tokens; call it between sampling and commit."""
        names = plan.request_ids[plan.samples].tolist()
        if plan.num_samples is not None:
            names = np.repeat(plan.request_ids, plan.num_samples).tolist()
        for i, name in reversed([*enumerate(names)]):  # the first one counts of those that sample after drafts too
            if (beam := self._beams.get(name)) is not None and beam.sequence.finished is None:
                best = torch.log_softmax(logits[i].float(), dim=-1).topk(self._width(logits.shape[1]))
                beam.candidates = (best.values, best.indices)
                # A row of NaN has sampled what is no token: that stays, so that `commit` refuses it.
                tokens[i : i + 1].masked_fill_(tokens[i : i + 1] < logits.shape[1], WITHHELD)

    def advance(self, scheduler: Scheduler) -> None:
        """Chooses the next beams if all have run; call it after commit."""
        if self.is_done:
            return
        if any(beam.sequence.finished is not None for beam in self._beams.values()):
            self.cancel(scheduler)  # somebody cancelled a beam: that ends the search
            return
        if not all(scheduler.lacks_token(name) for name in self._beams):
            return  # one has yet to run, or was preempted and runs again
        chosen = self._choose()
        if chosen:
            self._continue(scheduler, chosen)
        else:
            self.cancel(scheduler)

    def cancel(self, scheduler: Scheduler) -> tuple[Finished, ...]:
        """Gives up what runs."""
        running = [name for name, beam in self._beams.items() if beam.sequence.finished is None]
        ended = tuple(map(scheduler.cancel, running))
        self._beams.clear()
        self.is_done = True
        return ended

    def _width(self, vocab_size: int) -> int:
        """Continuations looked at of each beam."""
        return min(self._num_ranked, vocab_size)

    @property
    def _num_ranked(self) -> int:
        """Enough that as many as there are beams go on, though each beam may end in every stop token."""
        return max(2, 1 + len(set(self.request.stop_token_ids))) * self.params.num_beams

    def _choose(self) -> list[tuple[float, str, int]]:
        """The next beams, best first: (score, parent, token); none if this is the end. Finished ones are kept."""
        names, scores, tokens = [], [], []
        for name, beam in self._beams.items():
            assert beam.candidates is not None
            values, ids = beam.candidates
            names += [name] * len(ids)
            scores.append(values + beam.score)
            tokens.append(ids)
        all_scores, all_tokens = torch.cat(scores), torch.cat(tokens)
        order = all_scores.topk(min(self._num_ranked, len(names))).indices.tolist()
        ranked = [(float(all_scores[i]), names[i], int(all_tokens[i])) for i in order]
        length = len(next(iter(self._beams.values())).tokens) + 1
        last = length == self.request.max_new_tokens
        running = []
        for rank, (score, name, token) in enumerate(ranked):
            if score == -math.inf:
                break  # logits of -inf exclude a token
            if not last and token not in self.request.stop_token_ids:
                running.append((score, name, token))
            elif rank < self.params.num_beams:
                tokens_so_far = (*self._beams[name].tokens, token)
                self.finished.append(Hypothesis(score / length**self.params.length_penalty, tokens_so_far))
        self.finished = sorted(self.finished, key=lambda one: -one.score)[: self.params.num_beams]
        running = running[: self.params.num_beams]
        return [] if not running or self._cannot_improve(running[0][0], length) else running

    def _cannot_improve(self, best: float, length: int) -> bool:
        if len(self.finished) < self.params.num_beams:
            return False
        return self.params.early_stopping or best / length**self.params.length_penalty <= self.finished[-1].score

    def _continue(self, scheduler: Scheduler, chosen: list[tuple[float, str, int]]) -> None:
        """Forks parents that go on more than once, drops those that do not, and hands the tokens in."""
        before, after = self._beams, dict[str, _Beam]()
        in_place: dict[str, int] = {}
        for score, parent, token in chosen:
            beam = _Beam(before[parent].sequence, score, (*before[parent].tokens, token))
            if parent not in in_place:
                in_place[parent] = token
                after[parent] = beam
                continue
            name = self._unused_name(scheduler)
            scheduler.fork(parent, name, tokens=(token,))
            beam.sequence = scheduler.roster.live[name]
            after[name] = beam
            self._beams = before | after  # all that run, for `cancel`, should the next fork be refused
        self._beams = after
        for name in before:
            if name in in_place:
                scheduler.give(name, in_place[name])
            else:
                scheduler.cancel(name)

    def _unused_name(self, scheduler: Scheduler) -> str:
        """A name for a fork that no live request has."""
        while True:
            self._num_forks += 1
            name = f"{self.request.request_id}~{self._num_forks}"
            if name not in scheduler.roster.live:
                return name
