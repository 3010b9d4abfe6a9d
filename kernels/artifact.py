"""What a build produces, and where it is kept."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from .launch import CType


class ArtifactKind(StrEnum):
    """What the binary is."""

    CUBIN = "cubin"  # with the PTX it was assembled from
    PTX = "ptx"  # not assembled: what the virtual GPU runs, and no device
    NATIVE = "native"  # a shared library for the CPU


@dataclass(frozen=True)
class Resources:
    """What a kernel needs of a multiprocessor; all zero for a native library."""

    registers: int = 0
    static_shared_bytes: int = 0
    dynamic_shared_bytes: int = 0
    spill_bytes: int = 0


@dataclass(frozen=True)
class KernelAbi:
    """How one entry of a binary is called.

    Args:
        arg_types: types of all arguments in order, hidden ones included.
        align: required alignment in bytes by argument position, where above that of the type.
        hidden: positions of arguments that the compiler appended.
        offsets: of each argument in bytes among the parameters, where several together fill a struct that is passed by
            value; none where each argument is a parameter. Only the virtual GPU launches kernels with offsets.
    """

    arg_types: tuple[CType, ...]
    align: Mapping[int, int] = field(default_factory=dict)
    hidden: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Artifact:
    """A compiled binary with everything needed to launch, prove and identify it.

    Args:
        kind: cubin or native library.
        path: the binary in the cache.
        key: content key over source, flags, compiler and target.
        target: what it was built for, e.g. `sm_90` or `x86_64`.
        abi: calling convention by entry symbol.
        resources: by entry symbol (empty for a native library).
        ptx_path: for a cubin, the PTX that it was assembled from; for PTX alone, the same as `path`.
        compiler: compiler and version.
        flags: flags that it was given.
    """

    kind: ArtifactKind
    path: Path
    key: str
    target: str
    abi: Mapping[str, KernelAbi]
    resources: Mapping[str, Resources] = field(default_factory=dict)
    ptx_path: Path | None = None
    compiler: str = ""
    flags: tuple[str, ...] = ()


def content_key(parts: Mapping[str, object]) -> str:
    """A key over everything that changes a binary: 24 hex digits of SHA-256 over canonical JSON."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def cache_dir() -> Path:
    """Where artifacts are kept: `$PAGEDTUNE_CACHE`, else `$XDG_CACHE_HOME/pagedtune`, else `~/.cache/pagedtune`."""
    explicit = os.environ.get("PAGEDTUNE_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedtune"


def publish(data: bytes, path: Path) -> None:
    """Writes `data` to `path` so that a reader sees all of it or nothing: temporary file, fsync, rename.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # mkstemp's 0600 would hide a shared cache from its other users
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
