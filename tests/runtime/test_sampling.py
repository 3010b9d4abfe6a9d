"""Sampling against its definition, spelled out token by token in Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedtune.runtime import sampling
from pagedtune.runtime.errors import InvalidRequest
from pagedtune.runtime.sampling import SamplingBatch, SamplingParams, sample, uniform


def reference(logits: list[float], params: SamplingParams, draw: float) -> set[int]:
    """The tokens that the definition allows for a draw: one, or two where the draw lies on the edge between them."""
    if params.temperature == 0:
        return {logits.index(max(logits))}
    scaled = [(x - max(logits)) / params.temperature for x in logits]
    kept = set(range(len(scaled)))
    if params.top_k:
        floor = sorted(scaled, reverse=True)[min(params.top_k, len(scaled)) - 1]
        kept = {i for i in kept if scaled[i] >= floor}
    if params.top_p < 1:
        total = math.fsum(math.exp(scaled[i]) for i in kept)
        mass, floor = 0.0, math.inf
        for i in sorted(kept, key=lambda i: -scaled[i]):
            if mass >= params.top_p * total:
                break
            mass, floor = mass + math.exp(scaled[i]), scaled[i]
        kept = {i for i in kept if scaled[i] >= floor}
    total = math.fsum(math.exp(scaled[i]) for i in kept)
    allowed, mass = set(), 0.0
    for i in sorted(kept):
        low, mass = mass, mass + math.exp(scaled[i]) / total
        if low - 1e-12 <= draw < mass + 1e-12:
            allowed.add(i)
    return allowed


# Quarters: many ties, and masses that rounding cannot push over a threshold of the values below.
logit = st.integers(-24, 24).map(lambda n: n / 4)
parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.513, 0.1, 1e-6]),
    seed=st.integers(0, 2**63 - 1),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[SamplingParams], list[int]]:
    rows, vocab = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    logits = draw(st.lists(st.lists(logit, min_size=vocab, max_size=vocab), min_size=rows, max_size=rows))
    params = draw(st.lists(parameters, min_size=rows, max_size=rows))
    return logits, params, draw(st.lists(st.integers(0, 4000), min_size=rows, max_size=rows))


@pytest.mark.parametrize("candidates", [1024, 3])
@given(case=batches())
@settings(max_examples=150, deadline=None)
def test_every_token_is_the_one_that_the_definition_gives(
    candidates: int, case: tuple[list[list[float]], list[SamplingParams], list[int]]
) -> None:
    logits, params, positions = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "NUCLEUS_CANDIDATES", candidates)
        tokens = sample(torch.tensor(logits), SamplingBatch.of(params, positions)).tolist()
    seeds = np.array([p.seed for p in params], np.int64)
    draws = uniform(seeds, np.array(positions, np.int64))
    for row, token in enumerate(tokens):
        assert token in reference(logits[row], params[row], float(draws[row]))


@given(case=batches(), order=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_row_does_not_depend_on_the_batch(
    case: tuple[list[list[float]], list[SamplingParams], list[int]], order: object
) -> None:
    logits, params, positions = case
    together = sample(torch.tensor(logits), SamplingBatch.of(params, positions)).tolist()
    for i, token in enumerate(together):
        alone = sample(torch.tensor(logits[i : i + 1]), SamplingBatch.of(params[i : i + 1], positions[i : i + 1]))
        assert alone.tolist() == [token]
    backwards = sample(torch.tensor(logits[::-1]), SamplingBatch.of(params[::-1], positions[::-1]))
    assert backwards.tolist() == together[::-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_vocabulary_row_by_row_and_at_once(dtype: torch.dtype) -> None:
    logits = (torch.randn(12, 49152, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    logits[3] = 0  # flat: its top-p set is far larger than the candidates looked at first
    params = [
        SamplingParams(temperature, top_k, top_p, seed=seed)
        for seed, (temperature, top_k, top_p) in enumerate(
            [(0, 0, 1), (1, 0, 1), (1, 50, 1), (1, 0, 0.9), (0.7, 40, 0.95), (2, 2000, 0.99)] * 2
        )
    ]
    positions = list(range(12))
    together = sample(logits, SamplingBatch.of(params, positions))
    alone = [sample(logits[i : i + 1], SamplingBatch.of([params[i]], [i])).item() for i in range(12)]
    assert together.tolist() == alone
    assert torch.equal(together[[0, 6]], logits[[0, 6]].argmax(-1))


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf]).repeat(20_000, 1)
    params = [SamplingParams(temperature=2.0, seed=seed) for seed in range(20_000)]
    tokens = sample(logits, SamplingBatch.of(params, [0] * 20_000))
    expected = torch.softmax(logits[0].double() / 2, dim=0) * 20_000
    found = torch.bincount(tokens, minlength=5).double()
    assert found[4] == 0
    chi_square = (((found - expected) ** 2) / expected)[:4].sum().item()
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001


def test_draws_are_uniform_and_uncorrelated_over_seeds_and_positions() -> None:
    seeds, positions = np.meshgrid(np.arange(200), np.arange(200), indexing="ij")
    draws = uniform(seeds.ravel(), positions.ravel()).reshape(200, 200)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.bincount((draws.ravel() * 100).astype(int), minlength=100)
    assert ((counts - 400) ** 2 / 400).sum() < 149  # 99 degrees of freedom, p = 0.001
    for shifted in (draws[1:, :], draws[:, 1:]):
        whole = draws[: shifted.shape[0], : shifted.shape[1]]
        assert abs(np.corrcoef(whole.ravel(), shifted.ravel())[0, 1]) < 0.02  # 4 sigma of 40,000 pairs
    assert len(np.unique(draws)) == draws.size


def test_the_coldest_temperature_is_the_most_probable_token() -> None:
    batch = SamplingBatch.of([SamplingParams(temperature=1e-300, seed=1)], [0])
    assert sample(torch.tensor([[1.0, 30.0, -500.0]]), batch).tolist() == [1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed=9223372036854775808"),
        ({"seed": 1.0}, "seed=1.0"),
        ({"seed": "1"}, "seed='1'"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": 10**400}, "temperature=10"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"temperature": None}, "temperature=None"),
        ({"temperature": True}, "temperature=True"),
        ({"top_k": 2**64}, "top_k=18446744073709551616"),
        ({"top_k": 2**63}, "top_k=9223372036854775808"),
        ({"top_k": 5.0}, "top_k=5.0"),
        ({"top_k": None}, "top_k=None"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"top_p": "0.5"}, "top_p='0.5'"),
    ],
)
def test_bad_parameters_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**values)  # type: ignore[arg-type]


def test_numbers_of_numpy_become_plain_ones() -> None:
    params = SamplingParams(np.float32(0.5), np.int64(2**63 - 1), np.float64(0.5), np.uint8(3))  # type: ignore[arg-type]
    values = (params.temperature, params.top_k, params.top_p, params.seed)
    assert values == (0.5, 2**63 - 1, 0.5, 3)
    assert [type(value) for value in values] == [float, int, float, int]
    assert sample(torch.tensor([[0.0, 1.0]]), SamplingBatch.of([params], [0])).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_nan_or_without_a_token_get_none_and_spare_the_others(temperature: float) -> None:
    logits = torch.zeros(4, 5)
    logits[0] = torch.nan
    logits[1, 2] = torch.nan
    logits[2] = -torch.inf
    logits[3] = torch.tensor([-torch.inf] * 4 + [0.0])
    for params in ([SamplingParams(temperature)] * 4, [SamplingParams(temperature)] * 3 + [SamplingParams(0.5)]):
        assert sample(logits, SamplingBatch.of(params, [0] * 4)).tolist() == [5, 5, 5, 4]


def test_another_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \[1, vocab_size\]"):
        sample(torch.zeros(2, 3), SamplingBatch.of([SamplingParams()], [0]))
