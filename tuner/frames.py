"""Decisions as a pandas table: one row for each candidate that has a time in a cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from pagedtune.kernels.record import Record, TimeEvidence, Timing

from .select import Decision

COLUMNS = (
    "cell",
    "model",
    "problem",
    "dtype",
    "gqa_ratio",
    "format",
    "block_size",
    "layout",
    "kv_dtype",
    "num_seqs",
    "context",
    "query_len",
    "bucket",
    "workload",
    "variant",
    "candidate",
    "stage",
    "mode",
    "evidence",
    "median_us",
    "low_us",
    "high_us",
    "gb_s",
    "low_gb_s",
    "high_gb_s",
    "stream_share",
    "num_samples",
    "rejected",
    "note",
    "rank",
)


def timed_frame(decisions: Mapping[str, Decision], stream_gb_s: float | None) -> pd.DataFrame:
    """One row per candidate with a time, by cell; `rank` 0 won its cell.

    Args:
        decisions: of `decide_all`, by cell key.
        stream_gb_s: the device's stream bandwidth, which `stream_share` is relative to; None leaves it empty.
    """
    rows = [
        _row(cell, decision.stage, rank, entry.record, entry.timing, stream_gb_s)
        for cell, decision in sorted(decisions.items())
        for rank, entry in enumerate(decision.ranking)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _row(cell: str, stage: str, rank: int, record: Record, timing: Timing, stream_gb_s: float | None) -> dict[str, Any]:
    low_us, high_us = timing.ci_us
    problem, pool_format, bucket = record.problem, record.pool_format, record.bucket
    return {
        "cell": cell,
        "model": record.model,
        "problem": problem.key,
        "dtype": problem.q_dtype.value,
        "gqa_ratio": problem.gqa_ratio,
        "format": pool_format.key,
        "block_size": pool_format.block_size,
        "layout": pool_format.layout.value,
        "kv_dtype": pool_format.kv_dtype.value,
        "num_seqs": bucket.max_num_seqs,
        "context": bucket.max_context_len,
        "query_len": bucket.max_query_len,
        "bucket": bucket.key,
        "workload": record.workload,
        "variant": record.variant,
        "candidate": record.candidate_key,
        "stage": stage,
        "mode": timing.mode,
        "evidence": record.time_evidence.value,
        "median_us": timing.median_us,
        "low_us": low_us,
        "high_us": high_us,
        "gb_s": timing.bandwidth_gb_s,
        "low_gb_s": timing.kv_bytes / high_us / 1e3,
        "high_gb_s": timing.kv_bytes / low_us / 1e3,
        "stream_share": timing.bandwidth_gb_s / stream_gb_s if stream_gb_s else None,
        "num_samples": len(timing.samples_us),
        "rejected": timing.rejected,
        "note": timing.note,
        "rank": rank,
    }


def best_per_variant(frame: pd.DataFrame) -> pd.DataFrame:
    """The fastest candidate of each variant in each cell."""
    ordered = frame.sort_values(["cell", "rank"])
    return ordered.drop_duplicates(["cell", "variant"]).reset_index(drop=True)


def winners_of(frame: pd.DataFrame) -> pd.DataFrame:
    """The winner of each cell."""
    return frame[frame["rank"] == 0].reset_index(drop=True)


def evidence_kinds(frame: pd.DataFrame) -> list[tuple[TimeEvidence, str]]:
    """The pairs of time evidence and timer mode that occur, measured ones first: each has plots of its own."""
    order = [TimeEvidence.MEASURED, TimeEvidence.TRANSFERRED, TimeEvidence.PREDICTED]
    present = set(zip(frame["evidence"], frame["mode"], strict=True))
    pairs = [(TimeEvidence(evidence), str(mode)) for evidence, mode in present]
    return sorted(pairs, key=lambda pair: (order.index(pair[0]), pair[1]))


def of_kind(frame: pd.DataFrame, evidence: TimeEvidence, mode: str) -> pd.DataFrame:
    """The rows of one kind of evidence and one timer mode."""
    return frame[(frame["evidence"] == evidence.value) & (frame["mode"] == mode)].reset_index(drop=True)
