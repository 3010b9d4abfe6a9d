"""A few worker processes, and what their failures mean for a candidate."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import TracebackType
from typing import Any, TypeVar

from pagedtune.harness.worker import JobRaised, Worker, WorkerError, WorkerTimeout
from pagedtune.kernels.record import Status

T = TypeVar("T")
Failure = tuple[Status, str]


class WorkerPool:
    """`size` persistent workers. Jobs that must not overlap use `call`, all others `map`."""

    def __init__(self, size: int, jobs: Sequence[str]) -> None:
        """`jobs` are those that will be asked for: no candidate's time limit pays for importing them."""
        self.size = size
        preload = dict.fromkeys(("torch", *(job.partition(":")[0] for job in jobs)))
        self._workers = [Worker(preload=list(preload)) for _ in range(size)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(size)

    def __enter__(self) -> WorkerPool:
        for worker in self._workers:
            worker.prepare()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(cancel_futures=True)

    def call(self, job: str, payload: Any, timeout_s: float) -> Any:
        """One job, always on the same worker while nothing else runs.

        Raises:
            WorkerError: no result; `failure_of` says what that means.
        """
        return self._workers[0].call(job, payload, timeout_s)

    def map(
        self, job: str, items: Sequence[T], payload_of: Callable[[T], Any], timeout_s: float
    ) -> Iterator[tuple[T, Any]]:
        """The result of `job` for each item, or the `WorkerError` that came instead, in the order of completion."""
        futures = {self._threads.submit(self._borrow, job, payload_of(item), timeout_s): item for item in items}
        for future in as_completed(futures):
            yield futures[future], future.result()

    def _borrow(self, job: str, payload: Any, timeout_s: float) -> Any:
        worker = self._idle.get()
        try:
            return worker.call(job, payload, timeout_s)
        except WorkerError as error:
            return error
        finally:
            self._idle.put(worker)


def failure_of(error: WorkerError) -> Failure:
    """The status and reason that a job without a result gives its candidate."""
    if isinstance(error, WorkerTimeout):
        return Status.TIMEOUT, error.reason
    if isinstance(error, JobRaised) and error.type == "BuildError":
        return Status.BUILD_FAILED, error.message
    return Status.CRASHED, error.reason
