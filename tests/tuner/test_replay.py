"""Traces: read, generated, replayed. Against the public files where they are; without them by the generator."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pagedtune.tuner.cli import main
from pagedtune.tuner.errors import UsageError
from pagedtune.tuner.replay import Arrivals, ReplaySettings, replay, smallest_pool
from pagedtune.tuner.traces import MOONCAKE_BLOCK, Trace, TraceRequest, load_trace
from pagedtune.tuner.traces_fit import fit
from pagedtune.tuner.traces_generator import generate_trace
from pagedtune.tuner.traces_tables import AZURE_CODE, AZURE_CONVERSATION, MOONCAKE_CONVERSATION, TABLES

FILES = Path(__file__).resolve().parents[3] / "shared" / "traces"
SUFFIX = {AZURE_CONVERSATION.name: ".csv", AZURE_CODE.name: ".csv", MOONCAKE_CONVERSATION.name: ".jsonl"}


def public(name: str) -> Trace:
    path = FILES / f"{name}{SUFFIX[name]}"
    if not path.exists():
        pytest.skip(f"{path.name} is not at hand")
    return load_trace(path)


def lengths(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    return np.array([r.prompt_len for r in trace.requests]), np.array([r.output_len for r in trace.requests])


def test_azure_and_mooncake_files_are_read(tmp_path: Path) -> None:
    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:46.6805900,374,44\n"
    )
    requests = load_trace(azure).requests
    assert [(r.prompt_len, r.output_len) for r in requests] == [(374, 44), (396, 109)]
    assert [r.arrival_s for r in requests] == pytest.approx([0, 4.314579], abs=1e-6)
    mooncake = tmp_path / "m.jsonl"
    rows = [{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 9]}] * 2
    mooncake.write_text("\n".join(map(json.dumps, rows)))
    trace = load_trace(mooncake)
    assert trace.requests[0] == TraceRequest(0.0, 600, 5, (0, 9))
    assert trace.unlimited_hit_rate == 0.5


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.6,3\n", "entry 1 is no request with TIMESTAMP"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,0,3\n", "a prompt of 0"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [0]}', "1 hash ids for 513"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("a.txt", "", "a trace is an Azure .csv or a Mooncake .jsonl"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_trace(path)


def test_prompts_are_equal_where_hash_ids_are_and_nowhere_else() -> None:
    a, b = TraceRequest(0, 1100, 1, (0, 5, 7)), TraceRequest(0, 1100, 1, (0, 5, 8))
    same = a.prompt(0) == b.prompt(1)
    assert same.tolist() == [True] * (2 * MOONCAKE_BLOCK) + [False] * (1100 - 2 * MOONCAKE_BLOCK)
    assert TraceRequest(0, 9, 1).prompt(3)[0] != TraceRequest(0, 9, 1).prompt(4)[0]


@pytest.mark.parametrize(
    ("tables", "mean_in", "mean_out", "quantiles_in", "quantiles_out"),
    [  # the published figures: means, and the 10th, 50th, 90th and 99th percentiles
        (AZURE_CONVERSATION, 1154.7, 211.1, (207, 1020, 2734, 4142), (54, 129, 424, 601)),
        (AZURE_CODE, 2047.8, 27.9, (147, 1469, 5188, 7436), (7, 13, 55, 252)),
        (MOONCAKE_CONVERSATION, 12035, 342.6, (964, 6909, 27367, 85400), (24, 350, 597, 1119)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_generated_lengths_have_the_published_distribution(
    tables: object, mean_in: float, mean_out: float, quantiles_in: tuple[int, ...], quantiles_out: tuple[int, ...]
) -> None:
    prompts, outputs = lengths(generate_trace(tables, seed=3))  # type: ignore[arg-type]
    assert prompts.mean() == pytest.approx(mean_in, rel=0.07)
    assert outputs.mean() == pytest.approx(mean_out, rel=0.07)
    levels = (0.1, 0.5, 0.9, 0.99)
    assert np.quantile(prompts, levels) == pytest.approx(quantiles_in, rel=0.1)
    assert np.quantile(outputs, levels) == pytest.approx(quantiles_out, rel=0.1, abs=2)


def test_a_generated_trace_repeats_and_its_prefixes_repeat_as_published() -> None:
    first, again = (generate_trace(MOONCAKE_CONVERSATION, seed=1) for _ in range(2))
    assert first == again
    assert first != generate_trace(MOONCAKE_CONVERSATION, seed=2)
    assert first.unlimited_hit_rate == pytest.approx(0.366, rel=0.1)


def test_two_humps_of_the_conversation_outputs_are_there() -> None:
    """The 75th percentile is three times the median: a lognormal of the same mean and deviation has 1.8."""
    _, outputs = lengths(generate_trace(AZURE_CONVERSATION, seed=0))
    assert np.quantile(outputs, 0.75) == pytest.approx(395, rel=0.1)


@pytest.mark.parametrize("name", list(TABLES))
def test_the_tables_are_those_of_the_files(name: str) -> None:
    assert fit(public(name)) == TABLES[name]


def test_every_pool_from_one_longest_request_up_runs_to_the_end() -> None:
    trace = generate_trace(AZURE_CONVERSATION, 24, seed=5).scaled(64)
    smallest = smallest_pool(trace, 4)
    preempted = []
    for blocks in range(smallest, smallest + 60, 4):
        for in_flight in (1, 2):
            settings = ReplaySettings(
                blocks, 4, 8, 16, arrivals=Arrivals.SATURATED, steps_in_flight=in_flight, check_every=7
            )
            result = replay(trace, settings)
            assert result.requests == 24
            preempted.append(result.preemptions)
    assert max(preempted) > 0


def test_a_replay_counts_what_a_hand_can_count() -> None:
    """Two requests, one after the other, of 3 whole blocks and 2 tokens each, of which the second repeats 2 blocks."""
    trace = Trace("hand", (TraceRequest(0, 1026, 3, (0, 1, 2)), TraceRequest(1000, 1026, 3, (0, 1, 3))))
    result = replay(trace, ReplaySettings(8, MOONCAKE_BLOCK, 2, 2000, steps_in_flight=1))
    assert (result.requests, result.steps, result.preemptions, result.recomputed_tokens) == (2, 6, 0, 0)
    assert result.hit_rate == pytest.approx(1024 / 2052)
    assert (result.concurrency, result.peak_concurrency) == (1, 1)
    assert result.pool_use == pytest.approx(3 / 8)
    assert result.utilisation == pytest.approx(np.mean([1026, 1027, 1028]) / 1536)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "factor", "every", "blocks", "figures"),
    [
        (AZURE_CONVERSATION.name, 32, 4, 1000, ("concurrency", "pool_use", "utilisation")),
        (AZURE_CODE.name, 32, 2, 300, ("concurrency", "pool_use", "utilisation")),
        (MOONCAKE_CONVERSATION.name, 128, 1, 12_000, ("concurrency", "pool_use", "utilisation", "hit_rate")),
    ],
)
def test_the_generator_stands_in_for_the_file(
    name: str, factor: int, every: int, blocks: int, figures: tuple[str, ...]
) -> None:
    """Within 10 %, for traces of shortened requests; `pagedtune replay` compares the whole ones."""
    settings = ReplaySettings(blocks, 4, 128, 1024, prefix_cache="hit_rate" in figures, arrivals=Arrivals.SATURATED)
    found = [
        replay(Trace(trace.name, trace.requests[::every]).scaled(factor), settings)
        for trace in (public(name), generate_trace(TABLES[name]))
    ]
    for figure in figures:
        file, generated = (getattr(result, figure) for result in found)
        assert generated == pytest.approx(file, rel=0.1), figure


def test_the_command_prints_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", AZURE_CODE.name, "--limit", "20", "--json", "--block-size", "64"]
    assert main([*arguments, "--arrivals", "saturated"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["requests"] == 20
    assert main(["replay", "no-such-trace"]) == 2
    assert "neither a file nor a trace" in capsys.readouterr().err
