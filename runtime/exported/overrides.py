"""What calibration found on a machine, kept in a file of the user's."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels.artifact import publish
from ...kernels.device import Device
from ...kernels.dispatch import Winner
from ...kernels.serial import from_jsonable, to_jsonable

_LOG = logging.getLogger(__name__)
FOLDER_VARIABLE = "PAGEDTUNE_RUNTIME_OVERRIDES"  # folder of calibration files
CALIBRATION_SCHEMA = 1


@dataclass(frozen=True)
class Calibration:
    """`entries` of the dispatch table measured anew.

    Args:
        schema: of this file.
        package: digest of the package whose finalists were measured.
        device: fingerprint of the machine.
        entries: one for each cell that was settled.
    """

    schema: int
    package: str
    device: str
    entries: tuple[Winner, ...]


def calibration_path(package: str, device: Device) -> Path:
    """The file for one package on one machine: another package or machine has another file.

    In `$PAGEDTUNE_RUNTIME_OVERRIDES`, else in `$XDG_CACHE_HOME/pagedtune_runtime` or `~/.cache/pagedtune_runtime`.
    """
    explicit = os.environ.get(FOLDER_VARIABLE)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedtune_runtime"
    machine = hashlib.sha256(device.fingerprint.encode()).hexdigest()[:12]
    return (Path(explicit) if explicit else cache) / f"{device.name}-{machine}-{package[:12]}.json"


def write_calibration(calibration: Calibration, device: Device) -> Path:
    """Publishes the file in one piece, and returns its path.

    Raises:
        OSError: the folder cannot be written.
    """
    path = calibration_path(calibration.package, device)
    publish((json.dumps(to_jsonable(calibration), indent=1, sort_keys=True) + "\n").encode(), path)
    return path


def read_calibration(package: str, device: Device) -> Calibration | None:
    """What was measured for this package on this machine; None if nothing was.

    A file that does not fit is left out with a warning: the package works without.
    """
    path = calibration_path(package, device)
    try:
        data: Any = json.loads(path.read_bytes())
        found = from_jsonable(Calibration, data, path.name)
        if (found.schema, found.package, found.device) != (CALIBRATION_SCHEMA, package, device.fingerprint):
            raise ValueError(f"it is of schema {found.schema}, for {found.device}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _LOG.warning("%s is left out: %s. Calibrate again, or delete it", path, error)
        return None
    return found
