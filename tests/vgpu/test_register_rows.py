"""Rows shared between registers: whatever path runs, a register holds what was written to it last."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pagedtune.harness.vgpu.register_rows import Step, lifetimes, share


def step(reads: str = "", writes: str = "", certain: bool = True, goes_on: bool = True, target: int = -1) -> Step:
    """A step over registers a, b, c, .."""
    bits = [sum(1 << "abcdefgh".index(name) for name in names) for names in (reads, writes)]
    return Step(bits[0], bits[1], certain, goes_on, target)


def places(steps: list[Step], count: int) -> list[int]:
    lives, own = lifetimes(steps, count)
    return share(lives, own, [1] * count)[0]


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
    lives, own = lifetimes([step("", "a"), step("a", "b", certain=False), step("b", "c"), step("c")], 3)
    assert own == 0b010
    assert lives[1][0] == 0
    a, b, c = share(lives, own, [1, 1, 1])[0]
    assert b not in (a, c)


def test_written_on_one_path_only() -> None:
    """0 -> 2 skips the write of b: its read at 2 may find nothing, and must not find a."""
    steps = [step("", "a", target=2), step("", "b"), step("b", "")]
    _, own = lifetimes(steps, 2)
    assert own == 0b10


def test_sizes_do_not_mix() -> None:
    lives = [(0, 1), (2, 3), (2, 3)]
    rows, units = share(lives, 0, [4, 2, 4])
    assert rows[2] == rows[0]
    assert rows[1] >= 4
    assert units == 6


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 30))
def test_every_path_reads_what_it_wrote(seed: int) -> None:
    """Random programs and random walks over them, with values in rows and in registers side by side."""
    rng = random.Random(seed)
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
    rows = places(steps, count)
    for _ in range(5):
        held: dict[int, object] = {}
        truth: dict[int, object] = {}
        at = 0
        for _ in range(100):
            if at >= size:
                break
            now = steps[at]
            for register in range(count):
                if now.reads >> register & 1:
                    assert held.get(rows[register]) is truth.get(register)
            for register in range(count):
                if now.writes >> register & 1 and (now.certain or rng.random() < 0.5):
                    held[rows[register]] = truth[register] = object()
            follows = ([now.target] if now.target >= 0 else []) + ([at + 1] if now.goes_on else [])
            if not follows:
                break
            at = rng.choice(follows)
