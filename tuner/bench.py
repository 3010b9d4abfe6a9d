"""What the cells of a run share: where outcomes go, who does the work, and under which settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedtune.harness.device_lock import DeviceBusy, device_lock
from pagedtune.kernels.record import Record

from .budget import Pace
from .errors import UsageError
from .progress import Progress
from .records import Builds, History, RunFacts
from .store import Store
from .workers import WorkerPool

DEVICE_WAIT_S = 600.0  # for another process that times on the same device


@dataclass(frozen=True)
class Jobs:
    """Names of the jobs, as `Worker.call` takes them."""

    build: str = "pagedtune.tuner.jobs:build_candidate"
    check: str = "pagedtune.tuner.jobs:check_candidate"
    time: str = "pagedtune.harness.timing_jobs:time_cell"
    identify: str = "pagedtune.tuner.jobs:identify_variant"
    space: str = "pagedtune.tuner.jobs:list_space"
    predict: str = "pagedtune.harness.prediction_jobs:predict_candidate"

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return self.build, self.check, self.time, self.identify, self.space, self.predict


@dataclass(frozen=True)
class Bench:
    """Everything that the cells of a run share.

    Args:
        store: where records go; history: what is already there.
        pool: worker processes; jobs: what they are asked to do.
        mode: timer mode; limit_s: time limit of a candidate's gate job; seed: of inputs and orders.
        pace: what timing jobs have been seen to take.
        builds: of every candidate.
    """

    store: Store
    history: History
    pool: WorkerPool
    facts: RunFacts
    progress: Progress
    builds: Builds
    jobs: Jobs = field(default_factory=Jobs)
    mode: str = "cold"
    limit_s: float = 30.0
    seed: int = 0
    pace: Pace = field(default_factory=Pace)

    def wait_for_device(self) -> None:
        """Returns when no other process is timing: that wait must not count as a candidate's.

        Raises:
            UsageError: another process has held the device for ten minutes.
        """
        try:
            with device_lock(self.facts.device, DEVICE_WAIT_S):
                return
        except DeviceBusy as error:
            raise UsageError(f"{error}; end it, or run this command again later") from error

    def keep(self, record: Record) -> Record:
        """Appends a record that stands alone."""
        (stamped,) = self.store.append(record)
        self.history.add(stamped)
        return stamped
