"""The outer decision: which pool format a deployment of a model should have.

A pool has one format, so it is chosen once per model and dtype, over all buckets. With a fixed amount of KV memory
the number of sequences that fit falls with the bytes that a sequence needs, so time per generated token goes as

    cost(f) = T(f) / min T  *  M(f) / min M

    T(f)  time of one layer, averaged over the buckets by their weight and over the problems by their layers
    M(f)  bytes of one token's K and V  *  mean over the buckets of (L + (B - 1) / 2) / L

where B is the block size and L the bucket's mean context length: a sequence's last block is on average half empty,
exactly (B - 1) / 2 slots where lengths are spread evenly over the remainders. Formats are compared on the cells that
all of them have. Costs within ± 1 % are a tie, which the smaller block and then the simpler layout wins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedtune.kernels.dispatch import Winner
from pagedtune.kernels.pool_format import Layout, PoolFormat
from pagedtune.kernels.record import TimeEvidence
from pagedtune.kernels.variant import Op

from .stats import TIE_BAND

Entry = tuple[Winner, Mapping[str, Any]]


@dataclass(frozen=True)
class FormatCost:
    """One format's part of the comparison: µs per layer, KV memory and cost relative to the best, tokens wasted."""

    pool_format: PoolFormat
    time_us: float
    memory: float
    cost: float
    wasted: float


@dataclass(frozen=True)
class FormatChoice:
    """The decision for one model and dtype.

    Args:
        model_key: `MODEL/DTYPE`.
        chosen: the format, None if there is nothing to compare on.
        costs: of all formats compared, best first.
        reason: one line for people.
    """

    model_key: str
    chosen: PoolFormat | None
    costs: tuple[FormatCost, ...]
    reason: str


def choose_formats(winners: Sequence[Winner], provenances: Sequence[Mapping[str, Any]]) -> tuple[FormatChoice, ...]:
    """The choice for every model and dtype that has attention cells; those of cache operations do not count.

    Args:
        winners: one per cell.
        provenances: of their records, in the same order: `bucket_weight`, `num_layers`, `mean_context`.
    """
    models: dict[str, list[Entry]] = defaultdict(list)
    for winner, provenance in zip(winners, provenances, strict=True):
        if winner.op == Op.ATTENTION:
            models[f"{winner.model}/{winner.problem.q_dtype}"].append((winner, provenance))
    return tuple(_choose(key, entries) for key, entries in sorted(models.items()))


def _choose(model_key: str, entries: Sequence[Entry]) -> FormatChoice:
    measured = [entry for entry in entries if entry[0].time_evidence is not TimeEvidence.PREDICTED]
    entries = measured or entries  # measured times are compared with measured ones alone
    by_format: dict[PoolFormat, dict[str, Entry]] = defaultdict(dict)
    for winner, provenance in entries:
        where = f"{winner.problem.key}|{winner.bucket.key}|{winner.workload}"
        by_format[winner.pool_format][where] = (winner, provenance)
    common = set.intersection(*(set(cells) for cells in by_format.values()))
    everywhere = set.union(*(set(cells) for cells in by_format.values()))
    if not common:
        return FormatChoice(model_key, None, (), "not decided: no bucket was timed in every format")
    costs = _costs({f: [cells[key] for key in sorted(common)] for f, cells in by_format.items()})
    near = [c for c in costs if c.cost <= costs[0].cost * (1 + TIE_BAND)]
    best = min(near, key=lambda c: (c.pool_format.block_size, _LAYOUT_ORDER[c.pool_format.layout], c.pool_format.key))
    partial = "" if common == everywhere else f"; compared on {len(common)} of {len(everywhere)} cells"
    predicted = any(winner.time_evidence is TimeEvidence.PREDICTED for winner, _ in entries)
    return FormatChoice(model_key, best.pool_format, costs, _reason(best, costs, " (predicted)" * predicted) + partial)


_LAYOUT_ORDER = {layout: i for i, layout in enumerate(Layout)}


def _costs(by_format: Mapping[PoolFormat, Sequence[Entry]]) -> tuple[FormatCost, ...]:
    times = {f: _mean([(_weight(p), w.median_us) for w, p in entries]) for f, entries in by_format.items()}
    waste = {f: _mean([(_weight(p), _waste(f, p)) for _, p in entries]) for f, entries in by_format.items()}
    memory = {f: f.bytes_per_token(entries[0][0].problem) * (1 + waste[f]) for f, entries in by_format.items()}
    least_time, least_memory = min(times.values()), min(memory.values())
    costs = [
        FormatCost(f, times[f], memory[f] / least_memory, times[f] / least_time * memory[f] / least_memory, waste[f])
        for f in by_format
    ]
    return tuple(sorted(costs, key=lambda c: (c.cost, c.pool_format.key)))


def _weight(provenance: Mapping[str, Any]) -> float:
    return float(provenance["bucket_weight"]) * float(provenance["num_layers"])


def _waste(pool_format: PoolFormat, provenance: Mapping[str, Any]) -> float:
    """Mean share of a sequence's KV memory that holds no token."""
    return (pool_format.block_size - 1) / 2 / float(provenance["mean_context"])


def _mean(weighted: Sequence[tuple[float, float]]) -> float:
    return sum(w * x for w, x in weighted) / sum(w for w, _ in weighted)


def _reason(best: FormatCost, costs: Sequence[FormatCost], how: str) -> str:
    text = f"{best.time_us:.0f} µs a layer{how}, {best.wasted:.1%} of KV memory wasted"
    others = [c for c in costs if c is not best]
    if not others:
        return f"{text}; the only format tried so far"
    other = others[0]
    verb = "ties" if abs(other.cost / best.cost - 1) <= TIE_BAND else "next"
    ratio = other.time_us / best.time_us - 1
    return f"{text}; {verb} {other.pool_format.key} ({ratio:+.1%} time, {other.wasted:.1%} wasted)"
