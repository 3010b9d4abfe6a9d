"""What a person sees during a tune, on a terminal and in a log."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from pagedtune.tuner import check_view, tables
from pagedtune.tuner.progress import LiveProgress, PlainProgress, Progress, make_progress


def console_of(is_terminal: bool) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=is_terminal, width=120, highlight=False), text


def tell(progress: Progress) -> None:
    progress.phase("tune", 3, budget_s=100)
    progress.step("llama bf16")
    progress.candidate("fast[x=1]", "proven")
    progress.best("fast[x=1]", 1234.5)
    progress.note("a line that stays [not markup]")


@pytest.mark.parametrize(("is_terminal", "kind"), [(True, LiveProgress), (False, PlainProgress)])
def test_form_fits_the_console(is_terminal: bool, kind: type) -> None:
    assert isinstance(make_progress(console_of(is_terminal)[0]), kind)


def test_terminal_shows_cell_best_time_left_and_keeps_notes() -> None:
    console, text = console_of(True)
    with LiveProgress(console) as progress:
        tell(progress)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())
    for part in ("tune 1/3", "llama bf16", "best 1,234 µs fast[x=1]", "1:40 left", "a line that stays [not markup]"):
        assert part in shown


def test_log_has_a_line_per_phase_and_then_one_now_and_then() -> None:
    console, text = console_of(False)
    with PlainProgress(console, interval_s=0.0) as progress:
        tell(progress)
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("tune (3)")
    assert "tune 1/3  1:40 left  llama bf16  best 1,234 µs fast[x=1]" in lines
    assert "a line that stays [not markup]" in lines

    console, text = console_of(False)
    with PlainProgress(console, interval_s=1000.0) as progress:
        tell(progress)
    assert text.getvalue().splitlines() == ["tune (3)  1:40 left", "a line that stays [not markup]"]


@pytest.mark.parametrize("make", [check_view.console_for, tables.console_for])
def test_a_reference_is_not_turned_into_an_emoji(
    capsys: pytest.CaptureFixture[str], make: Callable[[], Console]
) -> None:
    make().print("kernel.py:a: it failed")
    assert "kernel.py:a: it failed" in capsys.readouterr().out
