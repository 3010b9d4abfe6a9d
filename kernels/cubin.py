"""Compiled GPU kernels in the cache: cubin, the PTX it was assembled from, and a description, published together."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .artifact import Artifact, ArtifactKind, KernelAbi, Resources, cache_dir, publish
from .launch import CType
from .variant import BuildError

_RESOURCE = re.compile(r"Function (\S+?):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)", re.DOTALL)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)")
_SYSTEM_SHARED = 1024
_CTYPES = {"u64": CType.I64, "s64": CType.I64, "b64": CType.I64, "f32": CType.F32}


_PTX_IS_ENOUGH: ContextVar[bool] = ContextVar("ptx_is_enough", default=False)


@contextmanager
def ptx_is_enough() -> Iterator[None]:
    """Builds within need no machine code, because only the virtual GPU will run them: a compiler that can leave it out
    saves half of its time. What is in the cache is taken as it is."""
    token = _PTX_IS_ENOUGH.set(True)
    try:
        yield
    finally:
        _PTX_IS_ENOUGH.reset(token)


def needs_code() -> bool:
    """Whether a build must give machine code too."""
    return not _PTX_IS_ENOUGH.get()


@dataclass(frozen=True)
class Compiled:
    """What a compiler gave: the binary (empty where the PTX is enough), its PTX, and what it was told."""

    cubin: bytes
    ptx: str
    compiler: str
    flags: tuple[str, ...]
    target: str
    abi: Mapping[str, KernelAbi]
    dynamic_shared: Mapping[str, int]


def paths_of(name: str, key: str) -> tuple[Path, Path, Path]:
    """Cubin, PTX and description of a content key."""
    stem = cache_dir() / "gpu" / f"{name}-{key}"
    return stem.with_suffix(".cubin"), stem.with_suffix(".ptx"), stem.with_suffix(".json")


def find_cached(name: str, key: str) -> Artifact | None:
    """The artifact of a key, None if it is not in the cache; where the PTX is enough, that one will do."""
    found = _cached(name, key)
    return found if found is not None or needs_code() else _cached(name, _ptx_key(key))


def _ptx_key(key: str) -> str:
    return f"{key}-ptx"


def _cached(name: str, key: str) -> Artifact | None:
    """The description is written last: it vouches for all."""
    cubin, ptx, description = paths_of(name, key)
    try:
        data = json.loads(description.read_text())
    except (OSError, ValueError):
        return None
    kind = ArtifactKind(data.get("kind", ArtifactKind.CUBIN))
    binary = cubin if kind is ArtifactKind.CUBIN else ptx
    if not (binary.exists() and ptx.exists()):
        return None
    abi = {
        entry: KernelAbi(
            tuple(CType(t) for t in a["arg_types"]),
            {int(k): v for k, v in a["align"].items()},
            tuple(a["hidden"]),
            tuple(a.get("offsets", ())),  # older descriptions have none
        )
        for entry, a in data["abi"].items()
    }
    resources = {entry: Resources(**r) for entry, r in data["resources"].items()}
    compiler, flags = data["compiler"], tuple(data["flags"])
    return Artifact(kind, binary, key, data["target"], abi, resources, ptx, compiler, flags)


def store(name: str, key: str, compiled: Compiled) -> Artifact:
    """Publishes what a compiler gave and returns it as an artifact.

    Raises:
        OSError: the cache cannot be written.
    """
    kind = ArtifactKind.CUBIN if compiled.cubin else ArtifactKind.PTX
    key = key if compiled.cubin else _ptx_key(key)
    cubin, ptx, description = paths_of(name, key)
    binary = cubin if compiled.cubin else ptx
    resources = read_resources(compiled.cubin, compiled.dynamic_shared, compiled.target)
    data = {
        "abi": {
            entry: {
                "arg_types": list(a.arg_types),
                "align": {str(k): v for k, v in a.align.items()},
                "hidden": list(a.hidden),
                "offsets": list(a.offsets),
            }
            for entry, a in compiled.abi.items()
        },
        "resources": {entry: vars(r) for entry, r in resources.items()},
        "compiler": compiled.compiler,
        "flags": list(compiled.flags),
        "target": compiled.target,
        "kind": kind,
    }
    if compiled.cubin:
        publish(compiled.cubin, cubin)
    publish(compiled.ptx.encode(), ptx)
    publish(json.dumps(data, sort_keys=True, indent=1).encode(), description)
    abi = compiled.abi
    return Artifact(kind, binary, key, compiled.target, abi, resources, ptx, compiled.compiler, compiled.flags)


def read_resources(cubin: bytes, dynamic_shared: Mapping[str, int], target: str = "") -> dict[str, Resources]:
    """Registers, shared memory and stack of each entry, by `cuobjdump`; dynamic shared memory comes from the compiler.

    The kilobyte that the system keeps of each block's shared memory is not part of the static one, although the tool
    counts it in from sm_90 on. Without the tool, or a binary, only the dynamic shared memory is known.
    """
    digits = "".join(c for c in target if c.isdigit())
    system = _SYSTEM_SHARED if digits and int(digits) >= 90 else 0
    tool = find_cuda_tool("cuobjdump")
    text = ""
    if tool is not None and cubin:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [str(tool), "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    found = {m[1]: (int(m[2]), int(m[3]), int(m[4])) for m in _RESOURCE.finditer(text)}
    entries = set(found) & set(dynamic_shared) or set(dynamic_shared)
    out = {}
    for entry in entries:
        registers, stack, static = found.get(entry, (0, 0, 0))
        out[entry] = Resources(registers, max(0, static - system), dynamic_shared[entry], stack)
    return out


def find_cuda_tool(name: str) -> Path | None:
    """A CUDA binary: in Triton's wheel, under `$CUDA_HOME`, or on the path."""
    spec = find_spec("triton")
    places = []
    if spec is not None and spec.origin:
        places.append(Path(spec.origin).parent / "backends/nvidia/bin" / name)
    if os.environ.get("CUDA_HOME"):
        places.append(Path(os.environ["CUDA_HOME"]) / "bin" / name)
    on_path = shutil.which(name)
    if on_path:
        places.append(Path(on_path))
    return next((p for p in places if p.exists()), None)


def ptx_parameters(ptx: str, entry: str) -> tuple[str, ...]:
    """Types of an entry's parameters as the PTX declares them, e.g. `u64`.

    Raises:
        BuildError: the PTX has no such entry.
    """
    for match in _ENTRY.finditer(ptx):
        if match[1] == entry:
            return tuple(_PARAM.findall(match[2]))
    raise BuildError(f"the PTX has no entry {entry!r}; it has {[m[1] for m in _ENTRY.finditer(ptx)]}")


def read_texts(paths: Sequence[Path]) -> dict[str, str]:
    """Contents by file name, for a content key."""
    return {path.name: path.read_text() for path in paths}
