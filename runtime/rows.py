"""State of the running sequences as arrays indexed by row, so that a step over all of them is vector operations."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import BoolArray, IntArray, RowIndex
from .plan import WITHHELD
from .sampling import SamplingBatch
from .sequence import MAX_STOP_TOKENS, Sequence

NO_STOP = -1  # fills the stop table; no token has this id
NO_TICKET = 0  # of a free row
UNKNOWN = -1  # input of a token that a step in flight still has to sample


class RunningRows:
    """One row for each running sequence; a sequence keeps its row until it ends or is preempted.

    Args:
        max_num_seqs: rows.
        max_tokens: most tokens of one sequence, prompt and output.
        stored: see `num_scheduled`; kept by whoever books tokens into blocks.

    Attributes:
        ticket: int64: number of the admission that holds the row, never used twice; 0 is a free row. A result of a
            step in flight belongs to a row only while the ticket is the one it was launched with.
        tokens: int32 [max_num_seqs, max_tokens]: prompt and output.
        num_tokens: int64: tokens known.
        num_pending: int64: tokens that steps in flight will sample.
        num_scheduled: int64: tokens whose K and V are written, or will be by steps in flight.
        num_drafts: int64: guessed tokens behind the known ones, which the next step or the one in flight verifies.
        request_ids: object: the caller's names.
        sequences: object: the sequence in each row.
    """

    def __init__(self, max_num_seqs: int, max_tokens: int, stored: IntArray) -> None:
        self.max_num_seqs, self.max_tokens = max_num_seqs, max_tokens
        self.num_scheduled = stored
        self.ticket, self.num_tokens, self.num_pending, self.num_drafts = (
            np.zeros(max_num_seqs, np.int64) for _ in range(4)
        )
        # Pages are touched only as far as tokens are written.
        self.tokens = np.empty((max_num_seqs, max_tokens), np.int32)
        self._flat_tokens = self.tokens.reshape(-1)
        self._start = np.arange(max_num_seqs) * max_tokens
        self.request_ids = np.full(max_num_seqs, None, object)
        self._prompt_len, self._max_total, self._last = (np.zeros(max_num_seqs, np.int64) for _ in range(3))
        self._top_k, self._seed = (np.zeros(max_num_seqs, np.int64) for _ in range(2))
        self._temperature, self._top_p = (np.zeros(max_num_seqs) for _ in range(2))
        self._stop = np.full((MAX_STOP_TOKENS, max_num_seqs), NO_STOP, np.int64)
        self._num_stops = np.zeros(max_num_seqs, np.int64)
        self.logprobs: npt.NDArray[np.float32] | None = None  # [max_num_seqs, max_tokens], once somebody asks
        self._wants_logprobs = np.zeros(max_num_seqs, np.bool_)
        self._last_ticket = NO_TICKET

    @property
    def has_free(self) -> bool:
        """Whether another sequence can be admitted."""
        return not bool(self.ticket.all())

    def admit(self, sequence: Sequence) -> int:
        """Puts a sequence into the lowest free row and returns the row. If that fails, the row is still free."""
        row = int(np.argmin(self.ticket != NO_TICKET))
        request, params = sequence.request, sequence.request.sampling
        count = sequence.tokens.size
        self.tokens[row, :count] = sequence.tokens
        self._prompt_len[row], self._max_total[row] = sequence.prompt_len, sequence.max_total_tokens
        self._temperature[row], self._top_k[row], self._top_p[row] = params.temperature, params.top_k, params.top_p
        self._seed[row] = sequence.seed
        self._stop[:, row] = NO_STOP
        self._stop[: len(request.stop_token_ids), row] = request.stop_token_ids
        self._num_stops[row] = len(request.stop_token_ids)
        self._wants_logprobs[row] = request.logprobs
        if request.logprobs:
            self._keep_logprobs(row, sequence)
        # From here on nothing converts a value that might not fit. The ticket, which takes the row, comes last.
        self.request_ids[row] = request.request_id
        self._last[row] = sequence.tokens[-1]
        self.num_tokens[row] = count
        self.num_pending[row] = self.num_scheduled[row] = self.num_drafts[row] = 0
        sequence.row = row
        self._last_ticket += 1
        self.ticket[row] = self._last_ticket
        return row

    def _keep_logprobs(self, row: int, sequence: Sequence) -> None:
        if self.logprobs is None:
            self.logprobs = np.empty(self.tokens.shape, np.float32)
        start = sequence.prompt_len
        self.logprobs[row, start : sequence.max_total_tokens] = np.nan  # of those for which the engine gives none
        self.logprobs[row, start : start + sequence.logprobs.size] = sequence.logprobs

    def vacate(self, sequence: Sequence) -> None:
        """Takes a sequence out of its row, with the tokens known so far."""
        row, count = sequence.row, int(self.num_tokens[sequence.row])
        sequence.tokens = self.tokens[row, :count].astype(np.int64)
        if self.logprobs is not None and self._wants_logprobs[row]:
            sequence.logprobs = self.logprobs[row, sequence.prompt_len : count].copy()
        sequence.row = -1
        self.ticket[row] = NO_TICKET
        self.num_tokens[row] = self.num_pending[row] = self.num_scheduled[row] = self.num_drafts[row] = 0
        self.request_ids[row] = None

    def owed(self, rows: RowIndex) -> IntArray:
        """Tokens that each of `rows` could compute next; 0 for one whose last token is on its way, and one or less
        for one whose drafts are."""
        total = self.num_tokens[rows] + self.num_pending[rows]
        owed = total - self.num_scheduled[rows]
        owed[total >= self._max_total[rows]] = 0
        np.maximum(owed, 0, out=owed)
        return owed

    def draft(self, row: int, tokens: IntArray) -> None:
        """Writes guesses behind the known tokens of `row`, as many as it may still sample after the next one."""
        start = int(self.num_tokens[row])
        count = min(tokens.size, int(self._max_total[row]) - start - 1)
        self.tokens[row, start : start + count] = tokens[:count]
        self.num_drafts[row] = count

    def verify(self, row: int, sampled: IntArray) -> tuple[IntArray, int, bool, bool]:
        """Takes the tokens sampled after the last known one and after each draft of `row`.

        Those up to the first that differs from its draft are what would have been sampled one by one. One that is
        withheld differs from every draft: it ends them and is not taken.

        Returns:
            The tokens taken, how many of the inputs after which `sampled` came stay stored, whether the last one taken
            is a stop token, and whether the row is full.
        """
        start, count = int(self.num_tokens[row]), sampled.size
        differs = np.flatnonzero(sampled[:-1] != self.tokens[row, start : start + count - 1])
        taken = sampled[: int(differs[0]) + 1 if differs.size else count]
        stops = np.flatnonzero(np.isin(taken, self._stop[: int(self._num_stops[row]), row]))
        if stops.size:
            taken = taken[: int(stops[0]) + 1]
        kept = taken.size
        if taken[-1] == WITHHELD:
            taken = taken[:-1]
        end = start + taken.size
        self.tokens[row, start:end] = taken
        self.num_tokens[row], self._last[row], self.num_drafts[row] = end, self.tokens[row, end - 1], 0
        return taken, kept, bool(stops.size), end >= int(self._max_total[row])

    def prompts_left(self, rows: IntArray) -> IntArray:
        """Tokens that each of `rows` still has to store before it may be forked for another sample."""
        return self._prompt_len[rows] - 1 - self.num_scheduled[rows]

    def schedule(self, rows: IntArray, scheduled: IntArray) -> BoolArray:
        """Which of `rows`, that hold `scheduled` tokens with the step being planned, will sample a token in it, [n]."""
        drafts = self.num_drafts[rows]
        samples: BoolArray = scheduled == self.num_tokens[rows] + self.num_pending[rows] + drafts
        self.num_pending[rows] += samples & (drafts == 0)  # until drafts are verified, nothing is certain
        return samples

    def inputs(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Token of each row at each position, [n]; -1 where a step in flight still has to sample it."""
        known = positions < self.num_tokens[rows] + self.num_drafts[rows]
        return np.where(known, self.tokens[rows, positions], UNKNOWN).astype(np.int64)

    def last_inputs(self, index: RowIndex) -> IntArray:
        """`inputs` of rows that compute the token after the last one scheduled."""
        pending = self.num_pending[index]
        if not np.count_nonzero(pending):
            return self._last[index].copy()
        return np.where(pending > 0, UNKNOWN, self._last[index])

    def push(self, index: RowIndex, tokens: IntArray) -> tuple[BoolArray, BoolArray | None]:
        """Appends one sampled token to each row; returns which rows are full and which hit a stop token (or None)."""
        end = self.num_tokens[index]
        self._flat_tokens[self._start[index] + end] = tokens
        self._last[index] = tokens
        self.num_tokens[index] = end + 1  # may change `end`, a view of it
        self.num_pending[index] -= 1
        full: BoolArray = self.num_tokens[index] >= self._max_total[index]
        most = int(np.maximum.reduce(self._num_stops[index])) if tokens.size else 0
        stopped: BoolArray | None = None
        for stops in self._stop[:most]:
            hit = stops[index] == tokens
            stopped = hit if stopped is None else stopped | hit
        return full, stopped

    def push_logprobs(self, rows: IntArray, logprobs: npt.NDArray[np.float32]) -> None:
        """Keeps the log probabilities of the tokens just pushed."""
        if self.logprobs is not None:
            self.logprobs[rows, self.num_tokens[rows] - 1] = logprobs

    def set_logprobs(self, row: int, logprobs: npt.NDArray[np.float32]) -> None:
        """Keeps the log probabilities of the last tokens of one row."""
        if self.logprobs is not None:
            end = int(self.num_tokens[row])
            self.logprobs[row, end - logprobs.size : end] = logprobs

    def wants_logprobs(self, index: RowIndex) -> bool:
        """Whether any of these rows asks for log probabilities."""
        return self.logprobs is not None and bool(self._wants_logprobs[index].any())

    def sampling(self, rows: IntArray) -> SamplingBatch:
        """Parameters for the token that each of `rows` samples in the step being scheduled."""
        position = self.num_tokens[rows] + self.num_pending[rows] - 1 - self._prompt_len[rows]
        return SamplingBatch(self._temperature[rows], self._top_k[rows], self._top_p[rows], self._seed[rows], position)

    def output_positions(self, index: RowIndex, scheduled: IntArray) -> IntArray:
        """`SamplingBatch.position` of rows that sample after `scheduled` tokens."""
        positions: IntArray = scheduled - self._prompt_len[index]
        return positions
