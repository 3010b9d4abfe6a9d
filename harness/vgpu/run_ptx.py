"""Runs one entry of a PTX text on tensors: for experiments, and for tests of the virtual GPU itself."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from pagedtune.kernels.artifact import Artifact, ArtifactKind, KernelAbi, Resources
from pagedtune.kernels.launch import Arg, CType, KernelStep, LaunchAttributes, LaunchPlan, ScalarArg, SlotArg
from pagedtune.kernels.slot import Access, SlotSpec, WorkspaceSpec

from .report import RunReport
from .virtual_gpu import VirtualGpu, VirtualGpuOptions

Argument = tuple[torch.Tensor, Access] | torch.Tensor | int | float

FILE_HEADER = ".version 8.7\n.target sm_90\n.address_size 64\n"


def run_ptx(
    ptx: str,
    entry: str,
    arguments: Mapping[str, Argument],
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (32, 1, 1),
    shared_bytes: int = 0,
    options: VirtualGpuOptions | None = None,
    cooperative: bool = False,
) -> RunReport:
    """The report of one launch.

    Args:
        arguments: kernel arguments by name, in order: a tensor with its access, a contiguous tensor that is a
            workspace, an integer (i32; i64 where it does not fit), or a float (f32).

    Raises:
        PtxError: the PTX cannot be run.
        ValueError: the arguments do not fit the entry.
    """
    slots: dict[str, SlotSpec] = {}
    workspaces: dict[str, WorkspaceSpec] = {}
    tensors: dict[str, torch.Tensor] = {}
    args: list[Arg] = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            workspaces[name] = WorkspaceSpec(value.dtype, tuple(value.shape))
            tensors[name] = value
        elif isinstance(value, tuple):
            slots[name] = SlotSpec(value[0].dtype, tuple(value[0].shape), value[1])
            tensors[name] = value[0]
        args.append(_argument(name, value))
    attributes = LaunchAttributes(cooperative=cooperative)
    step = KernelStep(entry, grid, tuple(args), block, shared_bytes=shared_bytes, attributes=attributes)
    abi = KernelAbi(tuple(_ctype(a) for a in args))
    with tempfile.TemporaryDirectory(prefix="pagedtune-ptx-") as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        resources = {entry: Resources()}
        artifact = Artifact(ArtifactKind.CUBIN, path, "", "", {entry: abi}, resources, path)
        gpu = VirtualGpu((artifact,), replace(options or VirtualGpuOptions(), raise_faults=False))
    gpu.prepare(LaunchPlan((step,), slots, workspaces).bind(tensors))()
    return gpu.report


def _argument(name: str, value: Argument) -> Arg:
    if isinstance(value, int):
        return ScalarArg(value, CType.I32 if -(1 << 31) <= value < 1 << 31 else CType.I64)
    return ScalarArg(value, CType.F32) if isinstance(value, float) else SlotArg(name)


def _ctype(arg: Arg) -> CType:
    return arg.ctype if isinstance(arg, ScalarArg) else CType.POINTER
