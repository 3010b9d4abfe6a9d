"""What is in the wheel: the tree's own sources, the binaries that were timed, and where each comes from."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pagedtune.kernels.catalogue import find_variant
from pagedtune.kernels.cpu_facts import cpu_device
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.tuner.export import Exported, export
from pagedtune.tuner.export_binaries import glibc_versions

GENERATED = {"__init__.py", "__main__.py", "kernels/__init__.py", "runtime/__init__.py"}


@pytest.fixture(scope="module")
def contents(exported: Exported) -> dict[str, bytes]:
    """Content by path in the wheel."""
    with zipfile.ZipFile(exported.path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def package(contents: dict[str, bytes]) -> dict[str, bytes]:
    """Content by path below `pagedtune_runtime/`."""
    return {n.partition("/")[2]: data for n, data in contents.items() if n.startswith("pagedtune_runtime/")}


@pytest.fixture(scope="module")
def manifest(package: dict[str, bytes]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(package["manifest.json"])
    return loaded


def test_the_same_inputs_give_the_same_bytes(results: Path, tmp_path: Path) -> None:
    """In another process, folder and second, and with another order of sets."""
    program = "import sys, pathlib, pagedtune.tuner.export as e; e.export(*map(pathlib.Path, sys.argv[1:]))"
    command = [sys.executable, "-c", program, results, tmp_path / "there"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    (there,) = (tmp_path / "there").iterdir()
    assert export(results, tmp_path / "here").path.read_bytes() == there.read_bytes()


def test_wheel_and_tree_agree_on_sources(root: Path, tree: list[str], package: dict[str, bytes]) -> None:
    sources = {path: data for path, data in package.items() if path.endswith(".py") and path not in GENERATED}
    assert {path: (root / path).read_bytes() for path in sources} == sources
    runtime = {path for path in tree if path.startswith("runtime/") and path.endswith(".py")}
    assert runtime <= set(sources)
    hosts = {"kernels/cpu_split.py", "kernels/cpu_cache.py", "kernels/eager.py", "kernels/native.py"}
    assert hosts <= set(sources)


def test_nothing_that_compiles_ships(package: dict[str, bytes]) -> None:
    assert {Path(path).suffix for path in package} == {".py", ".so", ".json", ".typed"}
    assert not [path for path in package if Path(path).name.startswith("build")]


def test_the_name_says_what_it_runs_on(exported: Exported, contents: dict[str, bytes]) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert exported.path.name == f"pagedtune_runtime-{exported.manifest.version}-py3-none-{platform}.whl"
    (wheel,) = (data.decode() for name, data in contents.items() if name.endswith(".dist-info/WHEEL"))
    assert f"Tag: py3-none-{platform}\n" in wheel
    assert "Root-Is-Purelib: false\n" in wheel


def test_the_record_lists_every_file_with_its_digest(contents: dict[str, bytes]) -> None:
    (name,) = (n for n in contents if n.endswith(".dist-info/RECORD"))
    lines = dict(line.rsplit(",", 2)[::2] for line in contents[name].decode().splitlines())
    assert set(lines) == set(contents)
    for line in contents[name].decode().splitlines():
        path, digest, size = line.rsplit(",", 2)
        if path != name:
            data = contents[path]
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (digest, int(size)) == (f"sha256={expected}", len(data)), path


def test_the_manifest_has_the_digest_of_every_other_file(manifest: dict[str, Any], package: dict[str, bytes]) -> None:
    expected = {path: hashlib.sha256(data).hexdigest() for path, data in package.items() if path != "manifest.json"}
    assert {path: facts["sha256"] for path, facts in manifest["files"].items()} == expected


def test_every_entry_says_where_it_comes_from(manifest: dict[str, Any], package: dict[str, bytes]) -> None:
    (origin,) = manifest["provenance"]
    (entry,) = json.loads(package["table.json"])["entries"]
    assert origin["candidate"].startswith("cpu_split[")
    assert "tile_tokens=64" in origin["candidate"]
    assert (origin["verdict"], origin["time_evidence"], origin["gate"]) == ("on-device", "measured", "gate-1")
    assert (origin["environment"]["revision"], origin["environment"]["dirty"]) == ("abc", False)
    assert origin["artifact_keys"] == entry["artifact_keys"]
    library = next(x for x in manifest["libraries"] if [x["key"]] == entry["artifact_keys"])
    assert library["compiler"]
    assert "-O3" in library["flags"]
    assert library["file"] in package
    assert any("another version of the gate" in note for note in manifest["notes"])


def test_finalists_come_with_their_binaries(manifest: dict[str, Any], package: dict[str, bytes]) -> None:
    (cell,) = json.loads(package["finalists.json"])["cells"]
    names = [(c["variant"], c["config"].get("tile_tokens")) for c in cell["candidates"]]
    assert names == [("cpu_split", 64), ("cpu_split", 32), ("eager", None)]
    split, pool_format = find_variant("cpu_split"), PoolFormat(8, DType.FP32)
    configs = [split.config_from(c["config"]) for c in cell["candidates"] if c["variant"] == "cpu_split"]
    wanted = {split.binary_id(Problem(6, 2, 32, q_dtype=DType.FP32), pool_format, config) for config in configs}
    assert {b["binary_id"] for b in manifest["binaries"] if b["variant"] == "cpu_split"} == wanted
    shipped = {library["key"] for library in manifest["libraries"]}
    assert {key for b in manifest["binaries"] for key in b["keys"]} == shipped
    native = {"cpu_kv_write", "cpu_copy_blocks", "cpu_pack_blocks", "cpu_unpack_blocks"}
    assert native <= {b["variant"] for b in manifest["binaries"]}
    assert "eager" in manifest["host_only"]


def test_equal_binary_ids_mean_equal_binaries() -> None:
    """Over configs, formats and problems that differ in one thing each: names and content keys split them alike."""
    problem, pool_format = Problem(6, 2, 32, q_dtype=DType.FP32), PoolFormat(8, DType.FP32)
    combinations = [
        (problem, pool_format, {}),
        (problem, pool_format, {"num_splits": 4, "prefetch_tokens": 0, "num_threads": 1}),
        (problem, pool_format, {"tile_tokens": 32}),
        (Problem(6, 2, 32, q_dtype=DType.FP32, window=5, soft_cap=30.0), pool_format, {}),
        (Problem(3, 1, 32, q_dtype=DType.FP32), PoolFormat(16, DType.FP32, Layout.HND), {}),
        (Problem(6, 2, 32, q_dtype=DType.BF16), pool_format, {}),
    ]
    for name in ("cpu_split", "cpu_kv_write"):
        variant, pairs = find_variant(name), []
        for some, stored, values in combinations:
            config = variant.config_from(values if name == "cpu_split" else {})
            keys = tuple(a.key for a in variant.build(some, stored, config, cpu_device()))
            pairs.append((variant.binary_id(some, stored, config), keys))
        assert len(set(pairs)) == len({i for i, _ in pairs}) == len({k for _, k in pairs}), name


def test_symbol_versions_are_found_in_a_library(exported: Exported) -> None:
    assert glibc_versions(b"\0GLIBC_2.34\0GLIBCXX_3.4.11\0GLIBC_2.2.5\0GLIBC_PRIVATE\0") == {"2.34", "2.2.5"}
    assert exported.manifest.requires.glibc.startswith("2.")
