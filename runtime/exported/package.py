"""An exported package, checked and ready to serve this machine."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ...kernels.artifact import Artifact
from ...kernels.cpu_facts import cpu_device
from ...kernels.device import Device, DeviceKind
from ...kernels.dispatch import DispatchTable
from ...kernels.pool_format import PoolFormat
from ...kernels.problem import Problem
from ...kernels.serial import from_jsonable
from ...kernels.variant import Config, Variant
from ..artifact_source import ArtifactUnavailable
from ..dispatch import Dispatch
from .forms import check_forms
from .gpu import gpu_here
from .integrity import SCHEMA, PackageError, check_package, sha256_of
from .manifest import FINALISTS, TABLE, Finalists, FinalistsFile, Library, Manifest, check_machine
from .overrides import Calibration, read_calibration

_LOG = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]  # the folder of the package, which holds `runtime` and `kernels`
T = TypeVar("T")


def cubin_runs(target: str, capability: int) -> bool:
    """Whether a cubin for `target` runs on a device: `sm_86` on its own major capability and no earlier minor one,
    `sm_90a` on 9.0 alone (CUDA C++ Programming Guide, "Binary Compatibility" and "Architecture-Specific Features").
    """
    number = int(target.removeprefix("sm_").rstrip("af"))
    if target.endswith("a"):
        return number == capability
    return number // 10 == capability // 10 and number <= capability


class ShippedArtifacts:
    """Hands out the libraries of a package; nothing is compiled.

    Args:
        root: folder of the package.
        manifest: which libraries there are.
    """

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self._root, self._manifest = root, manifest
        self._libraries = {library.key: library for library in manifest.libraries}
        self._fallbacks = {(f.variant, f.binary_id): f.library for f in manifest.fallbacks}
        self._keys = {(binary.variant, binary.binary_id): binary.keys for binary in manifest.binaries}
        self._checked: dict[str, Artifact] = {}

    def artifacts(
        self, variant: Variant, problem: Problem, pool_format: PoolFormat, config: Config, device: Device
    ) -> tuple[Artifact, ...]:
        """See `ArtifactSource.artifacts`.

        Raises:
            ArtifactUnavailable: nothing was shipped for this combination.
            PackageError: the library was changed since the package was imported.
        """
        if variant.name in self._manifest.host_only:
            return ()
        wanted = (variant.name, variant.binary_id(problem, pool_format, config))
        keys = self._keys.get(wanted)
        if keys is not None and device.kind is DeviceKind.CUDA and not self._fit(keys, device):
            if wanted in self._fallbacks:
                return (self._artifact(self._fallbacks[wanted]),)
            targets = ", ".join(sorted({self._libraries[key].target for key in keys}))
            raise ArtifactUnavailable(
                f"the package has its binary for {targets}, and this is sm_{device.capability}: tune and export for it"
            )
        if keys is None:
            raise ArtifactUnavailable(
                f"the package has no library for {problem.key} on {pool_format.key} with {config.key}: "
                "tune and export that model to have one"
            )
        return tuple(self._artifact(self._libraries[key]) for key in keys)

    def _fit(self, keys: Sequence[str], device: Device) -> bool:
        return all(cubin_runs(self._libraries[key].target, device.capability) for key in keys)

    def _artifact(self, library: Library) -> Artifact:
        """The library, read once more: what is loaded is what was checked."""
        if library.key not in self._checked:
            path = self._root / library.file
            if sha256_of(path.read_bytes()) != self._manifest.files[library.file].sha256:
                raise PackageError(f"{path} was changed (its SHA-256 differs): install the wheel again")
            self._checked[library.key] = library.artifact(self._root)
        return self._checked[library.key]


class Package:
    """What was exported, on this machine. Made by `load`.

    Attributes:
        root: its folder.
        manifest: what it holds.
        device: this machine; where a package for a GPU is on a machine without one, the GPU that it was tuned for.
        present: whether `device` is here.
        table: what tuning decided.
        finalists: what calibration settles among.
        artifacts: its libraries.
        calibration: what was measured on this machine, if it was.
        dispatch: for `PagedAttention` and the adapters.
    """

    def __init__(self, root: Path, manifest: Manifest, device: Device, present: bool = True) -> None:
        self.root, self.manifest, self.device, self.present = root, manifest, device, present
        self.table = _read(root / TABLE, DispatchTable)
        self.finalists: tuple[Finalists, ...] = _read(root / FINALISTS, FinalistsFile).cells
        check_forms(manifest, self.table, self.finalists)
        self.artifacts = ShippedArtifacts(root, manifest)
        self.calibration: Calibration | None = read_calibration(manifest.digest, device)
        self.dispatch = Dispatch(
            device,
            self.artifacts,
            self.table,
            calibrated=() if self.calibration is None else self.calibration.entries,
        )

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The attention problems that were tuned."""
        return tuple(dict.fromkeys(entry.problem for entry in self.table.entries))

    def pool_format(self, problem: Problem) -> PoolFormat:
        """The format that the pool of a model with this problem should have: what tuning chose for it.

        Without a choice it is that of the problem's first winner, and blocks of 16 tokens in the dtype of the query
        where the problem was not tuned.
        """
        same = [entry for entry in self.table.entries if entry.problem == problem]
        for entry in same:
            chosen = self.table.chosen_formats.get(f"{entry.model}/{problem.q_dtype}")
            if chosen is not None:
                return chosen
        return same[0].pool_format if same else PoolFormat(16, problem.q_dtype)


@cache
def load(root: Path = ROOT) -> Package:
    """The package that this code belongs to, after checking its files and that this machine can run it.

    Compiles nothing, starts no thread and creates no device context. A package for a GPU loads on a machine without
    one too, as far as `explain` and `verify` need it; launching anything there raises.

    Raises:
        PackageError: a file is missing or changed, a table has another schema, the files contradict each other, or
            the machine does not fit.
    """
    manifest = Manifest.parse(check_package(root))
    device, present = _device(manifest)
    check_machine(manifest.requires, device)
    package = Package(root, manifest, device, present)
    source = "exact" if manifest.device == device.fingerprint else f"tuned on {manifest.device}"
    _LOG.info("pagedtune_runtime %s on %s: %s", manifest.version, device.fingerprint, source)
    return package


def _device(manifest: Manifest) -> tuple[Device, bool]:
    """The device that the package runs on, and whether it is here."""
    if manifest.requires.device_kind is DeviceKind.CPU:
        return cpu_device(), True
    if manifest.tuned_for is None:
        raise PackageError("manifest.json: tuned_for: a package for a GPU needs its facts. Install the wheel again")
    here = gpu_here(manifest.tuned_for)
    return (manifest.tuned_for, False) if here is None else (here, True)


def _read(path: Path, kind: type[T]) -> T:
    try:
        data: Any = json.loads(path.read_bytes())
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise PackageError(f"{path} has schema {schema!r}, and this code reads {SCHEMA}: install one wheel's files")
        return from_jsonable(kind, data, path.name)
    except (OSError, ValueError) as error:
        raise PackageError(f"{path} does not fit this code: {error}. Install the wheel again") from error
