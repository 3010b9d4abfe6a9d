"""`pagedtune check`: proves variants, in the tree or from outside it, and says what was covered."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from pagedtune.harness.case import Level
from pagedtune.harness.checking import Crew, Listing, Outcome
from pagedtune.harness.coverage import coverage_of, shortfall
from pagedtune.harness.external import RequestError, absolute_ref
from pagedtune.harness.junit import junit_xml
from pagedtune.harness.machines import verdict_for
from pagedtune.harness.probe import cpu_facts
from pagedtune.kernels.artifact import publish
from pagedtune.kernels.catalogue import VARIANTS
from pagedtune.kernels.device import Device
from pagedtune.kernels.record import Verdict
from pagedtune.kernels.variant import Op

from .check_view import console_for, failure_line, show_coverage, show_failures, show_missing, totals, with_progress
from .configs import Configs
from .errors import UsageError, unknown_name

E = TypeVar("E", bound=StrEnum)
EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
UNLOADED = "it gave no cases, for the reason above"
TIMEOUT_S = {Level.TINY: 60.0, Level.CORNER: 60.0, Level.PRODUCTION: 240.0}
NO_CASE = "there is no case for it at this level, so nothing was checked"


@dataclass(frozen=True)
class Request:
    """What one check covers, after its options were found valid."""

    refs: tuple[str, ...]
    device: Device
    level: Level
    settings: dict[str, str]
    only: tuple[str, ...]
    op: Op | None
    jobs: int
    timeout_s: float
    allow_missing: bool
    junit: Path | None


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(check)


def check(
    variants: Annotated[
        list[str] | None, typer.Argument(help="names, or path/to/file.py:ClassName; none: the whole catalogue")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu (the default), or a GPU of configs/gpus: it need not be here")
    ] = None,
    cases: Annotated[
        str,
        typer.Option(
            help="how much to run: tiny (small shapes: seconds for a CPU, minutes for a GPU), corner (every pair of "
            "what a case can have) or production (longer contexts; on a GPU also every corner of the config spaces, "
            "and machine code)"
        ),
    ] = "corner",
    op: Annotated[str | None, typer.Option(help="only variants of this op, e.g. attention")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="only the case with this key, or those whose key contains this text")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option(help="a tunable as name=value, for all cases; repeat for several")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="cases that run at once, each in its own process")] = 2,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="seconds that one case may take, its build included: 60 without, 240 at production level, whose "
            "longest cases take half a minute of a core"
        ),
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="write a JUnit XML report to this file")] = None,
    allow_missing: Annotated[bool, typer.Option(help="do not fail because of cases that were not run")] = False,
) -> None:
    """Prove variants against the oracle, each case in a process of its own.

    Example: pagedtune check cpu_split --junit junit.xml

    Exit code 0: every case ran and passed (or is one that the variant itself rejects). 1: a case failed, a case was
    not run, or a variant does not load or rejects everything. 2: nothing was checked, because of the options or the
    machine.
    """
    request = Request(
        refs=tuple(dict.fromkeys(absolute_ref(ref) for ref in variants or ())),
        device=device_for_check(device),
        level=(level := _choice("cases", cases, Level)),
        settings=parse_pairs(config or ()),
        only=tuple(only or ()),
        op=None if op is None else _choice("op", op, Op),
        jobs=jobs,
        timeout_s=TIMEOUT_S[level] if timeout is None else timeout,
        allow_missing=allow_missing,
        junit=junit,
    )
    if not request.timeout_s > 0:
        raise UsageError(f"--timeout {timeout:g} must be above 0 seconds")
    if junit is not None:
        require_writable(junit)
    try:
        code = run_check(request)
    except KeyboardInterrupt:
        console_for(stderr=True).print("interrupted: nothing was written")
        code = EXIT_INTERRUPTED
    raise typer.Exit(code)


def run_check(request: Request) -> int:
    """Lists, runs, shows and writes; the exit code."""
    started = time.monotonic()
    with Crew(request.device, request.jobs, request.timeout_s, code=request.level is Level.PRODUCTION) as crew:
        listings = _listings(request, crew)
        planned = [one for listing in listings for one in listing.planned]
        order = {id(one): index for index, one in enumerate(planned)}
        running = with_progress(crew.outcomes(planned), len(planned), "cases", _Progress(), _failure)
        done = sorted(running, key=lambda outcome: order[id(outcome.planned)])
    if request.junit is not None:
        publish(junit_xml(done, listings, request.allow_missing), request.junit)
    return _show(request, listings, done, time.monotonic() - started)


class _Progress:
    """Says what the last outcome was about, and counts the failures so far."""

    def __init__(self) -> None:
        self._failed = 0

    def __call__(self, outcome: Outcome) -> str:
        self._failed += outcome.failed
        return f"{outcome.planned.variant} {outcome.planned.op}, {self._failed} failed"


def _failure(outcome: Outcome) -> str:
    return failure_line(outcome) if outcome.failed else ""


def device_for_check(name: str | None) -> Device:
    """The device to check for: this machine's CPU, or a GPU as its file in configs/gpus describes it.

    Raises:
        UsageError: an unknown name.
    """
    if name is None or name == "cpu":
        return cpu_facts()
    configs = Configs()
    if name not in configs.names("gpus"):
        raise unknown_name("device", name, configs.names("gpus"))
    return configs.gpu(name).device(name)


def parse_pairs(texts: Sequence[str]) -> dict[str, str]:
    """`name=value` options by name.

    Raises:
        UsageError: another form, or a name given twice.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UsageError(f"--config {text!r} must have the form name=value, e.g. --config num_splits=4")
        if name in pairs:
            raise UsageError(f"--config gives {name} twice: {pairs[name]} and {value}")
        pairs[name] = value
    return pairs


