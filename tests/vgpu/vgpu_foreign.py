"""Triton kernels out of other projects' wheels, run on the virtual GPU through those projects' own host code.

A wheel is downloaded once per machine with pip, into the user's cache; nothing of it is installed or kept in this tree.
One Python file of it is loaded, its package imports replaced by stubs. Its kernels then record what the host code
launches, and the recorded launches are compiled ahead of time and run as one plan, with every check on.
"""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from filelock import FileLock

from pagedtune.harness.vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions
from pagedtune.kernels.artifact import Artifact, ArtifactKind, KernelAbi, Resources, cache_dir
from pagedtune.kernels.cubin import ptx_parameters
from pagedtune.kernels.launch import Access, Arg, CType, KernelStep, LaunchPlan, ScalarArg, SlotArg
from pagedtune.kernels.slot import SlotSpec, WorkspaceSpec

DOWNLOAD_SECONDS = 120
DIVISIBLE = 16  # Triton's launcher tells the compiler which pointers and integers are multiples of 16
OPTIONS = ("num_warps", "num_stages", "maxnreg", "num_ctas")
_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip
_CTYPES = {"i32": CType.I32, "i64": CType.I64, "fp32": CType.F32}


@dataclass(frozen=True)
class Foreign:
    """One file of one wheel.

    Args:
        requirement: what pip downloads, e.g. `name==1.2`.
        member: path of the file in the wheel.
        kernels: jitted functions that the host code launches.
        stubs: contents of the modules that the file imports from its own package.
    """

    requirement: str
    member: str
    kernels: tuple[str, ...]
    stubs: Mapping[str, Mapping[str, object]]


@dataclass(frozen=True)
class Launch:
    """One launch that the host code asked for: arguments by name, constants included."""

    function: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, int]


def wheel(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement, in `folder` or from the package index; skips the test where it cannot be had."""
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    found = sorted(folder.glob(pattern))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--retries", "1", "--dest", str(folder), requirement]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
        found = sorted(folder.glob(pattern))
        if not found:
            pytest.skip(f"the wheel of {requirement} cannot be downloaded: {reason}")
    return found[0]


def load(foreign: Foreign) -> ModuleType:
    """The module of a foreign file, its own package's imports replaced by stubs."""
    folder = cache_dir() / "foreign"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        path = wheel(foreign.requirement, folder)
        source = path.with_suffix("") / foreign.member
        if not source.exists():
            with zipfile.ZipFile(path) as archive:
                archive.extract(foreign.member, path.with_suffix(""))
    spec = importlib.util.spec_from_file_location(f"_foreign_{source.stem}_{abs(hash(foreign.requirement))}", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, dict(_stub_modules(foreign.stubs))):
        spec.loader.exec_module(module)
    return module


def _stub_modules(stubs: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, ModuleType]]:
    for name, contents in stubs.items():
        parts = name.split(".")
        for n in range(1, len(parts)):
            parent = ".".join(parts[:n])
            if parent not in stubs:
                yield parent, ModuleType(parent)
        module = ModuleType(name)
        module.__dict__.update(contents)
        yield name, module


class _Recorder:
    """Stands in for a jitted function: `kernel[grid](...)` is noted, not run."""

    def __init__(self, function: Any, launches: list[Launch]) -> None:
        self._function, self._launches = function, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
            bound = inspect.signature(self._function.fn).bind(*args, **kwargs)
            bound.apply_defaults()
            dimensions = grid(dict(bound.arguments)) if callable(grid) else grid
            self._launches.append(Launch(self._function, tuple(dimensions), dict(bound.arguments), options))

        return launch


@contextmanager
def recording(module: ModuleType, kernels: Sequence[str]) -> Iterator[list[Launch]]:
    """The launches that host code of `module` makes inside the block."""
    launches: list[Launch] = []
    with patch.multiple(module, **{name: _Recorder(getattr(module, name), launches) for name in kernels}):
        yield launches


