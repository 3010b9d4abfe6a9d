"""Runs the cases of variants in worker processes and collects one outcome per case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock
from types import TracebackType
from typing import Any

from pagedtune.harness.case import Case
from pagedtune.harness.external import RequestError
from pagedtune.harness.worker import JobRaised, Worker, WorkerCrashed, WorkerError, WorkerTimeout
from pagedtune.kernels.catalogue import VARIANTS
from pagedtune.kernels.device import Device
from pagedtune.kernels.record import Status
from pagedtune.kernels.serial import from_jsonable, to_jsonable
from pagedtune.kernels.variant import Op

LISTING_JOB = "pagedtune.harness.listing:list_cases"
CASE_JOB = "pagedtune.harness.jobs:check_case"
PRELOAD = ("torch", "pagedtune.harness.jobs", "pagedtune.harness.listing")  # no part of a case's time
MAX_STREAK = 3  # crashes or time-outs in a row after which the rest of a variant is not worth the wait
# Several workers share the cores, so that threads of OpenMP (torch's) which spin while they wait take the time from
# those that they wait for: a case takes ten times as long on a busy machine.
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}
MEASURED = frozenset({Status.PASSED, Status.WRONG, Status.CORRUPTED})
FAILED = frozenset({Status.WRONG, Status.CORRUPTED, Status.CRASHED, Status.TIMEOUT, Status.BUILD_FAILED})


@dataclass(frozen=True)
class Planned:
    """One case of one variant, before it ran.

    Args:
        ref: what the user wrote, with an absolute path.
        variant: its name.
        op: what it computes.
        case: what runs.
        config: tunables by name.
        rejected: the constraint of the variant that rules the case out, if any.
    """

    ref: str
    variant: str
    op: Op
    case: Case
    config: dict[str, Any]
    rejected: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one case. `error_ratio` is the worst error as a share of the allowed one, where it ran."""

    planned: Planned
    status: Status
    reason: str = ""
    error_ratio: float | None = None
    duration_s: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether it ran and did not pass."""
        return self.status in FAILED


@dataclass(frozen=True)
class Listing:
    """The cases of one variant; `broken` says why there are none: its own code failed."""

    ref: str
    variant: str
    op: Op | None
    planned: tuple[Planned, ...] = ()
    broken: str = ""


_OWN = frozenset(variant.name for variant in VARIANTS)


class Crew:
    """The worker processes of one check, started when it is entered and ended when it is left.

    Args:
        device: what the variants run on.
        jobs: how many run at once.
        timeout_s: how long one case, or the listing of one variant, may take, in seconds.
        code: whether each GPU kernel must also be assembled to machine code, which the virtual GPU does not run.
    """

    def __init__(self, device: Device, jobs: int, timeout_s: float, code: bool = True) -> None:
        self._device, self._timeout_s, self._code = device, timeout_s, code
        self._workers = [Worker(PRELOAD, environment=PATIENT) for _ in range(jobs)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(jobs)
        self._streaks = _Streaks()
        self._last_ref: dict[Worker, str] = {}

    def __enter__(self) -> Crew:
        for worker in self._workers:
            worker.prepare()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def list_variants(self, refs: Sequence[str], level: str, settings: Mapping[str, str]) -> Iterator[Listing]:
        """The cases of each variant, in the order of `refs`.

        Raises:
            RequestError: a variant does not exist, or not with these settings.
        """
        payloads = [
            {"variant": ref, "device": to_jsonable(self._device), "level": level, "settings": dict(settings)}
            for ref in refs
        ]
        return self._threads.map(self._list, payloads)

    def outcomes(self, planned: Sequence[Planned]) -> Iterator[Outcome]:
        """Runs `planned` and yields each outcome when it is there."""
        for future in as_completed([self._threads.submit(self._run, one) for one in planned]):
            yield future.result()

    def _list(self, payload: dict[str, Any]) -> Listing:
        ref = payload["variant"]
        try:
            with self._worker(ref) as worker:
                found = worker.call(LISTING_JOB, payload, self._timeout_s)
        except JobRaised as error:
            if error.type == RequestError.__name__:
                raise RequestError(error.message) from error
            return Listing(ref, ref, None, broken=error.message if error.type == "VariantLoadError" else error.reason)
        except WorkerError as error:
            return Listing(ref, ref, None, broken=f"it was asked for its cases: {error.reason}")
        op = Op(found["op"])
        planned = tuple(
            Planned(ref, found["name"], op, from_jsonable(Case, entry["case"]), entry["config"], entry["rejected"])
            for entry in found["cases"]
        )
        return Listing(ref, found["name"], op, planned)

    def _run(self, one: Planned) -> Outcome:
        if one.rejected is not None:
            return Outcome(one, Status.REJECTED, one.rejected)
        if self._streaks.is_hopeless(one.ref):
            return Outcome(one, Status.NOT_RUN, f"not run after {MAX_STREAK} crashes or time-outs in a row")
        with self._worker(one.ref) as worker:
            outcome = self._attempt(worker, one)
            if outcome.status is Status.CORRUPTED:
                worker.renew()  # it wrote where it should not: later verdicts of that process would prove nothing
        self._streaks.count(one.ref, outcome.status in (Status.CRASHED, Status.TIMEOUT, Status.BUILD_FAILED))
        return outcome

    @contextmanager
    def _worker(self, ref: str) -> Iterator[Worker]:
        """A worker that no other variant from outside the tree has run in: it could have changed anything there."""
        worker = self._idle.get()
        last = self._last_ref.get(worker, ref)
        if last != ref and not {last, ref} <= _OWN:
            worker.renew()
        self._last_ref[worker] = ref
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def _attempt(self, worker: Worker, one: Planned) -> Outcome:
        payload = {
            "variant": one.ref,
            "config": one.config,
            "case": to_jsonable(one.case),
            "device": to_jsonable(self._device),
            "code": self._code,
        }
        try:
            found = worker.call(CASE_JOB, payload, self._timeout_s)
        except JobRaised as error:
            status = Status.BUILD_FAILED if error.type == "BuildError" else Status.CRASHED
            return Outcome(one, status, f"raised {error.reason}")
        except WorkerCrashed as error:
            return Outcome(one, Status.CRASHED, error.reason)
        except WorkerTimeout as error:
            return Outcome(one, Status.TIMEOUT, error.reason, duration_s=self._timeout_s)
        status = Status(found["status"])
        ratio = found["error_ratio"] if status in MEASURED else None
        return Outcome(one, status, found["reason"], ratio, found["duration_s"])


class _Streaks:
    """How often each variant crashed or hung in a row."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = Lock()

    def count(self, ref: str, bad: bool) -> None:
        with self._lock:
            if not self.is_hopeless(ref):
                self._counts[ref] = self._counts.get(ref, 0) + 1 if bad else 0

    def is_hopeless(self, ref: str) -> bool:
        return self._counts.get(ref, 0) >= MAX_STREAK
