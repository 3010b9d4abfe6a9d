"""What the gate can find wrong, and how a finding is reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pagedtune.kernels.record import Status


class Check(StrEnum):
    """One thing that the gate looks at. Closed: a fault is always one of these."""

    INPUTS = "inputs"  # inputs hold the same bits afterwards
    GUARDS = "guards"  # nothing was written around outputs, pools and workspaces
    WRITTEN = "written"  # every output element was written
    NONFINITE = "nonfinite"  # NaN and inf stand exactly where they must
    ELEMENT = "element"  # each element is within its bound
    ROW = "row"  # each (token, head) is within its relative L2 bound
    SCALE = "scale"  # over all rows, the output is not too large or too small as a whole
    EXACT = "exact"  # coded cases and cache operations: the very value
    LSE = "lse"
    PARTIALS = "partials"  # split partials in the workspace
    POISON = "poison"  # the same bits whatever fills memory that must not matter
    DETERMINISTIC = "deterministic"
    BATCH_INVARIANT = "batch_invariant"
    GRAPH_SAFE = "graph_safe"
    EMULATION = "emulation"  # the virtual GPU saw a fault: memory, race, synchronisation, use of what was never written


CORRUPTING = frozenset({Check.INPUTS, Check.GUARDS})


class Fault(Exception):
    """A check failed. Raised and caught inside the gate; outside, it is a `CaseResult`.

    Args:
        check: what failed.
        message: where (run, token, head, dim), what was found and what was expected.
        ratio: error over bound, where there is one.
    """

    def __init__(self, check: Check, message: str, ratio: float = 0.0) -> None:
        super().__init__(message)
        self.check, self.ratio = check, ratio

    @property
    def status(self) -> Status:
        """`corrupted` for a write where none belongs, `wrong` for all else."""
        return Status.CORRUPTED if self.check in CORRUPTING else Status.WRONG


@dataclass(frozen=True)
class CaseResult:
    """What became of one case.

    Args:
        case_key: `Case.key`.
        status: passed, wrong, corrupted, rejected (by the variant) or not_run (by this machine).
        reason: why, unless it passed: check, run, coordinates, values.
        error_ratio: worst error over its bound among the checks that have a bound; at most 1 if it passed.
        checks: what was checked, each with its worst error over bound (0 for a yes-or-no check).
        duration_s: wall-clock time, build included.
        failed: the check that failed, or empty.
    """

    case_key: str
    status: Status
    reason: str = ""
    error_ratio: float = 0.0
    checks: Mapping[str, float] = field(default_factory=dict)
    duration_s: float = 0.0
    failed: str = ""

    @property
    def passed(self) -> bool:
        """Whether it ran and nothing was wrong."""
        return self.status is Status.PASSED
