"""requirements.lock against pyproject.toml, and against the environment that the tests run in."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


@pytest.fixture(scope="module")
def lines(root: Path) -> list[str]:
    """The lines of the lock without comments."""
    text = (root / "requirements.lock").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def locked(lines: list[str]) -> dict[str, Version]:
    """Version of each distribution by its canonical name."""
    return {name: Version(version) for name, version in (line.split("==") for line in lines)}


@pytest.fixture(scope="module")
def ranges(root: Path) -> list[Requirement]:
    """What running and developing needs; the extras are optional and not locked."""
    pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = chain(pyproject["project"]["dependencies"], pyproject["dependency-groups"]["dev"])
    return [Requirement(text) for text in wanted]


def unmet(ranges: list[Requirement], locked: dict[str, Version]) -> list[str]:
    """The ranges that no locked version satisfies."""
    return [
        str(requirement)
        for requirement in ranges
        if (name := canonicalize_name(requirement.name)) not in locked or locked[name] not in requirement.specifier
    ]


def test_the_lock_has_exact_public_versions_only(lines: list[str]) -> None:
    # No local versions (+cpu, +cu130), no hashes, no links and no indexes: one file for every machine.
    strange = [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9]+(\.[0-9]+)*([a-z]+[0-9]+)?", line)]
    assert not strange
    assert len({line.split("==")[0] for line in lines}) == len(lines), "a distribution is listed twice"


def test_the_lock_satisfies_the_ranges(ranges: list[Requirement], locked: dict[str, Version]) -> None:
    assert unmet(ranges, locked) == []


def test_an_outdated_or_missing_pin_is_noticed() -> None:
    ranges = [Requirement("torch>=2.11"), Requirement("PyYAML>=6.0")]
    assert unmet(ranges, {"torch": Version("2.10.1"), "pyyaml": Version("6.0.1")}) == ["torch>=2.11"]
    assert unmet(ranges, {"torch": Version("2.13.0")}) == ["PyYAML>=6.0"]


def test_of_the_libraries_of_a_cuda_build_only_the_compilers_are_locked(locked: dict[str, Version]) -> None:
    gpu = {name for name in locked if name.startswith(("nvidia-", "cuda-", "triton"))}
    assert gpu == {"triton", "nvidia-cuda-nvrtc", "cuda-bindings", "cuda-pathfinder"}


def test_the_environment_is_the_locked_one(locked: dict[str, Version]) -> None:
    installed = {name: Version(Version(metadata.version(name)).public) for name in locked}
    assert installed == locked


def test_the_lock_is_closed(locked: dict[str, Version]) -> None:
    """Whatever a locked distribution needs on this machine is locked too, torch's CUDA libraries apart."""
    missing = set()
    for name in locked:
        for text in metadata.requires(name) or []:
            needed = Requirement(text)
            if needed.marker and not needed.marker.evaluate({"extra": ""}):
                continue
            if canonicalize_name(needed.name) not in locked and name != "torch":
                missing.add(f"{needed.name} (for {name})")
    assert not missing
