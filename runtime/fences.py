"""Which blocks must not be reused yet because a step in flight may still read them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from .arrays import IntArray
from .errors import StepError

MAX_STEPS_IN_FLIGHT = 2  # one that the device runs and one queued behind it


@dataclass(slots=True)
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
    held: list[IntArray]


class StepFences:
    """The steps in flight, oldest first, and the blocks that each of them holds back.

    A block released while steps are in flight waits for the newest of them: that step may name it, and so may
    the older ones, which end before. Steps end in the order in which they began, as on one stream.
    """

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._last_number = 0

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Numbers of the steps in flight, oldest first."""
        return tuple(step.number for step in self._steps)

    @property
    def last_number(self) -> int:
        """Number of the newest step begun; 0 before the first."""
        return self._last_number

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps in flight, oldest first, for `check()`."""
        return tuple(self._steps)

    def require_slot(self) -> None:
        """Raises StepError if another step may not begin."""
        if len(self._steps) == MAX_STEPS_IN_FLIGHT:
            raise StepError(
                f"steps {self.in_flight} are in flight and at most {MAX_STEPS_IN_FLIGHT} may be: "
                f"end step {self._steps[0].number} first"
            )

    def begin(self, reads: IntArray | None, generations: IntArray | None) -> int:
        """Starts the next step and returns its number.

        Raises:
            StepError: two are in flight.
        """
        if len(self._steps) == MAX_STEPS_IN_FLIGHT:
            self.require_slot()
        self._last_number = number = self._last_number + 1
        self._steps.append(Step(number, reads, generations, []))
        return number

    def hold(self, blocks: IntArray) -> None:
        """Keeps `blocks` back until the newest step in flight has ended."""
        self._steps[-1].held.append(blocks)

    def end(self, number: int) -> IntArray | None:
        """Ends the oldest step and returns the blocks that nothing holds back any more, in order of release; None
        if there are none.

        Raises:
            StepError: `number` is not the oldest step in flight.
        """
        steps = self._steps
        if not steps or steps[0].number != number:
            oldest = f"the oldest in flight is {steps[0].number}" if steps else "none is in flight"
            raise StepError(f"step {number} cannot end: {oldest}. Steps end once each, in the order they began")
        held = steps.popleft().held
        return np.concatenate(held) if held else None
