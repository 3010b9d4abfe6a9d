"""From winners to `pagedtune_runtime`: a wheel with the runtime, the winners' host sides and their binaries."""

from __future__ import annotations

import json
import platform
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pagedtune.kernels.artifact
from pagedtune.harness.environment import environment
from pagedtune.kernels.artifact import publish
from pagedtune.kernels.cpu_facts import cpu_device
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dispatch import Winner
from pagedtune.kernels.record import Record, TimeEvidence, Verdict
from pagedtune.kernels.serial import to_jsonable
from pagedtune.kernels.variant import Op
from pagedtune.runtime.exported.integrity import MANIFEST, SCHEMA, digest_of, sha256_of
from pagedtune.runtime.exported.manifest import (
    FINALISTS,
    TABLE,
    FinalistsFile,
    Manifest,
    Provenance,
    Requirements,
    ShippedFile,
)

from .configs import Configs
from .errors import UsageError
from .export_binaries import build_binaries
from .export_inputs import ExportInputs, read_inputs
from .export_parts import Binaries
from .export_wheel import Wheel, make_wheel
from .records import harness_key

ROOT = Path(pagedtune.kernels.artifact.__file__).resolve().parents[1]
# What ships of the tree: everything that plans and launches, nothing that compiles.
_NOT_SHIPPED = ("build", "_kernel", "_build")
_INIT = '''\
"""Paged attention for {device}: tuned kernels, KV block allocator, scheduler and decode loop.

Exported by pagedtune {version}. `load()` gives the package on this machine; see `python -m pagedtune_runtime --help`.
"""

from pathlib import Path as _Path

from .runtime.exported.integrity import check_package as _check_package

_check_package(_Path(__file__).resolve().parent)  # before anything else of the package runs

from .runtime.exported.surface import *  # noqa: E402, F403
from .runtime.exported.surface import __all__ as __all__  # noqa: E402

__version__ = "{version}"
'''
_MAIN = '''\
"""`python -m pagedtune_runtime`."""

import sys

from .runtime.exported.command import main

sys.exit(main())
'''


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Args:
        path: the wheel.
        num_bytes: its size.
        manifest: what it holds.
        num_finalists: candidates that calibration can choose among, over all cells.
    """

    path: Path
    num_bytes: int
    manifest: Manifest
    num_finalists: int


def export(
    folder: Path,
    out: Path,
    models: Sequence[str] = (),
    allow_predicted: bool = False,
    configs: Configs | None = None,
) -> Exported:
    """Writes the wheel of the winners in `folder` (e.g. `results/cpu`) into `out`.

    Raises:
        UsageError: there is nothing to export, or something that must not be; see `read_inputs`, `build_binaries`.
    """
    inputs = read_inputs(folder, models, allow_predicted)
    device = device_of(inputs.table.device, configs or Configs())
    binaries = build_binaries(inputs, device)
    manifest, wheel = assemble(inputs, binaries, device)
    path = out / wheel.file_name
    try:
        publish(wheel.data, path)
        path.chmod(0o644)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; choose another folder with --out") from error
    return Exported(path, len(wheel.data), manifest, sum(len(cell.candidates) for cell in inputs.finalists))


def assemble(inputs: ExportInputs, binaries: Binaries, device: Device) -> tuple[Manifest, Wheel]:
    """Manifest and wheel, a function of its arguments and of the tree alone."""
    version = package_version()
    files = {
        **dict(shipped_sources(ROOT)),
        **binaries.contents,
        "__init__.py": _INIT.format(device=inputs.table.device.replace("|", ", "), version=version).encode(),
        "__main__.py": _MAIN.encode(),
        "kernels/__init__.py": b'"""The winners\' host sides: problems, plans and launches."""\n',
        "runtime/__init__.py": b'"""What an engine needs around the kernels."""\n',
        "py.typed": b"",
        TABLE: _json(inputs.table),
        FINALISTS: _json(FinalistsFile(SCHEMA, inputs.finalists)),
    }
    manifest = _manifest(inputs, binaries, files, version, device)
    files[MANIFEST] = _json(manifest)
    wheel = make_wheel(version, files, _licence(), _description(inputs), needs_of(device))
    return manifest, wheel


def shipped_sources(root: Path) -> Iterator[tuple[str, bytes]]:
    """Path and content of every file of `kernels` and `runtime` that ships, as it is in the tree."""
    folders = {path.parent for path in (root / "runtime").rglob("*.py")} | {root / "kernels"}
    for folder in sorted(folders):
        for path in sorted(folder.glob("*.py")):
            if not (path.stem.startswith(_NOT_SHIPPED[0]) or path.stem.endswith(_NOT_SHIPPED[1:])):
                yield path.relative_to(root).as_posix(), path.read_bytes()


def package_version() -> str:
    """The version of `pagedtune`, which is that of what it exports."""
    pyproject = ROOT / "pyproject.toml"
    if pyproject.exists():
        return str(tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["version"])
    return metadata.version("pagedtune")


