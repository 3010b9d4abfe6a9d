"""Ahead-of-time builds of Triton kernels. Planning and launching never import this; Triton is imported on a build."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from .artifact import Artifact, KernelAbi, content_key
from .cubin import Compiled, find_cached, needs_code, ptx_parameters, store
from .launch import CType
from .variant import BuildError

_CTYPES = {"i64": CType.I64, "i32": CType.I32, "fp32": CType.F32}
_NO_LINE_INFO = "TRITON_DISABLE_LINE_INFO"
_loading = threading.Lock()


@dataclass(frozen=True)
class TritonKernel:
    """One kernel to build.

    Args:
        source: Python file that defines it.
        name: the jitted function.
        signature: type of every argument that is not a constant, by name and in order: `*bf16`, `i64`, `fp32`, ...
        constants: compile-time arguments by name.
        divisible: what arguments are multiples of: an address in bytes, an integer's value.
        num_warps, num_stages: launch options.
    """

    source: Path
    name: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2


def build_triton(kernel: TritonKernel, capability: int) -> Artifact:
    """The cubin and PTX of `kernel`, both from one compile, from the cache if its content key is there. Where the PTX
    is enough (`cubin.ptx_is_enough`), the same PTX alone.

    The key covers the source file, all arguments and options, target, and Triton's version.

    Raises:
        BuildError: Triton is missing or refused the source; the message carries its last lines.
    """
    compiler = f"triton {triton_version()}"
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": True}
    key = content_key(
        {
            "source": kernel.source.read_text(),
            "name": kernel.name,
            "signature": dict(kernel.signature),
            "constants": dict(kernel.constants),
            "divisible": dict(kernel.divisible),
            "options": options,
            "compiler": compiler,
            "target": capability,
        }
    )
    cached = find_cached(kernel.name, key)
    if cached is not None:
        return cached
    ptx, cubin, shared = _compile(kernel, capability, options)
    abi = {kernel.name: _abi(kernel, ptx)}
    flags = tuple(f"{k}={v}" for k, v in sorted(options.items()))
    target = f"sm_{capability}"
    return store(kernel.name, key, Compiled(cubin, ptx, compiler, flags, target, abi, {kernel.name: shared}))


def triton_version() -> str:
    """Triton's version.

    Raises:
        BuildError: it is not installed.
    """
    try:
        return version("triton")
    except PackageNotFoundError as error:
        raise BuildError("Triton is not installed: pip install 'pagedtune[gpu]'") from error


def _abi(kernel: TritonKernel, ptx: str) -> KernelAbi:
    """Triton appends pointers to scratch memory, null for kernels that use none."""
    types = [CType.POINTER if t.startswith("*") else _CTYPES[t] for t in kernel.signature.values()]
    extra = len(ptx_parameters(ptx, kernel.name)) - len(types)
    hidden = tuple(range(len(types), len(types) + extra))
    align = {k: kernel.divisible[name] for k, name in enumerate(kernel.signature) if name in kernel.divisible}
    return KernelAbi((*types, *(CType.POINTER,) * extra), align, hidden)


def _compile(kernel: TritonKernel, capability: int, options: dict[str, Any]) -> tuple[str, bytes, int]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    function = getattr(_load_module(kernel.source), kernel.name)
    names = list(function.arg_names)
    known = set(kernel.signature) | set(kernel.constants)
    if set(names) != known:
        raise BuildError(f"{kernel.name}: arguments {sorted(set(names) ^ known)} are missing or unknown")
    signature = {n: kernel.signature.get(n, "constexpr") for n in names}
    constants = {(names.index(n),): value for n, value in kernel.constants.items()}
    attributes = {(names.index(n),): [["tt.divisibility", d]] for n, d in kernel.divisible.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    with _no_line_info, nullcontext() if needs_code() else _no_assembler():
        try:
            compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        except Exception as error:
            tail = "\n".join(str(error).splitlines()[-20:])
            raise BuildError(f"{kernel.name} does not compile for sm_{capability}:\n{tail}") from error
    return compiled.asm["ptx"], compiled.asm["cubin"], int(compiled.metadata.shared)


def _load_module(path: Path) -> ModuleType:
    """The module of a source file, whatever package it lies in; an export builds several kernels of one at a time."""
    name = f"_pagedtune_triton_{path.stem}"
    with _loading:  # whoever comes second finds a module that is whole
        if name in sys.modules and getattr(sys.modules[name], "__file__", "") == str(path):
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise BuildError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


@contextmanager
def _no_assembler() -> Iterator[None]:
    """Ends Triton's pipeline at the PTX, by its own hook for changed pipelines: the cubin is empty then. Where somebody
    else has a hook in place, nothing is changed."""
    from triton import knobs

    if knobs.runtime.add_stages_inspection_hook is not None:
        yield
        return

    def hook(*arguments: Any) -> tuple[str, str] | None:
        if not arguments:  # asked for its part of the key of Triton's own cache
            return "-ptx-only", "ptx-only"
        arguments[1]["cubin"] = lambda ptx, metadata: b""
        return None

    knobs.runtime.add_stages_inspection_hook = hook
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = None


class _NoLineInfo:
    """Keeps line info out of what is compiled inside the block. The variable is the process's, and builds run in
    threads: it stays until the last block has ended, and then is what it was before the first."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._before: str | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._before = os.environ.get(_NO_LINE_INFO)
                os.environ[_NO_LINE_INFO] = "1"
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if self._before is None:
                os.environ.pop(_NO_LINE_INFO, None)
            else:
                os.environ[_NO_LINE_INFO] = self._before


_no_line_info = _NoLineInfo()
