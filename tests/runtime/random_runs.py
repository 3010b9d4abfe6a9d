"""State machines by a seed."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

STEPS_PER_RUN = 100


def run(machine: type[RuleBasedStateMachine], operations: int, number: int = 0) -> None:
    """About so many operations, in runs that begin anew."""
    run_state_machine_as_test(
        seed(number)(machine),
        settings=settings(
            max_examples=1 + operations // STEPS_PER_RUN,
            stateful_step_count=STEPS_PER_RUN,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
