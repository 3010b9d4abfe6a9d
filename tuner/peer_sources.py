"""Single source files of other packages, imported without the packages: their own imports are stubbed.

The block managers of serving engines are plain Python, but importing them imports the engine, a GPU stack and
compiled extensions. So the files named are executed as they are, from the wheel that PyPI has, and whatever else they
import from their own package becomes an empty stand-in. What is measured is their code; what is stubbed is named.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import UsageError


@dataclass(frozen=True)
class PeerSource:
    """What to take from a wheel.

    Args:
        requirement: for pip, `name==version`.
        package: top package.
        modules: those that run as they are; everything else of the package is a stand-in.
    """

    requirement: str
    package: str
    modules: tuple[str, ...]


def fetch(source: PeerSource, folder: Path) -> Path:
    """The wheel, downloaded into `folder` on first use and extracted there (Python files only); the extracted folder.

    Raises:
        UsageError: pip cannot get it; the message ends with its own words.
    """
    target = folder / source.requirement.replace("==", "-")
    if (target / "ready").exists():
        return target
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    name = source.requirement.split("==")[0].replace("-", "_")
    if not list(wheels.glob(f"{name}-{source.requirement.split('==')[1]}-*.whl")):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--dest",
            str(wheels),
            source.requirement,
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            tail = "\n".join(result.stderr.splitlines()[-3:])
            raise UsageError(f"{source.requirement} cannot be downloaded, so there is no peer to compare with:\n{tail}")
    (wheel,) = wheels.glob(f"{name}-{source.requirement.split('==')[1]}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(f"{source.package}/") and member.endswith(".py"):
                archive.extract(member, target)
    (target / "ready").touch()
    return target


class _StandInType(type):
    """A class of which every attribute is another stand-in."""

    def __getattr__(cls, name: str) -> Any:
        return _add_stand_in(cls, name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # used as a decorator
        return super().__call__()

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __bool__(cls) -> bool:
        return False


def _stand_in(name: str) -> _StandInType:
    return _StandInType(
        name, (), {"__getattr__": lambda self, each: _silent, "__class_getitem__": lambda each: _stand_in("item")}
    )


def _add_stand_in(owner: Any, name: str) -> _StandInType:
    """A stand-in that `owner` keeps, so that reading it again costs what reading the real one does."""
    if name.startswith("__"):
        raise AttributeError(name)
    made = _stand_in(name)
    setattr(owner, name, made)
    return made


def _silent(*args: Any, **kwargs: Any) -> None:
    """What every method of a stand-in does."""


class _StandInModule(ModuleType):
    """A module in which every name is a stand-in. Import its submodules by `import_module`, not from it."""

    def __getattr__(self, name: str) -> Any:
        return _add_stand_in(self, name)


class PeerFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a package's named modules from their files, and stand-ins for all its other modules.

    Args:
        source: which.
        folder: where `fetch` put the files.

    Attributes:
        replaced: modules that are stand-ins, in order of import.
    """

    def __init__(self, source: PeerSource, folder: Path) -> None:
        self._source, self._folder = source, folder
        self.replaced: list[str] = []

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        if fullname.split(".", maxsplit=1)[0] != self._source.package:
            return None
        if fullname not in self._source.modules:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        file = self._folder / (fullname.replace(".", "/") + ".py")
        return importlib.util.spec_from_file_location(fullname, file)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """See `importlib.abc.Loader`."""
        if not any(module.startswith(spec.name + ".") for module in self._source.modules):
            self.replaced.append(spec.name)
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""


def install(source: PeerSource, folder: Path) -> PeerFinder:
    """Makes the package importable in this process, in the sense above.

    Raises:
        UsageError: the wheel cannot be had, or the real package has been imported already.
    """
    if source.package in sys.modules:
        raise UsageError(f"{source.package} has been imported already: compare in a process of its own")
    finder = PeerFinder(source, fetch(source, folder))
    sys.meta_path.insert(0, finder)
    return finder
