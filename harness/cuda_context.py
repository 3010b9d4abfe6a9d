"""A CUDA device through the driver alone: context, memory, streams, events and graphs, for the gate and the timer."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from pagedtune.harness.nvidia import short_name
from pagedtune.kernels.cuda_driver import DriverError, call, load_driver
from pagedtune.kernels.device import Device, DeviceKind

ALIGNMENT = 256  # of what cuMemAlloc gives, at least (CUDA C++ Programming Guide, "Device Memory Accesses")


class CudaContext:
    """The primary context of one device, current in the thread that made it; `close` gives it back.

    Args:
        driver: `cuda.bindings.driver`, or what stands in for it; loaded without.
        ordinal: which device.

    Raises:
        LaunchError: there is no driver or no such device.
    """

    def __init__(self, driver: Any = None, ordinal: int = 0) -> None:
        self.driver = load_driver() if driver is None else driver
        self.emulated = bool(getattr(self.driver, "emulated", False))
        self._closed = self._capturing = False
        self._deferred: list[tuple[str, Any]] = []
        self._device = self.call("cuDeviceGet", ordinal, doing=f"opening CUDA device {ordinal}")
        context = self.call("cuDevicePrimaryCtxRetain", self._device, doing="retaining the primary context")
        self.call("cuCtxSetCurrent", context, doing="making the primary context current")
        flags = int(self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.stream = int(self.call("cuStreamCreate", flags, doing="making a stream"))

    def call(self, name: str, *args: Any, doing: str) -> Any:
        """The result of a driver call, as `kernels.cuda_driver.call`."""
        return call(self.driver, getattr(self.driver, name), *args, doing=doing)

    def __enter__(self) -> CudaContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives stream and context back; a context that a fault has broken is given back all the same."""
        self._closed = True
        with contextlib.suppress(DriverError):
            self.call("cuStreamDestroy", self.stream, doing="ending the stream")
        with contextlib.suppress(DriverError):
            self.call("cuDevicePrimaryCtxRelease", self._device, doing="releasing the primary context")

    def discard(self, name: str, handle: Any) -> None:
        """Gives an object back when nothing refers to it: in a closed context it is gone, and its handle may be reused.

        Nothing can be reported from here: after a fault the driver refuses, and the context is lost anyway.
        """
        if self._capturing:  # freeing memory would break the capture: the garbage collector picks its moment
            self._deferred.append((name, handle))
        elif not self._closed:
            getattr(self.driver, name)(handle)

    def attribute(self, name: str) -> int:
        """A device attribute, e.g. `MULTIPROCESSOR_COUNT`."""
        which = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", which, self._device, doing=f"reading {name}"))

    def device(self) -> Device:
        """The facts of the device that the driver tells; bandwidth from memory clock and bus width, if it has them."""
        raw = self.call("cuDeviceGetName", 256, self._device, doing="reading the device's name")
        product = raw.partition(b"\0")[0].decode(errors="replace").strip()
        clock_khz, bits = self.attribute("MEMORY_CLOCK_RATE"), self.attribute("GLOBAL_MEMORY_BUS_WIDTH")
        return Device(
            name=short_name(product),
            kind=DeviceKind.CUDA,
            product=product,
            capability=10 * self.attribute("COMPUTE_CAPABILITY_MAJOR") + self.attribute("COMPUTE_CAPABILITY_MINOR"),
            num_units=self.attribute("MULTIPROCESSOR_COUNT"),
            registers_per_unit=self.attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
            shared_bytes_per_block=self.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            shared_bytes_per_unit=self.attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
            l2_bytes=self.attribute("L2_CACHE_SIZE"),
            memory_bytes=int(self.call("cuDeviceTotalMem", self._device, doing="reading the size of memory")),
            bandwidth_gb_s=2 * clock_khz * bits / 8 / 1e6 if clock_khz and bits else None,
            base_clock_mhz=None,  # the driver tells only the boost clock
        )

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """Uninitialised device memory.

        Raises:
            DriverError: there is not that much.
        """
        return DeviceMemory(self, num_bytes)

    def upload(self, tensor: torch.Tensor) -> DeviceMemory:
        """A copy of a contiguous CPU tensor on the device."""
        memory = self.allocate(tensor.numel() * tensor.element_size())
        memory.copy_from(tensor)
        return memory

    def synchronise(self, doing: str = "waiting for the stream") -> None:
        """Waits for the stream; raises DriverError where something launched before has failed."""
        self.call("cuStreamSynchronize", self.stream, doing=doing)

    def capture(self, launch: Callable[[], None]) -> Graph:
        """The graph of what `launch` does on this context's stream."""
        mode = self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCapture", self.stream, mode, doing="beginning a capture")
        self._capturing = True
        try:
            launch()
        except BaseException:
            with contextlib.suppress(DriverError):
                graph = self.call("cuStreamEndCapture", self.stream, doing="ending a capture that failed")
                self.call("cuGraphDestroy", graph, doing="dropping its graph")
            raise
        else:
            return Graph(self, self.call("cuStreamEndCapture", self.stream, doing="ending a capture"))
        finally:
            self._capturing = False
            deferred, self._deferred = self._deferred, []
            for name, handle in deferred:
                self.discard(name, handle)


