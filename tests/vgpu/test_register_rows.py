"""Rows shared between registers: whatever path runs, a register holds what was written to it last."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedtune.harness.vgpu.register_rows import Flags, Numbers, Steps, accesses, lifetimes, share


@dataclass(frozen=True)
class Step:
    """One operation over registers 0, 1, .."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    certain: bool
    goes_on: bool
    target: int


def step(reads: str = "", writes: str = "", certain: bool = True, goes_on: bool = True, target: int = -1) -> Step:
    """A step over registers a, b, c, .."""
    numbers = [tuple("abcdefgh".index(name) for name in names) for names in (reads, writes)]
    return Step(numbers[0], numbers[1], certain, goes_on, target)


def lives(steps: list[Step], count: int) -> tuple[Numbers, Numbers, Flags]:
    together = Steps(
        accesses([s.reads for s in steps], np.arange(count)),
        accesses([s.writes for s in steps], np.arange(count)),
        [s.certain for s in steps],
        [s.goes_on for s in steps],
        [s.target for s in steps],
    )
    return lifetimes(together, count)


def places(steps: list[Step], count: int) -> list[int]:
    return share(*lives(steps, count), [1] * count)[0]


def test_one_after_the_other_share() -> None:
    a, b, c = places([step("", "a"), step("a", "b"), step("b", "c"), step("c", "")], 3)
    assert a == c != b


def test_source_and_destination_of_one_instruction_never_share() -> None:
    a, b = places([step("", "a"), step("a", "b"), step("b", "")], 2)
    assert a != b


def test_what_a_loop_carries_keeps_its_row() -> None:
    """a is written before the loop and read at its start: nothing inside it may take its row."""
    steps = [step("", "a"), step("a", "b"), step("b", "c"), step("c", "", goes_on=True, target=1), step("", "")]
    a, b, c = places(steps, 3)
    assert a not in (b, c)


def test_a_guarded_write_ends_no_life() -> None:
    """b is written for some lanes only: the others read what it held before, which nobody wrote."""
    first, last, own = lives([step("", "a"), step("a", "b", certain=False), step("b", "c"), step("c")], 3)
    assert own.tolist() == [False, True, False]
    assert first[1] == 0
    a, b, c = share(first, last, own, [1, 1, 1])[0]
    assert b not in (a, c)


def test_written_on_one_path_only() -> None:
    """0 -> 2 skips the write of b: its read at 2 may find nothing, and must not find a."""
    steps = [step("", "a", target=2), step("", "b"), step("b", "")]
    _, _, own = lives(steps, 2)
    assert own.tolist() == [False, True]


def test_sizes_do_not_mix() -> None:
    rows, units = share(np.array([0, 2, 2]), np.array([1, 3, 3]), np.zeros(3, np.bool_), [4, 2, 4])
    assert rows[2] == rows[0]
    assert rows[1] >= 4
    assert units == 6


def random_steps(rng: random.Random) -> tuple[list[Step], int]:
    """A program and its number of registers."""
    count, size = rng.randint(2, 8), rng.randint(3, 25)
    steps = []
    for _ in range(size):
        names = "abcdefgh"[:count]
        branch = rng.random() < 0.3
        steps.append(
            step(
                "".join(rng.sample(names, rng.randint(0, 2))),
                "".join(rng.sample(names, rng.randint(0, 1))),
                rng.random() < 0.8,
                not branch or rng.random() < 0.7,
                rng.randrange(size) if branch else -1,
            )
        )
    return steps, count


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 30))
def test_every_path_reads_what_it_wrote(seed: int) -> None:
    """Random programs and random walks over them, with values in rows and in registers side by side."""
    rng = random.Random(seed)
    steps, count = random_steps(rng)
    rows = places(steps, count)
    for _ in range(5):
        held: dict[int, object] = {}
        truth: dict[int, object] = {}
        at = 0
        for _ in range(100):
            if at >= len(steps):
                break
            now = steps[at]
            for register in range(count):
                if register in now.reads:
                    assert held.get(rows[register]) is truth.get(register)
            for register in range(count):
                if register in now.writes and (now.certain or rng.random() < 0.5):
                    held[rows[register]] = truth[register] = object()
            follows = ([now.target] if now.target >= 0 else []) + ([at + 1] if now.goes_on else [])
            if not follows:
                break
            at = rng.choice(follows)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 30))
def test_lifetimes_by_their_definition(seed: int) -> None:
    """Which registers are alive before each operation, by the equations of liveness one operation at a time."""
    steps, count = random_steps(random.Random(seed))
    size = len(steps)
    follows = [[n for n in ((s.target,) if s.target >= 0 else ()) + ((k + 1,) if s.goes_on else ()) if n < size]
               for k, s in enumerate(steps)]  # fmt: skip
    alive: list[set[int]] = [set() for _ in steps]
    for _ in range(size * count + 1):  # each round adds a register somewhere, or nothing changes any more
        for k, s in enumerate(steps):
            after = set().union(*(alive[n] for n in follows[k]))
            alive[k] = set(s.reads) | (after - set(s.writes) if s.certain else after)
    held = [alive[k].union(s.reads, s.writes, *(alive[n] for n in follows[k])) for k, s in enumerate(steps)]
    first, last, own = lives(steps, count)
    for register in range(count):
        at = [k for k in range(size) if register in held[k]]
        assert (first[register], last[register]) == ((at[0], at[-1]) if at else (size, -1))
        assert own[register] == (register in alive[0])
