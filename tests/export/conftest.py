"""Results as a tune leaves them, made of records with real binaries; the wheel of them, installed alone."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pagedtune.kernels.bounds import Bucket
from pagedtune.kernels.catalogue import find_variant
from pagedtune.kernels.cpu_facts import cpu_device
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import Record, Status, TimeEvidence, Timing, Verdict
from pagedtune.tuner.export import Exported, export
from pagedtune.tuner.jobs import identify_variant
from pagedtune.tuner.run import write_winners
from pagedtune.tuner.select import select
from pagedtune.tuner.store import open_store

PROBLEM = Problem(6, 2, 32, q_dtype=DType.FP32)
FORMAT = PoolFormat(8, DType.FP32)
BUCKET = Bucket(4, 256)
# Modules that no engine has: whatever imports one of them in an isolated program fails.
PROLOGUE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pagedtune", "triton"):
            raise ModuleNotFoundError(f"{name} is not there", name=name)
sys.meta_path.insert(0, Blocked())
sys.path[:0] = [%r]
sys.path.append(%r)
"""


def record(variant: str, config: dict[str, Any], median_us: float, index: int, evidence: TimeEvidence) -> Record:
    """A final of one candidate, with the binaries and the source key that it has in this tree."""
    made = find_variant(variant)
    full = made.config_from(config)
    device = cpu_device()
    samples = tuple(median_us + 0.01 * i for i in range(12))
    return Record(
        run_id="run-1",
        device=device.fingerprint,
        op="attention",
        model="tiny",
        problem=PROBLEM,
        pool_format=FORMAT,
        bucket=BUCKET,
        workload="ragged",
        variant=variant,
        config=full.as_dict(),
        stage="final",
        status=Status.PASSED,
        verdict=Verdict.ON_DEVICE,
        time_evidence=evidence,
        timing=Timing(
            "cold", samples, median_us, (median_us, median_us + 0.1), 1000, pair_ratios=(median_us / 100,) * 12
        ),
        artifact_keys=tuple(a.key for a in made.build(PROBLEM, FORMAT, full, device)),
        environment={"torch": "2", "compiler": "as it was", "revision": "abc", "dirty": False},
        provenance={
            "bucket_weight": 1.0,
            "num_layers": 2,
            "mean_context": 100.0,
            "source": identify_variant({"variant": variant})["source"],
            "code": "gate-1",
            "order": index,
            "is_default": False,
        },
    )


def finals(evidence: TimeEvidence = TimeEvidence.MEASURED) -> list[Record]:
    """Two candidates of `cpu_split`, the first faster, and `eager`."""
    return [
        record("cpu_split", {"tile_tokens": 64}, 100.0, 0, evidence),
        record("cpu_split", {"tile_tokens": 32, "num_splits": 2}, 120.0, 1, evidence),
        record("eager", {}, 900.0, 2, evidence),
    ]


def write_results(folder: Path, records: Sequence[Record]) -> Path:
    """A results folder with these finals, written by the tuner's own code."""
    with open_store(folder) as store:
        store.append_group(records, "group-1")
        write_winners(folder, select(store.records, cpu_device().fingerprint))
    return folder


@pytest.fixture(scope="session")
def make_finals() -> Callable[..., list[Record]]:
    return finals


@pytest.fixture(scope="session")
def make_results() -> Callable[[Path, Sequence[Record]], Path]:
    return write_results


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results that can be exported."""
    return write_results(tmp_path_factory.mktemp("results") / "cpu", finals())


@pytest.fixture(scope="session")
def exported(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The wheel of `results`."""
    return export(results, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def installed(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the installed wheel; not to be changed."""
    target = tmp_path_factory.mktemp("installed")
    command = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index", "-q")
    done = subprocess.run(
        [*command, "--no-compile", "--target", target, exported.path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where calibration is kept in this test."""
    folder = tmp_path / "overrides"
    monkeypatch.setenv("PAGEDTUNE_RUNTIME_OVERRIDES", str(folder))
    return folder


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_isolated(overrides: Path) -> Run:
    """Runs a program that sees an installed wheel and torch, but neither pagedtune nor triton."""

    def run(program: str, installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        prologue = PROLOGUE % (str(installed), sysconfig.get_paths()["purelib"])
        command = [sys.executable, "-S", "-B", "-c", prologue + program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=installed.parent)

    return run
