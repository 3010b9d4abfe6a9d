"""Launches a plan on a case's tensors and checks what every launch must keep to, whatever it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from pagedtune.kernels.launch import Access, LaunchPlan

from .case import Case, Hazard
from .compare import check_written
from .inputs import Inputs, element_of
from .machines import Machine
from .memory import Carved, Poison, change_sizes, flip_signs
from .verdicts import Check, Fault


class Source(Protocol):
    """Makes tensors of a case."""

    def make(self, plan: LaunchPlan, poison: Poison, sequences: Sequence[int] | None = None) -> Inputs:
        """Fresh tensors; the same numbers each time."""
        ...


@dataclass(frozen=True)
class Run:
    """One launch.

    Args:
        label: how it differs from the others, for messages.
        poison: what filled dead memory.
        inputs: the tensors, as the launch left them.
        before: private copies of what was read, taken before the launch.
        results: private copies of the slots that are written.
        launch: launches once more on the same tensors.
    """

    label: str
    poison: Poison
    inputs: Inputs
    before: Mapping[str, torch.Tensor]
    results: Mapping[str, torch.Tensor]
    launch: Callable[[], None]


class Runner:
    """Runs one plan of one case."""

    def __init__(self, case: Case, plan: LaunchPlan, machine: Machine, source: Source) -> None:
        self.case, self.plan = case, plan
        self.machine, self._source = machine, source

    def first(self, poison: Poison, sequences: Sequence[int] | None = None) -> Run:
        """Binds fresh tensors and launches.

        Raises:
            Fault: inputs, guards or written.
        """
        inputs = self._source.make(self.plan, poison, sequences)
        before = inputs.snapshot()
        inputs.freeze()
        launch = self.machine.prepare(self.plan, inputs)
        label = f"{poison} poison" if sequences is None else f"{poison} poison, sequences {list(sequences)} alone"
        if Hazard.REPLAY in self.case.hazards:
            self._launch_others(inputs, launch)
            label += ", after launches on other contents, of length 0 and of the true lengths"
        launch()
        return self._finished(label, poison, inputs, before, launch)

    def again(self, run: Run) -> Run:
        """Launches once more on the tensors of `run`; only what the plan writes to slots is reset.

        Raises:
            Fault: inputs, guards or written.
        """
        for name, carved in run.inputs.slots.items():
            if run.inputs.access[name] is not Access.IN:
                carved.restore()
        run.launch()
        return self._finished(f"{run.poison} poison, repeated", run.poison, run.inputs, run.before, run.launch)

    def _launch_others(self, inputs: Inputs, launch: Callable[[], None]) -> None:
        """Launches of the same bound plan on other queries, keys, values and tables: first of sequences without keys,
        so that nothing kept of a first launch is right, then at the true lengths, so that no result may be kept."""
        for name in ("q", "k_cache", "v_cache"):
            flip_signs(inputs.slots[name].parent)
        for name in set(inputs.block_slots) - {"k_cache", "v_cache"}:
            change_sizes(inputs.slots[name].parent)  # a scale is positive
        table, num_blocks = inputs.slots["block_table"].view, inputs.slots["k_cache"].view.shape[0]
        for row, context_len in zip(table, self.case.workload.context_lens, strict=False):
            entries = row[: -(-context_len // self.case.pool_format.block_size)]
            known = (entries >= inputs.first_block) & (entries < num_blocks)  # not what a window has left behind
            entries[known] = entries[known].flip(0)
        inputs.slots["context_lens"].view.zero_()
        launch()
        inputs.slots["context_lens"].restore()
        launch()
        for carved in inputs.slots.values():
            carved.restore()

    def _finished(
        self,
        label: str,
        poison: Poison,
        inputs: Inputs,
        before: Mapping[str, torch.Tensor],
        launch: Callable[[], None],
    ) -> Run:
        for name, carved in inputs.slots.items():
            if inputs.access[name] is Access.IN:
                _refuse(Check.INPUTS, label, name, carved, carved.changed_anywhere(), "input changed")
            else:
                _refuse(Check.GUARDS, label, name, carved, carved.changed_outside(), "write outside the tensor")
        for name, carved in inputs.workspaces.items():
            _refuse(Check.GUARDS, label, name, carved, carved.changed_outside(), "write outside the workspace")
        for name, carved in inputs.slots.items():
            if inputs.access[name] is Access.OUT:
                with located(label):
                    check_written(name, carved.view, poison)
        written = {n: c.view for n, c in inputs.slots.items() if inputs.access[n] is not Access.IN}
        results = {n: (v[inputs.first_block :] if n in inputs.block_slots else v).clone() for n, v in written.items()}
        return Run(label, poison, inputs, before, results, launch)


@contextmanager
def located(label: str) -> Iterator[None]:
    """Puts the run's label in front of the message of a fault raised inside."""
    try:
        yield
    except Fault as fault:
        raise Fault(fault.check, f"[{label}] {fault}", fault.ratio) from None


def _refuse(check: Check, label: str, name: str, carved: Carved, offset: int | None, what: str) -> None:
    if offset is None:
        return
    where = element_of(offset, carved.view.stride(), carved.view.shape)
    place = f"{offset:+d} elements from its start" if where is None else f"element {list(where)}"
    raise Fault(check, f"[{label}] {what}: {name!r}, {place}")
