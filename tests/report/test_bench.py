"""How kernels and problems are named on the command line of `pagedtune bench`."""

from __future__ import annotations

import pytest

from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.problem import Problem
from pagedtune.tuner.bench_run import Choice, parse_choice, parse_problem
from pagedtune.tuner.cli import main


def test_problems_are_read_as_their_keys_are_written() -> None:
    assert parse_problem("32/8x128", DType.BF16) == Problem(32, 8, 128, q_dtype=DType.BF16)
    assert parse_problem("9/3x64v32", DType.FP32) == Problem(9, 3, 64, 32, q_dtype=DType.FP32)
    for problem in (Problem(28, 4, 128), Problem(16, 16, 192, 128)):
        assert parse_problem(problem.key.split("-")[0], problem.q_dtype) == problem


@pytest.mark.parametrize("text", ["", "32x128", "32/8", "32/8x128x2", "a/bxc", "32/7x128", "0/1x64"])
def test_problems_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_problem(text, DType.BF16)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eager", Choice("eager", {})),
        ("eager[]", Choice("eager", {})),
        ("k[a=1,b=x, c=True,d=0.5]", Choice("k", {"a": 1, "b": "x", "c": True, "d": 0.5})),
    ],
)
def test_kernels_with_tunables(text: str, expected: Choice) -> None:
    assert parse_choice(text) == expected
    assert parse_choice(parse_choice(text).label) == expected


@pytest.mark.parametrize("text", ["", "k[a]", "k[a=1", "k]a=1[", "[a=1]"])
def test_malformed_kernels_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"of the form|no value"):
        parse_choice(text)


@pytest.mark.parametrize(
    "arguments",
    [["--problem", "32-8"], ["--block-size", "0"], ["--workload", "odd"], ["--context", "0"], ["nosuch[x"]],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_budget_that_is_no_time_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cpu_split", "--budget", seconds]) == 2
    assert f"--budget {seconds} must be a number of seconds above 0" in capsys.readouterr().err
