"""Runs launch plans on an NVIDIA GPU: cubins through the CUDA driver, on the caller's stream.

What a launch needs is made when it is prepared. The prepared function makes one driver call a step: it allocates
nothing on the device, waits for nothing and reads nothing back, so a stream that captures takes it into its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .arguments import PackedArguments, PointerOf, resolve_arguments
from .artifact import Artifact, ArtifactKind, KernelAbi, Resources
from .cuda_driver import call, failure, load_driver
from .launch import BoundPlan, CallStep, KernelStep, MemsetStep

DEFAULT_SHARED_BYTES = 48 << 10  # static and dynamic; beyond it a function must be told (CUDA C++ Programming Guide)
StreamOf = Callable[[], int]


def default_stream() -> int:
    """The legacy default stream."""
    return 0


@dataclass(frozen=True)
class _Kernel:
    function: Any
    abi: KernelAbi
    resources: Resources
    path: str


class CudaExecutor:
    """Runs plans whose kernels lie in cubins.

    Args:
        artifacts: cubins; each is loaded into the calling thread's current context, the primary one of device
            `ordinal` where there is none.
        driver: `cuda.bindings.driver`, or what stands in for it; loaded without.
        stream: gives the handle of the stream to launch on, asked at every launch.
        pointer_of: address of a tensor's first element on the device; its own without.
        ordinal: device whose context is used where none is current.

    Raises:
        DriverUnavailable: there is no CUDA driver.
        LaunchError: the driver refuses a binary; the message says which and why.
        ValueError: an artifact is no cubin.
    """

    def __init__(
        self,
        artifacts: Sequence[Artifact],
        driver: Any = None,
        stream: StreamOf = default_stream,
        pointer_of: PointerOf = torch.Tensor.data_ptr,
        ordinal: int = 0,
    ) -> None:
        self._driver = load_driver() if driver is None else driver
        self._stream, self._pointer_of = stream, pointer_of
        self._kernels: dict[str, _Kernel] = {}
        self._opted_in: dict[str, int] = {}
        self._modules: list[Any] = []
        self._ensure_context(ordinal)
        for artifact in artifacts:
            self._load(artifact)

    def close(self) -> None:
        """Unloads the binaries: no function that was prepared may run afterwards, and none may still be running."""
        modules, self._modules, self._kernels = self._modules, [], {}
        for module in modules:
            call(self._driver, self._driver.cuModuleUnload, module, doing="unloading a binary")

    def prepare(self, bound: BoundPlan) -> Callable[[], None]:
        """See `Executor.prepare`. The function raises LaunchError where the driver refuses the launch.

        Raises:
            ValueError: a step names an entry that no artifact has, or its arguments do not fit the binary's ABI.
            LaunchError: a block wants more shared memory than the device has.
        """
        calls = tuple(self._prepare_step(bound, step) for step in bound.plan.steps)
        if len(calls) == 1:
            return calls[0]

        def run() -> None:
            for launch in calls:
                launch()

        return run

    def _ensure_context(self, ordinal: int) -> None:
        driver = self._driver
        if int(call(driver, driver.cuCtxGetCurrent, doing="asking for the current context")):
            return
        device = call(driver, driver.cuDeviceGet, ordinal, doing=f"opening CUDA device {ordinal}")
        doing = f"retaining the primary context of CUDA device {ordinal}"
        context = call(driver, driver.cuDevicePrimaryCtxRetain, device, doing=doing)
        call(driver, driver.cuCtxSetCurrent, context, doing="making the primary context current")

    def _load(self, artifact: Artifact) -> None:
        if artifact.kind is not ArtifactKind.CUBIN:
            raise ValueError(f"{artifact.path} is a {artifact.kind} binary: a GPU runs cubins")
        driver, image = self._driver, artifact.path.read_bytes()
        doing = f"loading {artifact.path.name}, built for {artifact.target}"
        module = call(driver, driver.cuModuleLoadData, image, doing=doing)
        self._modules.append(module)
        for entry, abi in artifact.abi.items():
            doing = f"looking up {entry} in {artifact.path.name}"
            function = call(driver, driver.cuModuleGetFunction, module, entry.encode(), doing=doing)
            resources = artifact.resources.get(entry, Resources())
            self._kernels[entry] = _Kernel(function, abi, resources, artifact.path.name)

    def _prepare_step(self, bound: BoundPlan, step: KernelStep | MemsetStep | CallStep) -> Callable[[], None]:
        if isinstance(step, CallStep):
            function, tensors = step.function, bound.tensors
            return lambda: function(tensors)
        return self._prepare_memset(bound, step) if isinstance(step, MemsetStep) else self._prepare_kernel(bound, step)

    def _prepare_memset(self, bound: BoundPlan, step: MemsetStep) -> Callable[[], None]:
        driver, stream_of = self._driver, self._stream
        tensor = bound.tensors[step.workspace]
        address, num_bytes, byte = self._pointer_of(tensor), tensor.numel() * tensor.element_size(), step.byte
        memset = driver.cuMemsetD8Async

        def fill(_keep: object = tensor) -> None:
            (status,) = memset(address, byte, num_bytes, stream_of())
            if status:
                raise failure(driver, status, f"filling workspace {step.workspace!r}, {num_bytes} bytes")

        return fill

    def _prepare_kernel(self, bound: BoundPlan, step: KernelStep) -> Callable[[], None]:
        if step.entry not in self._kernels:
            raise ValueError(f"no artifact has the entry {step.entry!r}; there are {sorted(self._kernels) or 'none'}")
        kernel, driver, stream_of = self._kernels[step.entry], self._driver, self._stream
        packed = PackedArguments(resolve_arguments(bound, step, kernel.abi, self._pointer_of))
        shared_bytes = max(step.shared_bytes, kernel.resources.dynamic_shared_bytes)
        self._opt_in(step.entry, kernel, shared_bytes)
        configs: dict[int, Any] = {}
        function, params, launch = kernel.function, packed.address, driver.cuLaunchKernelEx

        # The default argument keeps alive what `params` and the kernel's pointers point at.
        def run(_keep: object = (packed, bound, self)) -> None:
            stream = stream_of()
            config = configs.get(stream)
            if config is None:  # a stream's first launch; a configuration is never changed, so threads may share it
                config = configs[stream] = launch_config(driver, step, shared_bytes, stream)
            (status,) = launch(config, function, params, 0)
            if status:
                raise failure(driver, status, _describe(step, kernel, shared_bytes))

        return run

    def _opt_in(self, entry: str, kernel: _Kernel, shared_bytes: int) -> None:
        """Allows a function more shared memory than every GPU grants unasked."""
        static = kernel.resources.static_shared_bytes
        if static + shared_bytes <= DEFAULT_SHARED_BYTES or shared_bytes <= self._opted_in.get(entry, 0):
            return
        driver = self._driver
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        doing = f"allowing {entry} {shared_bytes} bytes of dynamic and {static} of static shared memory a block"
        call(driver, driver.cuFuncSetAttribute, kernel.function, attribute, shared_bytes, doing=doing)
        self._opted_in[entry] = shared_bytes


def launch_config(driver: Any, step: KernelStep, shared_bytes: int, stream: int) -> Any:
    """The `CUlaunchConfig` of a step on a stream."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = step.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = step.block
    config.sharedMemBytes = shared_bytes
    config.hStream = driver.CUstream(stream)
    attributes = _launch_attributes(driver, step)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _launch_attributes(driver: Any, step: KernelStep) -> list[Any]:
    ids, attributes = driver.CUlaunchAttributeID, []

    def add(identity: Any) -> Any:
        attribute = driver.CUlaunchAttribute()
        attribute.id = identity
        attributes.append(attribute)
        return attribute.value

    if step.attributes.cooperative:
        add(ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE).cooperative = 1
    if step.attributes.programmatic_dependent_launch:
        add(ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION).programmaticStreamSerializationAllowed = 1
    if step.cluster != (1, 1, 1):
        value = add(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = step.cluster
    return attributes


def _describe(step: KernelStep, kernel: _Kernel, shared_bytes: int) -> str:
    resources = kernel.resources
    extras = [f"clusters of {step.cluster}"] if step.cluster != (1, 1, 1) else []
    extras += ["cooperative"] if step.attributes.cooperative else []
    return (
        f"launching {step.entry} of {kernel.path}: grid {step.grid}, block {step.block}, "
        f"{resources.registers} registers a thread, {resources.static_shared_bytes} static and {shared_bytes} dynamic "
        f"bytes of shared memory"
        f"{''.join(f', {extra}' for extra in extras)}"
    )
