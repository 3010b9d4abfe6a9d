"""The worker process: every way in which a job can go wrong is one typed exception, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagedtune.harness.worker import JobRaised, Worker, WorkerCrashed, WorkerError, WorkerTimeout

HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def jobs_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(HERE), *sys.path])


@pytest.fixture(scope="module")
def shared() -> Iterator[Worker]:
    with Worker(preload=()) as worker:
        yield worker


def call(worker: Worker, job: str, payload: Any = None, timeout_s: float = 20.0) -> Any:
    return worker.call(f"worker_jobs:{job}", payload, timeout_s)


def wait_until_gone(pid: int, seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("payload", [None, 0, "text", [1, [2.5, None]], {"a": {"b": True}}, "é\n" * 100_000])
def test_a_result_comes_back_as_it_was(shared: Worker, payload: Any) -> None:
    assert call(shared, "echo", payload) == payload


def test_the_child_is_another_process_and_stays_between_calls(shared: Worker) -> None:
    first = call(shared, "pid")
    assert first != os.getpid()
    assert call(shared, "pid") == first


@pytest.mark.parametrize(
    ("job", "payload", "kind", "words"),
    [
        ("fail", "wrong\n block size", "ValueError", "wrong block size"),
        ("fail_without_words", None, "Mute", "cannot be printed"),
        ("leave", 3, "SystemExit", "3"),
        ("not_json", None, "NotJson", "set is not JSON serializable"),
        ("circular", None, "NotJson", "Circular"),
        ("large", 65 << 20, "ResultTooLarge", "68157"),
        ("no_such_job", None, "AttributeError", "no_such_job"),
    ],
)
def test_a_job_that_raises_is_job_raised_and_the_child_lives_on(
    shared: Worker, job: str, payload: Any, kind: str, words: str
) -> None:
    child = call(shared, "pid")
    with pytest.raises(JobRaised) as caught:
        call(shared, job, payload)
    assert caught.value.type == kind
    assert words in caught.value.reason
    assert "\n" not in caught.value.reason
    assert call(shared, "pid") == child


def test_the_place_of_an_exception_is_named(shared: Worker) -> None:
    with pytest.raises(JobRaised, match=r"ValueError: x \(worker_jobs\.py:\d+\)"):
        call(shared, "fail", "x")


@pytest.mark.parametrize(
    ("job", "payload", "words"),
    [
        ("die", signal.SIGSEGV.value, "ended by SIGSEGV in die (worker_jobs.py:"),
        ("die", signal.SIGABRT.value, "ended by SIGABRT"),
        ("die", signal.SIGKILL.value, "ended by SIGKILL, as the out-of-memory killer does"),
        ("die", signal.SIGRTMIN.value + 5, "ended by signal"),
        ("read_null", None, "ended by SIGSEGV in string_at"),
        ("leave_at_once", 0, "exit code 0"),
        ("leave_at_once", 7, "exit code 7"),
        ("scribble", None, "something else than an answer"),
        ("close_channel", None, "closed the result channel"),
    ],
)
def test_an_end_of_the_child_is_worker_crashed_with_its_cause(
    shared: Worker, job: str, payload: Any, words: str
) -> None:
    child = call(shared, "pid")
    with pytest.raises(WorkerCrashed) as caught:
        call(shared, job, payload)
    assert words in caught.value.reason
    assert "\n" not in caught.value.reason
    assert wait_until_gone(child)
    assert call(shared, "pid") != child, "the next call has a fresh child"


def test_the_last_output_of_a_crashed_child_is_kept(shared: Worker) -> None:
    with pytest.raises(WorkerCrashed) as caught:
        call(shared, "leave_at_once", 1)
    assert "last words" in caught.value.output


@pytest.mark.parametrize("job", ["hang_holding_the_lock", "flood_and_hang"])
def test_a_hang_is_worker_timeout_and_the_child_is_killed(shared: Worker, job: str) -> None:
    child = call(shared, "pid")
    started = time.monotonic()
    with pytest.raises(WorkerTimeout) as caught:
        call(shared, job, timeout_s=0.5)
    assert time.monotonic() - started < 15
    assert caught.value.seconds == 0.5
    assert caught.value.reason.startswith("no answer within 0.5 s")
    assert len(caught.value.output) < 100_000
    assert wait_until_gone(child)


def test_a_hang_tells_where(shared: Worker) -> None:
    with pytest.raises(WorkerTimeout, match=r"in hang_holding_the_lock \(worker_jobs\.py:\d+\)"):
        call(shared, "hang_holding_the_lock", timeout_s=0.5)


def test_output_on_stdout_neither_blocks_nor_forges_a_result(shared: Worker) -> None:
    assert call(shared, "print_much", 1000) == "done"  # 21 MB


def test_a_hang_takes_the_whole_process_group_along(shared: Worker, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with pytest.raises(WorkerTimeout):
        call(shared, "sleeper_then_hang", str(note), timeout_s=2.0)
    assert wait_until_gone(int(note.read_text()))


def test_a_process_that_a_job_leaves_behind_does_not_delay_the_answer_and_dies_with_the_worker() -> None:
    with Worker(preload=()) as worker:
        sleeper = call(worker, "start_sleeper")
        with pytest.raises(WorkerCrashed):
            call(worker, "leave_at_once", 0, timeout_s=10)
    assert wait_until_gone(sleeper)


def test_a_job_that_forks_and_returns_twice_is_answered_once() -> None:
    with Worker(preload=()) as worker:
        assert call(worker, "fork_and_return") == 1
        assert call(worker, "echo", "next") == "next"


def test_a_memory_limit_fails_the_allocation_and_not_the_worker() -> None:
    with Worker(preload=(), memory_limit_bytes=200 << 20) as worker:
        assert call(worker, "allocate", 50 << 20) == 50 << 20
        with pytest.raises(JobRaised, match="MemoryError"):
            call(worker, "allocate", 400 << 20)
        assert call(worker, "allocate", 50 << 20) == 50 << 20


def test_failures_leave_no_process_and_no_descriptor() -> None:
    call_failures()  # whatever is opened once and for all
    before = open_descriptors(), children()
    call_failures()
    assert (open_descriptors(), children()) == before


def call_failures() -> None:
    with Worker(preload=()) as worker:
        for job, payload in (("fail", ""), ("die", signal.SIGSEGV.value), ("leave_at_once", 1)):
            with pytest.raises(WorkerError):
                call(worker, job, payload)
        with pytest.raises(WorkerTimeout):
            call(worker, "hang_holding_the_lock", timeout_s=0.2)
        call(worker, "pid")


def open_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def children() -> list[int]:
    return sorted(child.pid for child in psutil.Process().children())


def test_a_child_that_cannot_start_says_why() -> None:
    with Worker(preload=("no_such_module",)) as worker, pytest.raises(WorkerCrashed, match="no_such_module"):
        call(worker, "pid")


def test_stop_from_another_thread_ends_a_call() -> None:
    with Worker(preload=()) as worker:
        call(worker, "pid")
        threading.Timer(0.3, worker.stop).start()
        with pytest.raises(WorkerCrashed):
            call(worker, "hang_holding_the_lock", timeout_s=60)
        with pytest.raises(WorkerCrashed, match="stopped"):
            call(worker, "pid")


def test_a_job_without_a_function_name_is_refused(shared: Worker) -> None:
    with pytest.raises(ValueError, match="must name a function"):
        shared.call("worker_jobs", None, 1.0)


PARENT = """
import sys
from pagedtune.harness.worker import Worker
with Worker(preload=()) as worker:
    print(worker.call("worker_jobs:pid", None, 60), flush=True)
    worker.call("worker_jobs:hang_holding_the_lock", None, 600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_child_dies_with_its_parent_even_when_it_holds_the_lock(number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.send_signal(number)
        parent.wait(10)
    assert wait_until_gone(child)