def device_of(fingerprint: str, configs: Configs) -> Device:
    """The device of a table: a GPU as its file in configs/gpus describes it, else this machine's CPU.

    Raises:
        UsageError: the file describes another device than the one that was tuned for.
    """
    name = fingerprint.partition("|")[0]
    stated = configs.gpu(name).device(name) if name in configs.names("gpus") else None
    if stated is None or stated.kind is DeviceKind.CPU:
        return cpu_device()
    if stated.fingerprint != fingerprint:
        raise UsageError(
            f"the winners are of {fingerprint}, and configs/gpus/{name}.yaml describes {stated.fingerprint}: tune again"
        )
    return stated


def needs_of(device: Device) -> tuple[str, ...]:
    """What a package for `device` needs beside numpy and torch."""
    return ("cuda-bindings>=13",) if device.kind is DeviceKind.CUDA else ()


def _manifest(
    inputs: ExportInputs, binaries: Binaries, files: Mapping[str, bytes], version: str, device: Device
) -> Manifest:
    here = environment()
    manifest = Manifest(
        schema=SCHEMA,
        digest="",
        version=version,
        device=inputs.table.device,
        requires=Requirements(
            platform.system(), platform.machine(), binaries.isa, binaries.glibc, device.kind, binaries.driver
        ),
        exported_from={name: here[name] for name in ("revision", "dirty") if name in here},
        notes=_notes(inputs),
        files={path: ShippedFile(sha256_of(data), len(data)) for path, data in sorted(files.items())},
        libraries=binaries.libraries,
        binaries=binaries.binaries,
        host_only=binaries.host_only,
        provenance=tuple(_provenance(record) for record in inputs.records),
        tuned_for=device if device.kind is DeviceKind.CUDA else None,
        fallbacks=binaries.fallbacks,
    )
    return replace(manifest, digest=digest_of(to_jsonable(manifest)))


def _provenance(record: Record) -> Provenance:
    return Provenance(
        cell=record.cell_key,
        candidate=record.candidate_key,
        verdict=record.verdict.value,
        time_evidence=record.time_evidence.value,
        source=str(record.provenance.get("source", "")),
        gate=str(record.provenance.get("code", "")),
        artifact_keys=record.artifact_keys,
        run_id=record.run_id,
        recorded_at=record.recorded_at,
        environment=dict(record.environment),
        resources=dict(record.resources),
    )


def _notes(inputs: ExportInputs) -> tuple[str, ...]:
    """What a user of the package should know, and a careful exporter first."""
    notes = []
    gates = {True: harness_key(virtual=True), False: harness_key()}
    other_gate = sum(r.provenance.get("code") != gates[r.verdict is Verdict.EMULATED] for r in inputs.records)
    if other_gate:
        notes.append(f"{other_gate} entries were proven and timed by another version of the gate than the tree's")
    dirty = sum(bool(record.environment.get("dirty")) for record in inputs.records)
    if dirty:
        notes.append(f"{dirty} entries were tuned in a tree with uncommitted changes")
    predicted = [record for record in inputs.records if record.time_evidence is TimeEvidence.PREDICTED]
    if predicted:
        of_cache = sum(record.op != Op.ATTENTION for record in predicted)
        rest = f" (all but the {of_cache} of cache operations are settled by it)" if of_cache else ""
        notes.append(
            f"the times of {len(predicted)} entries are predicted, not measured: run "
            f"`python -m pagedtune_runtime calibrate` on the device{rest}"
        )
    emulated = sum(record.verdict is Verdict.EMULATED for record in inputs.records)
    if emulated:
        notes.append(f"{emulated} entries were proven on a virtual GPU, and not yet on the device")
    return tuple(notes)


def _description(inputs: ExportInputs) -> str:
    rows = [
        f"| {e.op} | {e.model} | {e.problem.key} | {e.pool_format.key} | {e.bucket.key} | {e.variant} | {_times(e)} |"
        for e in inputs.table.entries
    ]
    head = (
        "| op | model | problem | pool | bucket | variant | measured µs | predicted µs |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    device = inputs.table.device.replace("|", ", ")
    return "\n".join([f"# pagedtune_runtime\n\nTuned on {device}.\n", head, *rows, ""])


def _times(entry: Winner) -> str:
    """The two columns of a time: measured and predicted ones never share one."""
    text = f"{entry.median_us:.1f}"
    return f"| {text}" if entry.time_evidence is TimeEvidence.PREDICTED else f"{text} |"


def _json(value: Any) -> bytes:
    return (json.dumps(to_jsonable(value), indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _licence() -> bytes:
    path = ROOT / "LICENSE"
    if path.exists():
        return path.read_bytes()
    text = metadata.distribution("pagedtune").read_text("licenses/LICENSE")
    if text is None:
        raise UsageError("the licence of pagedtune is missing: install pagedtune again")
    return text.encode()