def require_writable(path: Path) -> None:
    """Raises UsageError unless a file can be made at `path`; leaves nothing behind."""
    if path.is_dir():
        raise UsageError(f"--junit {path} is a folder: give the name of a file")
    if not path.parent.is_dir():
        raise UsageError(f"--junit {path}: there is no folder {path.parent}; make it first")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"--junit {path}: {path.parent} cannot be written ({error.strerror})") from error


def _choice(option: str, text: str, kind: type[E]) -> E:
    values = [member.value for member in kind]
    if text not in values:
        raise unknown_name(f"--{option}", text, values)
    return kind(text)


def _ref_of(listing: Listing) -> str:
    return listing.ref


def _listings(request: Request, crew: Crew) -> list[Listing]:
    """What each variant has to pass, after `--op` and `--only`."""
    kind, op = request.device.kind, request.op
    refs = request.refs or tuple(v.name for v in VARIANTS if v.device_kind is kind and op in (None, v.op))
    found = with_progress(crew.list_variants(refs, request.level, request.settings), len(refs), "variants", _ref_of)
    try:
        listings = list(found)
    except RequestError as error:
        raise UsageError(str(error)) from error
    listings = [one for one in listings if op in (None, one.op) or one.broken]
    if not listings:
        raise UsageError(f"no variant to check on {request.device.name}" + (f" has --op {op}" if op else ""))
    return selected(listings, request.only) if request.only else listings


def selected(listings: Sequence[Listing], only: Sequence[str]) -> list[Listing]:
    """The listings with the cases whose key is in `only`; a text that is no key selects all keys that contain it."""
    keys = {planned.case.key for listing in listings for planned in listing.planned}
    chosen: set[str] = set()
    for text in only:
        matches = {text} & keys or {key for key in keys if text in key}
        if not matches:
            raise UsageError(f"--only {text!r} is in the key of none of the {len(keys)} cases; keys differ by --cases")
        chosen |= matches
    narrowed = [
        replace(listing, planned=tuple(one for one in listing.planned if one.case.key in chosen))
        for listing in listings
    ]
    return [listing for listing in narrowed if listing.planned or listing.broken]


def _show(request: Request, listings: Sequence[Listing], done: Sequence[Outcome], seconds: float) -> int:
    """Prints everything; the exit code."""
    console = console_for()
    coverages = coverage_of(done)
    show_coverage(console, coverages)
    show_missing(console, done)
    show_failures(console, done, listings, _repeat(request))
    reasons = [
        f"{listing.ref}: {UNLOADED if listing.broken else NO_CASE}" for listing in listings if not listing.planned
    ]
    reasons += [f"{c.variant} {c.op}: {why}" for c in coverages if (why := shortfall(c, request.allow_missing))]
    text = totals(coverages, len(listings), f"{_evidence(request.device)}, {seconds:.1f} s")
    console.print()
    for reason in reasons:
        console.print(reason, style="red", soft_wrap=True, markup=False)
    console.print(f"{'FAILED' if reasons else 'PASSED'}: {text}", style="bold red" if reasons else "bold green")
    return EXIT_FAILED if reasons else EXIT_OK


def _evidence(device: Device) -> str:
    if verdict_for(device) is Verdict.EMULATED:
        return f"for {device.name} (emulated: the PTX of each binary ran on the virtual GPU, no GPU did)"
    return f"on {device.name}"


def _repeat(request: Request) -> str:
    """The options that a repetition of one case needs."""
    options = ["--device", request.device.name, "--cases", request.level.value]
    for name, value in request.settings.items():
        options += ["--config", f"{name}={value}"]
    return shlex.join(options)
