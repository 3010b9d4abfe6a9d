"""Proves the binaries of an exported GPU wheel: the PTX in it runs through the gate on the virtual GPU.

`python -m pagedtune.tuner.prove_wheel dist/pagedtune_runtime-*.whl`: exit code 0 if every tuned entry passes. The cases
are those that a candidate must pass in its cell before it gets a time (`harness/cell_cases.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from pagedtune.harness.cell_cases import cases_for_cell
from pagedtune.harness.gate import run_case
from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.catalogue import find_variant
from pagedtune.kernels.device import Device
from pagedtune.kernels.dispatch import Winner
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import Status
from pagedtune.kernels.variant import Config, Op, Variant
from pagedtune.runtime.exported.integrity import check_package
from pagedtune.runtime.exported.manifest import Manifest
from pagedtune.runtime.exported.package import Package

from .configs import Configs


def shipped(variant: Variant, package: Package) -> Variant:
    """The variant with the binaries of a package in place of a compiler."""

    def build(
        self: Variant, problem: Problem, pool_format: PoolFormat, config: Config, device: Device
    ) -> tuple[Artifact, ...]:
        return package.artifacts.artifacts(self, problem, pool_format, config, device)

    found: Variant = type(f"Shipped{type(variant).__name__}", (type(variant),), {"build": build})()
    return found


def prove(package: Package, num_cases: int, tell: Callable[[str], None] = print) -> int:
    """Runs `num_cases` cases of every entry; how many failed. `tell` gets a line for each entry."""
    failures = 0
    for entry in package.table.entries:
        variant = shipped(find_variant(entry.variant), package)
        config = variant.config_from(entry.config)
        cases = cases_for_cell(entry.problem, entry.pool_format, entry.bucket, variant, config)[:num_cases]
        results = [run_case(variant, config, case, package.device) for case in cases]
        wrong = [r for r in results if r.status not in (Status.PASSED, Status.REJECTED)]
        failures += len(wrong)
        tell(f"{_name(entry)}: {len(results) - len(wrong)} of {len(results)} cases passed")
        for result in wrong:
            tell(f"  {result.status} {result.case_key}: {result.reason}")
    return failures


def _name(entry: Winner) -> str:
    op = "" if entry.op == Op.ATTENTION else f"{entry.op} "
    return f"{op}{entry.model} {entry.problem.q_dtype} {entry.bucket.key} {entry.variant}"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="run the PTX of an exported GPU wheel through the gate, without a GPU")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--cases", type=int, default=2, metavar="N", help="cases of each entry (default 2 of 7)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            zipfile.ZipFile(options.wheel).extractall(folder)
        except (OSError, zipfile.BadZipFile) as error:
            parser.error(f"{options.wheel} is no wheel that can be read: {error}")
        root = Path(folder) / "pagedtune_runtime"
        manifest = Manifest.parse(check_package(root))
        name = manifest.device.partition("|")[0]
        if name not in Configs().names("gpus") or name == "cpu":
            parser.error(f"{options.wheel} is for {name}: only the wheels of GPUs hold PTX")
        failures = prove(Package(root, manifest, Configs().gpu(name).device(name)), options.cases)
    print("all passed" if not failures else f"{failures} cases failed")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
