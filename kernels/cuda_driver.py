"""The CUDA driver through `cuda.bindings`, loaded when it is first needed; errors say what failed and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .native import LaunchError

# What helps with the errors that a launch runs into, by the driver's own name of the error.
HINTS = {
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the binary is for another architecture: build for this GPU's compute capability",
    "CUDA_ERROR_INVALID_IMAGE": "the file is no cubin or is damaged: delete it from the cache and build anew",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the driver is older than the compiler: update the driver",
    "CUDA_ERROR_NOT_FOUND": "the binary has no such entry: it belongs to another version of the kernel",
    "CUDA_ERROR_INVALID_VALUE": "a dimension, a size or an attribute is beyond the limit of the device or the kernel",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "registers times threads, or shared memory, exceed a multiprocessor: "
    "fewer warps or smaller tiles",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": "the blocks of a cooperative grid must all be resident at once: "
    "a smaller grid",
    "CUDA_ERROR_OUT_OF_MEMORY": "free device memory, or ask for a smaller pool or workspace",
    "CUDA_ERROR_INVALID_CONTEXT": "no context of this device is current in the calling thread: use a tensor of the "
    "device there first (torch.cuda.set_device)",
    "CUDA_ERROR_INVALID_HANDLE": "a stream, event or function of another context, or one that no longer exists",
    "CUDA_ERROR_NOT_INITIALIZED": "call cuInit first: `load_driver` does",
    "CUDA_ERROR_NO_DEVICE": "this machine shows no NVIDIA GPU to the process: see CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel touched memory that is not its own, perhaps one launched earlier; the "
    "context is lost: start a new process, and look for it with compute-sanitizer",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "a kernel made a misaligned access, perhaps one launched earlier; the context is "
    "lost: start a new process, and look for it with compute-sanitizer",
    "CUDA_ERROR_LAUNCH_FAILED": "a kernel failed while it ran, perhaps one launched earlier; the context is lost: "
    "start a new process, and look for it with compute-sanitizer",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "the kernel ran too long for a GPU that drives a display",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "not allowed while a stream is captured: do it before the capture",
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": "an earlier call broke this capture: end it and capture anew",
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": "the default stream would wait for the captured one: use a stream of its own",
}
_FALLBACK_HINT = "see the CUDA driver API's documentation of this error"


class DriverError(LaunchError):
    """A driver call failed; `name` is the driver's name of the error, e.g. `CUDA_ERROR_INVALID_VALUE`."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class DriverUnavailable(LaunchError):
    """There is no CUDA driver in this process; the message says what is missing."""


def load_driver() -> Any:
    """`cuda.bindings.driver`, initialised. It creates no context.

    Raises:
        DriverUnavailable: the bindings are not installed, or there is no driver library or no GPU.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverUnavailable("cuda-bindings is not installed: pip install 'cuda-bindings>=13'") from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # how the bindings say that libcuda.so.1 is not there
        raise DriverUnavailable(f"no CUDA driver on this machine ({error}): install NVIDIA's driver") from error
    if int(status):
        name, text = describe(driver, status)
        raise DriverUnavailable(f"the CUDA driver does not start: {name} ({text}): {hint_for(name)}")
    return driver


def describe(driver: Any, status: Any) -> tuple[str, str]:
    """The driver's name of a status, and its one-line explanation."""
    texts = []
    for call in (driver.cuGetErrorName, driver.cuGetErrorString):
        code, text = call(status)
        texts.append(text.decode() if not int(code) and text else "")
    name = texts[0] or str(getattr(status, "name", f"CUresult {int(status)}"))
    return name, texts[1] or "no explanation"


def hint_for(name: str) -> str:
    """What to do about an error."""
    return HINTS.get(name, _FALLBACK_HINT)


def failure(driver: Any, status: Any, doing: str) -> DriverError:
    """The exception for a status that is not success.

    Args:
        doing: what was being done, with its sizes.
    """
    name, text = describe(driver, status)
    return DriverError(name, f"{doing}: {name} ({text}): {hint_for(name)}")


def call(driver: Any, function: Callable[..., Sequence[Any]], *args: Any, doing: str) -> Any:
    """The result of a driver call without its status: None, one value, or a tuple.

    Raises:
        DriverError: the status is not success.
    """
    status, *values = function(*args)
    if int(status):
        raise failure(driver, status, doing)
    return None if not values else values[0] if len(values) == 1 else tuple(values)
