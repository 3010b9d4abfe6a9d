"""A few worker processes, and what their failures mean for a candidate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import TracebackType
from typing import Any, TypeVar

from pagedtune.harness.external import is_foreign
from pagedtune.harness.worker import JobRaised, Worker, WorkerError, WorkerTimeout
from pagedtune.kernels.record import Status

T = TypeVar("T")
Failure = tuple[Status, str]


class _Lane:
    """A worker that no variant from outside the catalogue shares with another: its code may have damaged memory."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.last: frozenset[str] = frozenset()

    def call(self, job: str, payload: Any, timeout_s: float) -> Any:
        refs = variants_in(payload)
        if refs:
            if self.last and refs != self.last and any(is_foreign(ref) for ref in refs | self.last):
                self.worker.renew()
            self.last = refs
        return self.worker.call(job, payload, timeout_s)


class WorkerPool:
    """`size` persistent workers. Jobs that must not overlap use `call`, all others `map`."""

    def __init__(self, size: int, jobs: Sequence[str]) -> None:
        """`jobs` are those that will be asked for: no candidate's time limit pays for importing them."""
        self.size = size
        preload = dict.fromkeys(("torch", *(job.partition(":")[0] for job in jobs)))
        self._lanes = [_Lane(Worker(preload=list(preload))) for _ in range(size)]
        self._idle = list(self._lanes)  # never empty when a thread asks: there are as many lanes as threads
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(size)

    def __enter__(self) -> WorkerPool:
        for lane in self._lanes:
            lane.worker.prepare()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for lane in self._lanes:
            lane.worker.close()
        self._threads.shutdown(cancel_futures=True)

    def call(self, job: str, payload: Any, timeout_s: float) -> Any:
        """One job, always on the same worker while nothing else runs.

        Raises:
            WorkerError: no result; `failure_of` says what that means.
        """
        return self._lanes[0].call(job, payload, timeout_s)

    def map(
        self, job: str, items: Sequence[T], payload_of: Callable[[T], Any], timeout_s: float
    ) -> Iterator[tuple[T, Any]]:
        """The result of `job` for each item, or the `WorkerError` that came instead, in the order of completion."""
        futures = {self._threads.submit(self._borrow, job, payload_of(item), timeout_s): item for item in items}
        for future in as_completed(futures):
            yield futures[future], future.result()

    def _borrow(self, job: str, payload: Any, timeout_s: float) -> Any:
        lane = self._take(variants_in(payload))
        try:
            return lane.call(job, payload, timeout_s)
        except WorkerError as error:
            return error
        finally:
            with self._lock:
                self._idle.append(lane)

    def _take(self, refs: frozenset[str]) -> _Lane:
        """An idle lane, best one that had the same variants last: starting a worker takes seconds."""
        with self._lock:
            lane = next((lane for lane in self._idle if lane.last == refs), self._idle[0])
            self._idle.remove(lane)
            return lane


def variants_in(payload: Any) -> frozenset[str]:
    """References of the variants whose code a job runs."""
    if not isinstance(payload, dict):
        return frozenset()
    parts = payload.get("candidates", [payload])
    return frozenset(part["variant"] for part in parts if "variant" in part)


def failure_of(error: WorkerError) -> Failure:
    """The status and reason that a job without a result gives its candidate."""
    if isinstance(error, WorkerTimeout):
        return Status.TIMEOUT, error.reason
    if isinstance(error, JobRaised) and error.type == "BuildError":
        return Status.BUILD_FAILED, error.message
    return Status.CRASHED, error.reason
