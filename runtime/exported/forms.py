"""Whether the files of an exported package fit each other: digests alone do not say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...kernels.catalogue import VARIANTS
from ...kernels.dispatch import DispatchTable
from ...kernels.variant import Config, Op
from ..ladder import TunedOn
from .integrity import MANIFEST, PackageError
from .manifest import FINALISTS, TABLE, Finalists, Manifest


def check_forms(manifest: Manifest, table: DispatchTable, finalists: Sequence[Finalists]) -> None:
    """Compares the files with each other and with this code; the machine does not matter.

    Raises:
        PackageError: something names what is not there, or is no fingerprint, op or config; the message gives the
            file and the field.
    """
    _check_fingerprint(f"{MANIFEST}: device", manifest.device)
    _check_fingerprint(f"{TABLE}: device", table.device)
    shipped = {library.key for library in manifest.libraries}
    for index, binary in enumerate(manifest.binaries):
        unknown = [key for key in binary.keys if key not in shipped]
        if unknown:
            where = f"{MANIFEST}: binaries[{index}].keys"
            raise PackageError(f"{where}: no library of the package has the key {', '.join(unknown)}")
    for index, entry in enumerate(table.entries):
        checked_config(f"{TABLE}: entries[{index}]", entry.op, entry.variant, entry.config)
    cells = {entry.cell for entry in table.entries}
    for index, cell in enumerate(finalists):
        where = f"{FINALISTS}: cells[{index}]"
        if (cell.op, cell.model, cell.problem, cell.pool_format, cell.bucket, cell.workload) not in cells:
            raise PackageError(f"{where}: {TABLE} has no entry for this cell of {cell.model}, {cell.bucket.key}")
        for number, candidate in enumerate(cell.candidates):
            checked_config(f"{where}.candidates[{number}]", cell.op, candidate.variant, candidate.config)


def checked_config(where: str, op: str, variant: str, values: Mapping[str, Any]) -> Config:
    """The config with these tunables.

    Raises:
        PackageError: no such op or variant, an unknown tunable, or a value of another type.
    """
    if op not in list(Op):
        raise PackageError(f"{where}.op: expected one of {', '.join(Op)}, found {op!r}")
    known = {v.name: v for v in VARIANTS if v.op == op}
    if variant not in known:
        raise PackageError(f"{where}.variant: expected one of {', '.join(known)}, found {variant!r}")
    try:
        return known[variant].config_from(values)
    except ValueError as error:
        raise PackageError(f"{where}.config: {error}") from error


def _check_fingerprint(where: str, fingerprint: str) -> None:
    try:
        TunedOn.parse(fingerprint)
    except ValueError as error:
        raise PackageError(f"{where}: expected name|product|units|detail, found {fingerprint!r}") from error
