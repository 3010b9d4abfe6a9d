"""State of the running sequences as arrays indexed by row, so that a step over all of them is vector operations."""

from __future__ import annotations

import numpy as np

from .arrays import BoolArray, IntArray
from .sampling import SamplingBatch
from .sequence import MAX_STOP_TOKENS, Sequence

NO_STOP = -1  # fills the stop table; no token has this id
NO_TICKET = 0  # of a free row


class RunningRows:
    """One row for each running sequence; a sequence keeps its row until it ends or is preempted.

    Args:
        max_num_seqs: rows.
        max_tokens: most tokens of one sequence, prompt and output.

    Attributes:
        ticket: int64: number of the admission that holds the row, never used twice; 0 is a free row. A result of a
            step in flight belongs to a row only while the ticket is the one it was launched with.
        tokens: int32 [max_num_seqs, max_tokens]: prompt and output.
        num_tokens: int64: tokens known.
        num_pending: int64: tokens that steps in flight will sample.
        num_scheduled: int64: tokens whose K and V are written, or will be by steps in flight.
        request_ids: object: the caller's names.
    """

    def __init__(self, max_num_seqs: int, max_tokens: int) -> None:
        self.max_num_seqs, self.max_tokens = max_num_seqs, max_tokens
        self.ticket, self.num_tokens, self.num_pending, self.num_scheduled = (
            np.zeros(max_num_seqs, np.int64) for _ in range(4)
        )
        # Pages are touched only as far as tokens are written.
        self.tokens = np.empty((max_num_seqs, max_tokens), np.int32)
        self.request_ids = np.full(max_num_seqs, None, object)
        self._prompt_len, self._max_total = (np.zeros(max_num_seqs, np.int64) for _ in range(2))
        self._top_k, self._seed = (np.zeros(max_num_seqs, np.int64) for _ in range(2))
        self._temperature, self._top_p = (np.zeros(max_num_seqs) for _ in range(2))
        self._stop = np.full((max_num_seqs, MAX_STOP_TOKENS), NO_STOP, np.int32)
        self._last_ticket = NO_TICKET

    @property
    def has_free(self) -> bool:
        """Whether another sequence can be admitted."""
        return not bool(self.ticket.all())

    def admit(self, sequence: Sequence) -> int:
        """Puts a sequence into the lowest free row and returns the row. If that fails, the row is still free."""
        row = int(np.argmin(self.ticket != NO_TICKET))
        request, params = sequence.request, sequence.request.sampling
        self.tokens[row, : sequence.tokens.size] = sequence.tokens
        self._prompt_len[row], self._max_total[row] = len(request.prompt), request.max_total_tokens
        self._temperature[row], self._top_k[row], self._top_p[row] = params.temperature, params.top_k, params.top_p
        self._seed[row] = sequence.seed
        self._stop[row] = NO_STOP
        self._stop[row, : len(request.stop_token_ids)] = request.stop_token_ids
        # From here on nothing converts a value that might not fit. The ticket, which takes the row, comes last.
        self.request_ids[row] = request.request_id
        self.num_tokens[row] = sequence.tokens.size
        self.num_pending[row] = self.num_scheduled[row] = 0
        sequence.row = row
        self._last_ticket += 1
        self.ticket[row] = self._last_ticket
        return row

    def vacate(self, sequence: Sequence) -> None:
        """Takes a sequence out of its row, with the tokens known so far."""
        row = sequence.row
        sequence.tokens = self.tokens[row, : self.num_tokens[row]].astype(np.int64)
        sequence.row = -1
        self.ticket[row] = NO_TICKET
        self.num_tokens[row] = self.num_pending[row] = self.num_scheduled[row] = 0
        self.request_ids[row] = None

    def owed(self, rows: IntArray) -> IntArray:
        """Tokens that each of `rows` could compute next; 0 for one whose last token is on its way."""
        total = self.num_tokens[rows] + self.num_pending[rows]
        return np.where(total < self._max_total[rows], total - self.num_scheduled[rows], 0)

    def schedule(self, rows: IntArray, counts: IntArray) -> BoolArray:
        """Counts `counts` more tokens of `rows` as scheduled; returns which rows will sample a token, [n]."""
        scheduled = self.num_scheduled[rows] + counts
        self.num_scheduled[rows] = scheduled
        samples: BoolArray = scheduled == self.num_tokens[rows] + self.num_pending[rows]
        self.num_pending[rows] += samples
        return samples

    def inputs(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Token of each row at each position, [n]; -1 where a step in flight still has to sample it."""
        known = positions < self.num_tokens[rows]
        return np.where(known, self.tokens[rows, positions], -1).astype(np.int64)

    def push(self, rows: IntArray, tokens: IntArray) -> tuple[BoolArray, BoolArray]:
        """Appends one sampled token to each row; returns which rows hit a stop token and which their length."""
        end = self.num_tokens[rows]
        self.tokens[rows, end] = tokens
        self.num_tokens[rows] = end + 1
        self.num_pending[rows] -= 1
        stopped: BoolArray = (self._stop[rows] == tokens[:, None]).any(axis=1)
        return stopped, end + 1 >= self._max_total[rows]

    def sampling(self, rows: IntArray) -> SamplingBatch:
        """Parameters for the token that each of `rows` samples in the step being scheduled."""
        position = self.num_tokens[rows] + self.num_pending[rows] - 1 - self._prompt_len[rows]
        return SamplingBatch(self._temperature[rows], self._top_k[rows], self._top_p[rows], self._seed[rows], position)
