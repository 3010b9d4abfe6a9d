"""`pagedtune export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedtune.kernels.device import DeviceKind
from pagedtune.runtime.exported.manifest import Manifest

from .cli_options import DEFAULT_RESULTS, DeviceOption, ResultsOption, split_names
from .errors import UsageError
from .export import Exported, export


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command("export")(export_command)


def export_command(
    device: DeviceOption = None,
    models: Annotated[
        str | None, typer.Option("--models", metavar="NAMES", help="Models, comma separated; default: all that won.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the wheel.")] = Path("dist"),
    allow_predicted: Annotated[
        bool, typer.Option("--allow-predicted", help="Ship winners whose time was only predicted, too.")
    ] = False,
    results: ResultsOption = DEFAULT_RESULTS,
) -> None:
    """Write the winners as a wheel: import name pagedtune_runtime, no compiler and no pagedtune needed.

    Example: pagedtune export --models smollm2-135m && pip install dist/pagedtune_runtime-*.whl
    """
    done = export(_folder(results, device), out, split_names(models), allow_predicted)
    for line in _summary(done):
        print(line)


def _folder(results: Path, device: str | None) -> Path:
    """The results of one device: the one named, or the only one that has winners."""
    if device is not None:
        return results / device
    found = sorted(path.parent for path in results.glob("*/winners.json"))
    if len(found) > 1:
        raise UsageError(f"{results} has winners of {', '.join(p.name for p in found)}: choose one with --device")
    if not found:
        raise UsageError(f"no winners in {results}: run `make tune` (or `pagedtune tune`) first")
    return found[0]


def _binaries_text(manifest: Manifest) -> str:
    requires = manifest.requires
    if requires.device_kind is DeviceKind.CPU:
        glibc = f", glibc {requires.glibc} or newer" if requires.glibc else ""
        return f"{len(manifest.libraries)} libraries for {requires.system} {requires.machine}{glibc}"
    targets = ", ".join(sorted({library.target for library in manifest.libraries}))
    text = f"{len(manifest.libraries)} cubins for {targets} with their PTX, driver {requires.driver} or newer"
    fallbacks = manifest.fallbacks
    if not fallbacks:
        return text
    driver = max((f.driver for f in fallbacks), key=int)
    return f"{text}; {len(fallbacks)} PTX fallbacks for other GPUs from sm_80 on, driver {driver} or newer"


def _summary(done: Exported) -> list[str]:
    manifest = done.manifest
    changes = " with uncommitted changes" if manifest.exported_from.get("dirty") else ""
    revision = str(manifest.exported_from.get("revision", "unknown"))[:12]
    return [
        f"{done.path}: {done.num_bytes / 1e6:.2f} MB",
        f"  {len(manifest.provenance)} entries tuned on {manifest.device.replace('|', ', ')}; "
        f"{done.num_finalists} finalists for calibration",
        f"  {_binaries_text(manifest)}",
        f"  revision {revision}{changes}, digest {manifest.digest[:16]}",
        *(f"  note: {note}" for note in manifest.notes),
        f"next: pip install {done.path}; python -m pagedtune_runtime verify",
    ]
