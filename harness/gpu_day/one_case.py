"""One launch, or a few cases of the gate, in a process of their own: what `ncu` and `compute-sanitizer` look at.

`python -m pagedtune.harness.gpu_day.one_case counted cuda_paged`, or `... gate 0 1 2`; `--dry GPU` on the stand-in.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from pagedtune.harness.cuda_context import CudaContext
from pagedtune.harness.gate import run_case
from pagedtune.harness.gpu_day.batch import Batch
from pagedtune.harness.gpu_day.cells import COUNTED, DRY_COUNTED, Candidate, candidates
from pagedtune.harness.gpu_day.gate import planned_cases
from pagedtune.harness.gpu_day.journal import Journal
from pagedtune.harness.gpu_day.session import Session, introduce, open_context, sheet_device
from pagedtune.kernels.catalogue import find_variant
from pagedtune.kernels.device import Device
from pagedtune.kernels.record import Status


def main() -> int:
    """0 if all is right."""
    parser = argparse.ArgumentParser(description="one launch or a few gate cases on the device, for a profiler")
    parser.add_argument("--dry", metavar="GPU", default="")
    parser.add_argument("what", choices=("counted", "gate"))
    parser.add_argument("which", nargs="+", help="a variant's name, or numbers of planned cases")
    options = parser.parse_args()
    with open_context(sheet_device(options.dry) if options.dry else None) as context:
        device = context.device()
        if options.what == "counted":
            return sum(_run_counted(context, device, name) for name in options.which)
        return _run_gate(context, device, [int(number) for number in options.which])


def counted(device: Device, variant: str, dry: bool) -> Candidate:
    """The configuration of a variant whose counters are compared."""
    cell = DRY_COUNTED if dry else COUNTED
    return next(c for c in candidates(cell, device) if c.variant.name == variant)


def _run_counted(context: CudaContext, device: Device, name: str) -> int:
    cell, candidate = DRY_COUNTED if context.emulated else COUNTED, counted(device, name, context.emulated)
    batch = Batch(cell, context, 1)
    artifacts = candidate.variant.build(cell.problem, cell.pool_format, candidate.config, device)
    introduce(context, artifacts)
    (launch,) = batch.launches(candidate, artifacts)
    launch()
    context.synchronise()
    error = batch.worst_error()
    print(f"{candidate.label}: {error:.3f} of the allowed error", flush=True)
    return int(error > 1)


def _run_gate(context: CudaContext, device: Device, numbers: list[int]) -> int:
    nowhere = Journal(Path(), "", "emulated" if context.emulated else "on-device")
    machines = Session(device, nowhere, time.monotonic()).machines(context)
    planned = planned_cases(device, context.emulated)
    failures = 0
    for number in numbers:
        each = planned[number]
        result = run_case(find_variant(each.variant), each.configured(), each.case, device, machines)
        print(f"{each.variant} {result.case_key}: {result.status} {result.reason}", flush=True)
        failures += result.status not in (Status.PASSED, Status.NOT_RUN)
    return failures


if __name__ == "__main__":
    raise SystemExit(main())
