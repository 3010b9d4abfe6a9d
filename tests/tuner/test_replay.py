"""Traces: read, generated, replayed. Against the public files where they are; without them by the generator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagedtune.tuner.cli import main
from pagedtune.tuner.errors import UsageError
from pagedtune.tuner.replay import Arrivals, ReplaySettings, replay, smallest_pool
from pagedtune.tuner.traces import MOONCAKE_BLOCK, Trace, TraceRequest, load_trace
from pagedtune.tuner.traces_compare import Figure, compare
from pagedtune.tuner.traces_fit import LengthTables, SharingTables, TraceTables, as_source, fit
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


@pytest.mark.parametrize(
    ("tables", "rate", "variation"),
    [  # requests a second, and the coefficient of variation of the times between them, as published
        (AZURE_CONVERSATION, 5.53, 1.09),
        (AZURE_CODE, 2.57, 13.2),
        (MOONCAKE_CONVERSATION, 3.40, None),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_generated_requests_come_as_often_and_as_unevenly_as_published(
    tables: TraceTables, rate: float, variation: float | None
) -> None:
    times = np.array([r.arrival_s for r in generate_trace(tables, seed=2).requests])
    gaps = np.diff(times)
    assert gaps.min() >= 0
    assert times.size / times[-1] == pytest.approx(rate, rel=0.02)
    if variation is not None:
        assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.1)


def test_a_part_of_a_generated_trace_comes_as_fast_as_the_whole() -> None:
    part = generate_trace(AZURE_CONVERSATION, 1000, seed=1)
    arrivals = AZURE_CONVERSATION.arrivals
    expected = np.interp(1000 / AZURE_CONVERSATION.num_requests, np.linspace(0, 1, len(arrivals)), arrivals)
    assert part.requests[-1].arrival_s == pytest.approx(expected, rel=0.1)


def test_generated_conversations_are_chains_that_nothing_from_before_the_start_goes_on() -> None:
    """Whoever repeats more than the first unit repeats the newest request of its conversation."""
    trace = generate_trace(MOONCAKE_CONVERSATION, 3000, seed=4)
    last: dict[int, int] = {}
    going_on = []
    for number, request in enumerate(trace.requests):
        ids = request.hash_ids
        assert ids[0] == 0
        assert len(ids) == -(-request.prompt_len // MOONCAKE_BLOCK)
        if len(ids) > 1 and ids[1] in last:
            known = next((i for i, each in enumerate(ids) if each not in last), len(ids))
            assert {last[each] for each in ids[1:known]} == {last[ids[1]]}
            going_on.append(number)
        last |= dict.fromkeys(ids, number)
    shares = [np.mean([start <= number < start + 500 for number in going_on]) for start in (0, 2500)]
    assert 0 < shares[0] < shares[1] / 2


def test_two_humps_of_the_conversation_outputs_are_there() -> None:
    """The 75th percentile is three times the median: a lognormal of the same mean and deviation has 1.8."""
    _, outputs = lengths(generate_trace(AZURE_CONVERSATION, seed=0))
    assert np.quantile(outputs, 0.75) == pytest.approx(395, rel=0.1)


def test_printed_tables_make_the_same_tables_again() -> None:
    names = {each.__name__: each for each in (TraceTables, LengthTables, SharingTables)}
    for tables in TABLES.values():
        source = as_source(tables)
        assert eval(source, names) == tables
        assert max(map(len, source.splitlines())) <= 120


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


def shortened(factor: int, block_size: int, blocks: int, arrivals: Arrivals) -> ReplaySettings:
    """Of a replay of a trace scaled by `factor` that takes as many blocks and seconds as the whole one."""
    whole = ReplaySettings()
    budget = whole.token_budget // factor
    return ReplaySettings(
        blocks, block_size // factor, min(budget, whole.max_num_seqs), budget, arrivals=arrivals,
        step_s=whole.step_s * factor, token_s=whole.token_s * factor, context_token_s=whole.context_token_s * factor,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "factor", "block_size", "arrivals", "blocks"),
    [  # pools of two of the longest requests: where there is room for more, less depends on the lengths
        (AZURE_CONVERSATION.name, 32, 64, Arrivals.SATURATED, 440),
        (AZURE_CONVERSATION.name, 64, 64, Arrivals.TRACE, 440),
        (AZURE_CODE.name, 8, 64, Arrivals.SATURATED, 250),
        (AZURE_CODE.name, 8, 64, Arrivals.TRACE, 250),
        (MOONCAKE_CONVERSATION.name, 32, 256, Arrivals.SATURATED, 1000),
    ],
)
def test_the_generator_stands_in_for_the_file(
    name: str, factor: int, block_size: int, arrivals: Arrivals, blocks: int
) -> None:
    """Within 10 %, for traces of shortened requests; `pagedtune replay --against-generator` compares whole ones."""
    file, generated = (trace.scaled(factor) for trace in (public(name), generate_trace(TABLES[name])))
    settings = shortened(factor, block_size, blocks, arrivals)
    figures = compare(replay(file, settings), replay(generated, settings))
    assert all(figure.agrees for figure in figures), figures


def test_figures_agree_within_a_tenth_or_below_their_floor() -> None:
    assert Figure("concurrency", 10, 11).agrees
    assert not Figure("concurrency", 10, 11.1).agrees
    assert not Figure("concurrency", 10, 8.9).agrees
    rare = Figure("preempted", 0.001, 0.005, floor=0.005)
    assert rare.difference == pytest.approx(4)
    assert rare.agrees
    assert rare.is_absolute
    assert not Figure("preempted", 0.001, 0.007, floor=0.005).agrees
    assert Figure("hit rate", 0, 0).agrees
    assert Figure("hit rate", 0, 0.01, floor=0.005).difference == float("inf")
    assert not Figure("hit rate", 0, 0.01, floor=0.005).agrees


def test_a_trace_agrees_with_itself_and_not_with_one_of_longer_outputs() -> None:
    trace = generate_trace(AZURE_CONVERSATION, 60).scaled(64)
    longer = Trace("longer", tuple(replace(r, output_len=2 * r.output_len) for r in trace.requests))
    settings = ReplaySettings(4 * smallest_pool(longer, 4), 4, 16, 64, arrivals=Arrivals.SATURATED)
    one, other = replay(trace, settings), replay(longer, settings)
    assert all(figure.agrees and figure.difference == 0 for figure in compare(one, one))
    assert not all(figure.agrees for figure in compare(one, other))
    with pytest.raises(ValueError, match="different settings"):
        compare(one, replay(trace, replace(settings, num_blocks=3 * smallest_pool(longer, 4))))


def test_the_command_prints_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", AZURE_CODE.name, "--limit", "20", "--json", "--block-size", "64"]
    assert main([*arguments, "--arrivals", "saturated"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["requests"] == 20
    assert main(["replay", "no-such-trace"]) == 2
    assert "neither a file nor a trace" in capsys.readouterr().err


def test_the_command_compares_a_file_with_its_stand_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"{AZURE_CODE.name}.csv"
    rows = [f"2023-11-16 18:15:{i % 60:02}.000000,{100 + i},{9 + i}" for i in range(20)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert main(["replay", str(path), "--limit", "20", "--pool", "4000", "--against-generator"]) == 1
    shown = capsys.readouterr().out
    assert "generated, against the file" in shown
    assert "!" in shown
    assert main(["replay", AZURE_CODE.name, "--against-generator"]) == 2
    assert "the file of a trace that can be generated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--block-size", "0"), ("--in-flight", "0"), ("--in-flight", "3"), ("--max-seqs", "0"), ("--seed", "-1")],
)
def test_settings_that_no_replay_can_have_are_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "azure_llm_2023_conv", "--limit", "2", option, value]) == 2
    assert f"error: Invalid value for '{option}'" in capsys.readouterr().err
