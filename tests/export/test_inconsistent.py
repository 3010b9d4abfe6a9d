"""Packages whose digests fit but whose files contradict each other, this code or this machine: one line each."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedtune.kernels.cpu_facts import cpu_device
from pagedtune.kernels.cpu_split import CpuSplit, CpuSplitConfig
from pagedtune.kernels.dispatch import DispatchTable
from pagedtune.kernels.serial import from_jsonable
from pagedtune.runtime.exported import command
from pagedtune.runtime.exported.calibrate import calibrate
from pagedtune.runtime.exported.forms import check_forms
from pagedtune.runtime.exported.integrity import PackageError, check_package, digest_of
from pagedtune.runtime.exported.manifest import FinalistsFile, Manifest, Requirements, check_machine
from pagedtune.runtime.exported.package import Package
from pagedtune.runtime.exported.verification import entry_faults, unlisted_files

from .conftest import FORMAT, PROBLEM

Change = Callable[[dict[str, Any]], object]
FILES = ("manifest.json", "table.json", "finalists.json")


@pytest.fixture
def parts(installed: Path, overrides: Path) -> dict[str, Any]:
    """The package's JSON files, to be changed."""
    return {name: json.loads((installed / "pagedtune_runtime" / name).read_text()) for name in FILES}


def parsed(parts: dict[str, Any]) -> tuple[Manifest, DispatchTable, FinalistsFile]:
    table = from_jsonable(DispatchTable, parts["table.json"])
    return Manifest.parse(parts["manifest.json"]), table, from_jsonable(FinalistsFile, parts["finalists.json"])


def made_of(parts: dict[str, Any], installed: Path, folder: Path) -> Package:
    """A package of these parts with the installed libraries."""
    for name, data in parts.items():
        (folder / name).write_text(json.dumps(data))
    (folder / "native").symlink_to(installed / "pagedtune_runtime" / "native")
    return Package(folder, Manifest.parse(parts["manifest.json"]), cpu_device())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("table.json", lambda t: t.update(device="xx"), "table.json: device: expected name|product|units|detail"),
        ("manifest.json", lambda m: m.update(device="xx"), "manifest.json: device: expected name|product|units"),
        ("table.json", lambda t: t["entries"][0]["config"].update(speed=1), "entries[0].config: cpu_split has no"),
        (
            "table.json",
            lambda t: t["entries"][0]["config"].update(tile_tokens="x"),
            "cpu_split.tile_tokens: expected int",
        ),
        ("table.json", lambda t: t["entries"][0].update(variant="fast"), "entries[0].variant: expected one of"),
        ("table.json", lambda t: t["entries"][0].update(op="sing"), "entries[0].op: expected one of attention"),
        ("table.json", lambda t: t.update(entries=[]), "finalists.json: cells[0]: table.json has no entry"),
        ("finalists.json", lambda f: f["cells"][0].update(model="other"), "has no entry for this cell of other"),
        (
            "finalists.json",
            lambda f: f["cells"][0]["candidates"][1]["config"].update(speed=1),
            "finalists.json: cells[0].candidates[1].config: cpu_split has no tunable speed",
        ),
        ("manifest.json", lambda m: m["binaries"][0].update(keys=["zz"]), "binaries[0].keys: no library"),
    ],
)
def test_contradictions_are_refused_by_field(name: str, change: Change, message: str, parts: dict[str, Any]) -> None:
    manifest, table, finalists = parsed(parts)
    check_forms(manifest, table, finalists.cells)
    change(parts[name])
    manifest, table, finalists = parsed(parts)
    with pytest.raises(PackageError) as caught:
        check_forms(manifest, table, finalists.cells)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("glibc", ["x", "2", "2.x", "2.34-1"])
def test_a_version_that_is_none_is_refused(glibc: str) -> None:
    with pytest.raises(PackageError, match=r"requires\.glibc: expected a version like 2\.34, found '"):
        check_machine(Requirements("Linux", "x86_64", "portable", glibc), cpu_device(), "Linux", "x86_64", glibc="2.36")


@pytest.mark.parametrize(
    ("files", "named"),
    [(None, "files: expected"), (3, "files: expected"), ({"a.py": {}}, "files.a.py"), ({"a.py": 1}, "files.a.py")],
)
def test_a_manifest_without_digests_is_refused(files: object, named: str, tmp_path: Path) -> None:
    manifest = {"schema": 1} | ({} if files is None else {"files": files})
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"digest": digest_of(manifest)}))
    with pytest.raises(PackageError) as caught:
        check_package(tmp_path)
    assert f"manifest.json: {named}" in str(caught.value)


