"""The binaries of a package for a GPU: cubins with the PTX they come from, and PTX that a driver compiles elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.device import Device
from pagedtune.kernels.variant import BuildError
from pagedtune.runtime.exported.manifest import Binary, Fallback, GpuEntry, Library

from .errors import UsageError
from .export_parts import Binaries, Wanted

FALLBACK_CAPABILITY = 80  # its PTX runs on every later GPU
FALLBACK_COMPILERS = ("nvrtc",)  # whose PTX promises nothing about the target but its capability
# Oldest driver branch of a PTX ISA version: CUDA's release notes, PTX ISA's "Release Notes".
DRIVERS = {"8.0": "525", "8.1": "530", "8.2": "535", "8.3": "545", "8.4": "550", "8.5": "555", "8.6": "560",
           "8.7": "570", "8.8": "575", "9.0": "580", "9.1": "590"}  # fmt: skip
OLDEST_DRIVER, UNKNOWN_DRIVER = "525", "590"  # nothing is known of later versions but that no older one will do
_VERSION = re.compile(r"^\s*\.version\s+(\d+\.\d+)", re.MULTILINE)
_TARGET = re.compile(r"^\s*\.target\s+(sm_\w+)", re.MULTILINE)


def gpu_binaries(
    built: Mapping[tuple[str, str], Sequence[Artifact]], fallbacks: Mapping[tuple[str, str], Artifact]
) -> Binaries:
    """Everything that goes into the package, by `Wanted.binary`."""
    artifacts = {a.key: a for each in built.values() for a in each}
    libraries = tuple(_library(a, _stem(a)) for _, a in sorted(artifacts.items()))
    contents: dict[str, bytes] = {}
    for _, artifact in sorted(artifacts.items()):
        contents |= {f"{_stem(artifact)}.cubin": artifact.path.read_bytes(), f"{_stem(artifact)}.ptx": _ptx(artifact)}
    rest = []
    for (variant, binary_id), artifact in sorted(fallbacks.items()):
        path = f"{_stem(artifact)}.fallback.ptx"
        contents[path] = _ptx(artifact)
        library = replace(_library(artifact, _stem(artifact)), file=path, ptx=path)
        rest.append(Fallback(variant, binary_id, library, driver_of(_ptx(artifact).decode())))
    drivers = [driver_of(_ptx(a).decode()) for a in artifacts.values()]
    return Binaries(
        contents=contents,
        libraries=libraries,
        binaries=tuple(Binary(*key, tuple(a.key for a in each)) for key, each in sorted(built.items()) if each),
        host_only=tuple(sorted({name for (name, _), each in built.items() if not each})),
        isa="",
        glibc="",
        driver=max(drivers, key=int, default=OLDEST_DRIVER),
        fallbacks=tuple(rest),
    )


def fallbacks_of(wanted: Iterable[Wanted], device: Device) -> dict[tuple[str, str], Artifact]:
    """PTX for GPUs that the cubins do not fit, of the variants that can have it.

    Raises:
        UsageError: a compiler refused.
    """
    lowest, found = replace(device, capability=FALLBACK_CAPABILITY), {}
    for each in wanted:
        if each.variant.reject(each.problem, each.pool_format, each.config, lowest) is not None:
            continue
        (first, *others) = each.variant.build(each.problem, each.pool_format, each.config, device)
        if others or not first.compiler.startswith(FALLBACK_COMPILERS):
            continue
        try:
            (found[each.binary],) = each.variant.build(each.problem, each.pool_format, each.config, lowest)
        except BuildError as error:
            raise UsageError(f"the fallback PTX of {each.variant.name} cannot be built: {error}") from error
    return found


def driver_of(ptx: str) -> str:
    """The oldest driver branch that takes this PTX, and a cubin of the same compiler."""
    version = _VERSION.search(ptx)
    return DRIVERS.get(version[1], UNKNOWN_DRIVER) if version else UNKNOWN_DRIVER


def target_of(ptx: str) -> str:
    """What this PTX, and the cubin made with it, is for: `sm_90`, or `sm_90a`, which no other capability runs."""
    found = _TARGET.search(ptx)
    if found is None:
        raise UsageError("a binary's PTX has no `.target`: export again with an empty cache (PAGEDTUNE_CACHE)")
    return found[1]


def _library(artifact: Artifact, stem: str) -> Library:
    entries = {entry: tuple(abi.arg_types) for entry, abi in sorted(artifact.abi.items())}
    gpu = {
        entry: GpuEntry({str(k): v for k, v in abi.align.items()}, abi.hidden, artifact.resources[entry])
        for entry, abi in sorted(artifact.abi.items())
    }
    return Library(
        artifact.key,
        f"{stem}.cubin",
        target_of(_ptx(artifact).decode()),
        artifact.compiler,
        artifact.flags,
        entries,
        f"{stem}.ptx",
        gpu,
    )


def _stem(artifact: Artifact) -> str:
    return f"gpu/{artifact.path.stem}"


def _ptx(artifact: Artifact) -> bytes:
    assert artifact.ptx_path is not None  # every cubin has its PTX
    return artifact.ptx_path.read_bytes()
