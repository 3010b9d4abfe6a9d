"""Builds native libraries with whatever C++ compiler is at hand. Planning and launching never import this."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from pathlib import Path

from .artifact import Artifact, ArtifactKind, KernelAbi, cache_dir, content_key, publish
from .variant import BuildError

# -ffast-math is left out on purpose: linking it into a library makes the loading thread flush denormals.
FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-Wno-psabi",
)
TIME_LIMIT_S = 300.0


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler as a command, with its version line."""

    command: tuple[str, ...]
    version: str


@cache
def find_compiler() -> Compiler:
    """`$CXX`, else g++, clang++ or c++ on the path, else `zig c++` of the PyPI package `ziglang`.

    Raises:
        BuildError: none of these works; the message says what to install.
    """
    for command in _candidates():
        try:
            result = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=120, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if result.returncode == 0:
            return Compiler(command, result.stdout.splitlines()[0])
    chosen = os.environ.get("CXX")
    problem = f"CXX={chosen} does not run" if chosen else "no C++ compiler found"
    raise BuildError(
        f"{problem}: install g++ or clang++ (Debian: apt-get install g++), or `pip install ziglang`, or set CXX"
    )


def _candidates() -> list[tuple[str, ...]]:
    chosen = os.environ.get("CXX")
    if chosen:
        return [tuple(chosen.split())]
    found: list[tuple[str, ...]] = [(name,) for name in ("g++", "clang++", "c++") if shutil.which(name)]
    if importlib.util.find_spec("ziglang") is not None:
        found.append((sys.executable, "-m", "ziglang", "c++"))
    return found


def build_library(
    source: Path,
    includes: Sequence[Path],
    defines: Mapping[str, int],
    abi: Mapping[str, KernelAbi],
    optimise: int = 3,
    more: Sequence[Path] = (),
) -> Artifact:
    """The shared library of `source` with `defines`, from the cache if its content key is there.

    Args:
        source: names the library.
        includes: files that the sources include.
        defines: macros.
        abi: calling convention of each entry.
        optimise: level.
        more: further sources of the same library, compiled at the same time.

    The key covers source and included files, flags, defines, compiler version and machine.

    Raises:
        BuildError: no compiler, or it refused; the message carries its last lines.
    """
    compiler = find_compiler()
    flags = (*FLAGS, f"-O{optimise}", *(f"-D{name}={value}" for name, value in sorted(defines.items())))
    target = platform.machine()
    texts = {path.name: path.read_text() for path in (source, *more, *includes)}
    key = content_key({"texts": texts, "flags": flags, "compiler": compiler.version, "target": target})
    path = cache_dir() / "native" / f"{source.stem}-{key}.so"
    if not path.exists():
        with _only_one(path):
            if not path.exists():
                publish(_library(compiler, (source, *more), flags), path)
    return Artifact(ArtifactKind.NATIVE, path, key, target, abi, compiler=compiler.version, flags=flags)


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Keeps other processes from building `path` at the same time; a process that dies lets go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _library(compiler: Compiler, sources: Sequence[Path], flags: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="pagedtune-build-") as folder, ThreadPoolExecutor(len(sources)) as threads:
        library, objects = Path(folder) / "library.so", [Path(folder) / f"{source.stem}.o" for source in sources]
        if len(sources) == 1:
            _run(compiler, (*flags, str(sources[0]), "-o", str(library)), sources[0].name)
            return library.read_bytes()
        plain = [flag for flag in flags if flag != "-shared"]
        commands = [(*plain, "-c", str(s), "-o", str(o)) for s, o in zip(sources, objects, strict=True)]
        list(threads.map(_run, repeat(compiler), commands, [source.name for source in sources]))
        _run(compiler, (*flags, *map(str, objects), "-o", str(library)), sources[0].name)
        return library.read_bytes()


def _run(compiler: Compiler, arguments: Sequence[str], name: str) -> None:
    command = [*compiler.command, *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{name}: the compiler took over {TIME_LIMIT_S:.0f} s: {command}") from error
    if result.returncode:
        tail = "\n".join(result.stderr.splitlines()[-20:])
        raise BuildError(f"{name} does not compile with {compiler.version}:\n{tail}")
