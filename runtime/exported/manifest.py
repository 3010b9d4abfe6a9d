"""What an exported package holds, for which machines, and where each part of it comes from."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...kernels.artifact import Artifact, ArtifactKind, KernelAbi, Resources
from ...kernels.bounds import Bucket
from ...kernels.cpu_facts import ISAS
from ...kernels.device import Device, DeviceKind
from ...kernels.launch import CType
from ...kernels.pool_format import PoolFormat
from ...kernels.problem import Problem
from ...kernels.serial import from_jsonable
from .integrity import PackageError

TABLE, FINALISTS = "table.json", "finalists.json"


@dataclass(frozen=True)
class ShippedFile:
    """SHA-256 in hex, and size in bytes."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class Requirements:
    """The machines that the package runs on.

    Args:
        system, machine: as `platform.system()` and `platform.machine()` say.
        isa: the least vector path that a shipped config asks for by name.
        glibc: the newest symbol version that a library needs, e.g. `2.34`; empty if none needs any.
        device_kind: what the kernels run on.
        driver: for a GPU, the oldest driver that takes the binaries, e.g. `580`.
    """

    system: str
    machine: str
    isa: str
    glibc: str = ""
    device_kind: DeviceKind = DeviceKind.CPU
    driver: str = ""


@dataclass(frozen=True)
class GpuEntry:
    """What launching one kernel of a cubin needs beyond its argument types; see `KernelAbi` and `Resources`.

    Args:
        align: required alignment in bytes by argument position.
        hidden: positions of arguments that the compiler appended.
        resources: registers and memory.
    """

    align: dict[str, int]
    hidden: tuple[int, ...]
    resources: Resources


@dataclass(frozen=True)
class Library:
    """A native library, or a cubin with the PTX that it was assembled from.

    Args:
        key: content key over source, flags, compiler and machine.
        file: path in the package.
        target, compiler, flags: how it was built.
        entries: argument types by entry symbol.
        ptx: path of a cubin's PTX; empty for a native library.
        gpu: the rest of a cubin's calling convention, by entry symbol.
    """

    key: str
    file: str
    target: str
    compiler: str
    flags: tuple[str, ...]
    entries: dict[str, tuple[CType, ...]]
    ptx: str = ""
    gpu: dict[str, GpuEntry] = field(default_factory=dict)

    def artifact(self, root: Path) -> Artifact:
        """As the executor takes it."""
        if self.ptx:
            return self._cubin(root, root / self.file)
        abi = {entry: KernelAbi(types) for entry, types in self.entries.items()}
        return Artifact(
            ArtifactKind.NATIVE, root / self.file, self.key, self.target, abi, compiler=self.compiler, flags=self.flags
        )

    def _cubin(self, root: Path, path: Path) -> Artifact:
        abi = {
            entry: KernelAbi(types, {int(k): v for k, v in self.gpu[entry].align.items()}, self.gpu[entry].hidden)
            for entry, types in self.entries.items()
        }
        return Artifact(
            ArtifactKind.CUBIN,
            path,
            self.key,
            self.target,
            abi,
            {entry: facts.resources for entry, facts in self.gpu.items()},
            root / self.ptx,
            self.compiler,
            self.flags,
        )


@dataclass(frozen=True)
class Fallback:
    """PTX of the lowest supported target, which a driver compiles for a GPU that no cubin of the package fits.

    Args:
        variant, binary_id: what it is of; see `Binary`.
        library: how it was built and is called; its `file` is the PTX itself.
        driver: the oldest driver that takes this PTX, e.g. `580`.
    """

    variant: str
    binary_id: str
    library: Library
    driver: str


