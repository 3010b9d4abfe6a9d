"""`python -m pagedtune.harness.gpu_day [--budget 450] [--dry]`: see the package."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pagedtune.harness.device_lock import DeviceBusy, device_lock
from pagedtune.harness.gpu_day import bandwidth, facts, gate, timings, tools
from pagedtune.harness.gpu_day.child import run_in_child
from pagedtune.harness.gpu_day.journal import Journal
from pagedtune.harness.gpu_day.session import ROOT, Session, open_context, sheet_device
from pagedtune.harness.gpu_day.summary import summarise
from pagedtune.kernels.device import Device
from pagedtune.kernels.serial import from_jsonable, to_jsonable

DEFAULT_BUDGET_S = 450.0  # with start and end, below eight minutes
PROBE_S = 60.0
LOCK_S = 5.0
MIN_STAGE_S = 2.0
DRY_FOLDER = ROOT / "build" / "gpu_day_dry"
# Statuses of lines that speak against a kernel or against what was measured of it, by stage.
FAILURES = {
    "gate": ("wrong", "corrupted", "crashed", "timeout", "build_failed"),
    "timings": ("wrong", "crashed", "timeout", "too_fast"),
    "sanitizer": ("errors", "failed"),
}


@dataclass(frozen=True)
class Stage:
    """One part of the day: `weight` is its share of the time that is left when it begins."""

    name: str
    weight: float
    run: Callable[[Session], dict[str, Any]]


STAGES = (
    Stage("facts", 0.5, facts.run),
    Stage("bandwidth", 1.5, bandwidth.run),
    Stage("build", 3.0, lambda session: gate.build(session, timings.builds(session))),
    Stage("gate", 4.5, gate.gate),
    Stage("timings", 5.5, timings.run),
    Stage("counters", 1.5, tools.counters),
    Stage("sanitizer", 2.0, tools.sanitizer),
)


def main(arguments: list[str] | None = None) -> int:
    """0 if every stage came to its end and no line of `FAILURES` was written."""
    options = _options(arguments)
    started = time.monotonic()
    device = sheet_device(options.gpu) if options.dry else _probe()
    if device is None:
        return 2
    folder = options.results or (DRY_FOLDER if options.dry else ROOT / "results" / device.name / "gpu_day")
    run = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"
    journal = Journal(folder, run, "emulated" if options.dry else "on-device")
    chosen = [stage for stage in STAGES if not options.stages or stage.name in options.stages]
    try:
        with contextlib.nullcontext() if options.dry else device_lock(device, LOCK_S):
            complete = _run_stages(chosen, device, journal, started + options.budget, options.seed)
    except DeviceBusy as error:
        print(f"{error}: it would be in the way of these times, and they in its", file=sys.stderr)
        return 2
    text = summarise(journal)
    journal.write_summary(text)
    sys.stdout.write(text)
    return int(not complete or _failed(journal))


def _failed(journal: Journal) -> bool:
    return any(line["status"] in bad for stage, bad in FAILURES.items() for line in journal.lines(stage))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(prog="gpu_day", description="what silicon alone can tell, in a few minutes")
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET_S, help="seconds in all (default %(default)s)")
    parser.add_argument("--dry", action="store_true", help="on the stand-in driver, with tiny sizes: measures nothing")
    parser.add_argument("--gpu", default="h100", help="for a dry run: the data sheet of configs/gpus (default h100)")
    parser.add_argument("--results", type=Path, help="folder (default results/GPU/gpu_day, dry build/gpu_day_dry)")
    parser.add_argument("--stages", type=_names, default=[], help=f"only these: {','.join(names)}")
    parser.add_argument("--seed", type=int, default=0, help="of the order of cases and of random content")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.stages) - set(names))
    if unknown:
        parser.error(f"no stage {', '.join(unknown)}: there are {', '.join(names)}")
    if options.dry and options.results and options.results.resolve().is_relative_to(ROOT / "results"):
        parser.error("a dry run measures nothing: its files do not belong into results/")
    return options


def _names(text: str) -> list[str]:
    return text.split(",")


def _probe() -> Device | None:
    """The GPU, asked in a child: this process must stay free of CUDA."""
    ended = run_in_child(lambda: to_jsonable(open_context(None).device()), PROBE_S)
    if ended.status != "done":
        print(f"no GPU can be used here: {ended.message}\n`--dry` tries everything without one", file=sys.stderr)
        return None
    return from_jsonable(Device, ended.value)


def _run_stages(stages: list[Stage], device: Device, journal: Journal, end_s: float, seed: int) -> bool:
    """Runs each in its box; whether all came to their end."""
    complete = True
    for index, stage in enumerate(stages):
        left_s = end_s - time.monotonic()
        box_s = max(MIN_STAGE_S, left_s * stage.weight / sum(later.weight for later in stages[index:]))
        session = Session(device, journal, time.monotonic() + box_s, seed)
        print(f"{stage.name}: at most {box_s:.0f} s", file=sys.stderr, flush=True)
        ended = run_in_child(partial(stage.run, session), box_s + MIN_STAGE_S)
        journal.add(
            "stages",
            name=stage.name,
            status=ended.status,
            value=ended.value,
            message=ended.message,
            seconds=round(ended.seconds, 2),
        )
        complete &= ended.status == "done"
    return complete


if __name__ == "__main__":
    raise SystemExit(main())
