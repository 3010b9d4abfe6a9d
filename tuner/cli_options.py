"""What several commands share: their common options, and how they find the results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedtune.kernels.record import Record

from .errors import UsageError
from .store import read_records

DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Device, a name in configs/gpus; by default an NVIDIA GPU if there is one, else cpu.",
    ),
]
ResultsOption = Annotated[Path, typer.Option("--results", metavar="DIR", help="Folder of all results.")]
ConfigsOption = Annotated[
    Path | None, typer.Option("--configs", metavar="DIR", help="Folder with gpus/, models/ and sweeps/ of your own.")
]
DEFAULT_RESULTS = Path("results")


def results_of(results: Path, device: str | None) -> tuple[Path, tuple[Record, ...]]:
    """The folder and records of one device: the one named, or the only one that has any.

    Raises:
        UsageError: there are none, or several to choose from.
    """
    found = sorted(path.parent for path in results.glob("*/records.jsonl"))
    if device is not None:
        folder = results / device
        if folder not in found:
            have = ", ".join(path.name for path in found) or "no device"
            raise UsageError(f"no records of {device} in {results} (there: {have}): run `pagedtune tune` first")
    elif len(found) == 1:
        (folder,) = found
    elif found:
        raise UsageError(f"{results} has records of {', '.join(p.name for p in found)}: choose one with --device")
    else:
        raise UsageError(f"no records in {results}: run `pagedtune tune` first, or name the folder with --results")
    records = read_records(folder)
    if not records:
        raise UsageError(f"no records in {folder}: run `pagedtune tune` first")
    return folder, records


def latest_device(records: tuple[Record, ...]) -> str:
    """Fingerprint of the device of the last record: a folder may hold those of several machines of one name."""
    return max(records, key=lambda record: record.recorded_at).device


def split_names(text: str | None) -> tuple[str, ...]:
    """Comma-separated names; none where the option is absent.

    Raises:
        UsageError: the option is there and holds no name.
    """
    names = tuple(part for part in (text or "").replace(" ", "").split(",") if part)
    if text is not None and not names:
        raise UsageError("--model '' names no model: give names from configs/models, comma separated, or leave it out")
    return names
