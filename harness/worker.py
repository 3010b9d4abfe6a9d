"""Runs jobs in a child process, so that a crash, a hang or a flood of output is an exception and not the end.

    with Worker() as worker:
        result = worker.call("pagedtune.harness.jobs:check_case", payload, timeout_s=30)

The child is a fresh interpreter in a session of its own. Answers come over a private socket that nothing the job
prints can reach; its stdout and stderr are read all the time and only the tail is kept, to explain a failure. The
child is killed, with its whole process group, when a call runs out of time, when the worker is closed, and by the
kernel when this process ends, even by SIGKILL.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from pagedtune.harness.worker_child import Child, JobRaised, WorkerCrashed, WorkerError, WorkerTimeout
from pagedtune.harness.worker_main import HEADER, MAX_FRAME_BYTES

__all__ = ["JobRaised", "Worker", "WorkerCrashed", "WorkerError", "WorkerTimeout"]

START_TIMEOUT_S = 120.0  # importing torch takes 2 s on an idle machine, half a minute on a loaded one


class Worker:
    """A persistent child process for jobs, for use by one thread; only `stop` may be called from another.

    Args:
        preload: modules that the child imports before it counts as started, so that no job's time includes them.
        memory_limit_bytes: address space that jobs may take beyond that; an allocation past it fails in the job.
        start_timeout_s: how long a start may take, in seconds.
        environment: variables for the child beside those of this process, which win.
    """

    def __init__(
        self,
        preload: Sequence[str] = ("torch",),
        memory_limit_bytes: int | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._options = json.dumps({"preload": list(preload), "memory_limit_bytes": memory_limit_bytes})
        self._start_timeout_s = start_timeout_s
        self._environment = dict(environment or {})
        self._child: Child | None = None
        self._stopped = False
        self._lock = threading.Lock()  # `stop` against the start and the end of a child

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def prepare(self) -> None:
        """Starts the child if there is none, and does not wait for it.

        Raises:
            WorkerCrashed: the worker was stopped or closed.
        """
        self._running_child()

    def call(self, job: str, payload: Any, timeout_s: float) -> Any:
        """The JSON result of `job`, a function named `module:function`, for `payload` (JSON too).

        `timeout_s` does not include the start of a child. After a failure the next call has a child that works.

        Raises:
            JobRaised: the job raised, or its result cannot be passed on.
            WorkerCrashed: the child ended before it answered, or did not start.
            WorkerTimeout: no answer in time.
            ValueError: `job` does not name a function, or `payload` is longer than can be passed on.
        """
        if not re.fullmatch(r"[\w.]+:\w+", job):
            raise ValueError(f"job {job!r} must name a function, as in pagedtune.harness.jobs:check_case")
        request = json.dumps({"job": job, "payload": payload}).encode()
        if len(request) > MAX_FRAME_BYTES:
            raise ValueError(
                f"the payload of {job} takes {len(request)} bytes; at most {MAX_FRAME_BYTES} are passed on"
            )
        child = self._running_child()
        try:
            self._await_start(child)
            frame = child.exchange(HEADER.pack(len(request)) + request, timeout_s)
            answer = _decode(frame, child.output)
        except BaseException:  # a crash, a time-out, or an interrupt of this process
            self._discard()
            raise
        if "error" in answer:
            raise JobRaised(answer["error"], answer["message"], answer["where"], child.output)
        return answer["result"]

    def renew(self) -> None:
        """Kills the child, so that the next call has a fresh one: for after a job that may have damaged memory."""
        self._discard()

    def stop(self) -> None:
        """Kills the child and starts no other; a call in another thread then raises WorkerCrashed."""
        with self._lock:
            self._stopped = True
            if self._child is not None:
                self._child.kill()

    def close(self) -> None:
        """Kills the child with its process group and waits for its end. Idempotent."""
        self.stop()
        self._discard()

    def _running_child(self) -> Child:
        with self._lock:
            if self._stopped:
                raise WorkerCrashed("the worker was stopped")
            if self._child is None:
                self._child = Child(self._options, self._environment)
            return self._child

    def _await_start(self, child: Child) -> None:
        if child.ready:
            return
        try:
            answer = _decode(child.exchange(b"", self._start_timeout_s), child.output)
        except WorkerError as error:
            raise WorkerCrashed(f"the worker process did not start: {error.reason}", error.output) from error
        if "error" in answer:
            reason = f"{answer['error']}: {answer['message']}"
            raise WorkerCrashed(f"the worker process did not start: {reason}", child.output)
        child.ready = True

    def _discard(self) -> None:
        with self._lock:
            child, self._child = self._child, None
            if child is not None:
                child.close()


def _decode(frame: bytes, output: str) -> dict[str, Any]:
    try:
        answer = json.loads(frame)
    except ValueError as error:
        raise WorkerCrashed(f"the job wrote something else than an answer to the result channel: {error}") from error
    if isinstance(answer, dict) and ("result" in answer or answer.keys() >= {"error", "message", "where"}):
        return answer
    raise WorkerCrashed("the job wrote something else than an answer to the result channel", output)
