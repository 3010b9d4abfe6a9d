"""Builds of CUDA C++ kernels with NVRTC. Planning and launching never import this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .artifact import Artifact, KernelAbi, content_key
from .cubin import Compiled, find_cached, needs_code, store
from .variant import BuildError

BASE_FLAGS = ("--std=c++17", "--fmad=true", "--relocatable-device-code=false")
_TYPICAL_HEADER = "cuda_fp16.h"


@dataclass(frozen=True)
class CudaKernel:
    """One CUDA source to build.

    Args:
        source: the `.cu` file.
        includes: files that it includes, part of the content key.
        defines: macros.
        abi: calling convention of each entry (declared `extern "C"`).
        dynamic_shared: dynamic shared memory that each entry is launched with, in bytes.
    """

    source: Path
    abi: Mapping[str, KernelAbi]
    includes: tuple[Path, ...] = ()
    defines: Mapping[str, int | str] = field(default_factory=dict)
    dynamic_shared: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """PTX, binary (empty where the PTX is enough), and the symbols of the template instances that were asked for."""

    ptx: str
    cubin: bytes
    symbols: tuple[str, ...] = ()


def build_nvrtc(kernel: CudaKernel, capability: int) -> Artifact:
    """The cubin and PTX of a CUDA source, both from one compile, from the cache if its content key is there. Where the
    PTX is enough (`cubin.ptx_is_enough`), the same PTX alone.

    Raises:
        BuildError: NVRTC is missing or refused the source; the message carries its log.
    """
    compiler = compiler_name()
    texts = {path.name: path.read_text() for path in (kernel.source, *kernel.includes)}
    defines = tuple(f"-D{name}={value}" for name, value in sorted(kernel.defines.items()))
    flags = (f"--gpu-architecture=sm_{capability}", *BASE_FLAGS, *defines)
    shared = {entry: kernel.dynamic_shared.get(entry, 0) for entry in kernel.abi}
    key = content_key(
        {
            "texts": texts,
            "flags": flags,
            "compiler": compiler,
            "shared": shared,
            "abi": {e: [list(a.arg_types), sorted(a.align.items())] for e, a in kernel.abi.items()},
        }
    )
    cached = find_cached(kernel.source.stem, key)
    if cached is not None:
        return cached
    if not needs_code():
        flags = (f"--gpu-architecture=compute_{capability}", *flags[1:])
    headers = {path.name: texts[path.name] for path in kernel.includes}
    output = compile_source(kernel.source.name, texts[kernel.source.name], headers, flags)
    compiled = Compiled(output.cubin, output.ptx, compiler, flags, f"sm_{capability}", kernel.abi, shared)
    return store(kernel.source.stem, key, compiled)


def compiler_name() -> str:
    """NVRTC with its version, for content keys.

    Raises:
        BuildError: it is not installed.
    """
    nvrtc = _nvrtc()
    return f"nvrtc {'.'.join(str(n) for n in _call(nvrtc, nvrtc.nvrtcVersion())[:2])}"


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise BuildError("NVRTC is not installed: pip install cuda-bindings nvidia-cuda-nvrtc") from error
    return nvrtc


def include_path() -> Path:
    """Folder of the CUDA headers: NVIDIA's header wheel, else Triton's wheel.

    Raises:
        BuildError: neither is installed.
    """
    places = []
    for package, folder in (
        ("nvidia", "cu13/include"),
        ("nvidia", "cuda_runtime/include"),
        ("triton", _TRITON_HEADERS),
    ):
        spec = find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec is not None else ():
            places.append(Path(root) / folder)
    for place in places:
        if (place / _TYPICAL_HEADER).exists():
            return place
    raise BuildError("no CUDA headers: pip install triton, or NVIDIA's runtime headers")


_TRITON_HEADERS = "backends/nvidia/include"


def _call(nvrtc: Any, result: Sequence[Any]) -> tuple[Any, ...]:
    """Results of an NVRTC call without its status.

    Raises:
        BuildError: the status is not success.
    """
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BuildError(f"NVRTC: {status.name}")
    return tuple(values)


def compile_source(
    name: str, source: str, headers: Mapping[str, str], flags: Sequence[str], expressions: Sequence[str] = ()
) -> Output:
    """What NVRTC makes of one source.

    Args:
        name: of the source, for messages.
        headers: contents by the name that they are included by; the CUDA headers are found without them.
        flags: for the compiler, the architecture among them.
        expressions: instances of kernel templates to compile, as C++ names them.

    Raises:
        BuildError: NVRTC is missing or refused the source; the message carries its log.
    """
    nvrtc = _nvrtc()
    names, contents = [n.encode() for n in headers], [text.encode() for text in headers.values()]
    (program,) = _call(nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(headers), contents, names))
    try:
        for expression in expressions:
            _call(nvrtc, nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        options = [f.encode() for f in (*flags, f"-I{include_path()}")]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            (size,) = _call(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
            log = b" " * size
            _call(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            tail = "\n".join(log.decode(errors="replace").strip("\0 ").splitlines()[-20:])
            raise BuildError(f"{name} does not compile ({status.name}):\n{tail}")
        cubin = _output(nvrtc, program, "CUBIN") if needs_code() else b""
        symbols = [_call(nvrtc, nvrtc.nvrtcGetLoweredName(program, e.encode()))[0].decode() for e in expressions]
        return Output(_output(nvrtc, program, "PTX").rstrip(b"\0").decode(), cubin, tuple(symbols))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _output(nvrtc: Any, program: Any, kind: str) -> bytes:
    size: int
    (size,) = _call(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}Size")(program))
    data = b" " * size  # the binding writes into it
    _call(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}")(program, data))
    return data
