"""The native code of a package: winners, finalists, defaults, built anew or found in the cache and compared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from pagedtune.kernels.artifact import Artifact, ArtifactKind
from pagedtune.kernels.build_native import find_compiler
from pagedtune.kernels.catalogue import find_variant
from pagedtune.kernels.cpu_facts import ISAS, usable_cores
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dispatch import Winner
from pagedtune.kernels.record import Record
from pagedtune.kernels.variant import BuildError, Op
from pagedtune.runtime.dispatch import DEFAULT_FALLBACKS
from pagedtune.runtime.exported.manifest import Binary, Library

from .errors import UsageError
from .export_gpu import fallbacks_of, gpu_binaries
from .export_inputs import ExportInputs, compiler_of
from .export_parts import Binaries, Wanted

_GLIBC = re.compile(rb"\bGLIBC_(\d+(?:\.\d+)+)\b")


def build_binaries(inputs: ExportInputs, device: Device) -> Binaries:
    """Builds everything that `inputs` can ask for, and compares the winners' keys with those that were timed.

    Raises:
        UsageError: a compiler is missing or refused, or a winner's binary is not the one that was timed.
    """
    wanted = list(dict.fromkeys(_wanted(inputs, device)))
    distinct = {w.binary: w for w in reversed(wanted)}
    try:
        with ThreadPoolExecutor(usable_cores()) as pool:  # each waits for a compiler process
            built = dict(zip(distinct, pool.map(lambda w: _build(w, device), distinct.values()), strict=True))
    except BuildError as error:
        raise UsageError(f"a library of the export cannot be built: {error}") from error
    _require_timed(inputs, built)
    artifacts = {a.key: a for each in built.values() for a in each}
    contents = {_path_of(a): a.path.read_bytes() for _, a in sorted(artifacts.items())}
    if device.kind is DeviceKind.CUDA:
        return gpu_binaries(built, fallbacks_of(list(distinct.values()), device))
    return Binaries(
        contents=contents,
        libraries=tuple(_library(a) for _, a in sorted(artifacts.items())),
        binaries=tuple(Binary(*key, tuple(a.key for a in each)) for key, each in sorted(built.items()) if each),
        host_only=tuple(sorted({name for (name, _), each in built.items() if not each})),
        isa=_least_isa(wanted),
        glibc=max((v for data in contents.values() for v in glibc_versions(data)), key=_numbers, default=""),
    )


def _wanted(inputs: ExportInputs, device: Device) -> Iterator[Wanted]:
    """Winners and finalists, then what dispatch falls back on for the same problems and formats."""
    for cell in inputs.finalists:
        for finalist in cell.candidates:
            variant = find_variant(finalist.variant)
            yield Wanted(variant, cell.problem, cell.pool_format, variant.config_from(finalist.config))
    attention = {(cell.problem, cell.pool_format) for cell in inputs.finalists if cell.op == Op.ATTENTION}
    for cell in inputs.finalists:
        # The attention cells of a problem bring what all ops fall back on: a cache operation's add but their own.
        alone = cell.op == Op.ATTENTION or (cell.problem, cell.pool_format) not in attention
        names = [name for op in Op if alone or op == cell.op for name in DEFAULT_FALLBACKS[op]]
        variants = map(find_variant, dict.fromkeys((*names, *(c.variant for c in cell.candidates))))
        for variant in (v for v in variants if v.device_kind is device.kind):
            config = variant.default_config(cell.problem, cell.pool_format, cell.bucket.bounds, device)
            if variant.reject(cell.problem, cell.pool_format, config, device) is None:
                yield Wanted(variant, cell.problem, cell.pool_format, config)


def _build(wanted: Wanted, device: Device) -> tuple[Artifact, ...]:
    artifacts = wanted.variant.build(wanted.problem, wanted.pool_format, wanted.config, device)
    kind = ArtifactKind.CUBIN if device.kind is DeviceKind.CUDA else ArtifactKind.NATIVE
    foreign = [a.kind.value for a in artifacts if a.kind is not kind]
    if foreign:
        raise UsageError(f"{wanted.variant.name} builds {', '.join(foreign)} for {device.kind}, which runs {kind} ones")
    return artifacts


def _require_timed(inputs: ExportInputs, built: dict[tuple[str, str], tuple[Artifact, ...]]) -> None:
    for entry, record in zip(inputs.table.entries, inputs.records, strict=True):
        variant = find_variant(entry.variant)
        binary_id = variant.binary_id(entry.problem, entry.pool_format, variant.config_from(entry.config))
        keys = tuple(artifact.key for artifact in built[variant.name, binary_id])
        if keys != entry.artifact_keys:
            raise UsageError(_other_binary(entry, record, keys))


def _other_binary(entry: Winner, record: Record, keys: Sequence[str]) -> str:
    reason = "its source, flags or compiler have changed since"
    if find_variant(entry.variant).device_kind is DeviceKind.CPU:
        then, now = compiler_of(record.environment), find_compiler().version
        changed = "its native source or flags have changed since"
        reason = f"it was {then} then and is {now} now" if then != now else changed
    return (
        f"the binary of {entry.variant} for {entry.model} {entry.problem.key} {entry.pool_format.key} "
        f"{entry.bucket.key} is {', '.join(keys)}, and {', '.join(entry.artifact_keys)} was proven and timed: "
        f"{reason}; tune again"
    )


def _library(artifact: Artifact) -> Library:
    entries = {entry: tuple(abi.arg_types) for entry, abi in sorted(artifact.abi.items())}
    return Library(artifact.key, _path_of(artifact), artifact.target, artifact.compiler, artifact.flags, entries)


def _path_of(artifact: Artifact) -> str:
    return f"native/{artifact.path.name}"


def _least_isa(wanted: Sequence[Wanted]) -> str:
    named = {w.config.as_dict().get("isa") for w in wanted} & set(ISAS)
    return next((isa for isa in ISAS if isa in named), ISAS[-1])


def glibc_versions(library: bytes) -> set[str]:
    """Versions of glibc symbols that a library asks for, e.g. `2.34`."""
    return {match.decode() for match in _GLIBC.findall(library)}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
