"""What the scheduler hands to the engine for one step, and what it makes of the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from ..kernels.bounds import Bounds
from .arrays import INT64, BoolArray, IntArray, RowIndex
from .errors import InvalidToken
from .sampling import SamplingBatch
from .sequence import Finished
from .validation import INT64_MAX

_NO_VOCABULARY = int(np.iinfo(np.int32).max)
WITHHELD = -1  # in place of a token: it is chosen later, and handed in with `Scheduler.give`
ObjectArray = npt.NDArray[np.object_]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step: which tokens go through the model, where their K and V go, and what attention reads.

    Sequences with one query token come first. Launch a plan before the next one is made: its table tensors may be
    views of those that the next plan updates, in stream order. All its tensors are good until its step has ended.

    Args:
        step: number of the step; `Scheduler.commit` or `abort` ends it.
        rows: int64 [num_seqs], host: row of each sequence.
        tickets: int64 [num_seqs], host: which admission held the row.
        request_ids: object [num_seqs]: the caller's names.
        query_lens: int64 [num_seqs], host.
        num_decodes: sequences with one query token.
        samples: bool [num_seqs], host: which sequences sample a token; the others are amid their prompt.
        sampling: parameters of the tokens that are sampled, in order.
        input_ids: int64 [num_tokens], device; -1 stands for the token that the sequence samples in the step
            before, still in flight: the engine fills it in on the device, by row.
        positions: int64 [num_tokens], device: position of each token in its sequence.
        slot_mapping: int64 [num_tokens], device: where its K and V go.
        query_start_loc: int32 [num_seqs + 1], device.
        block_table: int32 [num_seqs, max blocks of these sequences], device.
        context_lens: int32 [num_seqs], device: tokens of each sequence, this step's included.
        sample_index: int64 [num_sampled], device: the tokens whose logits are sampled, one for each row of `sampling`.
        bounds: tightest bounds of the launch, for dispatch.
        preempted: requests that lost their blocks while this plan was made; they run again later.
        copies: int64 [num_pairs, 2], device: (source, destination) blocks to copy, in every layer, before anything of
            this step is written (`Op.COPY_BLOCKS`); None if there are none. No destination is a source.
        wants_logprobs: whether any sequence asks for the log probability of its token.
        ends: int64 [num_seqs], host: `context_lens`.
        index: the rows as an index: a slice where they are 0, 1, 2, ...
        epoch: changes whenever a sequence gets or loses a row.
        num_samples: int64 [num_seqs], host: tokens that each sequence samples, in the order of `sample_index`: one
            more than its drafts, or 0 amid its prompt. None where everybody that samples samples one.
    """

    step: int
    rows: IntArray
    tickets: IntArray
    request_ids: ObjectArray
    query_lens: IntArray
    num_decodes: int
    samples: BoolArray
    sampling: SamplingBatch
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    sample_index: torch.Tensor
    bounds: Bounds
    ends: IntArray
    index: RowIndex
    epoch: int
    preempted: tuple[str, ...] = ()
    copies: torch.Tensor | None = None
    wants_logprobs: bool = False
    num_samples: IntArray | None = None

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return int(self.input_ids.shape[0])


@dataclass(frozen=True, eq=False)
class StepOutput:
    """What a step produced.

    Args:
        request_ids: object [n]: requests that got a token, in batch order.
        tokens: int64 [n]: their tokens.
        finished: requests that ended with it.
        logprobs: fp32 [n]: log probability of each token, if any of them asked; NaN where none was given.
    """

    request_ids: ObjectArray
    tokens: IntArray
    finished: tuple[Finished, ...]
    logprobs: npt.NDArray[np.float32] | None = None


def sampled_tokens(plan: StepPlan, tokens: Any, vocab_size: int | None) -> IntArray:
    """`tokens`, checked: one for each sequence of the plan that samples.

    Raises:
        InvalidToken: one is outside the vocabulary.
        ValueError: another number of tokens, or one that is no integer.
    """
    if isinstance(tokens, torch.Tensor):
        tokens = (tokens.double() if tokens.is_floating_point() else tokens).cpu().numpy()  # numpy lacks bfloat16
    values = np.asarray(tokens)
    if values.dtype is not INT64:
        values = _whole(plan.step, values)
    if values.shape != (plan.sampling.seed.size,):
        raise ValueError(
            f"step {plan.step} samples {plan.sampling.seed.size} tokens, not an array of shape {values.shape}"
        )
    limit = _NO_VOCABULARY if vocab_size is None else vocab_size
    if values.size and np.maximum.reduce(values.view(np.uint64)) >= limit:  # as unsigned, a negative token is huge
        bad = np.flatnonzero((values < WITHHELD) | (values >= limit))
        if bad.size:
            _reject_tokens(plan, values, bad, limit)
    return values


def _reject_tokens(plan: StepPlan, values: IntArray, bad: IntArray, limit: int) -> NoReturn:
    """Raises InvalidToken for the tokens at `bad`."""
    names = np.repeat(plan.request_ids, plan.samples if plan.num_samples is None else plan.num_samples)
    whose = tuple(dict.fromkeys(names[bad].tolist()))
    raise InvalidToken(
        f"step {plan.step} got token {values[bad[0]]} for request {', '.join(map(repr, whose))}: ids are 0 to "
        f"{limit - 1}. Logits of NaN sample beyond the last: cancel what is named here, and the others can go on",
        whose,
    )


def _whole(step: int, values: npt.NDArray[Any]) -> IntArray:
    """`values` of another dtype as int64.

    Raises:
        ValueError: they are no integers.
    """
    if values.size and values.dtype.kind not in "iu":
        raise ValueError(
            f"step {step} got tokens of type {values.dtype}, such as {values.flat[0]!r}: token ids are integers, and "
            "none is rounded or parsed"
        )
    if values.dtype.kind == "u":
        values = np.minimum(values, np.uint64(INT64_MAX))  # so that a huge one does not wrap around to -1
    return values.astype(np.int64)


def sampled_logprobs(plan: StepPlan, logprobs: Any) -> npt.NDArray[np.float32]:
    """`logprobs` as an array, one for each sequence of the plan that samples.

    Raises:
        ValueError: another number of them.
    """
    if isinstance(logprobs, torch.Tensor):
        logprobs = logprobs.detach().float().cpu().numpy()  # numpy lacks bfloat16
    values = np.asarray(logprobs, np.float32)
    if values.shape != (plan.sampling.seed.size,):
        raise ValueError(f"step {plan.step} samples {plan.sampling.seed.size} tokens, not {values.shape} logprobs")
    return values
