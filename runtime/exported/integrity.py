"""Whether an exported package is, byte for byte, what was exported.

Runs before anything else of the package is imported, so it uses nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
SCHEMA = 1  # of the manifest, and of every file that it lists


class PackageError(ImportError):
    """The package is damaged, changed, of another version than its own code, or made for another machine.

    It carries the package's name, by which `python -m` reports it in one line: no traceback where the import fails.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, name=(__package__ or "").partition(".")[0])


def check_package(root: Path) -> dict[str, Any]:
    """The manifest of the package in `root`, after comparing every file that it lists.

    Raises:
        PackageError: the manifest is missing, unreadable, changed or of another schema, or a file is missing or
            differs; the message names the files.
    """
    manifest = read_manifest(root)
    faults = [fault for path, facts in sorted(manifest["files"].items()) if (fault := _fault(root, path, facts))]
    if faults:
        raise PackageError(f"{root} is not what was exported: {'; '.join(faults)}. Install the wheel again")
    return manifest


def read_manifest(root: Path) -> dict[str, Any]:
    """The manifest in `root`, of the right schema and with the right digest.

    Raises:
        PackageError: it is not so.
    """
    path = root / MANIFEST
    try:
        manifest: Any = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise PackageError(f"{path} is missing: this is no package that `make export` made") from error
    except (OSError, ValueError) as error:
        raise PackageError(f"{path} cannot be read: {error}. Install the wheel again") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        schema = manifest.get("schema") if isinstance(manifest, dict) else None
        raise PackageError(f"{path} has schema {schema!r}, and this code reads {SCHEMA}: install a wheel of one export")
    if manifest.get("digest") != digest_of(manifest):
        raise PackageError(f"{path} was changed after the export: its digest does not fit. Install the wheel again")
    _check_files(path, manifest.get("files"))
    return manifest


def _check_files(path: Path, files: Any) -> None:
    if not isinstance(files, dict):
        raise PackageError(f"{path}: files: expected an object with a digest by path, found {files!r}")
    for name, facts in files.items():
        if not isinstance(facts, dict) or not isinstance(facts.get("sha256"), str):
            raise PackageError(f"{path}: files.{name}: expected an object with a text sha256, found {facts!r}")


def digest_of(manifest: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of a manifest without its own digest, in hex."""
    text = json.dumps({k: v for k, v in manifest.items() if k != "digest"}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_of(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def _fault(root: Path, path: str, facts: Mapping[str, Any]) -> str:
    """What is wrong with one file; empty if nothing is."""
    try:
        data = (root / path).read_bytes()
    except (OSError, ValueError) as error:  # a path may hold what no path can
        return f"{path} cannot be read ({getattr(error, 'strerror', None) or error})"
    return "" if sha256_of(data) == facts["sha256"] else f"{path} was changed (its SHA-256 differs)"
