"""Which executor runs which binaries on which device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .artifact import Artifact, ArtifactKind
from .cuda_executor import CudaExecutor
from .device import DeviceKind
from .launch import Executor
from .native import NativeExecutor


def make_executor(kind: DeviceKind, artifacts: Sequence[Artifact]) -> Executor:
    """The executor for a variant's binaries (none: its plan calls host functions, which run wherever the tensors lie).

    On a GPU it launches on torch's current stream of the current device.

    Raises:
        ValueError: a binary is not for this kind of device.
        LaunchError: a binary does not load here.
    """
    wanted = ArtifactKind.CUBIN if kind is DeviceKind.CUDA else ArtifactKind.NATIVE
    for artifact in artifacts:
        if artifact.kind is not wanted:
            raise ValueError(f"{artifact.path} is a {artifact.kind} binary: a {kind} device runs {wanted} ones")
    if kind is DeviceKind.CPU or not artifacts:
        return NativeExecutor(artifacts)
    return CudaExecutor(artifacts, stream=current_stream, ordinal=torch.cuda.current_device())


def current_stream() -> int:
    """Handle of torch's current stream."""
    return int(torch.cuda.current_stream().cuda_stream)


def torch_device(kind: DeviceKind) -> torch.device:
    """Where the tensors of a kind of device lie."""
    return torch.device("cuda" if kind is DeviceKind.CUDA else "cpu")
