"""Records and cells as small as they can be, for tests of what is made of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pagedtune.kernels.bounds import Bucket
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import Record, Status, TimeEvidence, Timing, Verdict

sys.path.insert(0, str(Path(__file__).parent))  # `quiet` is imported from here

MakeRecord = Callable[..., Record]
DEVICE = "cpu|some|2|avx2"


def timing_of(rounds: Sequence[float], ratios: Sequence[float] = ()) -> Timing:
    """A timing with these samples in µs and these ratios to the incumbent."""
    middle = sorted(rounds)[len(rounds) // 2]
    return Timing("cold", tuple(rounds), middle, (min(rounds), max(rounds)), 1_000_000, pair_ratios=tuple(ratios))


@pytest.fixture
def make_record() -> MakeRecord:
    """Makes a record: candidate, stage, time, outcome; everything else has a default."""

    def make(
        variant: str = "fast",
        config: dict[str, Any] | None = None,
        stage: str = "gate",
        *,
        samples: Sequence[float] = (),
        ratios: Sequence[float] = (),
        status: Status = Status.PASSED,
        reason: str = "",
        at: str = "2026-01-01T00:00:00.000000+00:00",
        block_size: int = 16,
        bucket: Bucket | None = None,
        model: str = "small",
        workspace_bytes: int = 0,
        device: str = DEVICE,
        **provenance: Any,
    ) -> Record:
        timing = timing_of(samples, ratios) if samples else None
        passed = status is Status.PASSED
        return Record(
            run_id="run",
            device=device,
            op="attention",
            model=model,
            problem=Problem(8, 2, 64),
            pool_format=PoolFormat(block_size, DType.BF16),
            bucket=bucket or Bucket(8, 1024),
            workload="ragged",
            variant=variant,
            config=config or {},
            stage=stage,
            status=status,
            reason=reason if passed else (reason or "it failed"),
            verdict=Verdict.ON_DEVICE if passed else Verdict.NONE,
            timing=timing,
            time_evidence=TimeEvidence.MEASURED if timing else TimeEvidence.NONE,
            resources={"workspace_bytes": workspace_bytes},
            provenance={
                "bucket_weight": 1.0,
                "num_layers": 2,
                "mean_context": 512.0,
                "source": "s",
                "order": 0,
                "is_default": False,
                **provenance,
            },
            recorded_at=at,
        )

    return make