class DeviceMemory:
    """Device memory, freed with `free` or when nothing refers to it any more.

    Args:
        address: of its first byte.
        num_bytes: its size; none is allocated for 0.
    """

    def __init__(self, context: CudaContext, num_bytes: int) -> None:
        self._context, self.num_bytes = context, num_bytes
        size = max(num_bytes, 1)
        self.address = int(context.call("cuMemAlloc", size, doing=f"allocating {size} bytes on the device"))
        self._finaliser = weakref.finalize(self, context.discard, "cuMemFree", self.address)
        self._finaliser.atexit = False

    def free(self) -> None:
        """Gives it back; a second time does nothing."""
        if self._finaliser.detach():
            self._context.call("cuMemFree", self.address, doing=f"freeing {self.num_bytes} bytes")

    def copy_from(self, tensor: torch.Tensor, offset: int = 0) -> None:
        """Copies a contiguous CPU tensor to byte `offset`, and waits."""
        num_bytes = _check_copy(tensor, offset, self.num_bytes)
        if num_bytes:
            # On the stream, not `cuMemcpyHtoD`: that may return before the bytes have arrived, and this stream does not
            # wait for the default one.
            args = (self.address + offset, tensor.data_ptr(), num_bytes, self._context.stream)
            self._context.call("cuMemcpyHtoDAsync", *args, doing=f"copying {num_bytes} bytes to the device")
            self._context.synchronise(f"waiting for a copy of {num_bytes} bytes to the device")

    def copy_to(self, tensor: torch.Tensor, offset: int = 0) -> None:
        """Fills a contiguous CPU tensor from byte `offset`, and waits."""
        num_bytes = _check_copy(tensor, offset, self.num_bytes)
        if num_bytes:
            args = (tensor.data_ptr(), self.address + offset, num_bytes, self._context.stream)
            self._context.call("cuMemcpyDtoHAsync", *args, doing=f"copying {num_bytes} bytes from the device")
            self._context.synchronise(f"waiting for a copy of {num_bytes} bytes from the device")

    def fill(self, byte: int) -> None:
        """Sets every byte, on the context's stream."""
        args = (self.address, byte, self.num_bytes, self._context.stream)
        self._context.call("cuMemsetD8Async", *args, doing=f"filling {self.num_bytes} bytes")


def _check_copy(tensor: torch.Tensor, offset: int, available: int) -> int:
    num_bytes = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"a copy wants a contiguous CPU tensor, not {tensor.device} with strides {tensor.stride()}")
    if not 0 <= offset <= available - num_bytes:
        raise ValueError(f"{num_bytes} bytes at offset {offset} do not fit into {available}")
    return num_bytes


class Graph:
    """An instantiated graph on a context's stream."""

    def __init__(self, context: CudaContext, graph: Any) -> None:
        self._context = context
        try:
            self._executable = context.call("cuGraphInstantiate", graph, 0, doing="instantiating a graph")
        finally:
            context.call("cuGraphDestroy", graph, doing="dropping a graph")
        self._finaliser = weakref.finalize(self, context.discard, "cuGraphExecDestroy", self._executable)
        self._finaliser.atexit = False

    def replay(self) -> None:
        """Launches it once."""
        self._context.call("cuGraphLaunch", self._executable, self._context.stream, doing="replaying a graph")


class Timer:
    """Two events on a context's stream."""

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._events = [context.call("cuEventCreate", 0, doing="making an event") for _ in range(2)]
        for event in self._events:
            weakref.finalize(self, context.discard, "cuEventDestroy", event).atexit = False

    def start(self) -> None:
        """Marks the beginning."""
        self._context.call("cuEventRecord", self._events[0], self._context.stream, doing="recording an event")

    def stop(self) -> None:
        """Marks the end."""
        self._context.call("cuEventRecord", self._events[1], self._context.stream, doing="recording an event")

    def around(self, graph: Graph) -> float | None:
        """Microseconds of one replay; None on an emulated device: it has no time.

        An untimed replay goes ahead. While the device is busy with it, the marks and the replay between them are
        queued; an idle device would mark the beginning at once, and the host's way to the launch would be part of the
        time.
        """
        if not self._context.emulated:
            graph.replay()
        self.start()
        graph.replay()
        self.stop()
        return self.elapsed_us()

    def elapsed_us(self) -> float | None:
        """Microseconds between the marks, after waiting for the second; None on an emulated device: it has no time."""
        self._context.call("cuEventSynchronize", self._events[1], doing="waiting for an event")
        if self._context.emulated:
            return None
        return 1e3 * float(self._context.call("cuEventElapsedTime", *self._events, doing="reading the elapsed time"))
