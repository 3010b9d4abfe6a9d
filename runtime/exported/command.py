"""The command line of an exported package: `python -m pagedtune_runtime explain | verify | calibrate`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from ...kernels.bounds import Bounds
from ...kernels.device import DeviceKind
from ...kernels.native import LaunchError
from ...kernels.variant import Op
from ..errors import PagedRuntimeError
from ..explanation import explain
from .calibrate import DEFAULT_BUDGET_S, Settled, calibrate, calibration_of
from .integrity import PackageError
from .overrides import calibration_path, write_calibration
from .package import Package, load
from .verification import entry_faults, library_faults, unlisted_files

EXIT_FAILURE, EXIT_USAGE = 1, 2
EXIT_PIPE = 128 + signal.SIGPIPE  # what a shell says of a program whose reader went away


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 ok, 1 failure found, 2 usage or environment."""
    options = _parser().parse_args(arguments)
    try:
        package = load()
        code: int = options.run(package, options)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at exit
        return EXIT_PIPE
    except (PackageError, PagedRuntimeError, LaunchError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pagedtune_runtime", description="Looks after this package.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    explain = commands.add_parser("explain", help="which kernel serves which launch here, and on what evidence")
    explain.add_argument("--seqs", type=_positive, metavar="N", help="for N sequences (with --context)")
    explain.add_argument("--context", type=_positive, metavar="N", help="for contexts of up to N tokens")
    explain.add_argument("--query", type=_positive, metavar="N", help="query tokens a sequence (default 1)")
    explain.set_defaults(run=_explain)
    verify = commands.add_parser("verify", help="check every file, this machine and every library")
    verify.set_defaults(run=_verify)
    settle = commands.add_parser(
        "calibrate", help="time the finalists of each attention cell here, and keep the result"
    )
    settle.add_argument(
        "--budget", type=float, default=DEFAULT_BUDGET_S, metavar="SECONDS", help="in all (default %(default)g)"
    )
    settle.set_defaults(run=_calibrate)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _explain(package: Package, options: argparse.Namespace) -> int:
    if (options.seqs is None) != (options.context is None):
        raise ValueError("--seqs and --context come together: a launch has both")
    if options.query is not None and options.seqs is None:
        raise ValueError("--query comes with --seqs and --context: a launch has all three")
    query = options.query or 1
    if options.seqs is not None and query > options.context:
        raise ValueError(f"--query {query} exceeds --context {options.context}, which includes the query tokens")
    here = package.device.fingerprint if package.present else "no NVIDIA GPU: what follows is for the one tuned for"
    print(f"tuned for: {package.manifest.device}\nthis one:  {here}")
    print(f"calibrated here: {_calibrated(package)}")
    asked = None if options.seqs is None else Bounds(options.seqs, options.context, query)
    cells = dict.fromkeys((e.model, e.problem, e.pool_format) for e in package.table.entries)
    for model, problem, pool_format in cells:
        print(f"\n{model}  {problem.key}  pool {pool_format.key}")
        same = [e for e in package.table.entries if (e.problem, e.pool_format) == (problem, pool_format)]
        tuned = [(Op(entry.op), entry.bucket.bounds) for entry in same]
        for op, bounds in dict.fromkeys([(Op.ATTENTION, asked)] if asked else tuned):
            text = explain(bounds, package.dispatch.select(op, problem, pool_format, bounds))
            print(text if op is Op.ATTENTION else f"{op} {text}")
    return 0


def _calibrated(package: Package) -> str:
    if package.calibration is None:
        return "no (python -m pagedtune_runtime calibrate)"
    return f"{len(package.calibration.entries)} cells, in {calibration_path(package.manifest.digest, package.device)}"


def _verify(package: Package, options: argparse.Namespace) -> int:
    manifest = package.manifest
    faults = [*library_faults(package), *unlisted_files(package.root, manifest), *entry_faults(package)]
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    if faults:
        return EXIT_FAILURE
    source = manifest.exported_from
    changes = " with uncommitted changes" if source.get("dirty") else ""
    size = sum(file.num_bytes for file in manifest.files.values())
    print(f"{len(manifest.files)} files, {size / 1e6:.1f} MB: as exported")
    print(f"{len(manifest.libraries)} {_libraries_text(package)}")
    where = "here" if package.present else "on the GPU tuned for, which is not here"
    print(f"{len(package.table.entries)} entries: each can run {where}, tuned on {manifest.device}")
    print(f"exported from revision {source.get('revision', 'unknown')}{changes}, digest {manifest.digest[:16]}")
    for note in manifest.notes:
        print(f"note: {note}")
    return 0


def _libraries_text(package: Package) -> str:
    if package.device.kind is DeviceKind.CPU:
        return f"libraries: load on this machine ({package.device.fingerprint})"
    fallbacks = len(package.manifest.fallbacks)
    driver = package.manifest.requires.driver
    more = f", and {fallbacks} PTX fallbacks for other GPUs" if fallbacks else ""
    return f"cubins with their PTX: of the right form, for driver {driver} or newer{more}; none was launched"


def _calibrate(package: Package, options: argparse.Namespace) -> int:
    if not 1 <= options.budget < float("inf"):
        raise ValueError(f"--budget {options.budget:g} must be at least 1 second")
    if not package.present:
        raise ValueError("nothing can be timed: this package is for a GPU, and there is none here")
    results: list[Settled] = []
    for result in calibrate(package, options.budget):
        results.append(result)
        print(_line(result), flush=True)
    settled = [result for result in results if result.winner is not None]
    if not results:
        print("nothing to settle: no cell has more than one candidate")
        return 0
    if not settled:
        print("nothing was settled, and nothing written", file=sys.stderr)
        return EXIT_FAILURE
    path = write_calibration(calibration_of(package, results), package.device)
    changed = sum(result.ratio != 1 for result in settled)
    print(f"{len(settled)} of {len(results)} cells settled, {changed} with another winner than shipped")
    print(f"written: {path} (used from the next import on; delete it to go back)")
    return 0


def _line(result: Settled) -> str:
    cell = result.cell
    where = f"{cell.model} {cell.problem.key} {cell.pool_format.key} {cell.bucket.key}"
    note = f" ({result.note})" if result.note else ""
    if result.winner is None:
        return f"{where}: not settled{note}"
    verdict = "the shipped winner stays" if result.ratio == 1 else f"takes {result.ratio:.3f} of the shipped one's time"
    inner = ",".join(f"{k}={v}" for k, v in result.winner.config.items())
    return (
        f"{where}: {result.winner.variant}[{inner}] {result.winner.median_us:.1f} us, {verdict}, "
        f"{result.rounds} rounds{note}"
    )
