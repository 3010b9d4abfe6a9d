"""Every public bug that can be planted here is found; the table of all is public_bugs.py."""

from __future__ import annotations

import importlib

import pytest

from .public_bugs import BUGS, Bug
from .public_scenarios import random_ledger, random_scheduler

PLANTED = [bug for bug in BUGS if bug.scenario is not None]


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: f"{bug.number}-{bug.method}")
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bug.scenario is not None
    if bug.scenario not in (random_ledger, random_scheduler):  # those run at length in the machines
        bug.scenario()
    owner = importlib.import_module(bug.owner) if isinstance(bug.owner, str) else bug.owner
    assert hasattr(owner, bug.method), "the method to replace has another name now"
    monkeypatch.setattr(owner, bug.method, bug.fault)
    with pytest.raises(Exception) as found:
        bug.scenario()
    assert not isinstance(found.value, (AttributeError, TypeError, NameError)), "the fault itself is broken"


def test_every_bug_of_the_survey_has_its_place() -> None:
    assert [bug.number for bug in BUGS] == list(range(1, 41))
    assert all(bug.where or bug.scenario for bug in BUGS)
