"""The wheel against the tree: everything in, nothing else, importable on its own."""

from __future__ import annotations

import configparser
import io
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

SHIPPED_FOLDERS = ("configs", "harness", "kernels", "runtime", "tuner")
NOT_SHIPPED = {".md"}


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that has to succeed."""
    done = subprocess.run([str(each) for each in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} in {cwd}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def shipped(tree: list[str]) -> list[str]:
    """The files of the tree that belong into a wheel."""
    return [path for path in tree if Path(path).parts[0] in SHIPPED_FOLDERS and Path(path).suffix not in NOT_SHIPPED]


@pytest.fixture(scope="module")
def wheel(root: Path, tree: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built offline from a copy of the project's files, so that no earlier build can leak into it."""
    copy = tmp_path_factory.mktemp("source")
    for path in tree:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, copy / path)
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel")
    run(*pip, "--no-deps", "--no-build-isolation", "--no-index", "-w", out, copy, cwd=out)
    built = list(out.glob("*.whl"))
    assert len(built) == 1
    return built[0]


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the installed wheel."""
    target = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install")
    run(*pip, "--no-deps", "--no-index", "--target", target, wheel, cwd=target)
    return target


def run_isolated(program: str, installed: Path, cwd: Path) -> str:
    """Runs a program that sees the installed wheel and the dependencies, but neither the working tree nor the
    editable install: -S leaves .pth files unread, -I the environment and the current folder."""
    site = sysconfig.get_paths()["purelib"]
    prologue = f"import sys; sys.path[:0] = [{str(installed)!r}]; sys.path.append({site!r})\n"
    return run(sys.executable, "-I", "-S", "-c", prologue + program, cwd=cwd)


def test_the_wheel_holds_the_tree_and_nothing_else(wheel_names: set[str], shipped: list[str]) -> None:
    in_wheel = {name for name in wheel_names if ".dist-info/" not in name}
    expected = {f"pagedtune/{path}" for path in shipped}
    hint = "list the folder in pyproject.toml under [tool.setuptools] packages, or its suffix under package-data"
    assert not expected - in_wheel, f"not in the wheel: {sorted(expected - in_wheel)}; {hint}"
    assert not in_wheel - expected, f"in the wheel, but not in the tree: {sorted(in_wheel - expected)}"


def test_the_only_top_level_name_is_pagedtune(wheel_names: set[str]) -> None:
    assert {name.split("/")[0] for name in wheel_names if ".dist-info/" not in name} == {"pagedtune"}
    assert "pagedtune/__init__.py" not in wheel_names


def test_every_room_says_that_it_is_typed(wheel_names: set[str]) -> None:
    missing = [room for room in SHIPPED_FOLDERS[1:] if f"pagedtune/{room}/py.typed" not in wheel_names]
    assert not missing, f"type checkers will ignore {missing}"


def test_the_wheel_carries_native_sources_and_configs(wheel_names: set[str]) -> None:
    kinds = {Path(name).suffix for name in wheel_names if name.startswith("pagedtune/kernels/")}
    assert {".cpp", ".h"} <= kinds
    for folder in ("gpus", "models", "sweeps"):
        assert any(name.startswith(f"pagedtune/configs/{folder}/") for name in wheel_names), folder


def test_the_wheel_has_the_licence_and_the_command(wheel: Path, wheel_names: set[str]) -> None:
    info = next(name.split("/")[0] for name in wheel_names if ".dist-info/" in name)
    with zipfile.ZipFile(wheel) as archive:
        licence = archive.read(f"{info}/licenses/LICENSE").decode()
        entry_points = configparser.ConfigParser()
        entry_points.read_file(io.StringIO(archive.read(f"{info}/entry_points.txt").decode()))
    assert "Apache License" in licence
    assert dict(entry_points["console_scripts"]) == {"pagedtune": "pagedtune.tuner.cli:main"}


def test_every_module_of_the_installed_wheel_imports(installed: Path, shipped: list[str], tmp_path: Path) -> None:
    modules = [
        ".".join(["pagedtune", *Path(path).with_suffix("").parts]).removesuffix(".__init__")
        for path in shipped
        if path.endswith(".py") and not path.endswith(("__main__.py", "_kernel.py"))
    ]
    program = f"import importlib\nfor name in {modules!r}:\n    print(importlib.import_module(name).__file__)\n"
    files = run_isolated(program, installed, tmp_path).split()
    assert len(files) == len(modules)
    assert not [path for path in files if not path.startswith(str(installed))]


def test_the_installed_command_runs_and_finds_its_configs(installed: Path, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pagedtune.tuner.cli import main\nsys.argv = ['pagedtune', 'devices']\nsys.exit(main())\n"
    )
    assert "cpu" in run_isolated(program, installed, tmp_path)
    assert list(tmp_path.iterdir()) == [], "listing devices wrote into the current folder"


def test_pyproject_lists_each_folder_with_python_files(root: Path, shipped: list[str]) -> None:
    setuptools = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {Path(path).parent for path in shipped if path.endswith((".py", "py.typed"))}
    expected = {".".join(["pagedtune", *folder.parts]) for folder in folders}
    assert set(setuptools["packages"]) == expected | {"pagedtune.configs"}
