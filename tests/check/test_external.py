"""Finding variants that somebody else wrote, and saying what is wrong when there is none."""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from pagedtune.harness import external
from pagedtune.harness.external import VariantLoadError, absolute_ref, load_variant
from pagedtune.kernels.eager import Eager
from pagedtune.kernels.variant import Variant

GOOD = """
from dataclasses import dataclass
from pagedtune.kernels.eager import Eager, EagerConfig

@dataclass(frozen=True)
class MineConfig(EagerConfig):
    tile: int = 4

class Mine(Eager):
    name = "mine"
    config_type = MineConfig

class Plain:
    pass
"""


@pytest.fixture(autouse=True)
def clean_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def write(folder: Path, text: str, name: str = "kernel.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_catalogue_name_is_found() -> None:
    assert type(load_variant("eager")) is Eager


def test_a_class_in_a_file_is_found_and_imported_once(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    variant = load_variant(f"{path}:Mine")
    assert variant.name == "mine"
    assert variant.config_type().as_dict() == {"tile": 4}
    assert type(load_variant(f"{path}:Mine")) is type(variant)


def test_files_of_the_same_name_are_different_modules(tmp_path: Path) -> None:
    refs = []
    for folder, name in ((tmp_path / "a", "first"), (tmp_path / "b", "second")):
        folder.mkdir()
        refs.append(f"{write(folder, GOOD.replace('mine', name))}:Mine")
    assert [load_variant(ref).name for ref in refs] == ["first", "second"]


def test_a_file_may_import_its_neighbour_but_not_hide_an_installed_module(tmp_path: Path) -> None:
    write(tmp_path, "NAME = 'neighbour'", "my_helper_of_kernel.py")
    write(tmp_path, "raise RuntimeError('hidden')", "json.py")
    text = GOOD.replace('"mine"', "my_helper_of_kernel.NAME") + "\n"
    path = write(tmp_path, "import json, my_helper_of_kernel\n" + text)
    assert load_variant(f"{path}:Mine").name == "neighbour"


def test_a_relative_path_means_the_same_after_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_ref("sub/kernel.py:Mine") == f"{tmp_path}/sub/kernel.py:Mine"
    assert absolute_ref("kernel.py") == f"{tmp_path}/kernel.py"
    assert absolute_ref("eager") == "eager"


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("eagre", "did you mean eager"),
        ("nothing_like_it", "`pagedtune variants` lists those that there are"),
        ("no/such/kernel.py:Mine", "no file"),
        ("kernel.py:Other", "has no 'Other': it has Mine"),
        ("kernel.py", "needs a class name after it: it has Mine"),
        ("kernel.py:Plain", "is no variant: derive it from"),
        ("kernel.py:MineConfig", "is no variant"),
    ],
)
def test_a_reference_that_names_no_variant_is_an_error_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ref: str, words: str
) -> None:
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^\S") as caught:
        load_variant(ref)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("class Mine(Variant):\n    name = 'x'\n", "does not implement build, plan"),
        ("class Mine(Eager):\n    name = ''\n", "must set the class attribute 'name' to a str, not ''"),
        ("class Mine(Eager):\n    device_kind = 'gpu'\n", "'device_kind' to a DeviceKind, not 'gpu'"),
        ("class Mine(Eager):\n    op = 'attend'\n", "'op' to a Op, not 'attend'"),
    ],
)
def test_a_class_that_is_no_complete_variant_is_refused(tmp_path: Path, body: str, words: str) -> None:
    header = "from pagedtune.kernels.eager import Eager\nfrom pagedtune.kernels.variant import Variant\n"
    with pytest.raises(ValueError, match=r"^\S") as caught:
        load_variant(f"{write(tmp_path, header + body)}:Mine")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\nx.no_such_thing", "AttributeError: 'int' object has no attribute 'no_such_thing' (kernel.py:2)"),
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all' (kernel.py:1)"),
        ("def broken(:\n", "SyntaxError: invalid syntax (kernel.py, line 1)"),
        ("import sys; sys.exit('bye')", "SystemExit: bye (kernel.py:1)"),
        (GOOD + "\nclass Mine(Mine):\n    def __init__(self): raise OSError('no')", "OSError: no (kernel.py:"),
    ],
)
def test_foreign_code_that_raises_is_one_line_with_the_place(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    for _ in range(2):  # a failed import leaves nothing behind that looks like a success
        with pytest.raises(VariantLoadError) as caught:
            load_variant(f"{path}:Mine")
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("    config_type = 3\n", "config_type must be a dataclass derived from Config, not 3"),
        ("    config_type = dict\n", "config_type must be a dataclass derived from Config"),
        ("    config_type = Undecorated\n", "put @dataclass(frozen=True) before class Undecorated"),
        ("    config_type = Bare\n", "give Bare.tile a default"),
        ("    properties = {'deterministic': True}\n", "properties must be a Properties"),
    ],
)
def test_tunables_and_promises_of_the_wrong_kind_are_refused(tmp_path: Path, body: str, words: str) -> None:
    configs = (
        "class Undecorated(EagerConfig):\n    tile: int = 4\n\n@dataclass(frozen=True)\nclass Bare(EagerConfig):\n"
    )
    path = write(tmp_path, f"{GOOD}\n{configs}    tile: int\n\nclass Other(Eager):\n    name = 'other'\n{body}")
    with pytest.raises(VariantLoadError) as caught:
        load_variant(f"{path}:Other")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_installed_entry_point_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, GOOD, "installed_kernel_module.py")
    sys.path.append(str(tmp_path))
    points = [
        EntryPoint("theirs", "installed_kernel_module:Mine", external.GROUP),
        EntryPoint("broken", "installed_kernel_module:Missing", external.GROUP),
    ]

    def installed(**wanted: Any) -> EntryPoints:
        return EntryPoints(points).select(**wanted)

    monkeypatch.setattr(external, "entry_points", installed)
    variant: Variant = load_variant("theirs")
    assert variant.name == "mine"
    with pytest.raises(ValueError, match="did you mean theirs"):
        load_variant("their")
    with pytest.raises(VariantLoadError, match="Missing"):
        load_variant("broken")


def test_the_group_of_entry_points_is_read_from_installed_distributions() -> None:
    assert external.entry_points is importlib.metadata.entry_points
