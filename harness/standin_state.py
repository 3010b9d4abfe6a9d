"""State of the stand-in driver, and what each of its calls goes through: recording, injected faults, refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from pagedtune.harness.standin_launch import Function
from pagedtune.harness.standin_memory import NotMapped, StandInMemory

Work = Callable[[], None]


class Refused(Exception):
    """A call ends with this error, by its name."""


@dataclass(frozen=True)
class Call:
    """One call: what was asked, and the name of the status that it got."""

    name: str
    args: tuple[Any, ...]
    status: str


@dataclass
class Stream:
    context: int
    blocking: bool
    nodes: list[Work] | None = None  # of the capture in progress
    broken: bool = False


@dataclass
class Context:
    """A context: the objects made in it, and the fault that has ended it."""

    ordinal: int
    memory: StandInMemory
    streams: dict[int, Stream] = field(default_factory=dict)
    functions: dict[int, Function] = field(default_factory=dict)
    modules: dict[int, dict[str, int]] = field(default_factory=dict)
    events: dict[int, bool] = field(default_factory=dict)
    graphs: dict[int, list[Work]] = field(default_factory=dict)
    executables: dict[int, list[Work]] = field(default_factory=dict)
    holders: int = 0
    error: str = ""


def api(
    results: int = 0, context: bool = True, in_capture: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A driver call: recorded, faults injected, refusals made into statuses.

    Args:
        results: values beside the status, None each where it fails.
        context: whether a current context is needed.
        in_capture: whether it is allowed while a stream of the context captures.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def invoke(self: StandInState, *args: Any) -> Any:
            name, value, status = function.__name__, None, "CUDA_SUCCESS"
            try:
                self.before(name, context, in_capture)
                value = function(self, *args)
            except (Refused, NotMapped) as error:
                status = str(error) if isinstance(error, Refused) else "CUDA_ERROR_INVALID_VALUE"
            self.calls.append(Call(name, args, status))
            code = self.CUresult[status]
            failed = status != "CUDA_SUCCESS"
            return (code,) if not results else (code, None) if failed else (code, value)

        return invoke

    return wrap


class StandInState:
    """What a process knows of its devices.

    Args:
        num_devices: how many there are.
    """

    def __init__(self, num_devices: int) -> None:
        from cuda.bindings import driver

        self.types: Any = driver
        self.CUresult = driver.CUresult
        self.calls: list[Call] = []
        self.num_devices = num_devices
        self.initialised = False
        self.contexts: dict[int, Context] = {}
        self.current = 0
        self._handles = count(0x5000, 16)
        self._injected: dict[str, list[str]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):  # structures and enumerations
            return getattr(self.types, name)
        raise AttributeError(f"the stand-in driver has no {name}")

    def fail(self, name: str, status: str, after: int = 0) -> None:
        """Lets a later call of `name` fail, once, after `after` more that do not."""
        self._injected[name] = ["CUDA_SUCCESS"] * after + [status]

    def names(self) -> list[str]:
        """Names of the calls so far."""
        return [made.name for made in self.calls]

    # What every call goes through.

    def before(self, name: str, needs_context: bool, in_capture: bool) -> None:
        """Raises Refused where a call is to fail by injection, lack of a context, an earlier fault, or a capture."""
        pending = self._injected.get(name)
        injected = pending.pop(0) if pending else "CUDA_SUCCESS"
        if injected != "CUDA_SUCCESS":
            raise Refused(injected)
        if not self.initialised and name != "cuInit":
            raise Refused("CUDA_ERROR_NOT_INITIALIZED")
        if not needs_context:
            return
        if self.current not in self.contexts:
            raise Refused("CUDA_ERROR_INVALID_CONTEXT")
        here = self.contexts[self.current]
        if here.error:
            raise Refused(here.error)
        if not in_capture:
            self.refuse_in_capture(here.streams.values())

    @property
    def here(self) -> Context:
        """The current context."""
        return self.contexts[self.current]

    def new_handle(self, kind: str) -> Any:
        """A fresh handle of one of the binding's classes."""
        return getattr(self.types, kind)(next(self._handles))

    def find(self, table: str, handle: Any) -> Any:
        """An object of the current context by its handle."""
        found = getattr(self.here, table).get(int(handle))
        if found is None:
            raise Refused("CUDA_ERROR_INVALID_HANDLE")
        return found

    def stream_of(self, handle: Any) -> Stream:
        """A stream by its handle; 0 is the default one."""
        return Stream(self.current, True) if not int(handle) else self.find("streams", handle)

    def submit(self, stream: Stream, work: Work) -> None:
        """Takes work for a stream: done at once, or kept where the stream captures."""
        if stream.broken:
            raise Refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
        others = self.here.streams.values()
        if all(stream is not other for other in others) and any(s.blocking and s.nodes is not None for s in others):
            raise Refused("CUDA_ERROR_STREAM_CAPTURE_IMPLICIT")
        if stream.nodes is None:
            work()
        else:
            stream.nodes.append(work)

    def refuse_in_capture(self, streams: Iterable[Stream]) -> None:
        """Breaks the captures in progress and refuses the call, as the driver does."""
        capturing = [stream for stream in streams if stream.nodes is not None]
        for stream in capturing:
            stream.broken = True
        if capturing:
            raise Refused("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
