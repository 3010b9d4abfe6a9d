"""Which blocks must not be reused yet because a step in flight may still read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import IntArray
from .errors import StepError

MAX_STEPS_IN_FLIGHT = 2  # one that the device runs and one queued behind it


@dataclass(frozen=True, eq=False)
class Step:
    """A step in flight.

    Args:
        number: 1, 2, 3 ... in the order of launch.
        reads: blocks that its tables name, if the caller recorded them, and the generation of each at its start.
        held: blocks released since it began and before the next one did.
    """

    number: int
    reads: IntArray | None
    generations: IntArray | None
    held: tuple[IntArray, ...]


class StepFences:
    """The steps in flight, oldest first, and the blocks that each of them holds back.

    A block released while steps are in flight waits for the newest of them: that step may name it, and so may
    the older ones, which end before. Steps end in the order in which they began, as on one stream: so two numbers say
    which are in flight, and a step that holds nothing back costs nothing else.

    Attributes:
        last_number: number of the newest step begun; 0 before the first.
    """

    def __init__(self) -> None:
        self.last_number = 0
        self._last_ended = 0
        self._held: dict[int, list[IntArray]] = {}
        self._reads: dict[int, tuple[IntArray, IntArray]] = {}

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Numbers of the steps in flight, oldest first."""
        return tuple(range(self._last_ended + 1, self.last_number + 1))

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps in flight, oldest first, for `check()`."""
        steps = []
        for number in self.in_flight:
            reads, generations = self._reads.get(number, (None, None))
            steps.append(Step(number, reads, generations, tuple(self._held.get(number, ()))))
        return tuple(steps)

    def require_slot(self) -> None:
        """Raises StepError if another step may not begin."""
        if self.last_number - self._last_ended == MAX_STEPS_IN_FLIGHT:
            raise StepError(
                f"steps {self.in_flight} are in flight and at most {MAX_STEPS_IN_FLIGHT} may be: "
                f"end step {self._last_ended + 1} first"
            )

    def begin(self, reads: tuple[IntArray, IntArray] | None = None) -> int:
        """Starts the next step and returns its number.

        Args:
            reads: blocks that its tables name, and the generation of each, if the caller records them.

        Raises:
            StepError: two are in flight.
        """
        self.require_slot()
        self.last_number += 1
        if reads is not None:
            self._reads[self.last_number] = reads
        return self.last_number

    def hold(self, blocks: IntArray) -> None:
        """Keeps `blocks` back until the newest step in flight has ended."""
        self._held.setdefault(self.last_number, []).append(blocks)

    def end(self, number: int) -> IntArray | None:
        """Ends the oldest step and returns the blocks that nothing holds back any more, in order of release; None
        if there are none.

        Raises:
            StepError: `number` is not the oldest step in flight.
        """
        if not number == self._last_ended + 1 <= self.last_number:
            in_flight = self.in_flight
            oldest = f"the oldest in flight is {in_flight[0]}" if in_flight else "none is in flight"
            raise StepError(f"step {number} cannot end: {oldest}. Steps end once each, in the order they began")
        self._last_ended += 1  # not `number`, which may be a float that compares equal
        if self._reads:
            self._reads.pop(number, None)
        held = self._held.pop(number, None)
        return None if held is None else np.concatenate(held)
