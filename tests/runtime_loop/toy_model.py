"""A model without neural network, for the decode loop: exact, fast, and it notices every misplaced token.

Its pool stores the token at each slot. The next token is a hash of all tokens of a sequence, read back through the
block table: one token written to a wrong slot, read too early or lost by a preemption changes everything after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.runtime.kv_cache import KVCache
from pagedtune.runtime.limits import BatchLimits
from pagedtune.runtime.plan import StepPlan
from pagedtune.runtime.step_model import Forward
from pagedtune.runtime.swap import copy_blocks

VOCAB = 101


def next_token(tokens: list[int]) -> int:
    """The token that follows `tokens`."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


def continuation(prompt: list[int], length: int) -> tuple[int, ...]:
    """What a request alone gets, greedily."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


@dataclass
class ToyModel:
    """See the module.

    Args:
        num_blocks, block_size: the pool.
        limits: the largest step.
        fail_at: numbers of forward passes that raise, counted from 1.
    """

    num_blocks: int
    block_size: int = 4
    limits: BatchLimits = field(default_factory=lambda: BatchLimits(4, 64, 16))
    fail_at: frozenset[int] = frozenset()
    vocab_size: int = VOCAB
    passes: int = 0

    def __post_init__(self) -> None:
        problem = Problem(1, 1, 1, q_dtype=DType.FP32)
        self.cache = KVCache(problem, PoolFormat(self.block_size, DType.FP32), 1, self.num_blocks, debug=True)
        self._slots = self.cache.k_cache(0).view(-1)

    def forward(self, plan: StepPlan) -> Forward:
        """Stores the step's tokens, then reads every sequence that samples."""
        self.passes += 1
        assert plan.num_tokens <= self.limits.token_budget
        assert len(plan.rows) <= self.limits.max_num_seqs
        if plan.copies is not None:
            copy_blocks(self.cache, plan.copies)
        self._slots[plan.slot_mapping] = plan.input_ids.float()
        if self.passes in self.fail_at:
            raise FloatingPointError(f"pass {self.passes} fails as it was told to")
        ends = plan.query_start_loc[1:].tolist()
        rows = []
        for index in plan.sample_index.tolist():  # a token's own sequence, read up to it
            i = next(i for i, end in enumerate(ends) if index < end)
            rows.append(self._logits(plan.block_table[i], int(plan.context_lens[i]) - (ends[i] - 1 - index)))
        logits = torch.stack(rows) if rows else torch.empty((0, VOCAB))
        return Forward(logits, model_ns=1, kernel_ns=1)

    def _logits(self, table: torch.Tensor, context_len: int) -> torch.Tensor:
        blocks = table[: -(-context_len // self.block_size)].long()
        slots = (blocks[:, None] * self.block_size + torch.arange(self.block_size)).flatten()[:context_len]
        logits = torch.zeros(VOCAB)
        logits[next_token([int(token) for token in self._slots[slots]])] = 1.0
        return logits
