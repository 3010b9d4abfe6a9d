"""The child side of `harness/worker.py`: takes one job at a time, answers on a private socket.

Started as `python -m pagedtune.harness.worker_main CHANNEL_FD LIFELINE_FD OPTIONS`, always in a process group of its
own. Nothing heavy is imported before the lifeline is armed.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADER = struct.Struct("!Q")  # length of the frame that follows, in bytes
MAX_FRAME_BYTES = 64 << 20  # far above any result of a job (a few kB); a larger one is a mistake of the job
MAX_MESSAGE_CHARS = 400


def main(argv: list[str]) -> int:
    """Serves until the parent closes the channel."""
    channel_fd, lifeline_fd, options = int(argv[0]), int(argv[1]), json.loads(argv[2])
    _die_with_parent(lifeline_fd)
    os.set_inheritable(channel_fd, False)
    _report_faults()
    channel = socket.socket(fileno=channel_fd)
    try:
        for name in options["preload"]:
            importlib.import_module(name)
    except ImportError as error:
        _send(channel, _failure(error))
        return 1
    _limit_memory(options["memory_limit_bytes"])
    gc.freeze()  # what is preloaded stays: collections need not walk it again and again
    _send(channel, json.dumps({"result": "ready"}).encode())
    own_pid = os.getpid()
    while (request := _receive(channel)) is not None:
        answer = _perform(request)
        if os.getpid() != own_pid:  # the job forked and its child came back here: one process answers, not two
            os._exit(0)
        _send(channel, answer)
    return 0


def _die_with_parent(lifeline_fd: int) -> None:
    """Has the kernel kill this process group once the parent's end of the pipe is gone, however the parent ended.

    Signal-driven I/O on a pipe that nobody writes to: unlike a watching thread it also works while a job holds the
    interpreter lock, and unlike a parent-death signal it does not depend on which thread of the parent started us.
    """
    os.set_inheritable(lifeline_fd, False)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgid(0))
    fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
    if select.select([lifeline_fd], [], [], 0)[0]:  # the parent was gone before the signal was armed
        os._exit(1)


def _report_faults() -> None:
    """On a fatal signal, and on SIGUSR1, the Python stack goes to stderr, where the parent looks for the place."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(file=2, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)


def _limit_memory(limit_bytes: int | None) -> None:
    """Allows `limit_bytes` of address space above what the interpreter and the preloaded modules take by now."""
    if limit_bytes is None:
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    total = pages * resource.getpagesize() + limit_bytes
    resource.setrlimit(resource.RLIMIT_AS, (total, total))


def _perform(request: dict[str, Any]) -> bytes:
    """Runs one job and returns the answer, encoded. The worker boundary: whatever the job raises is an answer."""
    try:
        result = _resolve(request["job"])(request["payload"])
    except BaseException as error:  # noqa: BLE001  foreign code may raise anything, SystemExit included
        return _failure(error)
    try:
        data = json.dumps({"result": result}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return _encode_error("NotJson", f"the job's result is not JSON: {_one_line(error)}")
    if len(data) > MAX_FRAME_BYTES:
        message = f"the job's result takes {len(data)} bytes as JSON; at most {MAX_FRAME_BYTES} are passed on"
        return _encode_error("ResultTooLarge", message)
    return data


def _resolve(job: str) -> Callable[[Any], Any]:
    module, _, function = job.partition(":")
    found = getattr(importlib.import_module(module), function)
    return found  # type: ignore[no-any-return]


def _failure(error: BaseException) -> bytes:
    return _encode_error(type(error).__name__, _one_line(error), _place(error))


def _encode_error(kind: str, message: str, where: str = "") -> bytes:
    return json.dumps({"error": kind, "message": message, "where": where}).encode()


def _one_line(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001  a foreign exception's own __str__
        text = "(its message cannot be printed)"
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 3] + "..."


def _place(error: BaseException) -> str:
    """File and line where it was raised: the innermost frame outside installed packages, else the innermost."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith("<frozen")]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _send(channel: socket.socket, data: bytes) -> None:
    channel.sendall(HEADER.pack(len(data)) + data)


def _receive(channel: socket.socket) -> dict[str, Any] | None:
    """The next request, None once the parent has closed the channel."""
    header = _receive_exactly(channel, HEADER.size)
    if header is None:
        return None
    data = _receive_exactly(channel, HEADER.unpack(header)[0])
    return None if data is None else json.loads(data)


def _receive_exactly(channel: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
