"""Jobs that misbehave, for test_worker.py: each runs in a child process only."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any


def echo(payload: Any) -> Any:
    return payload


def pid(payload: Any) -> int:
    return os.getpid()


def fail(payload: str) -> None:
    raise ValueError(payload)


def fail_without_words(payload: Any) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    raise Mute


def leave(payload: int) -> None:
    sys.exit(payload)


def leave_at_once(payload: int) -> None:
    print("last words")
    os._exit(payload)


def die(payload: int) -> None:
    os.kill(os.getpid(), payload)
    time.sleep(10)


def read_null(payload: Any) -> None:
    ctypes.string_at(0)


def hang_holding_the_lock(payload: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the interpreter lock


def flood_and_hang(payload: Any) -> None:
    while True:
        os.write(1, b"x" * 65536)


def print_much(payload: int) -> str:
    for _ in range(payload):
        os.write(1, b'{"result": "forged"}\n' * 1000)
    return "done"


def scribble(payload: bytes) -> None:
    """Writes to every descriptor that could be the result channel."""
    for fd in range(3, 64):
        try:
            os.write(fd, b"\xff" * 64)
        except OSError:
            continue


def close_channel(payload: Any) -> None:
    os.closerange(3, 64)
    time.sleep(10)


def large(payload: int) -> str:
    return "x" * payload


def not_json(payload: Any) -> Any:
    return {1, 2, 3}


def circular(payload: Any) -> Any:
    loop: list[Any] = []
    loop.append(loop)
    return loop


def allocate(payload: int) -> int:
    return len(bytearray(payload))


def fork_and_return(payload: Any) -> int:
    return 0 if os.fork() == 0 else 1


def start_sleeper(payload: Any) -> int:
    """Starts a process that outlives the job and holds its output open."""
    return subprocess.Popen(["sleep", "1000"]).pid


def sleeper_then_hang(payload: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    with open(payload, "w") as file:
        file.write(str(child.pid))
    time.sleep(1000)


def raise_in_thread_and_return(payload: Any) -> str:
    thread = threading.Thread(target=sys.exit)
    thread.start()
    thread.join()
    return "done"
