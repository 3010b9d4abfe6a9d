"""Runs a stage in a forked child: what hangs, crashes or breaks the CUDA context ends there.

The parent must not have touched CUDA, nor have computed with torch: neither survives a fork.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Args:
        status: `done`, `raised`, `crashed`, `stuck` (see `time_limit`) or `timeout`.
        value: what the function returned, if done.
        message: the exception with its place, or the signal.
        seconds: wall-clock time.
    """

    status: str
    value: Any = None
    message: str = ""
    seconds: float = 0.0


_STUCK_EXIT = 1  # what faulthandler ends a process with; nothing else here does


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends this process, its stack on stderr, where the block is still running after `seconds`: even where it waits
    for a kernel that never ends, which Python cannot be called back from."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)  # stderr itself, whatever Python makes of it
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def run_in_child(function: Callable[[], Any], limit_s: float, nested: bool = False) -> Ended:
    """Runs `function` in a child for at most `limit_s` seconds; then the child and all that it started are ended.

    Args:
        function: returns plain JSON.
        nested: the caller is such a child itself; the new one then ends with it, and starts nothing of its own.
    """
    started = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(function, writer, nested)
    os.close(writer)
    if not nested:
        with suppress(OSError):  # the child does it as well; whoever is first
            os.setpgid(pid, pid)
    text, in_time = _read_all(reader, started + limit_s)
    os.close(reader)
    with suppress(ProcessLookupError):
        if nested:
            os.kill(pid, signal.SIGKILL)
        else:
            os.killpg(pid, signal.SIGKILL)  # what the child itself started, too
    _, code = os.waitpid(pid, 0)
    seconds = time.monotonic() - started
    if not in_time:
        return Ended("timeout", message=f"ended after {limit_s:.0f} s", seconds=seconds)
    if not text and os.waitstatus_to_exitcode(code) == _STUCK_EXIT:
        return Ended("stuck", message="did not end in its time", seconds=seconds)
    if not text:
        return Ended("crashed", message=f"ended without a word (wait status {code})", seconds=seconds)
    data = json.loads(text)
    return Ended(data["status"], data.get("value"), data.get("message", ""), seconds)


def _read_all(reader: int, deadline: float) -> tuple[bytes, bool]:
    """All that the child writes, and whether it came to an end in time."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return b"".join(parts), False
        part = os.read(reader, 1 << 16)
        if not part:
            return b"".join(parts), True
        parts.append(part)


def _child(function: Callable[[], Any], writer: int, nested: bool) -> None:
    if not nested:
        os.setpgid(0, 0)
    try:
        data = {"status": "done", "value": function()}
    except BaseException as error:  # noqa: BLE001 - whatever a stage raises is a result of the day
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        data = {"status": "raised", "message": f"{type(error).__name__}: {error} ({where})"}
    remaining = json.dumps(data).encode()
    while remaining:
        remaining = remaining[os.write(writer, remaining) :]
    os.close(writer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no clean-up of what belongs to the parent
