"""Made-up records: whole finals of cells with known times."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pagedtune.harness.statistics import bootstrap_ci, median
from pagedtune.kernels.bounds import Bucket
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import Record, Status, TimeEvidence, Timing, Verdict

DEVICE = "cpu|Test CPU|2|avx2"
KV_BYTES = 16_000_000
MakeTiming = Callable[..., Timing]
MakeCell = Callable[..., list[Record]]


def make_timing(median_us: float, half_width: float = 0.002, note: str = "", n: int = 20) -> Timing:
    """A timing with this median and interval."""
    ci = (median_us * (1 - half_width), median_us * (1 + half_width))
    return Timing("cold", (median_us,) * n, median_us, ci, KV_BYTES, note=note)


def make_cell(
    times_us: Sequence[tuple[str, dict[str, Any], float]],
    model: str = "llama",
    heads: tuple[int, int] = (32, 8),
    block_size: int = 16,
    num_seqs: int = 8,
    context: int = 1024,
    seed: int = 0,
    evidence: TimeEvidence = TimeEvidence.MEASURED,
    environment: dict[str, Any] | None = None,
    device: str = DEVICE,
    spread: float = 0.01,
    note: str = "",
) -> list[Record]:
    """The finals of one cell: variant, config and median of each candidate, the incumbent first."""
    rng = random.Random(seed)
    rounds = [1 + rng.uniform(-spread, spread) for _ in range(20)]
    where = f"{model}{heads}{block_size}{num_seqs}{context}{seed}"
    records = []
    for index, (variant, config, time_us) in enumerate(times_us):
        samples = tuple(time_us * r for r in rounds)
        ratios = tuple(time_us / times_us[0][2] for _ in rounds) if index else ()
        timing = Timing(
            mode="cold",
            samples_us=samples,
            median_us=median(samples),
            ci_us=bootstrap_ci(samples),
            kv_bytes=KV_BYTES,
            note=note,
            pair_ratios=ratios,
            ratio_ci=bootstrap_ci(ratios) if ratios else None,
        )
        records.append(
            Record(
                run_id="run",
                device=device,
                op="attention",
                model=model,
                problem=Problem(*heads, 128, q_dtype=DType.BF16),
                pool_format=PoolFormat(block_size, DType.BF16),
                bucket=Bucket(num_seqs, context),
                workload="uniform",
                variant=variant,
                config=config,
                stage="final",
                status=Status.PASSED,
                verdict=Verdict.ON_DEVICE if evidence is TimeEvidence.MEASURED else Verdict.EMULATED,
                time_evidence=evidence,
                timing=timing,
                environment=environment or {"compiler": "g++ 12", "load_1min": 0.25},
                provenance={
                    "group": where,
                    "group_size": len(times_us),
                    "group_index": index,
                    "stream_gb_s": 30.0,
                    "bucket_weight": 1.0,
                    "num_layers": 32,
                    "mean_context": float(context),
                    "order": index,
                    "is_default": index == 0,
                    "sweep": "quick",
                },
                recorded_at=f"2026-01-01T00:00:{index:02d}.{rng.randrange(10**6):06d}+00:00",
            )
        )
    return records


@pytest.fixture
def timing() -> MakeTiming:
    """Makes timings."""
    return make_timing


@pytest.fixture
def cell() -> MakeCell:
    """Makes the finals of a cell."""
    return make_cell


@pytest.fixture
def device() -> str:
    """Fingerprint of the device that the records are of."""
    return DEVICE
