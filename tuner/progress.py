"""What a person sees while a tune runs: a live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

PLAIN_INTERVAL_S = 10.0


class Progress(Protocol):
    """Told by the pipeline what happens."""

    def phase(self, text: str, total: int, budget_s: float | None = None) -> None:
        """A part of the run with `total` steps begins; its time is limited to `budget_s`."""
        ...

    def step(self, text: str) -> None:
        """The next step begins."""
        ...

    def candidate(self, key: str, state: str) -> None:
        """Something became of a candidate."""
        ...

    def best(self, key: str, time_us: float) -> None:
        """The best candidate of this step so far."""
        ...

    def note(self, text: str) -> None:
        """A line that stays."""
        ...


class _State:
    """What both forms show."""

    def __init__(self) -> None:
        self.title, self.total, self.index = "", 0, 0
        self.text, self.detail, self.best_text = "", "", ""
        self.end_s: float | None = None
        self.tried = 0

    @property
    def left(self) -> str:
        """Time left, `1:05`."""
        if self.end_s is None:
            return ""
        seconds = max(0, round(self.end_s - time.monotonic()))
        return f"{seconds // 60}:{seconds % 60:02d} left"


class _Base:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = _State()

    def phase(self, text: str, total: int, budget_s: float | None = None) -> None:
        """See `Progress`."""
        self._state = _State()
        self._state.title, self._state.total = text, total
        self._state.end_s = None if budget_s is None else time.monotonic() + budget_s
        self._changed(True)

    def step(self, text: str) -> None:
        """See `Progress`."""
        self._state.index += 1
        self._state.text, self._state.detail, self._state.best_text = text, "", ""
        self._changed(False)

    def candidate(self, key: str, state: str) -> None:
        """See `Progress`."""
        self._state.tried += 1
        self._state.detail = f"{key} {state}"
        self._changed(False)

    def best(self, key: str, time_us: float) -> None:
        """See `Progress`."""
        self._state.best_text = f"best {time_us:,.0f} µs {key}"
        self._changed(False)

    def note(self, text: str) -> None:
        """See `Progress`."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _changed(self, is_new_phase: bool) -> None:
        raise NotImplementedError


class LiveProgress(_Base):
    """A bar with the current step and the best so far, for terminals."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[now]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._live = Live(self._bar, console=console, transient=True, refresh_per_second=5, get_renderable=self._render)

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.stop()

    def _changed(self, is_new_phase: bool) -> None:
        state = self._state
        if is_new_phase:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(state.title, total=state.total or 1, left="", now="")

    def _render(self) -> Bar:
        state = self._state
        if self._task is not None:
            now = "  ".join(part for part in (state.text, state.best_text or state.detail) if part)
            self._bar.update(
                self._task,
                completed=max(0, state.index - 1),
                description=f"{state.title} {min(state.index, state.total)}/{state.total}"
                if state.total
                else state.title,
                left=state.left,
                now=now,
            )
        return self._bar


class PlainProgress(_Base):
    """A line per phase and one every few seconds, for logs and pipes."""

    def __init__(self, console: Console, interval_s: float = PLAIN_INTERVAL_S) -> None:
        super().__init__(console)
        self._interval_s = interval_s
        self._next_s = 0.0

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return None

    def _changed(self, is_new_phase: bool) -> None:
        now = time.monotonic()
        if not is_new_phase and now < self._next_s:
            return
        self._next_s = now + self._interval_s
        state = self._state
        count = f" {state.index}/{state.total}" if state.index else f" ({state.total})" if state.total else ""
        self.note("  ".join(p for p in (state.title + count, state.left, state.text, state.best_text) if p))


def make_progress(console: Console) -> LiveProgress | PlainProgress:
    """The form that fits where the console writes to."""
    return LiveProgress(console) if console.is_terminal else PlainProgress(console)
