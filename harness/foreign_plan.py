"""Recorded launches of other projects' Triton kernels as binaries and one plan, and their run on the virtual GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedtune.kernels.artifact import Artifact, KernelAbi, content_key
from pagedtune.kernels.cubin import Compiled, ptx_parameters, store
from pagedtune.kernels.launch import (
    Access,
    Arg,
    CType,
    KernelStep,
    LaunchAttributes,
    LaunchPlan,
    ScalarArg,
    SlotArg,
)
from pagedtune.kernels.slot import SlotSpec, WorkspaceSpec

from .foreign import Launch
from .vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions

DIVISIBLE = 16  # Triton's launcher tells the compiler which pointers and integers are multiples of 16
_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip
_CTYPES = {"i32": CType.I32, "i64": CType.I64, "fp32": CType.F32}


@dataclass(frozen=True)
class _Built:
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


def _build(launch: Launch, capability: int) -> _Built:
    """Compiled ahead of time, as Triton's launcher would compile it; binary and PTX lie in the user's cache."""
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
    entry, ptx, cubin = compiled.metadata.name, compiled.asm["ptx"], compiled.asm["cubin"]
    passed = tuple(n for n in names if n not in constants)
    ctypes = [CType.POINTER if types[n].startswith("*") else _CTYPES[types[n]] for n in passed]
    hidden = len(ptx_parameters(ptx, entry)) - len(passed)
    abi = KernelAbi(
        (*ctypes, *(CType.POINTER,) * hidden),
        {k: DIVISIBLE for k, n in enumerate(passed) if n in multiples},
        tuple(range(len(passed), len(passed) + hidden)),
    )
    shared = {entry: int(compiled.metadata.shared)}
    key = content_key({"ptx": ptx, "types": types, "multiples": sorted(multiples), "shared": shared})
    built = Compiled(cubin, ptx, "triton", (), f"sm_{capability}", {entry: abi}, shared)
    return _Built(store(entry, key, built), passed, types, 32 * int(compiled.metadata.num_warps))


Tensors = Mapping[str, tuple[torch.Tensor, Access | None]]


def plan_of(launches: Sequence[Launch], tensors: Tensors, capability: int) -> tuple[tuple[Artifact, ...], LaunchPlan]:
    """Recorded launches as artifacts and one plan over the named tensors.

    Args:
        launches: in order.
        tensors: every tensor that a kernel takes, by a name of our own, with its access; None is a workspace.
        capability: compute capability that is compiled for, e.g. 90.
    """
    built = [_build(launch, capability) for launch in launches]
    slots = {n: SlotSpec(t.dtype, tuple(t.shape), a) for n, (t, a) in tensors.items() if a is not None}
    workspaces = {n: WorkspaceSpec(t.dtype, tuple(t.shape)) for n, (t, a) in tensors.items() if a is None}
    names = {t.data_ptr(): n for n, (t, _) in tensors.items()}
    steps = []
    for launch, kernel in zip(launches, built, strict=True):
        (entry,) = kernel.artifact.abi
        args: list[Arg] = []
        for name in kernel.arguments:
            value = launch.arguments[name]
            if isinstance(value, torch.Tensor):
                args.append(SlotArg(names[value.data_ptr()]))
            else:
                args.append(ScalarArg(value, _CTYPES[kernel.types[name]]))
        args += [ScalarArg(0, CType.POINTER) for _ in kernel.artifact.abi[entry].hidden]
        x, y, z = (*launch.grid, 1, 1)[:3]
        attributes = LaunchAttributes(programmatic_dependent_launch=bool(launch.options.get("launch_pdl")))
        steps.append(KernelStep(entry, (x, y, z), tuple(args), (kernel.block, 1, 1), attributes=attributes))
    return tuple(k.artifact for k in built), LaunchPlan(tuple(steps), slots, workspaces)


def run(launches: Sequence[Launch], tensors: Tensors, capability: int, options: VirtualGpuOptions) -> VirtualGpu:
    """Runs recorded launches as one plan; arguments as of `plan_of`.

    Raises:
        VirtualGpuError: the run has faults.
    """
    artifacts, plan = plan_of(launches, tensors, capability)
    gpu = VirtualGpu(artifacts, options)
    gpu.prepare(plan.bind({n: t for n, (t, _) in tensors.items()}))()
    return gpu
