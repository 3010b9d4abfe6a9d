"""Why the model prefers each predicted winner: where its time goes, and where the other variants' best lose theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagedtune.harness.prediction import StepPrediction
from pagedtune.kernels.record import Record
from pagedtune.kernels.serial import from_jsonable

WORTH_A_WORD_US = 0.05


@dataclass(frozen=True)
class Budget:
    """A predicted time as the parts that add up to it, in microseconds.

    Args:
        variant: whose.
        launch, ramp, body: of all kernels; the body is what their waves of blocks take.
        main: the kernel with the longest body.
        kernels: how many are launched.
    """

    variant: str
    launch: float
    ramp: float
    body: float
    main: StepPrediction
    kernels: int

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return self.launch + self.ramp + self.body


def budget_of(record: Record) -> Budget | None:
    """Parts of a record's predicted time; None where nothing was predicted."""
    found = record.counters.get("predicted")
    if not found:
        return None
    steps = from_jsonable(tuple[StepPrediction, ...], found)
    launch, ramp = sum(s.launch_us for s in steps), sum(s.ramp_us for s in steps)
    body = sum(s.total_us for s in steps) - launch - ramp
    return Budget(record.variant, launch, ramp, body, max(steps, key=_body_of), len(steps))


def bests_of(records: Sequence[Record]) -> dict[str, dict[str, Budget]]:
    """By cell key and variant, the least of the predictions on record, proven or not."""
    bests: dict[str, dict[str, Budget]] = {}
    for record in records:
        budget = budget_of(record)
        if budget is not None:
            cell = bests.setdefault(record.cell_key, {})
            if record.variant not in cell or budget.total < cell[record.variant].total:
                cell[record.variant] = budget
    return bests


def bound_text(budget: Budget) -> str:
    """What bounds a candidate, e.g. `memory: 10.9 of 13.8 µs; 0.88 waves of 2 blocks an SM; 3,082 GB/s a full wave`."""
    main = budget.main
    blocks = "block" if main.blocks_per_unit == 1 else "blocks"
    return (
        f"{main.bound}: {_body_of(main):.1f} of {budget.total:.1f} µs; {main.waves:.2f} waves of "
        f"{main.blocks_per_unit} {blocks} an SM; {main.gb_s:,.0f} GB/s a full wave"
    )


def loss_text(other: Budget, winner: Budget) -> str:
    """Where another variant's best loses, e.g. `triton_split 1.24×: launches +1.5 µs (2 kernels, not 1)`."""
    text = f"{other.variant} {other.total / winner.total:.2f}×"
    main, kernels = other.main, f"{other.kernels} kernels, not {winner.kernels}"
    why_body = f"{main.bound}-bound, {main.waves:.2f} waves, {main.gb_s:,.0f} GB/s"
    parts = (
        (other.body - winner.body, "body", why_body),
        (other.launch - winner.launch, "launches", kernels),
        (other.ramp - winner.ramp, "ramp", kernels),
    )
    told = [
        f"{name} {us:+.1f} µs ({why})" for us, name, why in sorted(parts, reverse=True) if abs(us) >= WORTH_A_WORD_US
    ]
    return f"{text}: {', '.join(told) or 'the same in every part'}"


def reason_of(record: Record, bests: Mapping[str, Mapping[str, Budget]]) -> tuple[str, str] | None:
    """What bounds a winner, and where the best of each other variant loses; None where nothing was predicted."""
    own = budget_of(record)
    if own is None:
        return None
    others = sorted((b for name, b in bests.get(record.cell_key, {}).items() if name != record.variant), key=_total_of)
    losses = "; ".join(loss_text(other, own) for other in others) or "no other variant was predicted"
    return bound_text(own), losses


def reason_rows(
    winners: Sequence[tuple[str, str, str, Record]], bests: Mapping[str, Mapping[str, Budget]]
) -> list[list[str]]:
    """A row for each winner: model, problem, bucket, variant, what bounds it, and the best of each other variant.

    Args:
        winners: model, problem, bucket and record.
        bests: of `bests_of`.
    """
    rows: list[list[str]] = []
    for model, problem, bucket, record in winners:
        reason = reason_of(record, bests)
        if reason is not None:
            rows.append([model, problem, bucket, record.variant, *reason])
    return rows


def _body_of(step: StepPrediction) -> float:
    return step.total_us - step.launch_us - step.ramp_us


def _total_of(budget: Budget) -> float:
    return budget.total
