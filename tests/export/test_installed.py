"""The installed wheel in a fresh process without pagedtune and triton: it runs, and it refuses what it must."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.runtime.exported.integrity import PackageError, digest_of, sha256_of
from pagedtune.runtime.exported.manifest import Requirements, check_machine

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = "import runpy; runpy.run_module('pagedtune_runtime', run_name='__main__')"
# Paged attention of three sequences in a permuted pool, by the definition, in float64.
AGAINST_THE_DEFINITION = """
import os, threading, time
import numpy as np, torch
torch.randn(8).sum()
tasks, threads = len(os.listdir("/proc/self/task")), threading.active_count()
before, start, cpu = set(sys.modules), time.perf_counter(), time.process_time()
import pagedtune_runtime as pr
print("import_s", time.perf_counter() - start)
print("import_cpu_s", time.process_time() - cpu)
assert (len(os.listdir("/proc/self/task")), threading.active_count()) == (tasks, threads), "a thread was started"
assert not {"subprocess", "ctypes.util"} & (set(sys.modules) - before), "something that compiles was loaded"
package = pr.load()
problem = package.problems[0]
pool_format = package.pool_format(problem)
attention = pr.PagedAttention(problem, pool_format, package.dispatch)
lengths, size = [37, 8, 1], pool_format.block_size
generator = torch.Generator().manual_seed(1)
randn = lambda *shape: torch.randn(shape, generator=generator)
heads, kv_heads, dim = problem.num_q_heads, problem.num_kv_heads, problem.head_dim
k_cache, v_cache = randn(16, size, kv_heads, dim), randn(16, size, kv_heads, dim)
blocks = torch.randperm(16, generator=generator).int()
table = torch.full((3, 5), -1, dtype=torch.int32)
used = 0
for row, n in enumerate(lengths):
    count = -(-n // size)
    table[row, :count] = blocks[used : used + count]
    used += count
q = randn(3, heads, dim)
out = attention(q, k_cache, v_cache, table, torch.tensor(lengths, dtype=torch.int32),
                torch.arange(4, dtype=torch.int32), pr.Bounds(3, 40))
worst = 0.0
for row, n in enumerate(lengths):
    places = [(int(table[row, i // size]), i % size) for i in range(n)]
    for head in range(heads):
        group = head // (heads // kv_heads)
        keys = np.array([k_cache[b, s, group].numpy() for b, s in places], np.float64)
        values = np.array([v_cache[b, s, group].numpy() for b, s in places], np.float64)
        scores = keys @ q[row, head].double().numpy() / np.sqrt(dim)
        p = np.exp(scores - scores.max())
        worst = max(worst, np.abs(out[row, head].double().numpy() - p @ values / p.sum()).max())
print("error", worst)
found = attention.explain(pr.Bounds(3, 40))
print("ran", found.variant, found.rung, found.verdict, found.time_evidence)
assert "pagedtune" not in sys.modules and "triton" not in sys.modules
"""


def copy_of(installed: Path, tmp_path: Path) -> Path:
    """An installation that may be changed."""
    return Path(shutil.copytree(installed, tmp_path / "copy"))


def sign(root: Path, changes: dict[str, Any]) -> None:
    """Changes the manifest of a package so that its digests still fit."""
    path = root / "manifest.json"
    manifest = json.loads(path.read_text()) | changes
    for name, facts in manifest["files"].items():
        facts["sha256"] = sha256_of((root / name).read_bytes())
    path.write_text(json.dumps(manifest | {"digest": digest_of(manifest)}))


def test_it_imports_and_attends_as_defined(installed: Path, run_isolated: Run) -> None:
    done = run_isolated(AGAINST_THE_DEFINITION, installed)
    assert done.returncode == 0, done.stderr
    facts = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    cpu_s, wall_s = float(facts["import_cpu_s"]), float(facts["import_s"])
    print(f"import of pagedtune_runtime beyond torch, without bytecode: {cpu_s:.3f} s of CPU, {wall_s:.3f} s in all")
    assert float(facts["error"]) < 1e-5  # fp32, weights sum to one, values of N(0, 1)
    assert facts["ran"] == "cpu_split exact on-device measured"


@pytest.mark.parametrize(
    "name",
    ["runtime/allocator.py", "kernels/cpu_split.py", "table.json", "manifest.json", "native/*.so", "__main__.py"],
)
def test_one_altered_byte_is_refused_by_name(name: str, installed: Path, tmp_path: Path, run_isolated: Run) -> None:
    copy = copy_of(installed, tmp_path)
    path = sorted((copy / "pagedtune_runtime").glob(name))[0]
    data = bytearray(path.read_bytes())
    middle = next(i for i in range(len(data) // 2, len(data)) if data[i : i + 1].isalnum())
    data[middle] ^= 1
    path.write_bytes(data)
    done = run_isolated("import pagedtune_runtime", copy)
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert "PackageError" in last
    assert path.name in last


def test_a_missing_file_is_refused_by_name(installed: Path, tmp_path: Path, run_isolated: Run) -> None:
    copy = copy_of(installed, tmp_path)
    (copy / "pagedtune_runtime" / "runtime" / "scheduler.py").unlink()
    done = run_isolated("import pagedtune_runtime", copy)
    assert "runtime/scheduler.py cannot be read" in done.stderr.splitlines()[-1]


def test_another_schema_of_the_manifest_is_refused(installed: Path, tmp_path: Path, run_isolated: Run) -> None:
    copy = copy_of(installed, tmp_path)
    sign(copy / "pagedtune_runtime", {"schema": 99})
    last = run_isolated("import pagedtune_runtime", copy).stderr.splitlines()[-1]
    assert "manifest.json has schema 99, and this code reads 1" in last


def test_another_schema_of_the_table_is_refused(installed: Path, tmp_path: Path, run_isolated: Run) -> None:
    copy = copy_of(installed, tmp_path)
    root = copy / "pagedtune_runtime"
    table = json.loads((root / "table.json").read_text())
    (root / "table.json").write_text(json.dumps(table | {"schema": 2}))
    sign(root, {})
    done = run_isolated(COMMAND, copy, "verify")
    assert done.returncode == 2
    assert "table.json has schema 2, and this code reads 1" in done.stderr


def test_a_wheel_for_another_machine_is_refused_at_load(installed: Path, tmp_path: Path, run_isolated: Run) -> None:
    copy = copy_of(installed, tmp_path)
    root = copy / "pagedtune_runtime"
    requires = json.loads((root / "manifest.json").read_text())["requires"]
    sign(root, {"requires": requires | {"machine": "vax"}})
    done = run_isolated(COMMAND, copy, "verify")
    assert done.returncode == 2
    assert "this package is for Linux on vax" in done.stderr


AVX2 = Device("cpu", DeviceKind.CPU, product="Some CPU", isa="avx2")
HERE = {"system": "Linux", "machine": "x86_64", "glibc": "2.36"}


@pytest.mark.parametrize(
    ("requires", "named"),
    [
        (Requirements("Linux", "aarch64", "portable"), "Linux on aarch64"),
        (Requirements("Darwin", "x86_64", "portable"), "Darwin on x86_64"),
        (Requirements("Linux", "x86_64", "avx512"), "avx512 CPUs, and this one (Some CPU) runs avx2"),
        (Requirements("Linux", "x86_64", "avx1024"), "avx1024"),
        (Requirements("Linux", "x86_64", "portable", "2.40"), "need glibc 2.40, and here is 2.36"),
    ],
)
def test_what_the_machine_lacks_is_named(requires: Requirements, named: str) -> None:
    with pytest.raises(PackageError) as caught:
        check_machine(requires, AVX2, **HERE)
    assert named in str(caught.value)


@pytest.mark.parametrize("isa", ["portable", "avx2"])
@pytest.mark.parametrize("glibc", ["", "2.4", "2.36"])
def test_a_machine_that_fits_is_taken(isa: str, glibc: str) -> None:
    check_machine(Requirements("Linux", "x86_64", isa, glibc), AVX2, **HERE)