@pytest.mark.parametrize("here", ["portable", "avx2", "avx512"])
def test_a_vector_path_that_the_cpu_lacks_is_rejected(here: str) -> None:
    order = ["portable", "avx2", "avx512"]
    device = replace(cpu_device(), isa=here)
    for isa in ("auto", *order):
        reason = CpuSplit().reject(PROBLEM, FORMAT, CpuSplitConfig(isa=isa), device)
        runs = isa == "auto" or order.index(isa) <= order.index(here)
        assert runs == (reason is None), (isa, here, reason)
        assert CpuSplit().reject(PROBLEM, FORMAT, CpuSplitConfig(isa=isa), replace(device, isa="")) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e["config"].update(tile_tokens=7), "tile_tokens=7 must be a multiple of 16"),
        (lambda e: e["bucket"].update(max_num_seqs=0), "max_num_seqs"),
        (lambda e: e["pool_format"].update(kv_dtype="fp16"), "the package has no library for"),
    ],
)
def test_verify_names_an_entry_that_cannot_run(
    change: Change, message: str, parts: dict[str, Any], installed: Path, tmp_path: Path
) -> None:
    change(parts["table.json"]["entries"][0])
    parts["finalists.json"]["cells"] = []
    (fault,) = entry_faults(made_of(parts, installed, tmp_path))
    assert fault.startswith("table.json: entries[0]: cpu_split: ")
    assert message in fault


def test_an_entry_for_a_wider_cpu_is_named_and_not_run(parts: dict[str, Any], installed: Path, tmp_path: Path) -> None:
    entry = parts["table.json"]["entries"][0]
    entry["config"]["isa"] = "avx512"
    narrow = replace(cpu_device(), isa="avx2")  # whatever this machine has
    parts["table.json"]["device"] = parts["manifest.json"]["device"] = narrow.fingerprint
    package = made_of(parts, installed, tmp_path)
    package.device = narrow
    (fault,) = entry_faults(package)
    assert "isa=avx512 is more than this CPU has, which is avx2" in fault
    (winner,) = package.table.entries
    dispatch = replace(package.dispatch, device=package.device)
    found = dispatch.select(CpuSplit.op, winner.problem, winner.pool_format, winner.bucket.bounds)
    assert found.winner is None
    assert any("isa=avx512" in reason for reason in found.passed_over)


def test_verify_accepts_what_was_exported(parts: dict[str, Any], installed: Path, tmp_path: Path) -> None:
    package = made_of(parts, installed, tmp_path)
    assert list(entry_faults(package)) == []
    assert list(unlisted_files(installed / "pagedtune_runtime", package.manifest)) == []


def test_a_file_that_is_not_listed_is_named(parts: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "runtime" / "__pycache__").mkdir(parents=True)
    (tmp_path / "runtime" / "__pycache__" / "plan.cpython-311.pyc").touch()
    (tmp_path / "runtime" / "extra.py").touch()
    (tmp_path / "manifest.json").touch()
    (line,) = unlisted_files(tmp_path, Manifest.parse(parts["manifest.json"]))
    assert f"{tmp_path / 'runtime' / 'extra.py'} is not part of what was exported" in line


def test_an_unlisted_file_fails_verify(
    parts: dict[str, Any],
    installed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = made_of(parts, installed, tmp_path)
    (tmp_path / "extra.py").touch()
    monkeypatch.setattr(command, "load", lambda: package)
    assert command.main(["verify"]) == 1
    found = capsys.readouterr()
    assert "extra.py is not part of what was exported" in found.err
    assert "as exported" not in found.out


def test_calibrating_nothing_is_no_failure(
    parts: dict[str, Any],
    installed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts["table.json"]["entries"], parts["finalists.json"]["cells"] = [], []
    package = made_of(parts, installed, tmp_path)
    assert list(calibrate(package, 1.0)) == []
    monkeypatch.setattr(command, "load", lambda: package)
    assert command.main(["calibrate"]) == 0
    assert "nothing to settle" in capsys.readouterr().out


def test_a_damaged_package_is_one_line_of_the_module_run(tmp_path: Path, installed: Path) -> None:
    """`python -m` imports the package first: the fault is found there."""
    root, source = tmp_path / "pagedtune_runtime", installed / "pagedtune_runtime"
    for name in ("__init__.py", "__main__.py", "runtime/__init__.py", "manifest.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes((source / name).read_bytes())
    (root / "runtime" / "exported").symlink_to(source / "runtime" / "exported")
    path = f"{tmp_path}:{sysconfig.get_paths()['purelib']}"
    line = [sys.executable, "-S", "-B", "-m", "pagedtune_runtime", "verify"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env={"PYTHONPATH": path}, cwd=tmp_path)
    assert done.returncode == 1
    (only,) = done.stderr.splitlines()
    assert "PackageError" in only
    assert "table.json cannot be read" in only


def test_a_reader_that_leaves_is_no_error(installed: Path, overrides: Path, tmp_path: Path) -> None:
    path = f"{installed}:{sysconfig.get_paths()['purelib']}"
    line = f"{sys.executable} -S -B -m pagedtune_runtime explain | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False, env={"PYTHONPATH": path}, cwd=tmp_path
    )
    assert done.stderr == ""
    assert done.stdout.strip() == "141"  # 128 + SIGPIPE
