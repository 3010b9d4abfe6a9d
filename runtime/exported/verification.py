"""What `verify` finds beyond what `load` refuses: entries that cannot run here, and files that nobody listed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ...kernels.dispatch import Winner
from ...kernels.native import load_library
from ...kernels.variant import Op
from ..artifact_source import ArtifactUnavailable
from ..blocklist import Blocklist
from ..dispatch import NoKernel
from .forms import checked_config
from .integrity import MANIFEST
from .manifest import TABLE, Manifest
from .package import Package

ELF_MAGIC = b"\x7fELF"


def unlisted_files(root: Path, manifest: Manifest) -> Iterator[str]:
    """A line for each file in the package's folder that its manifest lacks; what Python caches of itself is none."""
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        cached = path.parent.name == "__pycache__" and path.suffix == ".pyc"
        if not path.is_dir() and not cached and name != MANIFEST and name not in manifest.files:
            yield f"{path} is not part of what was exported: delete it, or install the wheel again"


def library_faults(package: Package) -> Iterator[str]:
    """A line for each binary that lacks an entry or, of a GPU's, is not of the form that its name says."""
    manifest = package.manifest
    for library in (*manifest.libraries, *(fallback.library for fallback in manifest.fallbacks)):
        path = package.root / library.file
        if not library.ptx:
            loaded = load_library(path)
            missing = [entry for entry in library.entries if not hasattr(loaded, entry)]
        else:
            data, ptx = path.read_bytes(), (package.root / library.ptx).read_text()
            if path.suffix == ".cubin" and not data.startswith(ELF_MAGIC):
                yield f"{library.file} is no cubin"
            if re.search(rf"^\.target {library.target}\b", ptx, re.MULTILINE) is None:
                yield f"{library.ptx} is not for {library.target}"
            missing = [e for e in library.entries if e.encode() not in data or f".entry {e}" not in ptx]
        if missing:
            yield f"{library.file} has no {', '.join(missing)}"


def entry_faults(package: Package) -> Iterator[str]:
    """A line for each entry of the table that cannot run on this machine, whatever the user has switched off."""
    for index, entry in enumerate(package.table.entries):
        where = f"{TABLE}: entries[{index}]"
        fault = _fault(package, entry, where)
        if fault:
            yield f"{where}: {fault}"


def _fault(package: Package, entry: Winner, where: str) -> str:
    """Why an entry cannot run; empty if it can."""
    problem, pool_format, device = entry.problem, entry.pool_format, package.device
    dispatch = replace(package.dispatch, blocklist=Blocklist(), calibrated=())
    config = checked_config(where, entry.op, entry.variant, entry.config)
    variant = next(v for v in dispatch.variants if v.name == entry.variant)
    if variant.device_kind is not device.kind:
        return f"{variant.name} runs on {variant.device_kind}, and this is {device.kind}"
    reason = variant.reject(problem, pool_format, config, device)
    if reason is not None:
        return f"{variant.name}: {reason}"
    try:
        package.artifacts.artifacts(variant, problem, pool_format, config, device)
        variant.plan(problem, pool_format, config, entry.bucket.bounds)
        dispatch.select(Op(entry.op), problem, pool_format, entry.bucket.bounds)
    except (ArtifactUnavailable, NoKernel, ValueError) as error:
        return f"{variant.name}: {error}"
    return ""
