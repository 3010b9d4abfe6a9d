"""Which part of the house may import which, checked on the syntax tree of every file.

kernels <- runtime, kernels <- harness, {kernels, runtime, harness} <- tuner. `kernels` and `runtime` import
relatively, so that the export is a copy of them, and need nothing but the standard library, numpy and torch.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest

ROOMS = ("kernels", "runtime", "harness", "tuner")
MAY_IMPORT = {
    "kernels": {"kernels"},
    "runtime": {"kernels", "runtime"},
    "harness": {"kernels", "harness"},
    "tuner": set(ROOMS),
}
RELATIVE_ONLY = {"kernels", "runtime"}
SHIPPED_THIRD_PARTY = {"numpy", "torch"}
# Compilers: only files named build*.py or *_build.py, which do not ship, and there only inside functions.
COMPILERS = {"triton", "cuda", "ziglang"}
# The one door of what ships to the CUDA driver; the bindings need no GPU to be there until a kernel is launched.
DRIVER_DOOR = "kernels/cuda_driver.py"
# Where the import name of a distribution is not its own name.
IMPORT_NAMES = {"pyyaml": "yaml", "cuda-bindings": "cuda"}


@dataclass(frozen=True)
class Import:
    """One imported module by its absolute dotted name."""

    name: str
    line: int
    relative: bool
    lazy: bool  # inside a function


def imports_of(path: str, source: str) -> Iterator[Import]:
    """All imports of a file in a room, `from .. import x` as well as constant `import_module("x")` calls."""
    package = ["pagedtune", *Path(path).parent.parts]
    tree = ast.parse(source, path)
    lazy_nodes = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        lazy = id(node) in lazy_nodes
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, False, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = package[: max(0, len(package) - node.level + 1)] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield Import(".".join([*base, alias.name]), node.lineno, node.level > 0, lazy)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield Import(node.args[0].value, node.lineno, False, lazy)


def is_builder(path: str) -> bool:
    stem = Path(path).stem
    return stem.startswith("build") or stem.endswith("_build")


def is_peer(path: str, found: Import) -> bool:
    """Whether this is the package that `tuner/peer_NAME.py` is timed against, in an environment of its own."""
    return found.lazy and path == f"tuner/peer_{found.name.split('.')[0]}.py"


def is_kernel_source(path: str) -> bool:
    """A Triton source: read by its compiler, never imported by what ships."""
    return path.startswith("kernels/triton/") and not path.endswith("__init__.py")


def problem_with(path: str, found: Import) -> str | None:
    """What is wrong with one import, or None."""
    room, top, *rest = Path(path).parts[0], *found.name.split(".")
    if top in ROOMS:
        return f"`{top}` is a bare folder name: say pagedtune.{top}"
    if top == "pagedtune":
        target = rest[0] if rest else "nothing below it"
        if target not in MAY_IMPORT[room]:
            return f"{room} may not import {target}"
        if room in RELATIVE_ONLY and not found.relative:
            return f"{room} must import relatively: the export is a copy of it under another name"
        return None
    if found.relative:
        return "a relative import that leaves the namespace"
    if top in sys.stdlib_module_names or room not in RELATIVE_ONLY or top in SHIPPED_THIRD_PARTY:
        return None
    if is_kernel_source(path) and top == "triton":
        return None
    if is_builder(path) and top in COMPILERS:
        return None if found.lazy else f"a builder imports {top} inside the function that needs it"
    if path == DRIVER_DOOR and found.name.startswith("cuda.bindings"):
        return None if found.lazy else "the driver is imported inside the function that needs it"
    if path == f"runtime/adapters/{top}.py":
        return None if found.lazy else f"an adapter imports {top} inside the function that needs it"
    return f"{room} may use only the standard library, {' and '.join(sorted(SHIPPED_THIRD_PARTY))}, not {top}"


def violations(path: str, source: str) -> list[str]:
    """One line for each forbidden import: path, line and rule."""
    found = ((each.line, problem_with(path, each)) for each in imports_of(path, source))
    return [f"{path}:{line}: {problem}" for line, problem in found if problem]


@pytest.fixture(scope="module")
def sources(root: Path, tree: list[str]) -> dict[str, str]:
    rooms = [path for path in tree if path.endswith(".py") and Path(path).parts[0] in ROOMS]
    return {path: (root / path).read_text(encoding="utf-8") for path in rooms}


def test_every_import_keeps_to_the_direction(sources: dict[str, str]) -> None:
    found = [line for path, source in sources.items() for line in violations(path, source)]
    assert not found, "\n".join(found)


def test_the_room_folders_are_no_packages(root: Path) -> None:
    present = [f"{room}/__init__.py" for room in ROOMS if (root / room / "__init__.py").exists()]
    assert not present, f"{present}: a folder named like a distribution of PyPI must not be importable by itself"


def test_every_third_party_import_is_declared(root: Path, sources: dict[str, str]) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ranges = chain(project["dependencies"], *project["optional-dependencies"].values())
    distributions = [requirement.split(">")[0].split("=")[0].strip() for requirement in ranges]
    declared = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in distributions}
    known = declared | set(sys.stdlib_module_names) | {"pagedtune"}
    undeclared = [
        f"{path}:{found.line}: {found.name}"
        for path, source in sources.items()
        for found in imports_of(path, source)
        if found.name.split(".")[0] not in known and not is_peer(path, found)
    ]
    assert not undeclared, f"imported, but not in pyproject.toml: {undeclared}"


def test_kernels_load_no_compiler_and_no_other_room(sources: dict[str, str]) -> None:
    modules = [
        ".".join(["pagedtune", *Path(path).with_suffix("").parts]).removesuffix(".__init__")
        for path in sources
        if path.startswith("kernels/") and not is_kernel_source(path)
    ]
    # torch may load some of these by itself: only what comes on top of it counts.
    program = (
        "import sys, importlib, torch, numpy\n"
        "before = set(sys.modules)\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print('\\n'.join(set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert set(modules) <= set(loaded), "nothing was imported: the check would prove nothing"
    banned = {"triton", "cuda", "yaml", "pydantic", "pandas", *(f"pagedtune.{room}" for room in ROOMS[1:])}
    wrong = [name for name in loaded if any(f"{name}.".startswith(f"{each}.") for each in banned)]
    assert not wrong, f"importing the kernels loads {wrong}"


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("kernels/a.py", "from ..harness import oracle", "kernels may not import harness"),
        ("kernels/a.py", "from .. import runtime", "kernels may not import runtime"),
        ("kernels/cpu/a.py", "from ...tuner.cli import main", "kernels may not import tuner"),
        ("kernels/a.py", "import pagedtune.kernels.problem", "must import relatively"),
        ("runtime/a.py", "from pagedtune.kernels import problem", "must import relatively"),
        ("runtime/a.py", "from ..harness.gate import run", "runtime may not import harness"),
        ("runtime/a.py", "import yaml", "runtime may use only"),
        ("harness/a.py", "from ..runtime import allocator", "harness may not import runtime"),
        ("harness/a.py", "import pagedtune.tuner.cli", "harness may not import tuner"),
        ("harness/a.py", "import pagedtune", "harness may not import nothing below it"),
        ("tuner/a.py", "import kernels", "bare folder name"),
        ("tuner/a.py", "from harness import gate", "bare folder name"),
        ("kernels/a.py", "from ....other import x", "leaves the namespace"),
        ("kernels/a.py", "import pydantic", "kernels may use only"),
        ("kernels/a.py", "def f():\n    import triton", "kernels may use only"),
        ("kernels/build_gpu.py", "import triton", "inside the function"),
        ("kernels/cuda_driver.py", "import cuda.bindings.driver", "inside the function"),
        ("kernels/cuda_executor.py", "def f():\n    from cuda.bindings import driver", "kernels may use only"),
        ("runtime/adapters/transformers.py", "import transformers", "inside the function"),
        ("runtime/adapters/transformers.py", "def f():\n    import yaml", "runtime may use only"),
        ("runtime/a.py", "def f():\n    import transformers", "runtime may use only"),
        ("kernels/a.py", "import importlib\nimportlib.import_module('triton')", "kernels may use only"),
        ("kernels/a.py", "if True:\n    from ..tuner import x", "kernels may not import tuner"),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str, expected: str) -> None:
    found = violations(path, source)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/a.py", "import math\nimport numpy as np\nimport torch.nn\nfrom .problem import Problem"),
        ("kernels/cpu/a.py", "from ..problem import Problem\nfrom . import host"),
        ("kernels/build_gpu.py", "def build():\n    from cuda.bindings import nvrtc"),
        ("kernels/cuda_driver.py", "def load():\n    from cuda.bindings import driver"),
        ("runtime/a.py", "from ..kernels.problem import Problem\nfrom .allocator import x"),
        ("runtime/adapters/transformers.py", "def f():\n    import transformers\nfrom ...kernels import problem"),
        ("harness/a.py", "from pagedtune.kernels import problem\nimport rich\nfrom ..kernels import y"),
        ("tuner/a.py", "from pagedtune.harness import gate\nfrom ..runtime import x\nfrom .cli import main"),
    ],
)
def test_a_permitted_import_is_not_a_violation(path: str, source: str) -> None:
    assert violations(path, source) == []
