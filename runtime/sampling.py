"""Choosing the next token of every sequence at once, each as if it were alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .arrays import IntArray, to_device
from .errors import InvalidRequest
from .validation import real_number, whole_number

# The largest logits that top-p looks at first; a full sort of a vocabulary costs tens of times as much, and few
# distributions spread their top-p mass over more tokens than this.
NUCLEUS_CANDIDATES = 1024


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses tokens: temperature first, then top-k, then top-p within what is left.

    Args:
        temperature: divides the logits; 0 takes the most probable token (the lowest id of equals).
        top_k: keeps the k most probable tokens and those equal to the k-th; 0 keeps all, 2^63 - 1 is the most.
        top_p: keeps the smallest set of most probable tokens that holds this mass, and those equal to its last.
        seed: 0 to 2^63 - 1; the same seed, logits and position give the same token in any batch. None draws one.

    Raises:
        InvalidRequest: a value outside its range, or not a number of its kind.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        temperature = real_number("temperature", self.temperature, "0 is greedy")
        if temperature < 0:
            raise InvalidRequest(f"temperature={temperature} must be a finite number of at least 0 (0 is greedy)")
        top_p = real_number("top_p", self.top_p, "above 0 and at most 1; 1 keeps all tokens")
        if not 0 < top_p <= 1:
            raise InvalidRequest(f"top_p={top_p} must be above 0 and at most 1 (1 keeps all tokens)")
        top_k = whole_number("top_k", self.top_k, 0, "0 keeps all tokens")
        seed = None if self.seed is None else whole_number("seed", self.seed, 0, "None draws one")
        for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("seed", seed)):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """Sampling parameters of the rows of one batch of logits, all [num_rows].

    Args:
        temperature: fp64.
        top_k: int64.
        top_p: fp64.
        seed: int64.
        position: int64: index of the token in its sequence's output; with the seed it picks the random number.
    """

    temperature: npt.NDArray[np.float64]
    top_k: IntArray
    top_p: npt.NDArray[np.float64]
    seed: IntArray
    position: IntArray

    @classmethod
    def of(cls, params: list[SamplingParams], positions: list[int]) -> SamplingBatch:
        """The batch of given rows; a row without a seed gets seed 0."""
        return cls(
            np.array([p.temperature for p in params], np.float64),
            np.array([p.top_k for p in params], np.int64),
            np.array([p.top_p for p in params], np.float64),
            np.array([p.seed or 0 for p in params], np.int64),
            np.array(positions, np.int64),
        )

    def spread(self, counts: IntArray, later: IntArray) -> SamplingBatch:
        """`counts[i]` rows for each row, for tokens `later` positions after its own."""
        return SamplingBatch(
            np.repeat(self.temperature, counts),
            np.repeat(self.top_k, counts),
            np.repeat(self.top_p, counts),
            np.repeat(self.seed, counts),
            np.repeat(self.position, counts) + later,
        )


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """One token per row.

    A row's token depends on its own logits and parameters only, not on the rows beside it.

    Args:
        logits: [num_rows, vocab_size], any float dtype; -inf excludes a token.
        batch: parameters of the rows.

    Returns:
        int64 [num_rows], on the logits' device. vocab_size, which is no token and which `commit` refuses, for a row
        with NaN or without any token: to raise here would make the host wait for the device.

    Raises:
        ValueError: the batch has another number of rows.
    """
    if logits.ndim != 2 or logits.shape[0] != batch.temperature.size:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} with {batch.temperature.size} rows of parameters: expected "
            f"[{batch.temperature.size}, vocab_size]"
        )
    random_rows = np.flatnonzero(batch.temperature > 0)
    if random_rows.size == 0:
        return _sample_greedy(logits)
    if random_rows.size == logits.shape[0]:
        return _sample_random(logits, batch, random_rows)
    tokens = _sample_greedy(logits)
    index = to_device(random_rows, logits.device)
    tokens[index] = _sample_random(logits[index], batch, random_rows)
    return tokens


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log probability of the token of each row under the logits as they are, temperature and cuts aside; fp32 [n]."""
    chosen = logits.gather(1, tokens.clamp(max=logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return chosen.float() - logits.float().logsumexp(dim=-1)


def _sample_greedy(logits: torch.Tensor) -> torch.Tensor:
    """The largest of each row, [n]; vocab_size where that is NaN, as it is if any of the row is, or -inf."""
    tokens = logits.argmax(dim=-1)
    chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens.masked_fill(~(chosen > -torch.inf), logits.shape[1])


def uniform(seed: IntArray, position: IntArray) -> npt.NDArray[np.float64]:
    """Random numbers in [0, 1), each a function of its seed and position alone; 52 random bits."""
    with np.errstate(over="ignore"):
        word = _mix(seed.astype(np.uint64)) + position.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bits = _mix(_mix(word))
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The 64-bit finaliser of SplitMix64 (Steele, Lea, Flood 2014; public domain): a bijection that mixes all bits."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def _sample_random(logits: torch.Tensor, batch: SamplingBatch, rows: IntArray) -> torch.Tensor:
    """Tokens of logits [n, vocab_size] that belong to `rows` of the batch, all with a temperature above 0."""
    device = logits.device
    scaled = logits.double()
    # Relative to the largest, so that no temperature, however low, overflows.
    scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / to_device(batch.temperature[rows], device).unsqueeze(1)
    top_k, top_p = batch.top_k[rows], batch.top_p[rows]
    top_k = np.where((top_k == 0) | (top_k > logits.shape[1]), logits.shape[1], top_k)
    kept = np.flatnonzero((top_k < logits.shape[1]) | (top_p < 1))
    if kept.size:
        index = to_device(kept, device)
        some = scaled[index]
        threshold = _thresholds(some, to_device(top_k[kept], device), to_device(top_p[kept], device))
        scaled[index] = some.masked_fill(some < threshold.unsqueeze(1), -torch.inf)
    return _invert_cdf(scaled, to_device(uniform(batch.seed[rows], batch.position[rows]), device))


def _thresholds(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest logit that each row keeps, [n]. Rows whose set is not among the largest candidates are sorted."""
    candidates = min(NUCLEUS_CANDIDATES, scaled.shape[1])
    largest = scaled.topk(candidates, dim=-1).values
    threshold, settled = _threshold_of_sorted(largest, scaled, top_k, top_p)
    rest = torch.nonzero(~settled).squeeze(1)
    if rest.numel():
        rows = scaled[rest]
        ordered = rows.sort(dim=-1, descending=True).values
        threshold[rest] = _threshold_of_sorted(ordered, rows, top_k[rest], top_p[rest])[0]
    return threshold


def _threshold_of_sorted(
    ordered: torch.Tensor, scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds from the largest logits in descending order, and whether those suffice to know them.

    Logits are relative to the largest of their row, which is 0.
    Without top-k the mass is that of the whole row; with it, that of what top-k leaves, ties included.
    """
    count = ordered.shape[1]
    at_k = ordered.gather(1, (top_k.clamp(max=count) - 1).unsqueeze(1))  # [n, 1]: the k-th largest
    limited = (top_k < scaled.shape[1]).unsqueeze(1)
    floor = torch.where(limited, at_k, -torch.inf)
    total = scaled.exp().masked_fill(scaled < floor, 0.0).sum(dim=-1, keepdim=True)
    mass = ordered.exp().cumsum(dim=-1)
    inside = mass < top_p.unsqueeze(1) * total  # these and the next one are kept
    needed = inside.sum(dim=-1, keepdim=True)
    at_p = ordered.gather(1, needed.clamp(max=count - 1))
    settled = (top_k <= count) | ~limited.squeeze(1)
    settled = settled & ((needed.squeeze(1) < count) | (top_p >= 1))
    at_p = torch.where((top_p >= 1).unsqueeze(1), -torch.inf, at_p)
    return torch.maximum(at_p, floor).squeeze(1), settled


def _invert_cdf(scaled: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """For each row the first token, in order of id, at which the cumulative probability exceeds its draw.

    The logits are relative to the largest of their row; in order of id, the result does not hang on how a sort
    breaks ties.
    """
    mass = scaled.exp().cumsum(dim=-1)
    return torch.searchsorted(mass, draws.unsqueeze(1) * mass[:, -1:], right=True).squeeze(1)
