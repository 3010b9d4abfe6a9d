"""Hypothesis over a model with operations: single ones, which shrink well, and bursts, which are cheap."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

RULES_PER_RUN = 30
BURST = 12  # operations


class Model(Protocol):
    """What a machine drives."""

    def operations(self) -> list[Callable[[random.Random], None]]: ...
    def check(self) -> None: ...
    def finish(self) -> None: ...


class Machine(RuleBasedStateMachine):
    """Any operation at any time, every check after each."""

    performed: ClassVar[int] = 0
    models: ClassVar[list[Callable[[], Model]]]
    model: Model | None = None

    @initialize(which=st.integers(0, 2**16))
    def begin(self, which: int) -> None:
        self.model = self.models[which % len(self.models)]()

    @rule(which=st.integers(0, 2**16), choices=st.integers(0, 2**32))
    def single(self, which: int, choices: int) -> None:
        assert self.model is not None
        operations = self.model.operations()
        self.perform(operations[which % len(operations)], random.Random(choices))

    @rule(choices=st.integers(0, 2**32))
    def burst(self, choices: int) -> None:
        assert self.model is not None
        choose, operations = random.Random(choices), self.model.operations()
        for _ in range(BURST):
            self.perform(choose.choice(operations), choose)

    def perform(self, operation: Callable[[random.Random], None], choose: random.Random) -> None:
        assert self.model is not None
        operation(choose)
        self.model.check()
        Machine.performed += 1

    def teardown(self) -> None:
        if self.model is not None:
            self.model.finish()


def run(models: list[Callable[[], Any]], operations: int, number: int = 0) -> None:
    """At least so many operations, in runs that begin anew."""
    Machine.performed = 0
    kind = type("ModelMachine", (Machine,), {"models": models})
    while (missing := operations - Machine.performed) > 0:  # Hypothesis ends some runs early
        run_state_machine_as_test(
            seed(number)(kind),
            settings=settings(
                max_examples=1 + missing // (RULES_PER_RUN * BURST // 2),
                stateful_step_count=RULES_PER_RUN,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
        number += 1


def drive(models: list[Callable[[], Any]], operations: int, number: int = 0, run_length: int = 500) -> int:
    """The same without Hypothesis, by a seed; returns how many were performed."""
    performed = 0
    while performed < operations:
        choose = random.Random(number)
        model = choose.choice(models)()
        choices = model.operations()
        for step in range(run_length):
            operation = choose.choice(choices)
            try:
                operation(choose)
                model.check()
            except BaseException as error:
                error.add_note(f"seed {number}, operation {step}: {operation.__name__}")
                raise
            performed += 1
        model.finish()
        number += 1
    return performed