@dataclass(frozen=True)
class Binary:
    """Which libraries a variant needs for one `Variant.binary_id`, by key."""

    variant: str
    binary_id: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Provenance:
    """Where an entry of the dispatch table comes from.

    Args:
        cell, candidate: which entry (`Record.cell_key`, `Record.candidate_key`).
        verdict, time_evidence: how right and how fast were established.
        source, gate: keys over the variant's source, and over that of the gate and the timer.
        artifact_keys: its libraries.
        run_id, recorded_at: the measurement.
        environment: of the measurement: versions, machine, clocks, revision and whether the tree had changes.
        resources: what its kernels need.
    """

    cell: str
    candidate: str
    verdict: str
    time_evidence: str
    source: str
    gate: str
    artifact_keys: tuple[str, ...]
    run_id: str
    recorded_at: str
    environment: dict[str, Any]
    resources: dict[str, Any]


@dataclass(frozen=True)
class Finalist:
    """A candidate that may win on another machine; `median_us` is its time where it was tuned."""

    variant: str
    config: dict[str, Any]
    median_us: float


@dataclass(frozen=True)
class Finalists:
    """The candidates of one cell that calibration settles among, the winner first."""

    op: str
    model: str
    problem: Problem
    pool_format: PoolFormat
    bucket: Bucket
    workload: str
    candidates: tuple[Finalist, ...]


@dataclass(frozen=True)
class FinalistsFile:
    """`finalists.json`."""

    schema: int
    cells: tuple[Finalists, ...]


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`; see the classes of its parts.

    Args:
        schema: of this file; digest: over all of it but this.
        version: of the package; of the `pagedtune` that exported it.
        device: fingerprint of the device that was tuned on.
        requires: the machines that it runs on.
        exported_from: `revision` and `dirty` of the tree that it was exported from, where known.
        notes: what the exporter said about it.
        files: all files of the package but this one, by path.
        libraries, binaries: native code.
        host_only: variants that need none.
        provenance: of each entry of the table, in its order.
        tuned_for: the facts of the device, of a GPU: what plans are made for where none is here.
        fallbacks: PTX for other GPUs, of variants that have it.
    """

    schema: int
    digest: str
    version: str
    device: str
    requires: Requirements
    exported_from: dict[str, Any]
    notes: tuple[str, ...]
    files: dict[str, ShippedFile]
    libraries: tuple[Library, ...]
    binaries: tuple[Binary, ...]
    host_only: tuple[str, ...]
    provenance: tuple[Provenance, ...]
    tuned_for: Device | None = None
    fallbacks: tuple[Fallback, ...] = ()

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Manifest:
        """From JSON.

        Raises:
            PackageError: it is not of this form.
        """
        try:
            return from_jsonable(cls, dict(data), "manifest.json")
        except ValueError as error:
            raise PackageError(f"the manifest does not fit this code: {error}") from error


def check_machine(requires: Requirements, device: Device, system: str = "", machine: str = "", glibc: str = "") -> None:
    """Compares what the package needs with this machine; the last three are found out where they are not given.

    Raises:
        PackageError: this machine cannot run it, or the C library's version is none; the message names what was
            needed and what is there.
    """
    here = (system or platform.system(), machine or platform.machine())
    if here != (requires.system, requires.machine):
        raise PackageError(
            f"this package is for {requires.system} on {requires.machine}, and this is {here[0]} on {here[1]}: "
            "export one here"
        )
    if requires.device_kind is DeviceKind.CUDA:
        return
    if requires.isa not in ISAS or device.isa not in ISAS or ISAS.index(device.isa) > ISAS.index(requires.isa):
        raise PackageError(
            f"this package has configs for {requires.isa} CPUs, and this one ({device.product}) runs {device.isa}: "
            "export one that was tuned here"
        )
    if requires.glibc and not re.fullmatch(r"[0-9]+(\.[0-9]+)+", requires.glibc):
        raise PackageError(f"manifest.json: requires.glibc: expected a version like 2.34, found {requires.glibc!r}")
    found = glibc or (platform.libc_ver()[1] if platform.libc_ver()[0] == "glibc" else "")
    if requires.glibc and (not found or _numbers(found) < _numbers(requires.glibc)):
        raise PackageError(
            f"the libraries of this package need glibc {requires.glibc}, and here is {found or 'another C library'}: "
            "export one on a system as old as this"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