@dataclass(frozen=True)
class _Compiled:
    artifact: Artifact
    arguments: tuple[str, ...]  # names of those that are passed at run time
    types: Mapping[str, str]
    block: int


def _specialise(launch: Launch) -> tuple[dict[str, str], dict[str, Any], set[str]]:
    """Types, constants and multiples of 16, as Triton's own launcher derives them from the arguments."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    multiples: set[str] = set()
    for parameter in launch.function.params:
        name, value = parameter.name, launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[name] = "*" + _TYPES[value.dtype]
            if value.data_ptr() % DIVISIBLE == 0:
                multiples.add(name)
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            types[name] = parameter.annotation_type or ("i32" if -(1 << 31) <= value < 1 << 31 else "i64")
            if value % DIVISIBLE == 0:
                multiples.add(name)
    return types, constants, multiples


def _compile(launch: Launch, capability: int, folder: Path) -> _Compiled:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = [p.name for p in launch.function.params]
    types, constants, multiples = _specialise(launch)
    source = ASTSource(
        fn=launch.function,
        signature=types,
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", DIVISIBLE]] for n in multiples},
    )
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))
    entry = compiled.metadata.name
    passed = tuple(n for n in names if n not in constants)
    ctypes = [CType.POINTER if types[n].startswith("*") else _CTYPES[types[n]] for n in passed]
    hidden = len(ptx_parameters(compiled.asm["ptx"], entry)) - len(passed)
    abi = KernelAbi(
        (*ctypes, *(CType.POINTER,) * hidden),
        {k: DIVISIBLE for k, n in enumerate(passed) if n in multiples},
        tuple(range(len(passed), len(passed) + hidden)),
    )
    path = folder / f"{entry}.ptx"
    path.write_text(compiled.asm["ptx"])
    resources = {entry: Resources(dynamic_shared_bytes=int(compiled.metadata.shared))}
    artifact = Artifact(ArtifactKind.CUBIN, path, "", f"sm_{capability}", {entry: abi}, resources, path)
    return _Compiled(artifact, passed, types, 32 * int(compiled.metadata.num_warps))


def run(
    launches: Sequence[Launch],
    tensors: Mapping[str, tuple[torch.Tensor, Access | None]],
    capability: int,
    folder: Path,
    options: VirtualGpuOptions,
) -> VirtualGpu:
    """Runs recorded launches as one plan.

    Args:
        tensors: every tensor that a kernel takes, by a name of our own, with its access; None is a workspace.

    Raises:
        VirtualGpuError: the run has faults.
    """
    compiled = [_compile(launch, capability, folder) for launch in launches]
    slots = {n: SlotSpec(t.dtype, tuple(t.shape), a) for n, (t, a) in tensors.items() if a is not None}
    workspaces = {n: WorkspaceSpec(t.dtype, tuple(t.shape)) for n, (t, a) in tensors.items() if a is None}
    names = {t.data_ptr(): n for n, (t, _) in tensors.items()}
    steps = []
    for launch, kernel in zip(launches, compiled, strict=True):
        (entry,) = kernel.artifact.abi
        args: list[Arg] = []
        for name in kernel.arguments:
            value = launch.arguments[name]
            if isinstance(value, torch.Tensor):
                args.append(SlotArg(names[value.data_ptr()]))
            else:
                args.append(ScalarArg(value, _CTYPES[kernel.types[name]]))
        args += [ScalarArg(0, CType.POINTER) for _ in kernel.artifact.abi[entry].hidden]
        grid = (*launch.grid, 1, 1)[:3]
        steps.append(KernelStep(entry, grid, tuple(args), (kernel.block, 1, 1)))
    gpu = VirtualGpu([k.artifact for k in compiled], options)
    bound = LaunchPlan(tuple(steps), slots, workspaces).bind({n: t for n, (t, _) in tensors.items()})
    gpu.prepare(bound)()
    return gpu
