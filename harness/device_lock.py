"""One timing at a time on a device, whoever asks: two tunes at once would each measure the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from pagedtune.kernels.artifact import cache_dir
from pagedtune.kernels.device import Device


class DeviceBusy(RuntimeError):
    """Another process held the device's lock for too long; the message says which lock and how long."""


@contextmanager
def device_lock(device: Device, timeout_s: float) -> Iterator[None]:
    """Holds the device for timing; the system releases it when the process ends, however it ends.

    Raises:
        DeviceBusy: another process has it and did not give it back in time.
        OSError: the cache folder cannot be written.
    """
    path = cache_dir() / "locks" / f"{device.name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=timeout_s, poll_interval=0.02)
    except Timeout as error:
        raise DeviceBusy(f"another process has been timing on {device.name} for {timeout_s:.0f} s ({path})") from error
    try:
        yield
    finally:
        lock.release()
