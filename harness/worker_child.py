"""One child process of `harness/worker.py` with the parent's ends of its pipes, and what can go wrong with it."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from pagedtune.harness.worker_main import HEADER, MAX_FRAME_BYTES

TAIL_BYTES = 8 << 10  # of the child's output: enough for a fault report and the lines before it
TICK_S = 0.1  # how often a child is looked at that neither answers nor closes its channel
EXIT_GRACE_S = 2.0  # between the end of the channel and the end of the process
OUTPUT_GRACE_S = 0.5  # for the last words of a child: its output, and the stack it reports when told to
KILL_GRACE_S = 10.0  # for a killed child to end; only the kernel can make it last longer

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)\n', re.MULTILINE)
_REPORT = re.compile(r"^(?:Current thread|Stack)\b.*most recent call first\):?$", re.MULTILINE)


class WorkerError(RuntimeError):
    """A job gave no result. `reason` says why in one line; `output` is the tail of what the child printed."""

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.output = output


class JobRaised(WorkerError):
    """The job raised, or its result was not JSON (`NotJson`) or too long (`ResultTooLarge`); the child lives on."""

    def __init__(self, kind: str, message: str, where: str = "", output: str = "") -> None:
        place = f" ({Path(where).name})" if where else ""
        super().__init__(f"{kind}: {message}{place}" if message else f"{kind}{place}", output)
        self.type, self.message, self.where = kind, message, where


class WorkerCrashed(WorkerError):
    """The child ended, or broke off the conversation, before it answered."""


class WorkerTimeout(WorkerError):
    """No answer within `seconds`; the child was killed."""

    def __init__(self, seconds: float, place: str = "", output: str = "") -> None:
        super().__init__(f"no answer within {seconds:g} s{place}", output)
        self.seconds = seconds


class Child:
    """A running child. `options` are those of `worker_main`, as JSON; `environment` yields to that of this process."""

    def __init__(self, options: str, environment: Mapping[str, str]) -> None:
        self.ready = False
        self._tail, self._incoming, self._outgoing = b"", bytearray(), b""
        self._channel, theirs = socket.socketpair()
        lifeline_theirs, self._lifeline = os.pipe()
        fds = (theirs.fileno(), lifeline_theirs)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", "pagedtune.harness.worker_main", *map(str, fds), options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=fds,
                start_new_session=True,
                env={**environment, **os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        except BaseException:
            self._channel.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline_theirs)
        assert self._process.stdout is not None  # asked for above
        self._stdout = self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._channel.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._stdout, selectors.EVENT_READ)

    @property
    def output(self) -> str:
        """Tail of what the child printed."""
        return self._tail.decode(errors="replace")

    def exchange(self, request: bytes, timeout_s: float) -> bytes:
        """Sends `request` and returns the next frame.

        Raises:
            WorkerCrashed, WorkerTimeout: the child must then be closed.
        """
        deadline = time.monotonic() + timeout_s
        self._outgoing = request
        while (left_s := deadline - time.monotonic()) > 0:
            exited = self._has_exited()
            is_open = self._turn(0 if exited else min(left_s, TICK_S))
            if (frame := self._take_frame()) is not None:
                return frame
            if exited or not is_open:
                raise self._crashed()
        raise self._overdue(timeout_s)

    def kill(self) -> None:
        """Kills the process group; any thread may do so."""
        if self._process.returncode is None:  # not reaped, so that the id of its group is still ours
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills the process group, reaps the child and closes all descriptors."""
        self.kill()
        self._reap()
        self._selector.close()
        self._channel.close()
        self._stdout.close()
        os.close(self._lifeline)

    def _has_exited(self) -> bool:
        """Whether it ended; does not reap it, so that its group can still be killed by its id."""
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # somebody else in this process reaped it
            return True

    def _reap(self) -> int | None:
        """The exit code of a killed child, None if the kernel does not let go of it in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_GRACE_S)
        return self._process.returncode

    def _turn(self, wait_s: float) -> bool:
        """Moves what can be moved within `wait_s` seconds; whether the channel is still open."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        self._selector.modify(self._channel, events)
        is_open = True
        for key, mask in self._selector.select(wait_s):
            if key.fileobj is self._stdout:
                self._read_output()
            else:
                is_open = self._move(mask)
        return is_open

    def _move(self, mask: int) -> bool:
        try:
            if mask & selectors.EVENT_WRITE:
                self._outgoing = self._outgoing[self._channel.send(self._outgoing) :]
            if mask & selectors.EVENT_READ:
                part = self._channel.recv(1 << 20)
                self._incoming += part
                return bool(part)
        except ConnectionError:
            return False
        return True

    def _read_output(self) -> None:
        part = os.read(self._stdout.fileno(), 1 << 16)
        if not part:
            self._selector.unregister(self._stdout)
        self._tail = (self._tail + part)[-TAIL_BYTES:]

    def _take_frame(self) -> bytes | None:
        if len(self._incoming) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self._incoming)
        if size > MAX_FRAME_BYTES:
            raise WorkerCrashed("the job wrote something else than an answer to the result channel", self.output)
        end = HEADER.size + size
        if len(self._incoming) < end:
            return None
        frame = bytes(self._incoming[HEADER.size : end])
        del self._incoming[:end]
        return frame

    def _overdue(self, timeout_s: float) -> WorkerTimeout:
        """The time-out, with the place at which the child was, if it still tells."""
        before, self._tail = self.output, b""
        self._process.send_signal(signal.SIGUSR1)
        self._read_rest()
        return WorkerTimeout(timeout_s, _place_of(self.output), before + self.output)

    def _crashed(self) -> WorkerCrashed:
        """Why there is no answer: how the child ended, or that it closed its channel and lives on."""
        deadline = time.monotonic() + EXIT_GRACE_S
        while not self._has_exited() and time.monotonic() < deadline:
            time.sleep(0.005)
        exited = self._has_exited()
        self.kill()  # what it left behind in its group
        self._read_rest()
        code = self._reap()
        if code is None or not exited:
            return WorkerCrashed("the job closed the result channel and gave no answer", self.output)
        if code >= 0:
            return WorkerCrashed(f"the job ended its process with exit code {code}", self.output)
        hint = ", as the out-of-memory killer does" if code == -signal.SIGKILL else _place_of(self.output)
        return WorkerCrashed(f"ended by {_signal_name(-code)}{hint}", self.output)

    def _read_rest(self) -> None:
        """Reads output until its end, a stack report, or a moment has passed."""
        deadline = time.monotonic() + OUTPUT_GRACE_S
        self._selector.unregister(self._channel)
        while self._stdout.fileno() in self._selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            if self._selector.select(left_s):
                self._read_output()
            if _place_of(self.output):
                return


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _place_of(output: str) -> str:
    """` in FUNCTION (FILE:LINE)` from the innermost frame of the last stack report in `output`, else nothing."""
    reports = _REPORT.split(output)
    frame = _FRAME.search(reports[-1]) if len(reports) > 1 else None
    return f" in {frame['function']} ({Path(frame['file']).name}:{frame['line']})" if frame else ""
