"""A stand-in for `cuda.bindings.driver` on a machine without a GPU: it records every call, and it executes.

It has the calls that `kernels/cuda_executor.py` and `harness/cuda_context.py` make, with the same signatures and
results, and takes the very structures and enumerations of `cuda.bindings`, which need no driver. A launch reads its
parameters through the caller's pointers and runs the PTX of the binary on the virtual GPU, so wrong packing gives
wrong answers. Misuse is refused with the error that the driver documents for it. Nothing takes time here: elapsed
times are not supported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from pagedtune.harness.standin_launch import (
    Function,
    LaunchRecord,
    execute,
    functions_of,
    read_params,
    refuse_launch,
    status_of,
)
from pagedtune.harness.standin_memory import StandInMemory
from pagedtune.harness.standin_state import Context, Refused, api
from pagedtune.harness.standin_streams import StandInStreams
from pagedtune.harness.vgpu.report import Fault
from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.device import Device

_TEXTS = {
    "CUDA_SUCCESS": "no error",
    "CUDA_ERROR_INVALID_VALUE": "invalid argument",
    "CUDA_ERROR_OUT_OF_MEMORY": "out of memory",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "no kernel image is available for execution on the device",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "too many resources requested for launch",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an illegal memory access was encountered",
}


class StandInDriver(StandInStreams):
    """See the module.

    Args:
        device: facts of every device that it shows; its memory is what is allocated from.
        artifacts: binaries that can be loaded; `know` adds more.
        num_devices: how many devices.

    Attributes:
        calls, launches: what was asked, in order.
        faults: what the virtual GPU found in the launches.
    """

    emulated = True

    def __init__(self, device: Device, artifacts: Sequence[Artifact] = (), num_devices: int = 1) -> None:
        super().__init__(num_devices)
        self._device = device
        self.launches: list[LaunchRecord] = []
        self.faults: list[Fault] = []
        self._known: dict[str, Artifact] = {}
        self.know(*artifacts)

    def know(self, *artifacts: Artifact) -> None:
        """Makes binaries loadable: a module is found by the bytes that it is loaded from."""
        for artifact in artifacts:
            self._known[hashlib.sha256(artifact.path.read_bytes()).hexdigest()] = artifact

    # Devices and contexts.

    @api(context=False)
    def cuInit(self, flags: int) -> None:
        self.initialised = True

    def cuGetErrorName(self, error: Any) -> tuple[Any, bytes]:
        return self.CUresult.CUDA_SUCCESS, error.name.encode()

    def cuGetErrorString(self, error: Any) -> tuple[Any, bytes]:
        return self.CUresult.CUDA_SUCCESS, _TEXTS.get(error.name, "as the CUDA driver API documents").encode()

    @api(1, context=False)
    def cuDriverGetVersion(self) -> int:
        return 13000

    @api(1, context=False)
    def cuDeviceGet(self, ordinal: int) -> Any:
        if not 0 <= ordinal < self.num_devices:
            raise Refused("CUDA_ERROR_INVALID_DEVICE")
        return self.types.CUdevice(ordinal)

    @api(1, context=False)
    def cuDeviceGetName(self, length: int, device: Any) -> bytes:
        return self._device.product.encode()[: length - 1].ljust(length, b"\0")

    @api(1, context=False)
    def cuDeviceGetPCIBusId(self, length: int, device: Any) -> bytes:
        return f"0000:{int(device):02X}:00.0".encode().ljust(length, b"\0")

    @api(1, context=False)
    def cuDeviceTotalMem(self, device: Any) -> int:
        return self._device.memory_bytes or 1 << 34

    @api(1, context=False)
    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> int:
        facts = {
            "MULTIPROCESSOR_COUNT": self._device.num_units,
            "MAX_REGISTERS_PER_MULTIPROCESSOR": self._device.registers_per_unit,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": self._device.shared_bytes_per_block,
            "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": self._device.shared_bytes_per_unit,
            "L2_CACHE_SIZE": self._device.l2_bytes or 0,
            "COMPUTE_CAPABILITY_MAJOR": self._device.capability // 10,
            "COMPUTE_CAPABILITY_MINOR": self._device.capability % 10,
        }
        return facts.get(attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_"), 0)

    @api(1, context=False)
    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        handle = 0x100 + int(device)
        if handle not in self.contexts:
            self.contexts[handle] = Context(int(device), StandInMemory(self._device.memory_bytes or 1 << 34))
        self.contexts[handle].holders += 1
        return self.types.CUcontext(handle)

    @api(context=False)
    def cuDevicePrimaryCtxRelease(self, device: Any) -> None:
        handle = 0x100 + int(device)
        if handle not in self.contexts:
            raise Refused("CUDA_ERROR_INVALID_CONTEXT")
        self.contexts[handle].holders -= 1
        if not self.contexts[handle].holders:
            del self.contexts[handle]

    @api(1, context=False)
    def cuCtxGetCurrent(self) -> Any:
        return self.types.CUcontext(self.current)

    @api(context=False)
    def cuCtxSetCurrent(self, context: Any) -> None:
        if int(context) and int(context) not in self.contexts:
            raise Refused("CUDA_ERROR_INVALID_CONTEXT")
        self.current = int(context)

    # Memory.

    @api(1, in_capture=False)
    def cuMemAlloc(self, num_bytes: int) -> Any:
        if num_bytes <= 0:
            raise Refused("CUDA_ERROR_INVALID_VALUE")
        address = self.here.memory.allocate(num_bytes)
        if not address:
            raise Refused("CUDA_ERROR_OUT_OF_MEMORY")
        return self.types.CUdeviceptr(address)

    @api(in_capture=False)
    def cuMemFree(self, address: Any) -> None:
        self.here.memory.free(int(address))

    @api(in_capture=False)  # from pageable memory it cannot be part of a graph
    def cuMemcpyHtoDAsync(self, destination: Any, source: int, num_bytes: int, stream: Any) -> None:
        self.stream_of(stream)
        memory = self.here.memory
        memory.copy(memory.host_address(int(destination), num_bytes), source, num_bytes)

    @api(in_capture=False)
    def cuMemcpyDtoHAsync(self, destination: int, source: Any, num_bytes: int, stream: Any) -> None:
        self.stream_of(stream)
        memory = self.here.memory
        memory.copy(destination, memory.host_address(int(source), num_bytes), num_bytes)

    @api()
    def cuMemcpyDtoDAsync(self, destination: Any, source: Any, num_bytes: int, stream: Any) -> None:
        memory = self.here.memory
        to, origin = (memory.host_address(int(address), num_bytes) for address in (destination, source))
        self.submit(self.stream_of(stream), lambda: memory.copy(to, origin, num_bytes))

    @api()
    def cuMemsetD8Async(self, address: Any, byte: int, num_bytes: int, stream: Any) -> None:
        memory = self.here.memory
        host = memory.host_address(int(address), num_bytes)
        self.submit(self.stream_of(stream), lambda: memory.fill(host, byte, num_bytes))

    # Binaries and launches.

    @api(1, in_capture=False)
    def cuModuleLoadData(self, image: bytes) -> Any:
        artifact = self._known.get(hashlib.sha256(image).hexdigest())
        if artifact is None:
            raise Refused("CUDA_ERROR_INVALID_IMAGE")
        digits = int("".join(c for c in artifact.target if c.isdigit()) or 0)
        # A cubin runs on its own architecture, and on later ones of the same major (CUDA C++ Programming Guide).
        if digits // 10 != self._device.capability // 10 or digits > self._device.capability:
            raise Refused("CUDA_ERROR_NO_BINARY_FOR_GPU")
        module, entries = self.new_handle("CUmodule"), {}
        for entry, function in functions_of(artifact, self.current).items():
            handle = next(self._handles)
            self.here.functions[handle] = function
            entries[entry] = handle
        self.here.modules[int(module)] = entries
        return module

    @api(in_capture=False)
    def cuModuleUnload(self, module: Any) -> None:
        for handle in self.find("modules", module).values():
            del self.here.functions[handle]
        del self.here.modules[int(module)]

    @api(1)
    def cuModuleGetFunction(self, module: Any, name: bytes) -> Any:
        entries = self.find("modules", module)
        if name.decode() not in entries:
            raise Refused("CUDA_ERROR_NOT_FOUND")
        return self.types.CUfunction(entries[name.decode()])

    @api()
    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: int) -> None:
        found: Function = self.find("functions", function)
        if attribute != self.types.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            raise Refused("CUDA_ERROR_NOT_SUPPORTED")
        if value + found.program.static_shared > (self._device.shared_bytes_per_block or 1 << 30):
            raise Refused("CUDA_ERROR_INVALID_VALUE")
        found.max_dynamic_shared = value

    @api()
    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> None:
        found: Function = self.find("functions", function)
        stream, context = self.stream_of(config.hStream), self.here
        launch = _record(self.types, found, config, params)
        self.launches.append(launch)
        refused = refuse_launch(found, launch, self._device)
        if refused is not None:
            raise Refused(refused)
        self.submit(stream, lambda: self._execute(context, found, launch))

    def _execute(self, context: Context, function: Function, launch: LaunchRecord) -> None:
        if context.error:
            return
        faults = execute(function, launch, context.memory)
        self.faults += faults
        if faults:  # a later call reports it
            context.error = status_of(faults[0])


def _record(types: Any, function: Function, config: Any, params: int) -> LaunchRecord:
    ids = types.CUlaunchAttributeID
    given = {attribute.id: attribute.value for attribute in config.attrs[: config.numAttrs]}
    if len(given) != config.numAttrs:
        raise Refused("CUDA_ERROR_INVALID_VALUE")
    cluster = given.get(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
    cooperative = given.get(ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
    programmatic = given.get(ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
    return LaunchRecord(
        function.entry,
        (config.gridDimX, config.gridDimY, config.gridDimZ),
        (config.blockDimX, config.blockDimY, config.blockDimZ),
        config.sharedMemBytes,
        int(config.hStream),
        read_params(function.program, params),
        cooperative is not None and bool(cooperative.cooperative),
        programmatic is not None and bool(programmatic.programmaticStreamSerializationAllowed),
        (1, 1, 1) if cluster is None else (cluster.clusterDim.x, cluster.clusterDim.y, cluster.clusterDim.z),
    )
